"""The provider through which inspect asks the policy and the owner's models, and what it needs around it."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field
from typing import Any

from toprope.sdk.adapters._inspect_ai.named_models import NO_KEY, PROVIDER, ROLE_PROVIDER, tokens_of
from toprope.sdk.authoring.env_managed import Session

__all__ = ["Rollout", "give_agents_a_key", "named", "register"]

_KEY = "OPENAI_API_KEY"
_VERDICT_TOKENS = 1024


@dataclass
class Rollout:
    """The session of a rollout, and its calls of the policy.

    Some tasks ask roles that nobody has bound, such as a simulated user; inspect gives them the evaluated model. Only
    calls without a role are the rollout, or those of the first role if all have one: the other players must not be
    trained for its reward.
    """

    session: Session
    plays: str | None = None
    """The role that the policy plays, empty for calls without one; None before the first call."""
    talk: list[Any] = field(default_factory=list)
    """The policy's last conversation, as messages of inspect."""
    _talks: list[list[Any]] = field(default_factory=list)
    """The policy's answered conversations, each with its answer."""
    _of_roles: list[Any] = field(default_factory=list)
    """The answers that other roles gave."""

    def messages(self, logged: list[Any]) -> list[Any]:
        """Return the conversation of the rollout: the logged messages, unless a role gave some of their answers.

        Then it is the policy's last one whose answer is logged, since a call after the rollout may grade it.
        """
        policy_answers = [talk[-1] for talk in self._talks]
        answers = [message for message in logged if message.role == "assistant"]
        others = [answer for answer in answers if not _holds(policy_answers, answer, by_text=False)]
        if not any(_holds(self._of_roles, answer) for answer in others):
            return logged
        return next((talk for talk in reversed(self._talks) if _holds(answers, talk[-1])), self.talk)

    def is_aside(self, role: str) -> bool:
        """Return True if another than the policy's own role is asked."""
        return bool(role) and self.plays not in (None, role)

    def ask(self, role: str, messages: list[Any]) -> None:
        """Note a question to the policy."""
        if self.plays is None or (self.plays and not role):
            self.plays = role
            self._of_roles += [talk[-1] for talk in self._talks]
            self._talks = []
        if role == self.plays:
            self.talk = list(messages)

    def hear(self, role: str, message: Any, messages: list[Any]) -> None:
        """Note the policy's answer to these messages."""
        if self.is_aside(role):
            self._of_roles.append(message)
        else:
            self.talk = [*messages, message]
            self._talks.append(self.talk)


def _holds(answers: list[Any], message: Any, by_text: bool = True) -> bool:
    """Return True if a message is one of these answers: by its id, or by its text if authors wrote it anew."""
    if any(answer.id == message.id for answer in answers if message.id is not None):
        return True
    return by_text and bool(message.text) and any(answer.text == message.text for answer in answers)


def give_agents_a_key() -> None:
    """Let bridged agents make OpenAI clients, whose requests inspect takes; OpenAI's own models still need a key."""
    if _KEY in os.environ:
        return
    from inspect_ai.model._providers.openai import OpenAIAPI

    os.environ[_KEY] = NO_KEY
    start = OpenAIAPI.__init__

    @functools.wraps(start)
    def started(self: Any, *arguments: Any, **keywords: Any) -> None:
        hidden = os.environ.get(_KEY) == NO_KEY and os.environ.pop(_KEY)
        try:
            start(self, *arguments, **keywords)
        finally:
            if hidden:
                os.environ.setdefault(_KEY, hidden)

    OpenAIAPI.__init__ = started


def named(model: str, role: str) -> str:
    """Return the name of a model as inspect knows it: of its role as well, because several may share one model."""
    return f"{model} as {role}" if role else model


