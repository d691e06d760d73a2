"""The rollout driver's program: the crew's `environment`.

It starts the worker that holds the user's environment, looks whether it scores, then follows the kind of its run:
`train` evaluates the starting policy, feeds the trajectory API with scored groups until it is asked to evaluate again;
`test` plays validation tasks, with the policy or with several models, and ends; `ask` loads no environment and puts
questions to the policy. It holds no user code and no model.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from toprope.errors import ComponentFailed, Corrupt, InvalidValue, NotFound, TopropeError
from toprope.records.crew import (
    ENV_FOLDER,
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
from toprope.records.digests import measuring
from toprope.records.folder import read_json
from toprope.records.lines import NO_ROOM
from toprope.records.specification import EnvironmentSource
from toprope.records.tested import ENDPOINT_KEY, write_models
from toprope.records.traces import append_traces
from toprope.sdk.errors import WorkerDied, WorkerFailure
from toprope.sdk.link import Link, worker_environment
from toprope.training.api.client import ApiClient
from toprope.training.asking import ask
from toprope.training.contents import Contents, write_contents
from toprope.training.contest import best_of, contest
from toprope.training.crew import Member, beating
from toprope.training.demonstrations import Collector, cache_of
from toprope.training.endpoints import EndpointClient
from toprope.training.evaluation import Evaluator, summary_of
from toprope.training.inference.client import PolicyClient, Sampling
from toprope.training.own_loop import OwnLoopMaker
from toprope.training.peers import PeerAway
from toprope.training.producing import Producer
from toprope.training.rollouts import Made, RolloutMaker
from toprope.training.workers import Worker

__all__ = ["Driver", "main"]


class Driver:
    """One run's rollouts, from the environment's first load to its last evaluation."""

    def __init__(self, member: Member) -> None:
        self._member, self._spec, self._config = member, member.spec, member.spec.config
        self._contents = Contents()
        # Out of this process's variables before a worker is started from it.
        names = [name for name in os.environ if name.startswith(ENDPOINT_KEY)]
        self._keys = {name.removeprefix(ENDPOINT_KEY): os.environ.pop(name) for name in names}

    async def run(self) -> None:
        """Does what the run's kind asks for.

        Raises:
            TopropeError, WorkerFailure: The run cannot go on.
        """
        if self._spec.kind == "ask":
            await ask(self._member)
            return
        worker = await Worker.start(self._open, self._config.launcher, self._member.report)
        policy: PolicyClient | None = None
        try:
            sizes = await self._check(await worker.link())
            if self._spec.kind == "sft":
                self._member.report(Ready(str(await self._demonstrations(worker))))
            else:
                self._member.report(Ready())
            if self._spec.test is not None and self._spec.test.models:
                await self._contest(worker, sizes)
                return
            policy = await self._own_policy()
            rollout, sampling = self._config.rollout, self._sampling()
            maker = self._maker(worker, policy)
            evaluator = Evaluator(
                self._member.folder,
                maker,
                sampling,
                concurrency=1 if self._config.algorithm.deterministic else max(64, rollout.concurrency),
                progress=lambda what, done, total: self._member.report(Progress(what, done, total)),
                evaluator=self._measured_by,
                seen=self._saw,
            )
            if self._spec.kind == "test":
                await self._test(evaluator, sizes)
            elif self._spec.kind == "sft":
                await self._fine_tune(evaluator, sizes)
            else:
                await self._train(maker, evaluator, sampling, sizes)
        finally:
            if policy is not None:
                await policy.close()
            await worker.close()

    async def _own_policy(self) -> PolicyClient:
        """The run's own policy, from when it serves, wherever that is."""
        await self._member.address_async("inference")
        return PolicyClient(lambda: self._member.peer("inference"), self._member.secret)

    def _sampling(self) -> Sampling:
        rollout = self._config.rollout
        algorithm = self._config.algorithm
        seed = algorithm.seed if algorithm.deterministic else None
        return Sampling(rollout.temperature, rollout.top_p, rollout.max_new_tokens, tuple(rollout.stop), seed)

    def _maker(self, worker: Worker, player: PolicyClient | EndpointClient) -> RolloutMaker:
        own_loop = bool(self._card.get("own_loop"))
        maker = (OwnLoopMaker if own_loop else RolloutMaker)(
            worker,
            player,
            multi_turn=self._card["max_turns"] > 1,
            call_timeout_s=self._config.environment.call_timeout_s,
        )
        if isinstance(maker, OwnLoopMaker):
            maker.rollout_timeout_s = self._config.environment.rollout_timeout_s
        return maker

    async def _open(self) -> Link:
        source: EnvironmentSource = self._spec.environment
        loaded = measuring(source)
        section = self._config.environment
        # The keeper gave this process what the environment may have, keys that the owner named for it included; by the
        # run's folder whatever the environment starts is known as the run's.
        given = {
            name: value for name, value in os.environ.items() if name == ENV_FOLDER or not name.startswith("TOPROPE_")
        }
        if self._config.algorithm.deterministic:
            given.setdefault("PYTHONHASHSEED", "0")  # else sets of texts have another order in every process
        link = await Link.start(
            source.interpreter, env=worker_environment(given), stderr=_OwnLog(), timeout=section.load_timeout_s
        )
        try:
            self._card: dict[str, Any] = await link.call(
                "open",
                timeout=section.load_timeout_s,
                source=source.model_dump(include={"file", "attribute", "adapter", "target"}, exclude_none=True),
                knobs=section.knobs,
                reward_weights=section.reward_weights,
                max_turns=section.max_turns,
                seed=self._config.algorithm.seed,
            )
        except BaseException:
            await link.close()
            raise
        for name in section.reward_weights_end:
            if name not in self._card["parts"]:
                await link.close()
                raise InvalidValue(
                    f"environment.reward_weights_end names {name!r}, which is no part of this environment's reward.",
                    hint=f"Parts: {', '.join(self._card['parts'])}.",
                )
        self._loaded = {"loaded": loaded, "versions": self._card["versions"]}
        return link

    async def _check(self, link: Link) -> dict[str, int]:
        """Looks whether every split has tasks and an answer can be scored; reports what was found."""
        timeout, evaluation = self._config.environment.call_timeout_s, self._config.evaluation
        along = evaluation.validation_tasks if evaluation.every_steps or self._spec.member is not None else 1
        needed = {"train": 1, "validation": max(evaluation.examples, along), "heldout": evaluation.heldout_tasks}
        if self._spec.test is not None:
            needed = {"train": 0, "validation": self._spec.test.tasks, "heldout": 0}
            if self._spec.test.heldout:
                needed |= {"validation": max(evaluation.examples, 1), "heldout": self._spec.test.tasks}
        sizes: dict[str, int] = {}
        example: dict[str, Any] = {}
        for split, count in needed.items():
            if not count:
                continue
            found = await self._tasks(link, split, count)
            sizes[split] = len(found)
            if not found:
                raise ComponentFailed(
                    f"The environment has no tasks in its {split} split.",
                    hint="Splits are made by content: an environment needs a few dozen distinct tasks at least.",
                )
            example = example or {"split": split, **found[0]}
        # Any answer says whether the environment scores; the right one also says how high.
        outcome = await link.call(
            "score", timeout=timeout, split=example["split"], index=0, answer=str(example["reference"])
        )
        self._member.report(Checked({"tasks": sizes, "reference_outcome": outcome, "versions": self._card["versions"]}))
        return sizes

    async def _tasks(self, link: Link, split: str, count: int) -> list[dict[str, Any]]:
        """The first `count` tasks of a split, or as many as there are.

        They come in pieces that a slow environment can make within the time limit of a call: ten tasks have to be
        looked at to find one that is held out.
        """
        found: list[dict[str, Any]] = []
        piece = 4
        while len(found) < count:
            began = time.monotonic()
            answer = await link.call(
                "tasks",
                timeout=self._config.environment.load_timeout_s,
                split=split,
                start=len(found),
                count=min(piece, count - len(found)),
            )
            found += answer["tasks"]
            if answer["exhausted"] and len(found) >= answer["known"]:
                break
            seconds = time.monotonic() - began
            piece = min(piece * 2, 1024) if seconds < 1 else max(1, piece // 2)
            if seconds >= 1:
                self._member.report(Progress(f"making {split} tasks", len(found), count))
        return found

    async def _demonstrations(self, worker: Worker) -> Path:
        """Has a teacher solve training tasks; the file in the run folder from which the trainer learns."""
        path, model = self._member.folder.path / "traces.jsonl", self._spec.teacher
        if path.is_file():
            return path  # of an earlier attempt, or an earlier life
        teacher = None
        if model is not None and model.endpoint is not None:
            teacher = EndpointClient(model.endpoint, self._keys.get(model.endpoint.key or ""))
        collector = Collector(
            worker,
            self._spec,
            cache_of(self._spec, self._loaded["loaded"]),
            teacher,
            lambda what, done, total: self._member.report(Progress(what, done, total)),
            self._config.environment.call_timeout_s,
        )
        try:
            found = await collector.collect(self._config.sft.tasks)
        finally:
            if teacher is not None:
                await teacher.close()
        aside = path.with_name(".traces.jsonl")
        aside.unlink(missing_ok=True)
        append_traces(aside, found)
        os.replace(aside, path)
        return path

    async def _fine_tune(self, evaluator: Evaluator, sizes: dict[str, int]) -> None:
        """Measures the policy before and after, as training by reward does; the trainer learns meanwhile."""
        await self._evaluate_first(evaluator, sizes)
        async for label in self._evaluations():
            await self._evaluate(evaluator, sizes, label)

    async def _evaluate_first(self, evaluator: Evaluator, sizes: dict[str, int]) -> None:
        # What was measured before training stays; a resumed run has another policy by now.
        if (known := self._known("before")) is None:
            await self._evaluate(evaluator, sizes, "before")
        else:
            self._member.report(Evaluated("before", known))

    async def _evaluate(self, evaluator: Evaluator, sizes: dict[str, int], label: str) -> None:
        evaluation = self._config.evaluation
        heldout, examples = sizes.get("heldout", 0), min(evaluation.examples, sizes["validation"])
        summary: dict[str, Any] = {}
        if heldout:
            summary = await evaluator.heldout(label, heldout, examples, greedy=evaluation.greedy)
        elif self._spec.member is not None and label != "before":
            # A sweep compares its members on validation tasks; held-out ones are for its winner.
            summary = await evaluator.along(label, min(evaluation.validation_tasks, sizes["validation"]))
        self._leave_contents()
        self._member.report(Evaluated(label, summary))

    async def _test(self, evaluator: Evaluator, sizes: dict[str, int]) -> None:
        assert self._spec.test is not None
        if self._spec.test.heldout:
            evaluation = self._config.evaluation
            examples = min(evaluation.examples, sizes["validation"])
            summary = await evaluator.heldout("test", sizes["heldout"], examples, greedy=evaluation.greedy)
        else:
            summary = await evaluator.test(sizes["validation"], self._spec.test.group_size)
        self._member.report(Evaluated("test", summary))
        self._member.report(Finished())

    async def _contest(self, worker: Worker, sizes: dict[str, int]) -> None:
        """Tests several models; what the best reached goes into the status."""
        plan, sampling = self._spec.test, self._sampling()
        assert plan is not None
        if plan.max_new_tokens is not None:
            sampling = replace(sampling, max_new_tokens=plan.max_new_tokens)
        models = await contest(
            plan,
            sizes["validation"],
            sampling,
            policy_name=self._config.policy.model,
            policy=self._policy,
            keys=self._keys,
            maker_of=lambda player: self._maker(worker, player),
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

    async def _train(
        self, maker: RolloutMaker, evaluator: Evaluator, sampling: Sampling, sizes: dict[str, int]
    ) -> None:
        evaluation = self._config.evaluation
        await self._evaluate_first(evaluator, sizes)
        await self._member.address_async("api")
        api = ApiClient(lambda: self._member.peer("api"), self._member.secret)
        producer = Producer(
            self._member,
            maker,
            api,
            sampling,
            evaluator,
            validation=min(evaluation.validation_tasks, sizes["validation"]),
            seen=lambda made: self._saw("train", made),
            weights={name: part["weight"] for name, part in self._card["parts"].items()},
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
                await self._evaluate(evaluator, sizes, label)
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
        self._contents.saw(split, made.task_id, made.messages)

    def _measured_by(self) -> dict[str, Any]:
        """What this attempt measures with, as it was loaded, and as it lies on the disk now."""
        now = measuring(self._spec.environment)
        return self._loaded | {"on_disk": now} if now != self._loaded["loaded"] else dict(self._loaded)


class _OwnLog:
    """What the worker prints goes where the driver's own words go: the component's log."""

    def write(self, data: bytes, /) -> None:
        while data:
            data = data[os.write(2, data) :]


async def _cancelled(task: asyncio.Task[None]) -> None:
    """Cancels a task and waits until it has ended, however."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def main() -> int:
    """The component program."""
    member = Member.join()

    async def run() -> None:
        pulse = asyncio.create_task(beating(member.report))
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


if __name__ == "__main__":
    sys.exit(main())
