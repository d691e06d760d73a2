"""Stand-ins for the trajectory API and the keeper, with the groups and configurations that trainer tests use."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from tests.support import records
from toprope.records.journal.groups import MASKED, PROMPT_LOGPROB, Batch, Group, Outcome
from toprope.records.messages import Stepped
from toprope.records.run.folder import RunFolder
from toprope.records.run.kinds import KINDS
from toprope.settings.schema import Config

GROUPS = 2


def group(number: int, version: int | None = None) -> Group:
    """A group of four rollouts that depends on the number alone."""
    tokens = [[5, 6, 10 + (number * 7 + row) % 150, 20 + (number * 3 + row) % 150, 1] for row in range(4)]
    rewards = [float((number + row) % 3 == 0) for row in range(4)]
    return Group(
        tokens=tokens,
        masks=[[MASKED, MASKED, *row[2:]] for row in tokens],
        scores=rewards,
        inference_logprobs=[[PROMPT_LOGPROB] * 2 + [-5.0, -5.0, -5.0] for _ in tokens],
        versions=None if version is None else [[(version, 3)] for _ in tokens],
        group_id=f"g-{number}",
        outcomes=[Outcome(reward, {"exact": reward}, success=reward >= 1) for reward in rewards],
    )


class StandInApi:
    """Delivers endless groups by position, as the journal does; records requests and commits."""

    def __init__(self, *_: Any) -> None:
        self.asked: list[int] = []
        self.commits: list[int] = []
        self.drops: list[tuple[int, str]] = []

    def next_batch(self, cursor: int, sequences: int, wait_s: float) -> Batch:
        self.asked.append(cursor)
        numbers = list(range(cursor + 1, cursor + 1 + sequences // 4))
        return Batch([group(number) for number in numbers], numbers[-1], numbers)

    def dropped(self, items: list[tuple[int, str]]) -> None:
        self.drops += items

    def commit(self, cursor: int) -> None:
        self.commits.append(cursor)

    def take_up(self, cursor: int) -> int:
        self.commit(cursor)
        return cursor


class StandInMember:
    """A member without a keeper; the policy's folder is its only peer. Stops after step `stop_after`."""

    def __init__(self, folder: RunFolder, policy: Path, config: Config, stop_after: int = 0) -> None:
        self.folder, self.weights, self.secret, self.ending = folder, folder.crew, "secret", threading.Event()
        self.spec = SimpleNamespace(
            config=config, member=None, run_kind=KINDS["train"], trainer=None, continued_run=None
        )
        self.reports: list[Any] = []
        self._policy, self._stop_after, self.attempt, self.life = policy, stop_after, 1, 0

    def address(self, peer: str) -> str:
        return str(self._policy) if peer == "policy" else "http://127.0.0.1:1"

    def report(self, report: Any) -> None:
        self.reports.append(report)
        if isinstance(report, Stepped) and report.step == self._stop_after:
            self.ending.set()

    def peer(self, name: str) -> str:
        return self.address(name)

    def beat(self) -> None:
        pass

    def hold(self, beat: Any = None) -> float:
        return 0.0

    def of(self, kind: type) -> list[Any]:
        return [report for report in self.reports if isinstance(report, kind)]


def train_in(folder: RunFolder, policy: Path, config: Config, api: Any, stop_after: int = 0) -> StandInMember:
    """Train from the newest checkpoint with the groups of `api`; further ranks are real processes."""
    from torch import distributed

    from toprope.training.api.clients import sync_client
    from toprope.training.trainer.program import create_training

    folder.crew.mkdir(exist_ok=True)
    records.specification(folder.run_id, config=config, policy_cache=str(folder.path / "policies")).write(folder)
    member: Any = StandInMember(folder, policy, config, stop_after)
    member.name = "trainer"
    with mock.patch.object(sync_client, "SyncApiClient", lambda *_: api), mock.patch("sys.argv", sys.argv[:1]):
        try:
            create_training(member).run(folder.newest_checkpoint())
        finally:
            if distributed.is_initialized():
                distributed.destroy_process_group()
    return member


def small_run_config(**changes: Any) -> Config:
    config = Config()
    config.rollout.group_size, config.rollout.groups_per_step, config.rollout.max_new_tokens = 4, GROUPS, 4
    config.policy.max_context, config.policy.lora_rank = 64, 4
    config.launcher.device = "cpu"
    config.budget.steps = 6
    config.optimizer.warmup_steps, config.optimizer.learning_rate = 2, 1e-2
    config.optimizer.lr_scheduler_type = "linear"
    for name, value in changes.items():
        section, field = name.split("__")
        setattr(getattr(config, section), field, value)
    return config


def rows(folder: RunFolder) -> list[dict[str, Any]]:
    return [json.loads(line) for line in folder.metrics.read_text().splitlines() if '"step"' in line]


def rollout_group(rewards: list[float], *, version: int = 0, task: str = "t") -> Group:
    """A group of one-row rollouts: prompt 5 6, two sampled tokens and the end."""
    tokens = [[5, 6, 10 + index, 20 + index, 1] for index in range(len(rewards))]
    return Group(
        tokens=tokens,
        masks=[[MASKED, MASKED, *row[2:]] for row in tokens],
        scores=rewards,
        inference_logprobs=[[PROMPT_LOGPROB] * 2 + [-2.0, -1.5, -0.5] for _ in tokens],
        versions=[[(version, 3)] for _ in tokens],
        group_id=f"{task}-{version}-{rewards}",
        outcomes=[Outcome(reward, {"exact": reward}, success=reward >= 1) for reward in rewards],
    )


def small_config(**changes: Any) -> Config:
    config = Config()
    config.rollout.group_size, config.rollout.groups_per_step, config.rollout.max_new_tokens = 4, 2, 4
    config.policy.max_context = 64
    config.launcher.device = "cpu"
    config.budget.steps = 3
    config.optimizer.warmup_steps = 0
    config.optimizer.learning_rate = 1e-2
    for name, value in changes.items():
        section, field = name.split("__")
        setattr(getattr(config, section), field, value)
    return config


class PreparedGroups:
    """Delivers the given groups, as many as requested."""

    def __init__(self, groups: Iterable[Group]) -> None:
        self.groups, self.sent = iter(groups), 0

    def next_batch(self, cursor: int, sequences: int, wait_s: float) -> Batch:
        found: list[Group] = []
        while sequences > 0 and (group := next(self.groups, None)) is not None:
            found.append(group)
            sequences -= len(group.tokens)
        numbers = list(range(self.sent, self.sent + len(found)))
        self.sent += len(found)
        return Batch(found or None, self.sent, numbers)
