"""The rollout driver: variables of its worker, first checks, waiting for room, and the account of groups."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.rollout_stand_ins import SAMPLING
from toprope.errors import ComponentFailed
from toprope.records.journal.groups import Group, Outcome
from toprope.records.messages import (
    Checked,
    Evaluate,
    Evaluated,
    Failed,
    Making,
    OutOfBudget,
    Ready,
    Stop,
)
from toprope.records.purse import LimitReached
from toprope.records.run.folder import RunFolder
from toprope.records.run.kinds import KINDS
from toprope.records.run.specification import EnvironmentSource
from toprope.sdk.errors import WorkerError
from toprope.settings.schema import Config
from toprope.settings.sections.environment import members_of
from toprope.training.driver import producer, program
from toprope.training.driver.producer import GroupProducer, resumed_version
from toprope.training.driver.program import Driver
from toprope.training.inference.client import PromptTooLong, SessionLost
from toprope.training.inference.sessions import Turn
from toprope.training.rollouts.endpoint_client import ModelFailed, Unanswered
from toprope.training.rollouts.sampled_group import SampledGroup
from toprope.training.rollouts.task_sampler import TaskSampler

ECHO = '''
"""Say the number."""
import os
from toprope.sdk import Environment, Part, Task


class Echo(Environment):
    """Says the number."""

    parts = {"exact": Part()}

    def setup(self):
        assert "JUDGE_KEY" in os.environ, "no key"
        assert "TOPROPE_RUN_SECRET" not in os.environ

    def tasks(self):
        for number in range(300):
            yield Task(f"Say {number}", reference=number)

    def score(self):
        return {"exact": float(self.answer == str(self.task.reference))}
'''


class Member:
    """Stand-in for the driver's membership that records reports."""

    attempt, life, number = 1, 0, 1

    def __init__(self, source: EnvironmentSource, config: Config) -> None:
        self.spec = SimpleNamespace(
            environment=source,
            mixture=[],
            locks={},
            code=None,
            config=config,
            run_kind=KINDS["train"],
            base_run=None,
            first_task=0,
            first_tasks={},
            test=None,
            helpers={},
            member=None,
            run_id="run",
        )
        self.folder = RunFolder(Path(str(source.file)).parent)
        self.reports: list[Any] = []

    def report(self, report: Any) -> None:
        self.reports.append(report)

    async def hold_async(self) -> None:
        pass


@pytest.fixture
def member(tmp_path: Path) -> Member:
    file = tmp_path / "echo.py"
    file.write_text(ECHO)
    config = Config()
    config.evaluation.heldout_tasks, config.evaluation.examples = 3, 2
    config.rollout.queue_groups, config.rollout.concurrency = 1, 2
    return Member(EnvironmentSource(name="echo", file=str(file), attribute="Echo"), config)


def test_worker_gets_named_keys_and_scores_first_task(member: Member, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "j")
    monkeypatch.setenv("TOPROPE_RUN_SECRET", "s")
    driver = Driver(member)  # type: ignore[arg-type]

    async def run() -> None:
        await driver.start_environments()
        try:
            await driver.check_environments()
        finally:
            await driver.close()

    asyncio.run(run())
    [checked] = [report for report in member.reports if isinstance(report, Checked)]
    assert "python" in checked.versions
    [host] = driver._hosts
    assert host.sizes == {"train": 1, "validation": 2, "heldout": 3}
    assert host.outcome is not None and host.outcome.success


def test_training_on_demonstrations_begins_after_the_first_evaluation(member: Member, monkeypatch) -> None:
    """Else inference takes the trainer's weights amid the evaluation of the policy that it begins with."""
    member.spec.run_kind, member.spec.ask = KINDS["sft"], None
    member.spec.config.evaluation.every_steps = 0

    async def nothing(self: Driver) -> None:
        pass

    async def evaluate(self: Driver, environments: Any, evaluator: Any, label: str) -> None:
        member.report(Evaluated(label, {}))

    async def collect(self: Driver) -> Path:
        return Path("traces.jsonl")

    async def connect(self: Driver) -> Any:
        return SimpleNamespace(close=lambda: nothing(self))

    async def orders() -> AsyncIterator[Any]:
        yield Evaluate("after")
        yield Stop()

    member.orders = orders  # type: ignore[attr-defined]
    stubs = {"start_environments": nothing, "check_environments": nothing, "evaluate": evaluate}
    for name, stub in {**stubs, "_collect_demonstrations": collect, "_connect_policy": connect}.items():
        monkeypatch.setattr(Driver, name, stub)
    asyncio.run(Driver(member).run())  # type: ignore[arg-type]
    assert member.reports == [Evaluated("before", {}), Ready("traces.jsonl"), Evaluated("after", {})]


