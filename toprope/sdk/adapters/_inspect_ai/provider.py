"""The provider through which inspect asks the policy and the owner's models, and what it needs around it."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import Any

from toprope.sdk.authoring.env_managed import Session

__all__ = ["PROVIDER", "give_agents_a_key", "register", "tokens_of"]

PROVIDER = "toprope"
_KEY = "OPENAI_API_KEY"
_NO_KEY = "none"
_VERDICT_TOKENS = 1024


def give_agents_a_key() -> None:
    """Let bridged agents make OpenAI clients, whose requests inspect takes; OpenAI's own models still need a key."""
    if _KEY in os.environ:
        return
    from inspect_ai.model._providers.openai import OpenAIAPI

    os.environ[_KEY] = _NO_KEY
    start = OpenAIAPI.__init__

    @functools.wraps(start)
    def started(self: Any, *given: Any, **named: Any) -> None:
        hidden = os.environ.get(_KEY) == _NO_KEY and os.environ.pop(_KEY)
        try:
            start(self, *given, **named)
        finally:
            if hidden:
                os.environ.setdefault(_KEY, hidden)

    OpenAIAPI.__init__ = started


def register() -> None:
    """Register a provider that uses the key of the sample's rollout, or that of a role."""
    from inspect_ai._util.registry import registry_lookup
    from inspect_ai.log._samples import sample_active
    from inspect_ai.model import modelapi
    from inspect_ai.model._providers.openai_compatible import OpenAICompatibleAPI

    if registry_lookup("modelapi", PROVIDER) is not None:
        return

    class SessionAPI(OpenAICompatibleAPI):  # type: ignore[misc]
        def __init__(
            self, model_name: str, sessions: Mapping[tuple[str, int], Session], plays: str, **arguments: Any
        ) -> None:
            self._sessions, self._plays = sessions, plays
            super().__init__(model_name=model_name, service=PROVIDER, **arguments)

        async def count_text_tokens(self, text: str) -> int:
            return tokens_of(text)  # inspect's own count needs a file of the internet

        def service_model_name(self) -> str:
            return str(self.model_name)

        def request_headers(self, config: Any) -> dict[str, str]:
            session = self._session()
            key = session.judge_key if self._plays and session.judge_key else session.api_key
            if self._plays in session.roles:
                key = session.roles[self._plays]["api_key"]
            return {**super().request_headers(config), "Authorization": f"Bearer {key}"}

        def completion_params(self, config: Any, tools: bool) -> dict[str, Any]:
            params: dict[str, Any] = super().completion_params(config, tools)
            if self._plays:  # The policy's limits are too narrow for a verdict.
                return {**params, "max_tokens": _VERDICT_TOKENS, "temperature": 0.0}
            seed = self._session().seed
            return params if seed is None else {**params, "seed": seed}

        def _session(self) -> Session:
            active = sample_active()
            if active is None:
                raise RuntimeError("a model was called outside any sample")
            return self._sessions[str(active.sample.id), active.epoch]

    def toprope() -> Any:
        return SessionAPI

    modelapi(name=PROVIDER)(toprope)


def tokens_of(text: str) -> int:
    """Return about how many tokens a text has."""
    return 1 + len(text) // 3
