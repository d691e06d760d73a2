"""Pipeline steps that call a teacher at an endpoint, an environment in a worker, or a user's code in a worker."""

from __future__ import annotations

import re
from typing import Any, Protocol

import msgspec

from toprope.errors import EnvironmentFailed, InvalidValue
from toprope.sdk.errors import WorkerError, WorkerFailure
from toprope.training.rollouts.workers.environment_worker import EnvironmentWorker
from toprope.trajectories.capture.strategy import WorkerObject
from toprope.trajectories.items import TrajectoryItem, as_messages, item_from, text_of
from toprope.trajectories.synthesis.pipeline import DataSynthesiser, PipelineStep, Round, TryAgain

_QUESTION = (
    "Here are tasks of one kind:\n\n{examples}\n\nWrite one new task of the same kind, different in content. Answer "
    "with the task alone."
)
_EXAMPLES = 3
_CALL_S = 60.0
_MOST_MISSED = 50
"""Consecutive unanswered tasks after which an environment's solver is given up."""
_FENCE = re.compile(r"^```\w*\n(.*?)\n?```$", re.DOTALL)


class Teacher(Protocol):
    """A model that answers conversations."""

    async def ask(self, messages: list[dict[str, Any]]) -> str:
        """Return the answer.

        Raises:
            TryAgain: Another attempt may succeed.
        """
        ...


class TeacherAnswers(PipelineStep):
    """Lets a teacher answer the questions.

    Args:
        teacher: The model.
        system: System message before each question.
        again: Also replace existing answers.
    """

    def __init__(self, teacher: Teacher, *, system: str = "", again: bool = False) -> None:
        self._teacher, self._system, self._again = teacher, system, again

    async def apply(self, items: list[TrajectoryItem], at: Round) -> list[TrajectoryItem]:
        async def answer_to(item: TrajectoryItem) -> TrajectoryItem:
            if text_of(item.action) and not self._again:
                return item
            question = as_messages(item.state, "user")
            before = [{"role": "system", "content": self._system}] if self._system else []
            answer = await self._teacher.ask([*before, *question])
            if not answer.strip():
                raise TryAgain("the teacher's answer is empty")
            # The new answer changes the id, by which a split finds the item's mutations.
            metadata = {**item.metadata, "answered_by": "teacher", "unscored": True, "made_from": item.first_id}
            for gone in ("score", "success", "parts"):  # metadata of the replaced answer
                metadata.pop(gone, None)
            return TrajectoryItem(item.state, answer, 0.0, metadata)

        return await at.each(items, answer_to, "unanswered")


class TeacherQuestions(DataSynthesiser):
    """Lets a teacher write new questions in the style of the seeds.

    Args:
        teacher: The model.
        prompt: Prompt; `{examples}` is replaced by three questions of the seeds.
    """

    def __init__(self, teacher: Teacher, *, prompt: str = _QUESTION) -> None:
        if "{examples}" not in prompt:
            raise InvalidValue(
                "The prompt for questions does not contain {examples}.",
                hint="Put {examples} where the examples belong.",
            )
        self._teacher, self._prompt = teacher, prompt

    async def generate(self, count: int) -> list[TrajectoryItem]:
        at = self.at
        if not at.seeds:
            raise InvalidValue(
                "A teacher writes questions from examples, and there are no seeds.", hint="Give seed data."
            )
        orders = []
        for _ in range(count):
            seeds = at.random.sample(at.seeds, min(_EXAMPLES, len(at.seeds)))
            examples = "\n\n".join(text_of(seed.state) for seed in seeds)
            orders.append(TrajectoryItem(self._prompt.replace("{examples}", examples), "", 0.0, {}))

        async def write_question(order: TrajectoryItem) -> TrajectoryItem:
            answer = (await self._teacher.ask(as_messages(order.state, "user"))).strip()
            fenced = _FENCE.match(answer)
            question = fenced[1].strip() if fenced else answer
            if not question:
                raise TryAgain("the teacher's question is empty")
            return TrajectoryItem(question, "", 0.0, {"origin": "teacher", "unscored": True})

        return await at.each(orders, write_question, "unanswered")


class _NoMore(Exception):
    """All tasks were used once."""


