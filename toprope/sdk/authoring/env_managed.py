"""Environments that sample their rollouts themselves: their code calls the policy like an OpenAI client.

Most environments of other ecosystems own the loop between policy and environment. They get one `Session` per rollout:
an address, and a key under which the policy's server records the sampled tokens, so that the environment never handles
tokens. Judges and simulated users call it with the session's `judge_key`, under which nothing is recorded for training.

    class Debate(OwnLoop):
        async def rollout(self, session):
            said = await talk(base_url=session.base_url, api_key=session.api_key, model=session.model)
            return Played({"score": judge(said)}, messages=said)
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from toprope.sdk.authoring.environment import Environment, Messages, Outcome, Scoring, Task, copy_for
from toprope.sdk.errors import EnvironmentMistake, Failure, InvalidRequest, shortened, with_host

__all__ = ["REWARD_ERRORS", "OwnLoop", "Played", "Session", "off_the_clock", "sample_group"]

REWARD_ERRORS = "reward_errors"
"""Part of weight 0 that counts reward functions whose errors an ecosystem takes for reward 0."""
_LONGEST_ERROR = 500
_LONGEST_TALK = 200_000
"""Characters of a conversation that a worker passes on, beyond which messages other than answers are cut."""
_LONGEST_ANSWERS = 2_000_000
"""Characters of the answers of a conversation, beyond which nothing of it is passed on."""
_LONGEST_SEAT = 64
_LONGEST_WAIT_S = 3600.0
"""Longest wait of a rollout for its turn."""
_clock: ContextVar[asyncio.Timeout | None] = ContextVar("clock", default=None)
"""The time limit of the rollout that runs."""


@dataclass(frozen=True)
class Session:
    """Access of one rollout to the policy."""

    base_url: str
    """Address of an OpenAI-compatible server, including `/v1`."""
    api_key: str
    """Key of this rollout; the server records under it."""
    model: str
    judge_key: str = ""
    """Key for requests that are not part of the rollout, such as those of a judge."""
    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int = 256
    """Most tokens per answer."""
    stop: tuple[str, ...] = ()
    seed: int | None = None
    timeout_s: float = 600.0
    """Seconds for the whole rollout, after which it is cancelled."""
    opponent: Mapping[str, str] | None = None
    """`base_url`, `api_key` and `model` of a fixed opponent of games for several players; None: self-play."""

    roles: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """`base_url`, `api_key` and `model` of the owner's models by role; nothing that they answer is recorded."""

    @property
    def sampling(self) -> dict[str, Any]:
        """The settings of a request to the policy, as OpenAI's interface names them."""
        settings = {"temperature": self.temperature, "top_p": self.top_p, "max_tokens": self.max_tokens,
                 "stop": list(self.stop) or None, "seed": self.seed}  # fmt: skip
        return {name: value for name, value in settings.items() if value is not None}

    def as_opponent(self) -> Session:
        """The session with which the fixed opponent is asked; nothing that it answers is recorded.

        Raises:
            InvalidRequest: There is no fixed opponent.
        """
        if self.opponent is None:
            raise InvalidRequest("This run has no fixed opponent.")
        key = self.opponent["api_key"]
        return replace(
            self, base_url=self.opponent["base_url"], api_key=key, judge_key=key, model=self.opponent["model"],
            opponent=None,
        )  # fmt: skip

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> Session:
        """Create a session from JSON values.

        Raises:
            InvalidRequest: A field is missing or unknown.
        """
        try:
            return cls(**{**value, "stop": tuple(value.get("stop", ()))})
        except TypeError as error:
            raise InvalidRequest(f"Not a valid session: {error}") from None


@dataclass
class Played:
    """The result of a rollout."""

    parts: dict[str, float]
    """Value of each reward part of the environment."""
    messages: Messages = field(default_factory=list)
    """The conversation that the outcome rests on, prompt included. Answers that are not in it (retries, abandoned
    branches) are not trained on. Without messages, all answers are."""
    turns: int = 1
    truncated: bool = False
    success: bool | None = None
    """None to ask the environment's `success`."""
    error: str | BaseException | None = None
    """Reason of a failed rollout, or the exception; its reward is then 0."""
    seat: str = ""
    """The player's seat in a game of several: rewards are compared with those of the same seat."""


