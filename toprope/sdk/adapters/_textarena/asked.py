"""Models that a game asks itself: game masters and juries, for which TextArena's authors ask OpenRouter.

A game asks within a step, where it would block all games beside it. So a step is tried on a copy of the game with the
answers that are known, and again with one more whenever it asks for another. With the role `grader` the owner's model
answers; without, OpenRouter if there is a key for it, or else the policy.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, TypeVar

from toprope.sdk.authoring.env_managed import Session
from toprope.sdk.authoring.policy_client import ask
from toprope.sdk.errors import EnvironmentMistake

__all__ = ["ASKS", "lead_to_judge", "with_answers"]

ASKS = "OpenRouter"
"""Word in the files of games that ask a model."""
_Made = TypeVar("_Made")
_GRADER, _KEY = "grader", "OPENROUTER_API_KEY"
_SERVICE = "https://openrouter.ai/api/v1"
_MOST = 200
"""Questions of one step."""

_answers: ContextVar[Iterator[str] | None] = ContextVar("_answers", default=None)


class _Asks(BaseException):
    """A game asks for one more answer. No `Exception`, which juries take for a missing vote."""

    def __init__(self, model: str, messages: list[dict[str, Any]], more: dict[str, Any]) -> None:
        super().__init__(model)
        self.model, self.messages, self.more = model, messages, more


def lead_to_judge() -> None:
    """Put agents that ask the judge of a rollout in place of TextArena's agents for OpenRouter."""
    from textarena import agents

    own = agents.OpenRouterAgent
    if issubclass(own, _Agent):
        return
    usual = inspect.signature(own.__init__).parameters.get("system_prompt")

    class Agent(_Agent):
        def __init__(self, model_name: str, system_prompt: Any = usual and usual.default, **more: Any) -> None:
            self.model_name, self.system_prompt = model_name, system_prompt
            self.more = {name: value for name, value in more.items() if name != "verbose"}

    agents.OpenRouterAgent = Agent


class _Agent:
    model_name: str
    system_prompt: Any
    more: dict[str, Any]

    def __call__(self, observation: str) -> str:
        known = _answers.get()
        if known is None:
            return ""  # a game that is only listed
        for answer in known:
            return answer
        system = [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []
        raise _Asks(self.model_name, [*system, {"role": "user", "content": observation}], self.more)


async def with_answers(step: Callable[[], _Made], session: Session) -> _Made:
    """Return what a step gives once it has all the answers that it asks for.

    Args:
        step: Is called again for each answer, so it must work on copies.
        session: The rollout in whose name the models are asked.

    Raises:
        EnvironmentMistake: It asks without end.
        PolicyRefused: A model did not answer.
    """
    given: list[str] = []
    while len(given) <= _MOST:
        token = _answers.set(iter(given))
        try:
            return step()
        except _Asks as asked:
            wanted = asked
        finally:
            _answers.reset(token)
        said = await ask(_judge(session, wanted.model), wanted.messages, judge=True, **wanted.more)
        given.append(str(said.get("content") or "").strip())
    raise EnvironmentMistake(f"a step of the game asks a model more than {_MOST} times")


def _judge(session: Session, model: str) -> Session:
    """The session of the model that answers; for the service of the game's author, `model` is the author's choice."""
    role, key = session.roles.get(_GRADER), os.environ.get(_KEY)
    if role is not None:
        place, key, model = role["base_url"], role["api_key"], role["model"]
    elif key:
        place = _SERVICE
    else:
        place, key, model = session.base_url, session.judge_key or session.api_key, session.model
    return dataclasses.replace(session, base_url=place, api_key=key, judge_key=key, model=model, stop=())
