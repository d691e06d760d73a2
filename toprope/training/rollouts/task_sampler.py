"""What is played next for training: of which environment, which task, at which level. And what is remembered of it.

A driver that is started again, and an attempt that goes on, take up where they were: the numbers of the tasks lie in
mixture.json of the run's folder, the levels in curriculum.json.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toprope.atomic import write_json
from toprope.errors import Corrupt, NotFound
from toprope.records.messages import ENV_CHECKPOINT, Leveled
from toprope.records.run.curriculum import Climbed, Curricula
from toprope.records.run.folder import read_json
from toprope.records.run.full_disk import NO_ROOM
from toprope.records.run.metrics import last_row
from toprope.training.component.member import CrewMember
from toprope.training.rollouts.curriculum import Climb
from toprope.training.rollouts.environment_host import level_name
from toprope.training.rollouts.environment_set import Players
from toprope.training.rollouts.mixture_weights import Claim, Mixer

__all__ = ["Choice", "Pick", "share_key"]

MIXTURE_VERSION = 1
_KEEP_EVERY_S = 1.0


def share_key(label: str) -> str:
    """The metric that says which share of the groups that were trained lately was an environment's."""
    return f"environments/{label}/share"


@dataclass(frozen=True)
class Pick:
    """One group to be made: `number` counts the groups of its environment, `variant` names its level."""

    label: str
    number: int
    variant: str = ""


class Choice:
    """The order in which groups are made.

    Args:
        member: The driver's membership.
        players: The environments.
    """

    def __init__(self, member: CrewMember, players: Players) -> None:
        self._member, self._hosts = member, players.hosts
        config = member.spec.config
        self._in_step = config.algorithm.deterministic
        self._several = len(self._hosts) > 1
        plans = [host.plan for host in self._hosts.values()]
        self._mixer = Mixer(
            [Claim(plan.label, plan.weight, plan.min_share) for plan in plans],
            places=1 if self._in_step else config.rollout.concurrency,
            seed=config.algorithm.seed,
        )
        self._minds = any(plan.min_share for plan in plans)
        self._begun: Counter[str] = Counter()
        self._posted: Counter[str] = Counter()
        self._freed = asyncio.Event()
        self._kept_at = self._fed_at = float("-inf")
        self._fed_step = -1
        known = self._stands() if any(plan.curriculum for plan in plans) else {}
        self.climbs: dict[str, Climb] = {}
        """The curricula, by environment."""
        for plan in plans:
            if (curriculum := plan.curriculum) is not None:
                self.climbs[plan.label] = Climb(curriculum, known.get(plan.label))
        if self.climbs:
            self._keep_curricula()

    def begin(self, first: int, accepted: int) -> None:
        """Says where the numbers of tasks begin: at `first`, after `accepted` groups that were made before."""
        if not self._several:
            self._begun[next(iter(self._hosts))] = first + accepted
            return
        state: Mapping[str, Any] = {}
        if accepted:
            try:
                state = read_json(self._path, MIXTURE_VERSION)
                self._mixer.take_up(state["mixer"])
                self._begun.update({label: int(state["posted"][label]) for label in self._hosts})
            except (NotFound, Corrupt, KeyError, TypeError, ValueError):
                state = {}
        if not state:
            shares = self._mixer.shares
            self._begun.update({label: first + round(accepted * shares[label]) for label in self._hosts})
        self._posted.update(self._begun)

    async def next(self) -> Pick:
        """The next group; waits where those that may be played have as many in the making as they may."""
        self._feed()
        while (label := self._mixer.take()) is None:
            self._freed.clear()
            await self._freed.wait()
        number = self._begun[label]
        self._begun[label] += 1
        climb = self.climbs.get(label)
        return Pick(label, number, level_name(climb.next_level()) if climb is not None else "")

    def done(self, pick: Pick, *, posted: bool, counts: bool = True) -> None:
        """A group is no longer in the making. `counts`: it was the environment's turn, whatever came of it."""
        self._mixer.done(pick.label, counts=counts)
        self._freed.set()
        if posted:
            self._posted[pick.label] += 1
        now = time.monotonic()
        if self._several and (self._in_step or now - self._kept_at >= _KEEP_EVERY_S):
            self._kept_at = now
            state = {"version": MIXTURE_VERSION, "posted": dict(self._posted), "mixer": self._mixer.state()}
            self._write(lambda: write_json(self._path, state))

    def climbed(self, label: str, step: int, successes: int, tasks: int) -> None:
        """Takes a measure of an environment's present level on validation tasks, and tells where the next one opens."""
        climb = self.climbs[label]
        measure = climb.measured(step, successes, tasks)
        self._keep_curricula()
        if not measure.moved:
            return
        said = Leveled(
            label,
            climb.curriculum.knob,
            climb.level,
            len(climb.curriculum.levels),
            climb.stands.value,
            successes,
            tasks,
            step,
        )
        self._member.report(said)

    @property
    def _path(self) -> Path:
        return self._member.folder.path / "mixture.json"

    def _feed(self) -> None:
        """Hears which shares of what was trained each environment had, from the trainer's own numbers."""
        now = time.monotonic()
        if not (self._several and self._minds) or not (self._in_step or now - self._fed_at >= _KEEP_EVERY_S):
            return
        self._fed_at = now
        row = last_row(self._member.folder.metrics)
        step = int(row.get("step") or 0)
        if step and step != self._fed_step:
            self._fed_step = step
            self._mixer.trained({label: row.get(share_key(label)) or 0.0 for label in self._hosts})

    def _stands(self) -> dict[str, Climbed]:
        member = self._member
        if member.attempt == 1 and not member.life:
            return {}
        curricula = Curricula.read(member.folder)
        if curricula is None:
            return {}
        if member.life:
            return curricula.environments
        # The policy is what it was at the checkpoint.
        name = Path(os.environ.get(ENV_CHECKPOINT, "step-0")).name.removeprefix("step-")
        step = int(name) if name.isdigit() else 0
        return {label: one.at(step) for label, one in curricula.environments.items()}

    def _keep_curricula(self) -> None:
        curricula = Curricula(environments={label: climb.stands for label, climb in self.climbs.items()})
        self._write(lambda: curricula.write(self._member.folder))

    def _write(self, write: Any) -> None:
        try:
            write()
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            print(f"where the environments stand could not be written: {error}", file=sys.stderr, flush=True)
