"""Models that a game asks itself: game masters and juries, for which TextArena's authors ask OpenRouter.

A game asks within a step, where it would block all games beside it. So a step is tried on a copy of the game with the
answers that are known, and again with one more whenever it asks for another. With the role `grader` the owner's model
answers; without, OpenRouter if there is a key for it, or else the policy.
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import os
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, TypeVar

from toprope.sdk.authoring.env_managed import Session
from toprope.sdk.authoring.policy_client import PolicyRefused, ask
from toprope.sdk.errors import EnvironmentMistake

__all__ = ["ASKS", "lead_to_judge", "with_answers"]

ASKS = "OpenRouter"
"""Word in the files of games that ask a model."""
_Made = TypeVar("_Made")
_GRADER, _KEY = "grader", "OPENROUTER_API_KEY"
_MOST = 200
"""Questions of one step."""
_VERDICT_TOKENS = 1024
"""The policy's limit may be too narrow for a verdict."""

_answers: ContextVar[Iterator[str] | None] = ContextVar("_answers", default=None)


class _Asks(BaseException):
    """A game asks for one more answer. No `Exception`, which juries take for a missing vote."""

    def __init__(self, agent: _Agent, observation: str) -> None:
        super().__init__(observation)
        self.agent, self.observation = agent, observation


def lead_to_judge() -> None:
    """Put agents that ask the judge of a rollout in place of TextArena's agents for OpenRouter."""
    import textarena
    from textarena import agents

    original = agents.OpenRouterAgent
    if issubclass(original, _Agent):
        return
    usual = inspect.signature(original.__init__).parameters.get("system_prompt")

    class Agent(_Agent):
        def __init__(self, model_name: str, system_prompt: Any = usual and usual.default, **more: Any) -> None:
            self.system_prompt, self.more = system_prompt, more
            self.make_own = lambda: original(model_name=model_name, system_prompt=system_prompt, **more)

        def __deepcopy__(self, memo: Any) -> Agent:
            return self  # it keeps nothing of a game

    agents.OpenRouterAgent = Agent
    if (state := getattr(textarena, "TwoPlayerState", None)) is not None:
        draw = state.set_draw
        # Scenario planning misspells the name, so every tie of its jury would be an error.
        state.set_draw = lambda self, reason="", reson="": draw(self, reason=reason or reson)


class _Agent:
    system_prompt: Any
    more: dict[str, Any]
    make_own: Callable[[], Callable[[str], str]]
    """Makes the agent for OpenRouter in place of which this one stands."""

    def __call__(self, observation: str) -> str:
        answers = _answers.get()
        if answers is None:
            return ""  # a game that is only listed
        for answer in answers:
            return answer
        raise _Asks(self, observation)


async def with_answers(step: Callable[[], _Made], session: Session) -> _Made:
    """Return what a step gives once it has all the answers that it asks for.

    Args:
        step: Is called again for each answer, so it must work on copies.
        session: The rollout in whose name the models are asked.

    Raises:
        EnvironmentMistake: It asks without end.
        PolicyRefused: A model did not answer.
    """
    answers: list[str] = []
    while True:
        token = _answers.set(iter(answers))
        try:
            return step()
        except _Asks as asked:
            question = asked
        finally:
            _answers.reset(token)
        if len(answers) == _MOST:
            raise EnvironmentMistake(f"a step of the game asks a model more than {_MOST} times")
        answers.append(await _answer(question, session, len(answers)))


async def _answer(question: _Asks, session: Session, number: int) -> str:
    role, agent = session.roles.get(_GRADER), question.agent
    if role is None and os.environ.get(_KEY):
        return str(await asyncio.to_thread(agent.make_own(), question.observation))
    judge = {"base_url": session.base_url, "api_key": session.judge_key, "model": session.model} if not role else role
    system = [{"role": "system", "content": agent.system_prompt}] if agent.system_prompt else []
    at = dataclasses.replace(
        session, base_url=judge["base_url"], api_key=judge["api_key"], judge_key=judge["api_key"],
        model=judge["model"], stop=(), max_tokens=max(session.max_tokens, _VERDICT_TOKENS),
        seed=None if session.seed is None else session.seed + number,  # jurors who are asked alike need not agree
    )  # fmt: skip
    more = {name: value for name, value in agent.more.items() if name != "verbose"}
    try:
        answer = await ask(at, [*system, {"role": "user", "content": question.observation}], judge=True, **more)
    except PolicyRefused as refused:
        who = "the role grader" if role else "the policy as judge"
        raise PolicyRefused(f"the game asked a model, {who}, which gave no answer: {refused}") from refused
    return str(answer.get("content") or "").strip()