def test_an_empty_split_is_refused_if_it_is_evaluated(member: Member) -> None:
    file = Path(str(member.spec.environment.file))
    file.write_text(ECHO.replace("range(300)", "range(3)").replace('assert "JUDGE_KEY"', 'assert "PATH"'))

    async def run() -> None:
        driver = Driver(member)  # type: ignore[arg-type]
        await driver.start_environments()
        try:
            await driver.check_environments()
            assert driver._hosts[0].sizes == {"train": 1}
        finally:
            await driver.close()

    member.spec.config.evaluation.heldout_tasks = 0
    asyncio.run(run())
    assert isinstance(member.reports[-1], Checked)
    member.spec.config.evaluation.every_steps = 5
    with pytest.raises(ComponentFailed, match="no tasks in its validation split") as failed:
        asyncio.run(run())
    assert "evaluation.every_steps 0" in failed.value.hint


class FullApi:
    """An API whose queue is full, or that raises `error` when asked for room."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.asked, self.given_up = error, asyncio.Event(), False

    async def post_group(self, group: Group) -> int:
        return 1

    async def wait_for_room(self, below: int, wait_s: float) -> bool:
        self.asked.set()
        if self.error is not None:
            raise self.error
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.given_up = True
            raise
        return True


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (PromptTooLong("no room"), "The environment failed 32 groups one after the other; the last: no room"),
        (Unanswered("busy"), "A model that the environment asks failed 32 groups one after the other; the last: busy"),
    ],
)
def test_too_many_failed_groups_fail_the_run(member: Member, error: Exception, told: str) -> None:
    class Sampler:
        calls = 0

        async def sample(self, *arguments: Any) -> Any:
            await asyncio.sleep(0)
            Sampler.calls += 1
            raise error

    async def run() -> None:
        async with asyncio.timeout(10):
            await produce(member, FullApi(), Sampler())

    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(run())
    assert told in str(caught.value.exceptions[0])
    assert Sampler.calls >= 32


def test_validation_tasks_whose_models_do_not_answer_count_for_no_level(member: Member) -> None:
    errors = iter([Unanswered("busy"), PromptTooLong("no room"), None, None])

    class Some:
        async def sample(self, *arguments: Any) -> Any:
            if (error := next(errors)) is not None:
                raise error
            return SampledGroup("t", [], ["x"], [Outcome(1.0, success=True)], [[_TURN]], 0.1)

    maker = object.__new__(GroupProducer)
    maker._environments = only_environment(member, Some())
    maker._config, maker._sampling = member.spec.config, SAMPLING
    assert asyncio.run(maker._count_solved("echo", 4, "level-0")) == (2, 3)


class Sampler:
    async def sample(self, *arguments: Any) -> Any:
        await asyncio.sleep(0)
        turn = Turn([], [1], [-0.1], [(0, 1)], "stop")
        return SampledGroup("t", [], ["x"], [Outcome(1.0)], [[turn]], 0.1)


_TURN = Turn([], [1], [-0.1], [(0, 1)], "stop")


@pytest.mark.parametrize(
    ("outcomes", "texts", "turns", "why", "told"),
    [
        ([Outcome(0.0), Outcome(0.0, error="SampleError: the prompt is too long")], [], [[], []], "nothing was sampled",
         "contains a sampled token: SampleError: the prompt is too long"),
        ([Outcome(0.0)], ["the prompt has\n9 tokens too many"], [[]], "nothing was sampled",
         "contains a sampled token: its answer: the prompt has 9 tokens too many"),
        ([Outcome(0.0, error="JudgeFailed: style: busy")], [], [[_TURN]], "the judge failed",
         "no answer of it could be judged: JudgeFailed: style: busy"),
    ],
)  # fmt: skip
def test_groups_that_cannot_be_trained_tell_the_error_of_their_rollouts(
    member: Member, outcomes: list[Outcome], texts: list[str], turns: list[list[Turn]], why: str, told: str
) -> None:
    class Useless:
        async def sample(self, *arguments: Any) -> Any:
            await asyncio.sleep(0)
            return SampledGroup("t", [], texts or [""] * len(outcomes), outcomes, turns, 0.1)

    async def run() -> None:
        async with asyncio.timeout(10):
            await produce(member, FullApi(), Useless())

    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(run())
    assert told in str(caught.value.exceptions[0])
    made = [one for one in member.reports if isinstance(one, Making)]
    assert made[-1].given_up[why] >= 32


def only_environment(member: Member, sampler: Any) -> Any:
    """The environments of a run with one environment, whose groups come from `sampler`."""
    [plan] = members_of(member.spec.config.environment)
    host = SimpleNamespace(plan=plan, part_weights={})
    return SimpleNamespace(hosts={"echo": host}, samplers={"echo": sampler})


def produce(member: Member, api: FullApi, sampler: Any = None) -> Any:
    member.spec.config.environment.name = "echo"
    environments = only_environment(member, sampler or Sampler())
    tasks = TaskSampler(member, environments.hosts)  # type: ignore[arg-type]
    return GroupProducer(member, environments, api, SAMPLING, None, tasks).run()  # type: ignore[arg-type]


def test_failed_wait_for_room_ends_production(member: Member) -> None:
    async def run() -> None:
        async with asyncio.timeout(10):
            await produce(member, FullApi(ComponentFailed("the api is gone")))

    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(run())
    assert "the api is gone" in str(caught.value.exceptions[0])


def test_cancelled_production_stops_waiting_for_room(member: Member) -> None:
    async def run() -> FullApi:
        api = FullApi()
        task = asyncio.create_task(produce(member, api))
        async with asyncio.timeout(10):
            await api.asked.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert api.given_up
        return api

    asyncio.run(run())


def test_every_group_is_posted_or_given_up_with_reason(member: Member) -> None:
    class Mixed:
        """Fails once in every way, then succeeds twice, then hangs."""

        def __init__(self) -> None:
            self.turns = [
                SessionLost("gone"),
                PromptTooLong("long"),
                WorkerError("raised", "ValueError", "no"),
                Unanswered("The question was refused: HTTP 400"),
                None,
                None,
            ]

        async def sample(self, *arguments: Any) -> Any:
            await asyncio.sleep(0)
            if not self.turns:
                await asyncio.Event().wait()
            if (error := self.turns.pop(0)) is not None:
                raise error
            return await Sampler().sample()

    class Api(FullApi):
        posted: list[Group] = []

        async def counts(self) -> Any:
            return SimpleNamespace(accepted=40)

        async def post_group(self, group: Group) -> int:
            self.posted.append(group)
            return 0

    async def run() -> None:
        task = asyncio.create_task(produce(member, Api(), Mixed()))
        async with asyncio.timeout(10):
            while len(Api.posted) < 2 or making().begun < 8:
                await asyncio.sleep(0.005)
        # Two more are in progress and are given up when production is cancelled.
        assert making().posted == 2 and sum(making().given_up.values()) == 4
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    def making() -> Making:
        return [report for report in member.reports if isinstance(report, Making)][-1]

    member.life = 2
    asyncio.run(run())
    assert making() == Making(
        8,
        0,
        2,
        {
            "inference was started again": 1,
            "the prompt left no room": 1,
            "the environment failed": 1,
            "a model did not answer": 1,
            "training had ended": 2,
        },
        rollouts=2,
    )
    assert [group.group_id.rpartition("-")[0] for group in Api.posted] == ["run-1.2"] * 2
    assert all(int(group.group_id.rpartition("-")[2]) >= 40 for group in Api.posted)


@pytest.mark.parametrize("needed", [0.52, 0.0], ids=["spent", "without a price"])
def test_a_limit_on_cost_stops_the_run_before_the_driver_fails(
    member: Member, monkeypatch: pytest.MonkeyPatch, needed: float
) -> None:
    async def refused(self: Driver) -> None:
        error = ModelFailed("per_run.cost_usd allows 1 USD here")
        error.limit = LimitReached("per_run.cost_usd allows 1 USD here")
        error.limit.used, error.limit.needed = 0.9, needed
        raise ExceptionGroup("in a task", [error])

    monkeypatch.setattr(Driver, "run", refused)
    monkeypatch.setattr(program.CrewMember, "join", lambda: member)
    assert program.main() == 1
    told = [report for report in member.reports if isinstance(report, OutOfBudget | Failed)]
    failed = Failed("per_run.cost_usd allows 1 USD here", "", False)
    assert told == ([OutOfBudget(0.9, needed), failed] if needed else [failed])


@pytest.mark.parametrize("report_s", [0.001, 3600.0], ids=["soon", "late"])
def test_account_is_told_before_each_post_and_soon_after(
    member: Member, monkeypatch: pytest.MonkeyPatch, report_s: float
) -> None:
    monkeypatch.setattr(producer, "_REPORT_S", report_s)

    class Slow:
        async def sample(self, *arguments: Any) -> Any:
            return await Sampler().sample()

    class Api(FullApi):
        told: list[tuple[int, int, int]] = []

        async def counts(self) -> Any:
            return SimpleNamespace(accepted=0)

        async def post_group(self, group: Group) -> int:
            self.told.append(state())
            return 99

    def state() -> tuple[int, int, int]:
        last = member.reports[-1]
        assert isinstance(last, Making)
        return last.begun, last.posting, last.posted

    async def run() -> None:
        member.spec.config.rollout.concurrency = 4
        task = asyncio.create_task(produce(member, Api(), Slow()))
        async with asyncio.timeout(10):
            while len(Api.told) < 4 or (report_s < 1 and state()[1:] != (0, 4)):
                await asyncio.sleep(0.005)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())
    assert [posting + posted for _, posting, posted in Api.told] == [1, 2, 3, 4]
    assert state()[1:] == (0, 4)
    if report_s > 1:
        assert len(member.reports) == 5, "one for each post, and the last one tells of all that followed"


def test_resumed_driver_knows_the_version_of_a_trainer_that_publishes_at_will(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert resumed_version(folder) == 0
    for step, content in ((35, '{"step": 35, "cursor": 9, "policy_version": 7, "train_seconds": 1.0}'), (40, "{")):
        (folder.checkpoints / f"step-{step:06}").mkdir(parents=True)
        (folder.checkpoints / f"step-{step:06}" / "state.json").write_text(content)
    assert resumed_version(folder) == 7
