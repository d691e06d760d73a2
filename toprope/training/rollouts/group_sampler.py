"""Makes groups of rollouts: the loop between the environment's worker and the policy.

We own the loop here (the worker offers begin, advance, score): the first turn of a group is one request for n answers,
later turns go on answer by answer under the group's session, so that sampled ids stay as they were sampled. What goes
wrong within a rollout is data with a reason; what goes wrong with the worker ends the program.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import signal
import time
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, field
from typing import Any

from toprope.records.journal.groups import Group, Outcome
from toprope.sdk.errors import WorkerDied, WorkerError, WorkerFailure, WorkerTimeout
from toprope.training.inference.client import Answer, PolicyClient, PromptTooLong, Sampling, SessionLost
from toprope.training.inference.sessions import Turn, join_turns
from toprope.training.rollouts.endpoint_client import EndpointClient
from toprope.training.rollouts.environment_worker import EnvironmentWorker
from toprope.training.rollouts.restarting_worker import Worker

__all__ = ["Made", "RolloutMaker", "told"]

_SEALED = "heldout"
_TRAINED = "train"
_HEAD, _TAIL = 1200, 800
"""Characters of a text's beginning and end that are kept for people to read."""


@dataclass
class _Rollout:
    handle: int
    messages: list[dict[str, Any]]
    turns: list[Turn] = field(default_factory=list)
    text: str = ""
    outcome: Outcome | None = None
    waits: bool = False
    """Done, and to be scored with the others of its group."""


@dataclass(frozen=True)
class Made:
    """A finished group: the task's first messages, and per rollout its last answer and how it ended."""

    task_id: str
    messages: list[dict[str, Any]]
    texts: list[str]
    outcomes: list[Outcome]
    turns: list[list[Turn]]
    seconds: float
    talks: list[str] = field(default_factory=list)
    """Per rollout what was said after the first messages, cut; empty where nothing was played."""
    environment: str = ""
    """Whose task it is, where a run has several environments."""

    def group(self, environment: str, group_id: str) -> Group:
        """The group as the trajectory API takes it: one row a segment, rollouts without a token left out."""
        tokens, masks, logprobs, versions, scores, owners = [], [], [], [], [], []
        for index, (turns, outcome) in enumerate(zip(self.turns, self.outcomes, strict=True)):
            for segment in join_turns(turns):
                tokens.append(segment.tokens)
                masks.append(segment.masks)
                logprobs.append(segment.logprobs)
                versions.append(segment.versions)
                scores.append(outcome.reward)
                owners.append(index)
        plain = owners == list(range(len(self.outcomes)))
        return Group(
            tokens=tokens,
            masks=masks,
            scores=scores,
            inference_logprobs=logprobs,
            versions=versions,
            group_id=group_id,
            environment=environment,
            task_id=f"{self.environment}/{self.task_id}" if self.environment else self.task_id,
            rollouts=None if plain else owners,
            outcomes=self.outcomes,
            prompt=_cut("\n".join(str(message.get("content", "")) for message in self.messages)),
            answers=self.talks or None,
            seconds=round(self.seconds, 4),
        )