class OwnLoop(Environment):
    """Base class of environments that own the loop. Define `tasks` and `rollout`, or `group` instead of `rollout` if
    the rollouts of a group depend on each other."""

    takes_turns: bool = False
    """True if rollouts may wait for each other, `off_the_clock`."""

    async def rollout(self, session: Session) -> Played:
        """Sample `self.task` once. Rollouts share one event loop, so nothing in here may block.

        An exception ends this rollout with an error.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot sample: define rollout(self, session).")

    async def group(self, task: Task, sessions: Sequence[Session]) -> list[Played | BaseException]:
        """Sample a task once per session, each on its own copy; an exception stands in place of a failed result."""
        copies = [copy_for(self, task) for _ in sessions]
        for number, copied in enumerate(copies):
            copied.random = Random(f"{self.seed}:{task.id}:{number}")
        return list(
            await asyncio.gather(
                *(timed(member.rollout(session), session) for member, session in zip(copies, sessions, strict=True)),
                return_exceptions=True,
            )
        )

    def score(self) -> dict[str, float]:
        raise EnvironmentMistake(f"{type(self).__name__} samples its rollouts itself and has no score().")


async def timed(playing: Any, session: Session) -> Any:
    """Await a rollout within the time of its session.

    Raises:
        TimeoutError: It took longer; the text says how long.
    """
    try:
        async with asyncio.timeout(session.timeout_s) as clock:
            _clock.set(clock)
            return await playing
    except TimeoutError:
        if not clock.expired():
            raise  # a limit of its own
        raise TimeoutError(f"the rollout took longer than {session.timeout_s:g} s") from None


@contextmanager
def off_the_clock() -> Iterator[None]:
    """Wait in here for other rollouts: that does not count as the rollout's own time, up to an hour.

    Raises:
        EnvironmentMistake: It waited longer.
    """
    clock, now = _clock.get(), asyncio.get_running_loop().time
    began = now()
    if clock is None or (deadline := clock.when()) is None:
        yield
        return
    clock.reschedule(began + _LONGEST_WAIT_S)
    try:
        yield
    except asyncio.CancelledError:
        if clock.expired():
            raise EnvironmentMistake(f"the rollout waited longer than {_LONGEST_WAIT_S:g} s for its turn") from None
        raise
    finally:
        if not clock.expired():
            clock.reschedule(deadline + now() - began)


@dataclass(frozen=True)
class GroupResult:
    """Outcomes and conversations of a group, in the order of its sessions."""

    outcomes: list[Outcome]
    messages: list[Messages]

    @property
    def talks(self) -> list[Messages]:
        """The conversations within the limits of a worker's answer, each with all answers or empty."""
        return [_bounded(messages) for messages in self.messages]


async def sample_group(environment: OwnLoop, task: Task, sessions: Sequence[Session], near: str = "") -> GroupResult:
    """Have an environment sample a task and validate its results; a failed rollout is an outcome with an error.

    Args:
        environment: A configured environment.
        task: The task.
        sessions: One session per rollout.
        near: Folder of the environment's code, for error messages.

    Raises:
        EnvironmentMistake: `group` did not return one result per session.
    """
    results = await environment.group(task, sessions)
    if not isinstance(results, list | tuple) or len(results) != len(sessions):
        raise EnvironmentMistake(f"group() must return a list of {len(sessions)} results, one for each session.")
    outcomes, talks = [], []
    for result in results:
        outcome = _outcome(environment, task, result, near)
        outcomes.append(outcome)
        talks.append(_sayable(result.messages) if isinstance(result, Played) else [])
    return GroupResult(outcomes, talks)


def _outcome(environment: OwnLoop, task: Task, result: Any, near: str) -> Outcome:
    seat = ""
    try:
        if isinstance(result, BaseException):
            raise result
        if not isinstance(result, Played):
            raise EnvironmentMistake(f"rollout() must return Played(...), not {type(result).__name__}.")
        seat = str(result.seat)[:_LONGEST_SEAT]
        turns, truncated = max(int(result.turns), 0), bool(result.truncated)
        if isinstance(result.error, BaseException):
            raise result.error
        if result.error is not None:
            message = shortened(with_host(str(result.error)), _LONGEST_ERROR)
            return Outcome(0.0, turns=turns, truncated=truncated, error=message, seat=seat)
        scoring = Scoring(environment.parts)
        parts = scoring.read(result.parts)
        reward = scoring.reward(parts)
        success = result.success
        if success is None:
            judged = copy_for(environment, task)
            judged.messages = list(result.messages)
            success = judged.success(dict(parts), reward)
        return Outcome(reward, parts, bool(success), turns, truncated, seat=seat)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # an author may return anything
        return Outcome(0.0, error=shortened(Failure.of(error, near).line(), _LONGEST_ERROR), seat=seat)


def _sayable(messages: Any) -> Messages:
    """The conversation as JSON: role, text and tool calls."""
    conversation: Messages = []
    for message in messages if isinstance(messages, list | tuple) else ():
        if not isinstance(message, Mapping):
            continue
        content = message.get("content")
        if isinstance(content, list):  # parts, as vision models have them
            content = "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
        text = "" if content is None else str(content)
        calls = [call for call in message.get("tool_calls") or () if isinstance(call, Mapping)]
        text = "\n".join(filter(None, [text, *map(_call_text, calls)]))
        conversation.append({"role": str(message.get("role", "")), "content": text})
        if calls:
            conversation[-1]["tool_calls"] = [{"id": str(call.get("id", ""))} for call in calls]
    return conversation


def _bounded(conversation: Messages) -> Messages:
    # All answers or none: the policy is not trained on answers that are missing in a conversation.
    answers = sum(len(message["content"]) for message in conversation if message["role"] == "assistant")
    if answers > _LONGEST_ANSWERS:
        return []
    left, bounded = max(_LONGEST_TALK - answers, 0), []
    for message in conversation:
        if message["role"] != "assistant":
            text = message["content"]
            if len(text) > left:
                message = {**message, "content": f"{text[:left]} [cut]"}
            left = max(left - len(text), 0)
        bounded.append(message)
    return bounded


def _call_text(call: Mapping[str, Any]) -> str:
    """A tool call as text, in the form that most open models write."""
    function = call.get("function")
    if not isinstance(function, Mapping):
        return ""
    name, arguments = json.dumps(str(function.get("name", ""))), function.get("arguments") or {}
    arguments_text = arguments if isinstance(arguments, str) else json.dumps(arguments, default=str)
    return f'<tool_call>{{"name": {name}, "arguments": {arguments_text}}}</tool_call>'