class EnvironmentTasks(DataSynthesiser):
    """Generates items from an environment's training tasks, answered by its author's solver.

    Args:
        link: A worker in which the environment is open.
        environment: Its name.
        solve: Use its solver; otherwise tasks come without answers, for a teacher.
    """

    def __init__(self, link: EnvironmentWorker, environment: str, *, solve: bool = True) -> None:
        self._link, self._name, self._solve = link, environment, solve

    async def generate(self, count: int) -> list[TrajectoryItem]:
        items: list[TrajectoryItem] = []
        missed = 0
        while len(items) < count and missed < _MOST_MISSED:
            try:
                item = await self._task(self.place)
            except _NoMore:
                break
            except WorkerError:
                item = None
            except WorkerFailure as error:
                raise EnvironmentFailed(f"{self._name}: {error}", hint="Fix the environment.") from None
            self.place += 1
            missed = missed + 1 if item is None else 0
            if item is not None:
                items.append(item)
        if missed == self.place == _MOST_MISSED:
            raise EnvironmentFailed(
                f"{self._name} gave no answers: its solver answered none of {missed} tasks.",
                hint='Implement solve(), or use its tasks alone ("solve": false) and let a teacher answer.',
            )
        return items

    async def _task(self, index: int) -> TrajectoryItem | None:
        try:
            start = await self._link.begin("train", index, 1, timeout=_CALL_S)
        except WorkerError as error:
            if error.kind == "invalid":  # the tasks have ended, unless the author's reset() refused this one
                page = await self._link.tasks("train", index, 1, timeout=_CALL_S)
                if page.exhausted and not page.tasks:
                    raise _NoMore from None
            raise
        [handle], messages = start.rollouts, list(start.messages)
        if start.epoch:  # Training repeats the tasks after the last one.
            await self._link.discard([handle], timeout=_CALL_S)
            raise _NoMore
        metadata: dict[str, Any] = {
            "origin": "environment",
            "environment": self._name,
            "task": start.task_id,
            "split": "train",
            "index": index,
        }
        if not self._solve:
            await self._link.discard([handle], timeout=_CALL_S)
            return TrajectoryItem(messages, "", 0.0, {**metadata, "unscored": True})
        try:
            return await self._answered(handle, messages, metadata)
        except WorkerError:  # the rollout may still be open
            await self._link.discard([handle], timeout=_CALL_S)
            raise

    async def _answered(
        self, handle: int, messages: list[dict[str, Any]], metadata: dict[str, Any]
    ) -> TrajectoryItem | None:
        """The item of a rollout that the solver plays to its end; None if the solver gives no answer."""
        question_length = len(messages)
        while True:
            answer = await self._link.solve(handle, timeout=_CALL_S)
            if answer is None:
                await self._link.discard([handle], timeout=_CALL_S)
                return None
            messages.append({"role": "assistant", "content": answer})
            [result] = await self._link.advance([[handle, answer, False]], timeout=_CALL_S)
            if result.done:
                outcome = result.outcome
                if outcome is None:
                    return None
                metadata |= {"success": outcome.success, "parts": outcome.parts, "turns": outcome.turns}
                return TrajectoryItem(messages[:question_length], messages[question_length:], outcome.reward, metadata)
            messages += result.messages


class EnvironmentScorer(PipelineStep):
    """Lets an environment score answers to its own tasks from `EnvironmentTasks`; other items pass unchanged.

    Only single-turn answers can be scored. Items whose task has another number here, because they are older or had
    other knobs, are dropped.
    """

    def __init__(self, link: EnvironmentWorker, environment: str) -> None:
        self._link, self._name = link, environment

    async def apply(self, items: list[TrajectoryItem], at: Round) -> list[TrajectoryItem]:
        async def score(item: TrajectoryItem) -> TrajectoryItem | None:
            metadata = item.metadata
            if metadata.get("environment") != self._name or "index" not in metadata:
                return item
            page = await self._link.tasks("train", metadata["index"], 1, timeout=_CALL_S)
            if [task.id for task in page.tasks] != [metadata.get("task")]:
                return None
            outcome = await self._link.score("train", metadata["index"], text_of(item.action), timeout=_CALL_S)
            scored_metadata = {key: value for key, value in metadata.items() if key != "unscored"}
            scored_metadata |= {"success": outcome.success, "parts": outcome.parts, "turns": outcome.turns}
            return TrajectoryItem(item.state, item.action, outcome.reward, scored_metadata)

        return await at.each(items, score, "not scored")


class OwnGenerator(DataSynthesiser):
    """A user's generator in a worker: `generate(count)` returns items as JSON objects."""

    def __init__(self, worker_object: WorkerObject) -> None:
        self._worker_object = worker_object

    async def generate(self, count: int) -> list[TrajectoryItem]:
        [objects] = await self._worker_object.call("generate", [[count]])
        name = f"{self._worker_object.code.attribute}.generate"
        if not isinstance(objects, list):
            raise EnvironmentFailed(f"{name} did not return a list of items.", hint="Return one object per item.")
        try:
            return [
                item_from(json_object, f"item {number} from {name}")
                for number, json_object in enumerate(objects[:count])
            ]
        except InvalidValue as error:
            raise EnvironmentFailed(error.message, hint=error.hint) from None


class OwnScorer(PipelineStep):
    """A user's scorer in a worker: `score(item)`, or a function of an item, returns a number."""

    def __init__(self, worker_object: WorkerObject) -> None:
        self._method = "score" if "score" in worker_object.methods else "call"
        self._worker_object = worker_object

    async def apply(self, items: list[TrajectoryItem], at: Round) -> list[TrajectoryItem]:
        if not items:
            return items
        scores = await self._worker_object.call(self._method, [[msgspec.to_builtins(item)] for item in items])
        scored = []
        for item, score in zip(items, scores, strict=True):
            if isinstance(score, bool) or not isinstance(score, int | float) or score != score:
                at.dropped["not scored"] += 1
                continue
            metadata = {key: value for key, value in item.metadata.items() if key != "unscored"}
            scored.append(TrajectoryItem(item.state, item.action, item.reward, {**metadata, "score": float(score)}))
        return scored


class OwnFilter(PipelineStep):
    """A user's filter in a worker: `keep(item)`, or a function of an item, returns True to keep it."""

    def __init__(self, worker_object: WorkerObject) -> None:
        self._method = "keep" if "keep" in worker_object.methods else "call"
        self._worker_object = worker_object

    async def apply(self, items: list[TrajectoryItem], at: Round) -> list[TrajectoryItem]:
        if not items:
            return items
        verdicts = await self._worker_object.call(self._method, [[msgspec.to_builtins(item)] for item in items])
        kept = [item for item, verdict in zip(items, verdicts, strict=True) if verdict]
        at.dropped[f"filter {self._worker_object.code.attribute}"] += len(items) - len(kept)
        return kept