def register() -> None:
    """Register a provider that uses the key of the sample's rollout, or that of a role. inspect caches none of it."""
    from inspect_ai._util.registry import registry_lookup
    from inspect_ai.log._samples import sample_active
    from inspect_ai.model import modelapi
    from inspect_ai.model._providers.openai_compatible import OpenAICompatibleAPI

    if registry_lookup("modelapi", PROVIDER) is not None:
        return

    class SessionAPI(OpenAICompatibleAPI):  # type: ignore[misc]
        def __init__(
            self, model_name: str, rollouts: Mapping[tuple[str, int], Rollout], plays: str, **arguments: Any
        ) -> None:
            self._rollouts, self._plays, self._role = rollouts, plays, ""
            super().__init__(model_name=model_name, service=PROVIDER, **arguments)

        async def count_text_tokens(self, text: str) -> int:
            return tokens_of(text)  # inspect's own count needs a file of the internet

        def as_role(self, role: str) -> SessionAPI:
            """Return the policy as it answers for a role that nobody has bound."""
            copied = copy(self)
            copied._role = role
            return copied

        def is_aside(self) -> bool:
            """Return True if it answers for another than the policy."""
            return bool(self._plays) or self._rollout().is_aside(self._role)

        async def generate(self, input: list[Any], tools: Any, tool_choice: Any, config: Any) -> Any:
            if self._plays:
                return await super().generate(input, tools, tool_choice, config)
            rollout = self._rollout()
            rollout.ask(self._role, input)
            result = await super().generate(input, tools, tool_choice, config)
            output = result[0] if isinstance(result, tuple) else result
            if getattr(output, "choices", None):
                rollout.hear(self._role, output.choices[0].message, input)
            return result

        def service_model_name(self) -> str:
            return str(self.model_name).removesuffix(named("", self._plays))

        def request_headers(self, config: Any) -> dict[str, str]:
            session = self._rollout().session
            key = session.judge_key if self.is_aside() and session.judge_key else session.api_key
            if self._plays in session.roles:
                key = session.roles[self._plays]["api_key"]
            return {**super().request_headers(config), "Authorization": f"Bearer {key}"}

        def completion_params(self, config: Any, tools: bool) -> dict[str, Any]:
            params: dict[str, Any] = super().completion_params(config, tools)
            if self._plays:  # The policy's limits are too narrow for a verdict.
                return {**params, "max_tokens": _VERDICT_TOKENS, "temperature": 0.0}
            seed = self._rollout().session.seed
            return params if seed is None else {**params, "seed": seed}

        def _rollout(self) -> Rollout:
            active = sample_active()
            if active is None:
                raise RuntimeError("a model was called outside any sample")
            return self._rollouts[str(active.sample.id), active.epoch]

    def toprope() -> Any:
        return SessionAPI

    modelapi(name=PROVIDER)(toprope)
    _cache_others_only()
    _count_own_turns_only()


def _cache_others_only() -> None:
    """Ask again where tasks set `cache=True`: its keys know no rollout, which would have no tokens of its own."""
    from inspect_ai.model import _model

    fetch, store = _model.cache_fetch, _model.cache_store

    def is_ours(entry: Any) -> bool:
        return str(entry.model).partition("/")[0] in (PROVIDER, ROLE_PROVIDER)

    _model.cache_fetch = lambda entry: None if is_ours(entry) else fetch(entry)
    _model.cache_store = lambda entry, output: False if is_ours(entry) else store(entry, output)


def _count_own_turns_only() -> None:
    """Count the policy's answers as turns, not those of simulated users and judges, and ask for none beyond a limit."""
    from inspect_ai.model import Model
    from inspect_ai.util import suspend_turn_limit

    generate = Model.generate

    @functools.wraps(generate)
    async def counted(self: Any, *arguments: Any, **keywords: Any) -> Any:
        is_aside = getattr(self.api, "is_aside", None)
        if is_aside is None or is_aside():
            with suspend_turn_limit():
                return await generate(self, *arguments, **keywords)
        _end_at_limit()
        return await generate(self, *arguments, **keywords)

    Model.generate = counted


def _end_at_limit() -> None:
    """Raise inspect's error before an answer that it would count and throw away because the turns are used up."""
    from inspect_ai.util._limit import record_turn, turn_limit_tree

    limit = turn_limit_tree.get()
    while limit is not None:
        if limit.limit is not None and limit.usage >= limit.limit:
            record_turn()
            return
        limit = limit.parent
