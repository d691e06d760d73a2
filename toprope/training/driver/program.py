"""The rollout driver's program: the crew's `environment`.

It starts a worker for each environment of its run, looks whether they score, then follows the kind of its run:
`train` evaluates the starting policy, feeds the trajectory API with scored groups until it is asked to evaluate again;
`test` plays validation tasks, with the policy or with several models, and ends; `ask` loads no environment and puts
questions to the policy. It holds no user code and no model.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from toprope.errors import ComponentFailed, Corrupt, NotFound, TopropeError
from toprope.records.messages import (
    Checked,
    Evaluate,
    Evaluated,
    Failed,
    Finished,
    Peers,
    Progress,
    Ready,
    Stop,
    Without,
)
from toprope.records.run.folder import read_json
from toprope.records.run.full_disk import NO_ROOM
from toprope.records.run.specification import EnvironmentSource
from toprope.records.run.tested_models import ENDPOINT_KEY, write_models
from toprope.sdk.errors import WorkerDied, WorkerFailure
from toprope.settings.environment import MemberPlan
from toprope.training.api.clients.async_client import ApiClient
from toprope.training.component.member import CrewMember, send_heartbeats
from toprope.training.component.peer_addresses import PeerAway
from toprope.training.demonstrations.from_dataset import take_given
from toprope.training.demonstrations.from_teacher import demonstrate
from toprope.training.driver.contamination import Contents, write_contents
from toprope.training.driver.environment_report import describe
from toprope.training.driver.producer import Producer
from toprope.training.evaluation.evaluator import Evaluator, summary_of
from toprope.training.evaluation.model_comparison import best_of, contest
from toprope.training.evaluation.periodic import every_so_many_steps
from toprope.training.evaluation.questions import ask
from toprope.training.inference.client import PolicyClient, Sampling
from toprope.training.rollouts.endpoint_client import EndpointClient
from toprope.training.rollouts.environment_host import Hosted, checked_of, measured_by, plans_of
from toprope.training.rollouts.environment_set import Players
from toprope.training.rollouts.group_sampler import Made
from toprope.training.rollouts.task_sampler import Choice

__all__ = ["Driver", "main"]


class Driver:
    """One run's rollouts, from the environment's first load to its last evaluation."""

    def __init__(self, member: CrewMember) -> None:
        self._member, self._spec, self._config = member, member.spec, member.spec.config
        self._contents = Contents()
        self._started: dict[str, Hosted] = {}
        # Out of this process's variables before a worker is started from it.
        names = [name for name in os.environ if name.startswith(ENDPOINT_KEY)]
        self._keys = {name.removeprefix(ENDPOINT_KEY): os.environ.pop(name) for name in names}

    async def run(self) -> None:
        """Does what the run's kind asks for.

        Raises:
            TopropeError, WorkerFailure: The run cannot go on.
        """
        if self._spec.ask is not None:
            await ask(self._member)
            return
        policy: PolicyClient | None = None
        try:
            await self._start()
            await self._check()
            if self._spec.run_kind.demonstrates:
                self._member.report(Ready(str(await self._demonstrations())))
            elif self._has_own_trainer:
                self._member.report(Ready(str(await describe(self._member.folder, self._hosts))))
            else:
                self._member.report(Ready())
            if self._spec.test is not None and self._spec.test.models:
                await self._contest()
                return
            policy = await self._own_policy()
            rollout, sampling = self._config.rollout, self._sampling()
            players = Players(self._hosts, policy)
            evaluator = Evaluator(
                self._member.folder,
                players,
                sampling,
                concurrency=1 if self._config.algorithm.deterministic else max(64, rollout.concurrency),
                progress=lambda what, done, total: self._member.report(Progress(what, done, total)),
                evaluator=self._measured_by,
                seen=self._saw,
            )
            if self._spec.test is not None:
                await self._test(players, evaluator)
            elif self._spec.run_kind.demonstrates:
                await self._fine_tune(players, evaluator)
            else:
                await self._train(players, evaluator, sampling)
        finally:
            if policy is not None:
                await policy.close()
            await asyncio.gather(*(host.close() for host in self._hosts))

    async def _start(self) -> None:
        """Starts all workers, beside each other; where one fails the others are ended by `run`."""
        plans = plans_of(self._spec)

        async def one(plan: MemberPlan, source: EnvironmentSource) -> Hosted:
            host = await Hosted.start(self._spec, plan, source, self._member.report, alone=len(plans) == 1)
            self._started[plan.label] = host
            return host

        found = await asyncio.gather(*(one(plan, source) for plan, source in plans), return_exceptions=True)
        for failure in found:
            if isinstance(failure, BaseException):
                raise failure

    @property
    def _hosts(self) -> list[Hosted]:
        """The environments whose workers are there, the selected one first."""
        order = [plan.label for plan, _ in plans_of(self._spec)] if self._started else []
        return [self._started[label] for label in order if label in self._started]

    async def _own_policy(self) -> PolicyClient:
        """The run's own policy, from when it serves, wherever that is."""
        await self._member.address_async("inference")
        return PolicyClient(lambda: self._member.peer("inference"), self._member.secret)

    def _sampling(self) -> Sampling:
        rollout = self._config.rollout
        algorithm = self._config.algorithm
        seed = algorithm.seed if algorithm.deterministic else None
        return Sampling(rollout.temperature, rollout.top_p, rollout.max_new_tokens, tuple(rollout.stop), seed)

    async def _check(self) -> None:
        """Looks whether every split of every environment has tasks and an answer can be scored.

        Raises: see `Hosted.check`.
        """
        evaluation = self._config.evaluation
        along = evaluation.validation_tasks if evaluation.every_steps or self._spec.member is not None else 1
        needed = {"train": 1, "validation": max(evaluation.examples, along), "heldout": evaluation.heldout_tasks}
        if self._spec.test is not None:
            needed = {"train": 0, "validation": self._spec.test.tasks, "heldout": 0}
            if self._spec.test.heldout:
                needed |= {"validation": max(evaluation.examples, 1), "heldout": self._spec.test.tasks}
        elif self._spec.member is not None:
            needed["heldout"] = 0
        found = await asyncio.gather(*(host.check(needed) for host in self._hosts), return_exceptions=True)
        for failure in found:
            if isinstance(failure, BaseException):
                raise failure
        self._member.report(Checked(checked_of(self._hosts)))

    async def _demonstrations(self) -> Path:
        """Has a teacher solve training tasks; the file in the run folder from which the trainer learns."""
        path, model = self._member.folder.path / "traces.jsonl", self._spec.teacher
        if path.is_file():
            return path  # of an earlier attempt, or an earlier life
        if self._spec.dataset is not None:
            return await take_given(
                self._hosts,
                self._spec,
                path,
                lambda what, done, total: self._member.report(Progress(what, done, total)),
                lambda environment, task, asked: self._contents.saw("train", f"{environment}/{task}", asked),
            )
        teacher = None
        if model is not None and model.endpoint is not None:
            teacher = EndpointClient(model.endpoint, self._keys.get(model.endpoint.key or ""))
        try:
            return await demonstrate(
                self._hosts,
                self._spec,
                path,
                teacher,
                lambda what, done, total: self._member.report(Progress(what, done, total)),
            )
        finally:
            if teacher is not None:
                await teacher.close()

    async def _fine_tune(self, players: Players, evaluator: Evaluator) -> None:
        """Measures the policy before and after, as training by reward does; the trainer learns meanwhile."""
        await self._evaluate_first(players, evaluator)
        along: asyncio.Task[None] | None = None
        if every := self._config.evaluation.every_steps:
            tasks = players.count("validation", self._config.evaluation.validation_tasks)

            async def measure(label: str) -> None:
                self._member.report(Evaluated(label, await evaluator.along(label, tasks)))

            along = asyncio.create_task(every_so_many_steps(self._member.folder.metrics, every, measure))
        try:
            async for label in self._evaluations():
                if along is not None:
                    await _cancelled(along)
                    if not along.cancelled():
                        along.result()
                await self._evaluate(players, evaluator, label)
        finally:
            if along is not None:
                await _cancelled(along)

    async def _evaluate_first(self, players: Players, evaluator: Evaluator) -> None:
        # What was measured before training stays; a resumed run has another policy by now.
        if (known := self._known("before")) is None:
            await self._evaluate(players, evaluator, "before")
        else:
            self._member.report(Evaluated("before", known))

    async def _evaluate(self, players: Players, evaluator: Evaluator, label: str) -> None:
        evaluation = self._config.evaluation
        heldout = players.count("heldout", evaluation.heldout_tasks)
        summary: dict[str, Any] = {}
        if heldout:
            examples = self._examples(players)
            summary = await evaluator.heldout(label, heldout, examples, greedy=evaluation.greedy)
        elif self._spec.member is not None and label != "before":
            # A sweep compares its members on validation tasks; held-out ones are for its winner.
            summary = await evaluator.along(label, players.count("validation", evaluation.validation_tasks))
        self._leave_contents()
        self._member.report(Evaluated(label, summary))

    def _examples(self, players: Players) -> int:
        """How many tasks are shown: as many as were asked for, and of each environment one at least."""
        asked = self._config.evaluation.examples
        return players.count("validation", max(1, asked // len(self._hosts)) if asked else 0)

    async def _test(self, players: Players, evaluator: Evaluator) -> None:
        plan = self._spec.test
        assert plan is not None
        if plan.heldout:
            tasks, greedy = players.count("heldout", plan.tasks), self._config.evaluation.greedy
            summary = await evaluator.heldout("test", tasks, self._examples(players), greedy=greedy)
        else:
            summary = await evaluator.test(players.count("validation", plan.tasks), plan.group_size)
        self._member.report(Evaluated("test", summary))
        self._member.report(Finished())

    async def _contest(self) -> None:
        """Tests several models; what the best reached goes into the status."""
        plan, sampling = self._spec.test, self._sampling()
        assert plan is not None
        if plan.max_new_tokens is not None:
            sampling = replace(sampling, max_new_tokens=plan.max_new_tokens)
        models = await contest(
            plan,
            sum(min(plan.tasks, host.sizes["validation"]) for host in self._hosts),
            sampling,
            policy_name=self._config.policy.model,
            policy=self._policy,
            keys=self._keys,
            players_of=lambda player: Players(self._hosts, player),
            progress=lambda what, done, total: self._member.report(Progress(what, done, total)),
        )
        write_models(self._member.folder, models)
        summary: dict[str, Any] = {
            "split": "validation",
            "models": {model.name: model.sampled and model.sampled["accuracy"] for model in models},
        }
        if (best := best_of(models)) is not None and best.sampled is not None:
            kept = ("accuracy", "tasks", "successes", "rollouts", "reward_mean", "errors")
            summary |= {"best": best.name} | {key: best.sampled[key] for key in kept}
        self._member.report(Evaluated("test", summary))
        self._member.report(Finished())

    async def _policy(self) -> PolicyClient:
        """The run's own policy once it serves; the run goes on where it will not."""
        async for order in self._member.orders():
            if isinstance(order, Peers) and "inference" in order.addresses:
                return await self._own_policy()
            if isinstance(order, Without):
                raise ComponentFailed(f"The policy could not be brought up: {order.component}: {order.reason}")
            if isinstance(order, Stop):
                break
        raise ComponentFailed("The run is ending.")

    @property
    def _has_own_trainer(self) -> bool:
        return self._spec.run_kind.samples and self._config.algorithm.name == "custom"

    async def _train(self, players: Players, evaluator: Evaluator, sampling: Sampling) -> None:
        if self._has_own_trainer:
            await self._member.address_async("trainer")  # its checks come before anything is sampled
        await self._evaluate_first(players, evaluator)
        await self._member.address_async("api")
        api = ApiClient(lambda: self._member.peer("api"), self._member.secret)
        producer = Producer(
            self._member,
            players,
            api,
            sampling,
            evaluator,
            Choice(self._member, players),
            validation=players.count("validation", self._config.evaluation.validation_tasks),
            seen=lambda made: self._saw("train", made),
        )
        producing: asyncio.Task[None] | None = asyncio.create_task(producer.run())
        evaluations = self._evaluations()
        try:
            while True:
                order = asyncio.ensure_future(anext(evaluations, None))
                await asyncio.wait({order} | ({producing} if producing else set()), return_when=asyncio.FIRST_COMPLETED)
                if producing is not None and producing.done():
                    order.cancel()
                    producing.result()
                if (label := await order) is None:
                    return
                if producing is not None:  # the trainer has ended: what is in the making would be nobody's
                    producing = await _cancelled(producing)
                await self._evaluate(players, evaluator, label)
        finally:
            if producing is not None:
                await _cancelled(producing)
            self._leave_contents()
            await api.close()

    def _known(self, label: str) -> dict[str, Any] | None:
        """What an evaluation found in an earlier attempt or an earlier life of this driver; None: there is none."""
        try:
            return summary_of(read_json(self._member.folder.evaluation(label)))
        except (NotFound, Corrupt, KeyError, TypeError):
            return None

    async def _evaluations(self) -> AsyncIterator[str]:
        """Labels of the evaluations that the keeper asks for, until it says stop or is gone."""
        async for order in self._member.orders():
            if isinstance(order, Evaluate):
                yield order.label
            if isinstance(order, Stop):
                return

    def _leave_contents(self) -> None:
        try:
            write_contents(self._member.folder, self._member.attempt, self._contents)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            print(f"what tasks held could not be written: {error}", file=sys.stderr, flush=True)

    def _saw(self, split: str, made: Made) -> None:
        self._contents.saw(split, f"{made.environment}/{made.task_id}", made.messages)

    def _measured_by(self) -> dict[str, Any]:
        """What this attempt measures with, as it was loaded, and as it lies on the disk now."""
        return measured_by(self._hosts)


async def _cancelled(task: asyncio.Task[None]) -> None:
    """Cancels a task and waits until it has ended, however."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def main() -> int:
    """The component program."""
    member = CrewMember.join()

    async def run() -> None:
        pulse = asyncio.create_task(send_heartbeats(member.report))
        try:
            await Driver(member).run()
        finally:
            pulse.cancel()

    try:
        asyncio.run(run())
    except (TopropeError, WorkerFailure, BaseExceptionGroup) as error:
        cause = _first(error)
        if isinstance(cause, TopropeError):
            member.report(Failed(cause.message, cause.hint, isinstance(cause, PeerAway)))
        elif isinstance(cause, WorkerFailure):
            hint = "read_logs(component='environment') has what the environment printed."
            # Killed by somebody else, before there was one to keep going.
            killed = isinstance(cause, WorkerDied) and cause.code == -signal.SIGKILL
            member.report(Failed(str(cause), hint, killed))
        else:
            raise
        return 1
    return 0


def _first(error: BaseException) -> BaseException:
    """The first error within the groups that task groups raise."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
