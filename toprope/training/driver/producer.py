"""Feeds the trajectory API with scored groups until it is told to stop, and keeps the account of them.

Every group that is begun ends as one of two: posted, or given up with a reason. What is given up is no loss (there are
other tasks), but it is counted, and the keeper is told before and after each step, so that even of a driver that is
killed the account is exact. Group ids name run, attempt, the driver's life and a number: none comes twice, and a post
that had to be repeated is stored once.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections import Counter
from collections.abc import Callable

from toprope.errors import ComponentFailed
from toprope.records.messages import Evaluated, Making
from toprope.sdk.errors import WorkerError
from toprope.training.api.clients.async_client import ApiClient
from toprope.training.component.member import CrewMember
from toprope.training.driver.mishaps import Errors, reason_of
from toprope.training.evaluation.evaluator import Evaluator, newest_version
from toprope.training.inference.client import PromptTooLong, Sampling, SessionLost
from toprope.training.rollouts.environment_host import level_name
from toprope.training.rollouts.environment_set import Players
from toprope.training.rollouts.group_sampler import Made
from toprope.training.rollouts.task_sampler import Choice

__all__ = ["Producer"]

_FAILURES_IN_A_ROW = 32
"""Groups that may fail one after the other before the environment is given up."""
_ROOM_WAIT_S = 20.0

_TOO_LONG = "the prompt left no room"
_EMPTY = "nothing was sampled"
_SESSION = "inference was started again"
_ENDED = "training had ended"


class _Account:
    """What became of the groups of this life; every change is told."""

    def __init__(self, member: CrewMember) -> None:
        self._member = member
        self._begun = self._posting = self._posted = 0
        self._given_up: Counter[str] = Counter()
        self._errors = Errors()

    def begin(self) -> None:
        self._begun += 1
        self._tell()

    def post(self) -> None:
        self._posting += 1
        self._tell()

    def posted(self) -> None:
        self._posting, self._posted = self._posting - 1, self._posted + 1
        self._tell()

    def played(self, made: Made) -> None:
        self._errors.add(made.outcomes)

    def give_up(self, reason: str) -> None:
        self._given_up[reason] += 1
        self._tell()

    def _tell(self) -> None:
        errors = self._errors
        self._member.report(
            Making(
                self._begun,
                self._posting,
                self._posted,
                dict(self._given_up),
                errors.rollouts,
                dict(errors.counted),
            )
        )


class Producer:
    """The making of groups for training.

    Args:
        member: The driver's membership.
        players: Play tasks.
        api: Where groups go.
        sampling: How answers are sampled.
        evaluator: Measures along the way.
        choice: What is played next.
        validation: Validation tasks for that.
        seen: Hears of every group that was played for training.
    """

    def __init__(
        self,
        member: CrewMember,
        players: Players,
        api: ApiClient,
        sampling: Sampling,
        evaluator: Evaluator,
        choice: Choice,
        *,
        validation: int = 0,
        seen: Callable[[Made], None] = lambda made: None,
    ) -> None:
        self._member, self._spec, self._config = member, member.spec, member.spec.config
        self._players, self._api, self._sampling = players, api, sampling
        self._choice = choice
        self._evaluator, self._validation, self._seen = evaluator, validation, seen
        self._account = _Account(member)
        self._failed_in_a_row: Counter[str] = Counter()
        self._version, self._news, self._climbs = 0, asyncio.Event(), asyncio.Event()

    async def run(self) -> None:
        """Makes groups for ever, `concurrency` at a time, and pauses while enough of them wait.

        Raises:
            BaseExceptionGroup, TopropeError, WorkerFailure: It cannot go on.
        """
        # A run or driver that goes on does so with tasks that were not played yet, or few that were.
        goes_on = self._member.attempt > 1 or self._member.life > 0
        # So does a member of a sweep that goes on with another's weights.
        first = self._spec.member.first_task if self._spec.member is not None else 0
        accepted = (await self._api.counts()).accepted if goes_on else 0
        self._numbers = itertools.count(first + accepted)
        self._choice.begin(first, accepted)
        if self._config.algorithm.deterministic:
            await self._in_step()
        else:
            await self._side_by_side()

    async def _side_by_side(self) -> None:
        rollout, api = self._config.rollout, self._api
        room = asyncio.Event()
        room.set()

        async def watch_room() -> None:
            while not await api.wait_for_room(below=rollout.queue_groups, wait_s=_ROOM_WAIT_S):
                pass
            room.set()

        async def work() -> None:
            while True:
                await room.wait()
                await self._member.hold_async()
                waiting = await self._one()
                if waiting >= rollout.queue_groups and room.is_set():
                    room.clear()
                    tasks.create_task(watch_room())

        async with asyncio.TaskGroup() as tasks:
            for _ in range(rollout.concurrency):
                tasks.create_task(work())
            if self._config.evaluation.every_steps:
                tasks.create_task(self._evaluate_along())
            if self._choice.climbs:
                tasks.create_task(self._climb_along())

    async def _in_step(self) -> None:
        """Makes groups one after the other, and only for a trainer that waits: each is sampled by exactly the weights
        that it trains, and no clock decides what a step is made of."""
        due = self._config.evaluation.every_steps
        while True:
            wanted = await self._api.missing_rows(wait_s=_ROOM_WAIT_S)
            if not wanted.rows:
                continue
            if due and wanted.version >= due:
                due = await self._evaluate_now(wanted.version)
            await self._climb(wanted.version)
            await self._member.hold_async()
            await self._one()

    async def _one(self) -> int:
        """Makes and posts a group; how many wait with it."""
        pick = await self._choice.next()
        number, account = next(self._numbers), self._account
        account.begin()
        self._weigh()
        posting, posted, counts = False, False, True
        try:
            made = await self._players.play(
                pick.label, "train", pick.number, self._config.rollout.group_size, self._sampling, pick.variant
            )
            member = self._member
            life = f"{member.attempt}.{member.life}" if member.life else str(member.attempt)
            group = made.group(pick.label, f"{self._spec.run_id}-{life}-{number}")
            if not group.tokens:
                return self._failed(pick.label, _EMPTY, "no rollout of it holds a sampled token")
            self._failed_in_a_row[pick.label] = 0
            self._seen(made)
            account.played(made)
            self._sampled_by(newest_version(made))
            account.post()
            posting = True
            waiting = await self._api.post_group(group)
            account.posted()
            posted = True
            return waiting
        except WorkerError as error:
            return self._failed(pick.label, reason_of(error), error)
        except PromptTooLong as error:
            return self._failed(pick.label, _TOO_LONG, error)
        except SessionLost:
            account.give_up(_SESSION)
            counts = False
            return 0
        except asyncio.CancelledError:
            if not posting:  # what was being posted is nobody's loss: the API's account says whether it has it
                account.give_up(_ENDED)
            raise
        finally:
            self._choice.done(pick, posted=posted, counts=counts)

    def _weigh(self) -> None:
        """Moves the weights of reward parts along their line: as far as the policy's versions are on theirs."""
        share = min(1.0, self._version / self._config.budget.steps)
        for label, host in self._players.hosts.items():
            if end := host.plan.section.reward_weights_end:
                begun = host.parts
                moved = {name: round(begun[name] + share * (end[name] - begun[name]), 6) for name in end}
                self._players.weigh(label, moved)

    def _failed(self, label: str, reason: str, error: Exception | str) -> int:
        self._account.give_up(reason)
        self._failed_in_a_row[label] += 1
        several = len(self._players.hosts) > 1
        print(f"a group{f' of {label}' if several else ''} failed: {error}", file=sys.stderr, flush=True)
        if self._failed_in_a_row[label] >= _FAILURES_IN_A_ROW:
            raise ComponentFailed(
                f"The environment {f'{label} ' if several else ''}failed {self._failed_in_a_row[label]} groups one "
                f"after the other; the last: {error}",
                hint="describe_environment shows how it scores; read_logs(component='environment') has the details.",
            )
        return 0

    def _sampled_by(self, version: int) -> None:
        if version > self._version:
            self._version = version
            self._news.set()
            self._climbs.set()

    async def _climb_along(self) -> None:
        """Measures the levels of curricula when it is time, while training goes on."""
        while True:
            await self._climbs.wait()
            self._climbs.clear()
            await self._climb(self._version)

    async def _climb(self, version: int) -> None:
        """Measures those levels that are due, on validation tasks."""
        for label, climb in self._choice.climbs.items():
            if climb.due(version):
                host = self._players.hosts[label]
                tasks = min(climb.curriculum.window, host.level_sizes[climb.level])
                successes = await self._solved(label, tasks, level_name(climb.level))
                self._choice.climbed(label, version, successes, tasks)

    async def _solved(self, label: str, tasks: int, variant: str) -> int:
        """How many of the first validation tasks of a level one answer each solves; those that fail are not solved."""
        limit = asyncio.Semaphore(1 if self._config.algorithm.deterministic else self._config.rollout.concurrency)

        async def one(index: int) -> bool:
            async with limit:
                try:
                    made = await self._players.play(label, "validation", index, 1, self._sampling, variant)
                except (WorkerError, PromptTooLong) as error:
                    print(f"a validation task of {label} failed: {error}", file=sys.stderr, flush=True)
                    return False
            return made.outcomes[0].success

        return sum(await asyncio.gather(*(one(index) for index in range(tasks))))

    async def _evaluate_along(self) -> None:
        """Evaluates on validation tasks every so many steps, while training goes on."""
        due = self._config.evaluation.every_steps
        while True:
            await self._news.wait()
            self._news.clear()
            if self._version < due:
                continue
            due = await self._evaluate_now(self._version)

    async def _evaluate_now(self, version: int) -> int:
        """Evaluates on validation tasks; the version at which the next time is due."""
        label, every = f"step-{version}", self._config.evaluation.every_steps
        self._member.report(Evaluated(label, await self._evaluator.along(label, self._validation)))
        return (version // every + 1) * every
