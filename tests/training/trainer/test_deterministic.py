"""The deterministic mode, part by part; `make bench-reproduce` compares whole runs."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.training_api_server import group, served
from tests.training.inference.conftest import sample
from toprope.records.journal.groups import Outcome
from toprope.records.messages import Evaluated
from toprope.records.run.folder import RunFolder
from toprope.settings.schema import Config
from toprope.settings.sections.environment import members_of
from toprope.training.driver.producer import GroupProducer
from toprope.training.inference.client import Sampling
from toprope.training.inference.embedded_engine import EmbeddedEngine
from toprope.training.inference.engine import SamplingRequest
from toprope.training.inference.sessions import Turn
from toprope.training.policy.loading import fix_kernels, load_tokenizer
from toprope.training.rollouts.group_sampler import TaskRef
from toprope.training.rollouts.sampled_group import SampledGroup
from toprope.training.rollouts.task_sampler import TaskSampler


def test_api_reports_missing_rows(tmp_path: Path) -> None:
    with served(tmp_path / "journal") as api:
        assert api.get("/wanted") == {"version": 0, "rows": 0}
        answers: list[Any] = []
        trainer = threading.Thread(
            target=lambda: answers.append(api.get("/batch?cursor=0&sequences=16&version=3&wait_s=50"))
        )
        trainer.start()
        assert api.get("/wanted?wait_s=50") == {"version": 3, "rows": 16}
        api.post("/scored_data", group(1))
        assert api.get("/wanted?wait_s=50") == {"version": 3, "rows": 8}
        api.post("/scored_data", group(2))
        trainer.join(60)
        assert len(answers[0]["batch"]) == 2
        assert api.get("/wanted")["rows"] == 0


def test_sampling_seeds_are_distinct_and_reproducible() -> None:
    plain, seeded = Sampling(1.0, 1.0, 9), Sampling(1.0, 1.0, 9, seed=5)
    assert plain.at("train", 3) is plain
    places = [("train", 3), ("train", 4), ("heldout", 3), ("train", 3, 1)]
    assert len({seeded.at(*place).seed for place in places}) == len(places)
    # A constant, because a repeated run must draw the same seeds in another process.
    assert seeded.at("train", 3).seed == 114_522_574
    assert seeded.greedy().at("train", 3).seed == seeded.at("train", 3).seed


@pytest.fixture(scope="module")
def policy(tiny_policy: Path) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_policy).eval(), load_tokenizer(tiny_policy)


def test_seeded_request_is_independent_of_others(policy: tuple[Any, Any]) -> None:
    def answered(*others: SamplingRequest) -> Any:
        engine = EmbeddedEngine(*policy, max_context=64, max_rows=1, seed=len(others))
        engine.start()
        try:
            *_, samples = sample(engine, *others, SamplingRequest([5, 6, 7], n=4, max_new_tokens=12, seed=11))
            assert engine.batches == len(others) + 1
            return [(sample.token_ids, sample.logprobs) for sample in samples]
        finally:
            engine.stop()

    alone = answered()
    assert (
        alone
        == answered()
        == answered(SamplingRequest([9] * 30, n=8, max_new_tokens=20), SamplingRequest([1], max_new_tokens=3))
    )
    assert len({tuple(ids) for ids, _ in alone}) > 1


class Api:
    """An API whose trainer wants the given (version, rows); logs all requests."""

    def __init__(self, log: list[str], demands: list[tuple[int, int]]) -> None:
        self.log, self.demands = log, demands

    async def counts(self) -> Any:
        return SimpleNamespace(accepted=0)

    async def missing_rows(self, wait_s: float) -> Any:
        if not self.demands:
            await asyncio.sleep(3600)
        version, rows = self.demands.pop(0)
        self.log.append(f"wanted {rows} at {version}")
        return SimpleNamespace(version=version, rows=rows)

    async def post_group(self, posted: Any) -> int:
        self.log.append(f"posted {posted.group_id}")
        return 0


def test_deterministic_producer_samples_only_wanted_groups(tmp_path: Path) -> None:
    log: list[str] = []
    config = Config()
    config.algorithm.deterministic, config.evaluation.every_steps = True, 2

    async def sample(task: TaskRef, size: int, sampling: Sampling) -> SampledGroup:
        log.append(f"made {task.index}")
        weights.append(sampler.weights["a"])
        turn = Turn([1], [2], [-0.5], [(0, 1)], "stop")
        return SampledGroup("t", [{"role": "user", "content": "q"}], ["a"], [Outcome(1.0)], [[turn]], 0.1)

    async def along(label: str, tasks: int) -> dict[str, Any]:
        log.append(label)
        return {}

    async def hold() -> None:
        pass

    reports: list[Any] = []
    member = SimpleNamespace(
        spec=SimpleNamespace(
            config=config, run_id="run", first_task=0, first_tasks={}, environment=SimpleNamespace(name="e")
        ),
        attempt=1, life=0, number=1, report=reports.append, hold_async=hold, folder=RunFolder(tmp_path),
    )  # fmt: skip
    demands = [(0, 16), (0, 8), (0, 0), (1, 8), (2, 8), (2, 8), (4, 8)]
    api = Api(log, demands)
    config.environment.name, config.environment.reward_weights_end = "e", {"a": 1.0}
    config.budget.steps, weights = 10, list[float]()
    [plan] = members_of(config.environment)
    sampler = SimpleNamespace(sample=sample)
    environments: Any = SimpleNamespace(
        hosts={"e": SimpleNamespace(plan=plan, part_weights={"a": 0.0})}, samplers={"e": sampler}
    )
    producer = GroupProducer(
        member,
        environments,
        api,
        Sampling(1, 1, 9),
        SimpleNamespace(evaluate_validation=along),  # type: ignore[arg-type]
        TaskSampler(member, environments.hosts),  # type: ignore[arg-type]
    )

    async def until_nothing_is_wanted() -> None:
        task = asyncio.create_task(producer.run())
        while demands or log[-1] != "posted run-1-5":
            await asyncio.wait({task}, timeout=0.01)
            assert not task.done(), task.result()
        task.cancel()

    asyncio.run(asyncio.wait_for(until_nothing_is_wanted(), 30))
    assert log == [
        "wanted 16 at 0", "made 0", "posted run-1-0", "wanted 8 at 0", "made 1", "posted run-1-1", "wanted 0 at 0",
        "wanted 8 at 1", "made 2", "posted run-1-2", "wanted 8 at 2", "step-2", "made 3", "posted run-1-3",
        "wanted 8 at 2", "made 4", "posted run-1-4", "wanted 8 at 4", "step-4", "made 5", "posted run-1-5",
    ]  # fmt: skip
    assert [report.label for report in reports if isinstance(report, Evaluated)] == ["step-2", "step-4"]
    assert weights == [0.0, 0.0, 0.1, 0.2, 0.2, 0.4], "of the version that is trained"


def test_kernels_are_fixed_in_deterministic_mode_only(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[Any] = []
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda *given, **named: chosen.append((given, named)))
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")  # what the owner chose stays
    config = Config()
    fix_kernels(config)
    assert chosen == []
    config.algorithm.deterministic = True
    fix_kernels(config)
    assert chosen == [((True,), {"warn_only": True})] and os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
