"""Feeds the trajectory API with scored groups until it is stopped, and accounts for them.

Every group that is begun ends as posted, or as given up with a reason. A group that is given up is no loss, because
there are other tasks, but it is counted. The keeper is told before each post, so that the account covers every group
whose post was begun even if the driver is killed; the API's own account says whether it has such a group. Group ids
contain run, attempt, the driver's life and a number, so none occurs twice, and a repeated post is stored once.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress

from toprope.errors import ComponentFailed, Corrupt
from toprope.records.journal.groups import Outcome
from toprope.records.messages import Evaluated, Making
from toprope.records.run.folder import RunFolder, checkpoints_in
from toprope.sdk.errors import WorkerError, shortened
from toprope.training.api.clients.async_client import ApiClient
from toprope.training.component.member import CrewMember
from toprope.training.evaluation.evaluator import Evaluator, newest_version, next_due
from toprope.training.inference.client import PromptTooLong, Sampling, SessionLost
from toprope.training.rollouts.curriculum import level_variant
from toprope.training.rollouts.difficulty import TaskSkipped
from toprope.training.rollouts.endpoint_client import Unanswered
from toprope.training.rollouts.environment_set import EnvironmentSet
from toprope.training.rollouts.group_sampler import TaskRef
from toprope.training.rollouts.sampled_group import SampledGroup
from toprope.training.rollouts.task_sampler import TaskChoice, TaskSampler
from toprope.training.trainer.checkpoints.checkpoint_folder import read_state

_MAX_FAILURES = 32
"""Groups in a row that may fail before the environment is given up."""
_REPORT_S = 0.05
"""Seconds for which changes of the account that no post waits for are collected."""
_WAIT_S = 20.0
"""Seconds of one long poll of the API."""
_ERROR_KIND = re.compile(r"^([A-Za-z_][\w.]{0,60}?)(?::|$)")
_MAX_KINDS = 12
_OTHER = "other"
_ERROR_TEXT = 300
"""Most characters of an answer that a message quotes."""

# Reasons for which groups are given up. They are stored in status.json.
_TOO_LONG = "the prompt left no room"
_EMPTY = "nothing was sampled"
_UNJUDGED = "the judge failed"
_UNANSWERED = "a model did not answer"
_SESSION = "inference was started again"
_ENDED = "training had ended"


def failure_reason(error: WorkerError) -> str:
    """The reason for which a group is given up; there are few, so that their counts are informative."""
    if error.kind != "ended":
        return "the environment failed"
    return "the environment hung" if error.type == "WorkerTimeout" else "the environment's process ended"


class ErrorCounts:
    """Counts the errors of rollouts by kind."""

    def __init__(self) -> None:
        self.rollouts = 0
        self.by_kind: Counter[str] = Counter()

    def add(self, outcomes: Iterable[Outcome]) -> None:
        for outcome in outcomes:
            self.rollouts += 1
            if outcome.error:
                kind = found[1] if (found := _ERROR_KIND.match(outcome.error)) else outcome.error[:40]
                is_counted = kind in self.by_kind or len(self.by_kind) < _MAX_KINDS
                self.by_kind[kind if is_counted else _OTHER] += 1


class _Account:
    """The fate of this life's groups, reported before each post and when one is given up; other changes follow soon."""

    def __init__(self, member: CrewMember) -> None:
        self._member = member
        self._begun = self._posting = self._posted = 0
        self._given_up: Counter[str] = Counter()
        self._errors = ErrorCounts()
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        self._begun += 1
        self._report_soon()

    def add_outcomes(self, outcomes: Iterable[Outcome]) -> None:
        """Counts the rollouts of a sampled group; reported with the next change."""
        self._errors.add(outcomes)

    def start_post(self) -> None:
        self._posting += 1
        self.report()

    def finish_post(self) -> None:
        self._posting, self._posted = self._posting - 1, self._posted + 1
        self._report_soon()

    def give_up(self, reason: str) -> None:
        self._given_up[reason] += 1
        self.report()

    def _report_soon(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_REPORT_S, self.report)

    def report(self) -> None:
        """Tells the keeper everything so far."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        given_up, errors = dict(self._given_up), self._errors
        self._member.report(
            Making(self._begun, self._posting, self._posted, given_up, errors.rollouts, dict(errors.by_kind))
        )


class GroupProducer:
    """Samples groups for training.

    Args:
        member: The driver's membership.
        environments: The environments with the policy.
        api: Takes the groups.
        sampling: Sampling parameters.
        evaluator: Evaluates during training; None if another driver does.
        tasks: Chooses the tasks.
        validation_tasks: Tasks of an evaluation during training.
        on_group: Called with every group that was sampled for training.
    """

    def __init__(
        self,
        member: CrewMember,
        environments: EnvironmentSet,
        api: ApiClient,
        sampling: Sampling,
        evaluator: Evaluator | None,
        tasks: TaskSampler,
        *,
        validation_tasks: int = 0,
        on_group: Callable[[SampledGroup], None] = lambda group: None,
    ) -> None:
        self._member, self._spec, self._config = member, member.spec, member.spec.config
        self._environments, self._api, self._sampling = environments, api, sampling
        self._tasks, self._evaluator, self._validation_tasks = tasks, evaluator, validation_tasks
        self._on_group = on_group
        for label, sampler in environments.samplers.items():
            tasks.filter_by_difficulty(label, sampler)
        self._account = _Account(member)
        self._failures_in_a_row: Counter[str] = Counter()
        self._version = 0
        """Newest policy version that sampled a token, or that the trainer waits to train."""
        self._news: list[asyncio.Event] = []
        """Set at each newer version, one for each task that `_at_new_versions` runs."""
        self._evaluation_due = 0
        """Version at which the next evaluation is due; 0 before the trainer's first version is known."""

    async def run(self) -> None:
        """Samples and posts groups until it is cancelled; pauses while enough of them wait for the trainer.

        Raises:
            BaseExceptionGroup, TopropeError, WorkerFailure: It cannot continue.
        """
        # A resumed run and a restarted driver begin with tasks that were not sampled yet, up to a few.
        is_resumed = self._member.attempt > 1 or self._member.life > 0
        # So does a run that continues with another's weights.
        accepted = (await self._api.counts()).accepted if is_resumed else 0
        self._numbers = itertools.count(self._spec.first_task + accepted)
        self._tasks.restore(accepted, is_resumed=is_resumed)
        if is_resumed:
            self._version = resumed_version(self._member.folder)
        try:
            if self._config.samples_in_step:
                await self._sample_in_step()
            else:
                await self._sample_concurrently()
        finally:
            self._account.report()
            self._tasks.save()

    async def _sample_concurrently(self) -> None:
        """Samples `rollout.concurrency` groups at a time."""
        rollout, api = self._config.rollout, self._api
        has_room = asyncio.Event()
        has_room.set()

        async def watch_room() -> None:
            while not await api.wait_for_room(below=rollout.queue_groups, wait_s=_WAIT_S):
                pass
            has_room.set()

        async def sample_forever() -> None:
            while True:
                await has_room.wait()
                await self._member.hold_async()
                waiting = await self._sample_group()
                if waiting >= rollout.queue_groups and has_room.is_set():
                    has_room.clear()
                    group.create_task(watch_room())

        async with asyncio.TaskGroup() as group:
            if self._config.evaluation.every_steps and self._evaluator is not None:
                group.create_task(self._at_new_versions(self._evaluate_if_due))
            if self._tasks.curricula:
                group.create_task(self._at_new_versions(self._measure_due_levels))
            for _ in range(rollout.concurrency):
                group.create_task(sample_forever())

    async def _sample_in_step(self) -> None:
        """Samples groups only while the trainer waits, each by exactly the weights that it trains.

        A deterministic run samples one group at a time, so that no clock decides which groups a step has.
        """
        rollout, one_by_one = self._config.rollout, self._config.algorithm.deterministic
        while True:
            missing = await self._api.missing_rows(wait_s=_WAIT_S)
            if not missing.rows:
                continue
            self._version = missing.version
            await self._evaluate_if_due(missing.version)
            await self._measure_due_levels(missing.version)
            await self._member.hold_async()
            groups = 1 if one_by_one else min(-(-missing.rows // rollout.group_size), rollout.concurrency)
            await asyncio.gather(*(self._sample_group() for _ in range(groups)))

    async def _sample_group(self) -> int:
        """Samples and posts one group; returns how many groups wait for the trainer."""
        choice = await self._tasks.next()
        number, account = next(self._numbers), self._account
        account.begin()
        self._update_reward_weights()
        is_posting, ended, counts = False, True, True
        try:
            sampler = self._environments.samplers[choice.label]
            sampled = await sampler.sample(choice.task, self._config.rollout.group_size, self._sampling)
            group = sampled.to_record(choice.label, self._group_id(number), choice.task.variant)
            if not group.tokens:
                errors = [outcome.error for outcome in sampled.outcomes if outcome.error]
                # Frameworks write what refused a prompt in place of an answer.
                answers = [
                    f"its answer: {shortened(' '.join(text.split()), _ERROR_TEXT)}"
                    for text in sampled.texts
                    if text.strip()
                ]
                why = f": {found[0]}" if (found := errors + answers) else ""
                if any(outcome.unjudged for outcome in sampled.outcomes):
                    return self._count_failure(choice, _UNJUDGED, f"no answer of it could be judged{why}")
                return self._count_failure(choice, _EMPTY, f"no rollout of it contains a sampled token{why}")
            self._failures_in_a_row[choice.label] = 0
            self._on_group(sampled)
            self._tasks.note_difficulty(choice, sampled.task_id, sampled.outcomes)
            account.add_outcomes(sampled.outcomes)
            self._note_version(newest_version(sampled))
            account.start_post()
            is_posting = True
            waiting = await self._api.post_group(group)
            account.finish_post()
            return waiting
        except WorkerError as error:
            return self._count_failure(choice, failure_reason(error), error)
        except PromptTooLong as error:
            return self._count_failure(choice, _TOO_LONG, error)
        except Unanswered as error:
            return self._count_failure(choice, _UNANSWERED, error)
        except TaskSkipped as skipped:
            account.give_up(str(skipped))
            counts = False
            return 0
        except SessionLost:
            account.give_up(_SESSION)
            counts = False
            return 0
        except asyncio.CancelledError:
            if not is_posting:  # the API's own account says whether it has a group that was being posted
                account.give_up(_ENDED)
                ended = counts = False
            raise
        finally:
            self._tasks.finish(choice, ended=ended, counts=counts)

    def _group_id(self, number: int) -> str:
        member = self._member
        life = f"{member.attempt}.{member.life}" if member.life else str(member.attempt)
        driver = f"d{member.number}-" if member.number > 1 else ""
        return f"{self._spec.run_id}-{life}-{driver}{number}"

    def _update_reward_weights(self) -> None:
        """Interpolates the weights of reward parts by the share of steps that the policy has made."""
        share = min(1.0, self._version / self._config.budget.steps)
        for label, host in self._environments.hosts.items():
            if end := host.plan.section.reward_weights_end:
                start = host.part_weights
                weights = {name: round(start[name] + share * (end[name] - start[name]), 6) for name in end}
                self._environments.samplers[label].weights = weights

    def _count_failure(self, choice: TaskChoice, reason: str, error: Exception | str) -> int:
        """Gives a group up; returns 0.

        Raises:
            ComponentFailed: Too many groups of the environment failed in a row. It names the models if they failed.
        """
        label = choice.label
        self._account.give_up(reason)
        self._failures_in_a_row[label] += 1
        is_mixture = len(self._environments.hosts) > 1
        print(f"a group{f' of {label}' if is_mixture else ''} failed: {error}", file=sys.stderr, flush=True)
        if self._failures_in_a_row[label] >= _MAX_FAILURES:
            name = f"environment {label}" if is_mixture else "environment"
            how_often = f"{self._failures_in_a_row[label]} groups one after the other; the last: {error}"
            if reason == _UNANSWERED:
                raise ComponentFailed(
                    f"A model that the {name} asks failed {how_often}",
                    hint="environment.opponent and environment.model_roles name its models; the owner checks them.",
                )
            raise ComponentFailed(
                f"The {name} failed {how_often}",
                hint="describe_environment shows how it scores; read_logs(component='environment') has the details.",
            )
        return 0

    def _note_version(self, version: int) -> None:
        if version > self._version:
            self._version = version
            for news in self._news:
                news.set()

    async def _at_new_versions(self, act: Callable[[int], Awaitable[None]]) -> None:
        """Calls `act` with the newest version whenever there is a newer one, while training goes on."""
        news = asyncio.Event()
        self._news.append(news)
        while True:
            await news.wait()
            news.clear()
            await act(self._version)

    async def _measure_due_levels(self, version: int) -> None:
        """Measures the levels that are due, on validation tasks."""
        for label, progress in self._tasks.curricula.items():
            if progress.is_due(version):
                host = self._environments.hosts[label]
                tasks = min(progress.curriculum.window, host.level_sizes[progress.level])
                successes, sampled = await self._count_solved(label, tasks, level_variant(progress.level))
                self._tasks.add_measure(label, version, successes, sampled)

    async def _count_solved(self, label: str, tasks: int, variant: str) -> tuple[int, int]:
        """Of a level's first validation tasks, one answer each: the number that are solved, and of all that count.

        A failed task is not solved; one whose opponent or model with a role does not answer counts nowhere.
        """
        limit = asyncio.Semaphore(1 if self._config.algorithm.deterministic else self._config.rollout.concurrency)
        sampler = self._environments.samplers[label]

        async def is_solved(index: int) -> bool | None:
            async with limit:
                try:
                    group = await sampler.sample(TaskRef("validation", index, variant), 1, self._sampling)
                except (WorkerError, PromptTooLong, Unanswered) as error:
                    print(f"a validation task of {label} failed: {error}", file=sys.stderr, flush=True)
                    return None if isinstance(error, Unanswered) else False
            return group.outcomes[0].success

        solved = await asyncio.gather(*(is_solved(index) for index in range(tasks)))
        return solved.count(True), tasks - solved.count(None)

    async def _evaluate_if_due(self, version: int) -> None:
        """Evaluates on validation tasks if enough steps were made since the last evaluation."""
        every = self._config.evaluation.every_steps
        if not every or self._evaluator is None:
            return
        self._evaluation_due = self._evaluation_due or next_due(self._member.folder, version, every)
        if version >= self._evaluation_due:
            label = f"step-{version}"
            result = await self._evaluator.evaluate_validation(label, self._validation_tasks)
            self._member.report(Evaluated(label, result))
            self._evaluation_due = (version // every + 1) * every


def resumed_version(folder: RunFolder) -> int:
    """Return the policy version of the newest checkpoint that can be read; 0 without one.

    A trainer of one's own publishes at will, so the version need not be the step.
    """
    for checkpoint in reversed(checkpoints_in(folder.checkpoints)):
        with suppress(Corrupt):  # the trainer sets it aside
            return read_state(checkpoint).policy_version
    return 0
