"""Environments that play their rollouts themselves: their code talks to the policy, as an OpenAI client would.

Most environments of other ecosystems own the loop between policy and environment. They get a `Session` a rollout: an
address, and a key by which the policy's server knows whose tokens it samples, so that nothing of theirs needs to know
of tokens. Judges and simulated users among their models get the session's `judge_key`, under which nothing is recorded
for training.

    class Debate(OwnLoop):
        async def rollout(self, session):
            said = await talk(base_url=session.base_url, api_key=session.api_key, model=session.model)
            return Played({"score": judge(said)}, messages=said)
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from toprope.sdk.authoring.environment import Environment, Messages, Outcome, Scoring, Task, copy_for
from toprope.sdk.errors import EnvironmentMistake, Failure, InvalidRequest

__all__ = ["OwnLoop", "Played", "Session", "sample_group"]

_LONGEST_ERROR = 500
_LONGEST_TALK = 200_000


@dataclass(frozen=True)
class Session:
    """How one rollout reaches the policy."""

    base_url: str
    """Of an OpenAI-compatible server, with its `/v1`."""
    api_key: str
    """The rollout's own: it names what is recorded."""
    model: str
    judge_key: str = ""
    """For requests that are not the policy's part in the rollout."""
    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int = 256
    """Most tokens of one answer."""
    stop: tuple[str, ...] = ()
    seed: int | None = None
    timeout_s: float = 600.0
    """Seconds that the whole rollout may take; it is cancelled then."""

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> Session:
        """A session as JSON says it.

        Raises:
            InvalidRequest: It is none.
        """
        try:
            return cls(**{**value, "stop": tuple(value.get("stop", ()))})
        except TypeError as error:
            raise InvalidRequest(f"A session has other fields: {error}") from None


@dataclass
class Played:
    """What became of a rollout."""

    parts: dict[str, float]
    """The value of each of the environment's reward parts."""
    messages: Messages = field(default_factory=list)
    """The conversation that the outcome rests on, prompt included. Answers of the policy that are not in it (retries,
    abandoned branches) are not trained; without messages all are."""
    turns: int = 1
    truncated: bool = False
    success: bool | None = None
    """None: as the environment's `success` says."""
    error: str | None = None
    """Why the rollout does not count as it stands; its reward is 0 then."""


class OwnLoop(Environment):
    """An environment that plays. Write `tasks` and `rollout`; where rollouts of a group are scored by each other,
    `group`."""

    async def rollout(self, session: Session) -> Played:
        """Plays `self.task` once. It runs beside other rollouts on one event loop: nothing in it should block.

        Whatever it raises ends this rollout with an error.
        """
        raise NotImplementedError(f"{type(self).__name__} does not play: write rollout(self, session).")

    async def group(self, task: Task, sessions: Sequence[Session]) -> list[Played | BaseException]:
        """Plays a task once a session, each on a copy of its own; what went wrong with one stands in its place."""
        copies = [copy_for(self, task) for _ in sessions]
        for number, copied in enumerate(copies):
            copied.random.seed(f"{self.seed}:{task.id}:{number}")
        return list(
            await asyncio.gather(
                *(_timed(one.rollout(session), session) for one, session in zip(copies, sessions, strict=True)),
                return_exceptions=True,
            )
        )

    def score(self) -> dict[str, float]:
        raise EnvironmentMistake(f"{type(self).__name__} plays its rollouts itself and has no score().")


async def _timed(playing: Any, session: Session) -> Any:
    try:
        return await asyncio.wait_for(playing, session.timeout_s)
    except TimeoutError:
        raise TimeoutError(f"the rollout took longer than {session.timeout_s:g} s") from None


@dataclass(frozen=True)
class GroupResult:
    """A group's outcomes and conversations, in the order of its sessions."""

    outcomes: list[Outcome]
    messages: list[Messages]


async def sample_group(environment: OwnLoop, task: Task, sessions: Sequence[Session], near: str = "") -> GroupResult:
    """Plays a task and checks what came of it: a bad rollout is data.

    Args:
        environment: A configured environment.
        task: The task.
        sessions: One a rollout.
        near: Folder of the environment's code, for error messages.

    Raises:
        EnvironmentMistake: `group` did not return one result a session.
    """
    found = await environment.group(task, sessions)
    if not isinstance(found, list | tuple) or len(found) != len(sessions):
        raise EnvironmentMistake(f"group() must return a list of {len(sessions)} results, one for each session.")
    outcomes, talks = [], []
    for one in found:
        outcome = _outcome(environment, task, one, near)
        outcomes.append(outcome)
        talks.append(_sayable(one.messages) if isinstance(one, Played) else [])
    return GroupResult(outcomes, talks)


def _outcome(environment: OwnLoop, task: Task, found: Any, near: str) -> Outcome:
    if isinstance(found, KeyboardInterrupt):
        raise found
    if isinstance(found, BaseException):
        return Outcome(0.0, error=Failure.of(found, near).line()[:_LONGEST_ERROR])
    try:
        if not isinstance(found, Played):
            raise EnvironmentMistake(f"rollout() must return Played(...), not {type(found).__name__}.")
        turns, truncated = max(int(found.turns), 0), bool(found.truncated)
        if found.error is not None:
            return Outcome(0.0, turns=turns, truncated=truncated, error=str(found.error)[:_LONGEST_ERROR])
        scoring = Scoring.of(environment)
        parts = scoring.read(found.parts)
        reward = scoring.reward(parts)
        success = found.success
        if success is None:
            judged = copy_for(environment, task)
            judged.messages = list(found.messages)
            success = judged.success(dict(parts), reward)
        return Outcome(reward, parts, bool(success), turns, truncated)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # what an author returned may be anything
        return Outcome(0.0, error=Failure.of(error, near).line()[:_LONGEST_ERROR])


def _sayable(messages: Any) -> Messages:
    """The conversation as JSON can say it: role, text, and tool calls; bounded."""
    kept, size = [], 0
    for message in messages if isinstance(messages, list | tuple) else ():
        if not isinstance(message, Mapping):
            continue
        content = message.get("content")
        if isinstance(content, list):  # parts, as vision models have them
            content = "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
        text = "" if content is None else str(content)
        calls = [call for call in message.get("tool_calls") or () if isinstance(call, Mapping)]
        text = "\n".join(filter(None, [text, *map(_called, calls)]))
        size += len(text)
        if size > _LONGEST_TALK:
            break
        kept.append({"role": str(message.get("role", "")), "content": text})
        if calls:
            kept[-1]["tool_calls"] = [{"id": str(call.get("id", ""))} for call in calls]
    return kept


def _called(call: Mapping[str, Any]) -> str:
    """A tool call for people to read, and as most open models write it."""
    function = call.get("function")
    if not isinstance(function, Mapping):
        return ""
    name, arguments = json.dumps(str(function.get("name", ""))), function.get("arguments") or {}
    written = arguments if isinstance(arguments, str) else json.dumps(arguments, default=str)
    return f'<tool_call>{{"name": {name}, "arguments": {written}}}</tool_call>'