class RolloutMaker:
    """Plays tasks with the policy.

    Args:
        worker: The environment's worker.
        policy: The policy, or a model at an endpoint that stands in for it.
        multi_turn: Whether rollouts can have more than one turn; single turns need no sessions.
        call_timeout_s: How long one call into the environment may take.
    """

    deaths_allowed: float = math.inf
    """Ends of the worker amid one group, over whatever item, after which the group is given up."""

    def __init__(
        self, worker: Worker, policy: PolicyClient | EndpointClient, *, multi_turn: bool, call_timeout_s: float
    ) -> None:
        self._worker, self._policy = worker, policy
        self._multi_turn, self._timeout = multi_turn, call_timeout_s
        self.numbers: Iterator[int] = itertools.count()
        """Names of sessions; whoever plays with the same policy beside this one has the same."""
        self.weights: dict[str, float] | None = None
        """What reward parts weigh in the rollouts that begin from now on, where that is not the environment's own."""

    async def make(self, split: str, index: int, size: int, sampling: Sampling, variant: str = "") -> Made:
        """Plays one task `size` times; with other knobs where `variant` names a variant that the worker has open.

        It is begun again where the worker ended over another one; and where inference lost its sessions, but for
        training, which has other tasks.

        Raises:
            toprope.sdk.errors.WorkerError: The environment raised, or its worker ended over this very task.
            toprope.sdk.errors.WorkerFailure: The worker ended and is not started again.
            SessionLost: Inference was started again amid a rollout for training.
            ComponentFailed: Inference failed.
            ValueError: A held-out task is asked for without a seal: a bug of ours, which is to harm nobody's figures.
        """
        if split == _SEALED and not self._worker.is_sealed:
            raise ValueError("held-out tasks are played under seal, at the evaluations before and after training only")
        deaths = 0
        while True:
            link = await self._worker.link()
            try:
                made = await self._play(link, split, index, size, sampling, variant)
                self._worker.played()
                return made
            except (WorkerDied, WorkerTimeout) as error:
                await self._worker.lost(link, error)
                deaths += not _killed(error)
                if (error.at_work and not _killed(error)) or deaths > self.deaths_allowed:
                    raise WorkerError("ended", type(error).__name__, str(error)) from error
            except SessionLost:
                if split == _TRAINED:
                    raise

    async def _play(
        self, link: EnvironmentWorker, split: str, index: int, size: int, sampling: Sampling, variant: str
    ) -> Made:
        began, sampling = time.monotonic(), sampling.at(split, index)
        start = await link.begin(split, index, size, timeout=self._timeout, weights=self.weights, variant=variant)
        first, own = start.messages, start.per_rollout
        rollouts = [
            _Rollout(handle, list(own[place]) if own else list(first)) for place, handle in enumerate(start.rollouts)
        ]
        session = f"g{next(self.numbers)}" if self._multi_turn else ""
        try:
            if own:
                answers = await self._answers(rollouts, sampling, session)
            else:
                answers = list(await self._policy.chat(first, sampling, n=size, session=session))
            open_rollouts = await self._advance(link, rollouts, answers, start.tokens)
            while open_rollouts:
                answers = await self._answers(open_rollouts, sampling, session, rollouts)
                open_rollouts = await self._advance(link, open_rollouts, answers, start.tokens)
            await self._settle(link, [rollout for rollout in rollouts if rollout.waits])
        except BaseException:
            left = [rollout.handle for rollout in rollouts if rollout.outcome is None]
            if left and link.alive:
                with suppress(WorkerFailure):  # it may be going: what went wrong first is what counts
                    await self._discard(link, left)
            raise
        finally:
            if session:
                await self._forget(session)
        return Made(
            task_id=start.task_id,
            messages=first,
            texts=[rollout.text for rollout in rollouts],
            outcomes=[rollout.outcome or Outcome(0.0, error="unfinished") for rollout in rollouts],
            turns=[rollout.turns for rollout in rollouts],
            seconds=time.monotonic() - began,
            talks=[_talk(rollout, len(own[place] if own else first)) for place, rollout in enumerate(rollouts)],
        )

    def environment_of(self, split: str, index: int) -> str:
        """Whose task number `index` of a split is: nobody has to be told while there is one environment."""
        return ""

    def sealed(self) -> AbstractAsyncContextManager[None]:
        """See `Worker.sealed`."""
        return self._worker.sealed()

    async def _answers(
        self, rollouts: list[_Rollout], sampling: Sampling, session: str, everyone: list[_Rollout] | None = None
    ) -> list[Answer | None]:
        """Each rollout's next answer; None where its conversation has outgrown the context."""
        numbers = {id(rollout): place for place, rollout in enumerate(everyone or rollouts)}
        many = len(numbers) > 1

        def seeded(rollout: _Rollout) -> Sampling:
            return sampling.at(len(rollout.turns), numbers[id(rollout)])

        async def one(rollout: _Rollout) -> Answer | None:
            key = f"{session}/{numbers[id(rollout)]}" if session and many else session
            try:
                return (await self._policy.chat(rollout.messages, seeded(rollout), session=key))[0]
            except PromptTooLong:
                if not rollout.turns:  # even the task does not fit: the configuration is at fault, not the policy
                    raise
                return None

        return list(await asyncio.gather(*(one(rollout) for rollout in rollouts)))

    async def _advance(
        self, link: EnvironmentWorker, rollouts: list[_Rollout], answers: list[Answer | None], tokens: bool
    ) -> list[_Rollout]:
        """Hands the answers (with `tokens` their ids too) to the environment; returns the rollouts that go on."""
        moves, moved, outgrown = [], [], []
        for rollout, answer in zip(rollouts, answers, strict=True):
            if answer is None:
                rollout.outcome = Outcome(0.0, turns=len(rollout.turns), truncated=True, error="context is full")
                outgrown.append(rollout.handle)
                continue
            rollout.turns.append(answer.turn)
            rollout.text = answer.text
            rollout.messages.append({"role": "assistant", "content": answer.text})
            ids = [answer.turn.completion_ids] if tokens else []
            moves.append([rollout.handle, answer.text, answer.truncated, *ids])
            moved.append(rollout)
        if outgrown:
            await self._discard(link, outgrown)
        if not moves:
            return []
        results = await link.advance(moves, timeout=self._timeout)
        going = []
        for rollout, result in zip(moved, results, strict=True):
            if not result.done:
                rollout.messages += result.messages
                going.append(rollout)
            elif result.outcome is None:
                rollout.waits = True
            else:
                rollout.outcome = result.outcome
        return going

    async def _settle(self, link: EnvironmentWorker, rollouts: list[_Rollout]) -> None:
        """Has those scored that waited for the others of the group."""
        if not rollouts:
            return
        handles = [rollout.handle for rollout in rollouts]
        outcomes = await link.settle(handles, timeout=self._timeout)
        for rollout, outcome in zip(rollouts, outcomes, strict=True):
            rollout.outcome, rollout.waits = outcome, False

    async def _discard(self, link: EnvironmentWorker, handles: list[int]) -> None:
        await link.discard(handles, timeout=self._timeout)

    async def _forget(self, session: str) -> None:
        await self._policy.close_session(session)


def _killed(error: WorkerDied | WorkerTimeout) -> bool:
    """Whether somebody else ended the worker: the system, for lack of memory, or a person."""
    return isinstance(error, WorkerDied) and error.code == -signal.SIGKILL


def _talk(rollout: _Rollout, asked: int) -> str:
    """What was said in a rollout after the `asked` first messages, for people."""
    if len(rollout.messages) <= asked + 1:
        return _cut(rollout.text)
    return told(rollout.messages[asked:])


def told(messages: list[dict[str, Any]]) -> str:
    """A conversation for people to read, cut where it is long."""
    if len(messages) == 1:
        return _cut(str(messages[0].get("content", "")))
    return _cut("\n".join(f"{message.get('role', '')}: {message.get('content', '')}" for message in messages))


def _cut(text: str) -> str:
    return text if len(text) <= _HEAD + _TAIL else f"{text[:_HEAD]}\n[...]\n{text[-_TAIL:]}"
