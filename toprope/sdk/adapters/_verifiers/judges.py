"""Models that a package with `load_environment` asks besides the policy: judges, simulated users.

Authors make clients of OpenAI as they like, in rubrics, closures or reward functions, for services whose keys others
do not have. All of them are led to the rollout's judge: the owner's model with the role `grader`, or the policy.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

from toprope.sdk.authoring.env_managed import Session

__all__ = ["lead_to_judge", "rollout_of"]

_GRADER = "grader"
_LED = "_toprope_led"

rollout_of: ContextVar[Session | None] = ContextVar("rollout_of", default=None)
"""The rollout in whose name the current task asks a model."""


def lead_to_judge() -> None:
    """Lead every client of OpenAI in this process to the judge, unless it asks the rollout's own server."""
    import openai

    if hasattr(openai.OpenAI, _LED):
        return
    asked_at_once, asked_later = openai.OpenAI._prepare_options, openai.AsyncOpenAI._prepare_options

    def prepare(self: Any, options: Any) -> Any:
        return asked_at_once(self, _led(self, options))

    async def prepare_later(self: Any, options: Any) -> Any:
        return await asked_later(self, _led(self, options))

    openai.OpenAI._prepare_options = prepare  # type: ignore[method-assign]
    openai.AsyncOpenAI._prepare_options = prepare_later  # type: ignore[method-assign]
    setattr(openai.OpenAI, _LED, True)


def _led(client: Any, options: Any) -> Any:
    """Return a request's options with address, key and model of the judge."""
    session = rollout_of.get()
    if session is None or str(client.base_url).startswith(session.base_url):
        return options
    own = {"base_url": session.base_url, "api_key": session.judge_key or session.api_key, "model": session.model}
    judge = session.roles.get(_GRADER) or own
    options.url = f"{judge['base_url'].rstrip('/')}/{options.url.lstrip('/')}"
    given = options.headers if isinstance(options.headers, Mapping) else {}
    options.headers = {**given, "Authorization": f"Bearer {judge['api_key']}"}
    if isinstance(options.json_data, dict):
        options.json_data = {**options.json_data, "model": judge["model"]}
    return options
