"""Models that the code of a task names itself, as judges of one provider are: a role plays them.

`get_model("openai/gpt-4o")` fails without that provider's key, mostly while a task is loaded. A model that cannot be
made is replaced by one that asks, whenever it is called, the role of that name or `grader`; one without a name, or with
that of the evaluated model, is the policy; one with the name of a role's model is that role. A model that can be made,
because the owner gave its key, stays. A role that nobody has bound is the policy, but told apart from it: see
`provider.Rollout`.
"""

from __future__ import annotations

import functools
import os
import sys
from copy import copy
from typing import Any

__all__ = ["GRADER", "NO_KEY", "PROVIDER", "ROLE_PROVIDER", "play_named_models", "tokens_of"]

GRADER = "grader"
"""The role of inspect's model-graded scorers, and of models whose names are no roles."""
PROVIDER, ROLE_PROVIDER = "toprope", "toprope_role"
NO_KEY = "none"
"""Stands for a key of OpenAI's that the owner has not given; see `provider.give_agents_a_key`."""
_NO_MODEL = "No model specified"


def tokens_of(text: str) -> int:
    """Return about how many tokens a text has."""
    return 1 + len(text) // 3


def play_named_models() -> None:
    """Replace `get_model` wherever inspect and modules loaded so far hold it. Repeated calls change nothing."""
    from inspect_ai._util.error import PrerequisiteError
    from inspect_ai.model import ModelAPI, model_roles, modelapi
    from inspect_ai.model import get_model as start
    from inspect_ai.model._generate_config import active_generate_config
    from inspect_ai.model._model import active_model

    if getattr(start, "plays_roles", False):
        return

    stand_ins: dict[str, Any] = {}

    class Played(ModelAPI):  # type: ignore[misc]
        def __init__(self, model_name: str, plays: str = "", **settings: Any) -> None:
            accepted = {name: value for name, value in settings.items() if name in ("base_url", "config")}
            super().__init__(model_name=model_name, **accepted)
            self._plays = plays

        async def generate(self, input: Any, tools: Any, tool_choice: Any, config: Any) -> Any:
            if not self._plays:  # inspect gives the settings of the evaluation to the model that it knows as its own
                config = active_generate_config().merge(config)
            return await self._model().api.generate(input, tools, tool_choice, config)

        def is_aside(self) -> bool:
            return self._model().api.is_aside()  # type: ignore[no-any-return]

        def should_retry(self, ex: Exception) -> Any:
            return self._model().api.should_retry(ex)

        async def count_text_tokens(self, text: str) -> int:
            return tokens_of(text)

        def _model(self) -> Any:
            roles = model_roles()
            played = (roles.get(self._plays) or roles.get(GRADER)) if self._plays else active_model()
            if played is None:
                raise RuntimeError("a model was called outside any sample")
            return played[0] if isinstance(played, list) else played

    @functools.wraps(start)
    def get_model(model: Any = None, *, role: str | None = None, **settings: Any) -> Any:
        if isinstance(model, str) and model.startswith(f"{PROVIDER}/") and "rollouts" not in settings:
            roles = [one for bound in model_roles().values() for one in (bound if isinstance(bound, list) else [bound])]
            model = next((one for one in roles if str(one) == model), None)
        try:
            made_model = start(model, role=role, **settings)
            return _as_role(made_model, role) if role and made_model is active_model() else made_model
        except PrerequisiteError:  # no key, or no package, of its provider
            player = role or model or settings.get("default") or GRADER
            requested = str(model or settings.get("default") or "")
            if os.environ.get(f"{requested.partition('/')[0].upper()}_API_KEY", NO_KEY) not in ("", NO_KEY):
                raise  # the owner gave the key, so the package is missing
        except ValueError as error:
            if _NO_MODEL not in str(error):
                raise
            player = role or ""
        about = {"config": settings["config"]} if settings.get("config") is not None else {}
        key = f"{player} {about}"  # scorers ask for it in every rollout
        if key not in stand_ins:
            if player:
                print(f"{player}: a role of that name plays it, or {GRADER!r}", file=sys.stderr)
            stand_ins[key] = start(f"{ROLE_PROVIDER}/{player or 'policy'}", plays=str(player), memoize=False, **about)
        return stand_ins[key]

    def _as_role(policy: Any, role: str) -> Any:
        copied = copy(policy)
        copied.api = policy.api.as_role(role)
        copied.config = policy.config.merge(active_generate_config())  # which inspect gives to the policy itself alone
        return copied

    get_model.plays_roles = True  # type: ignore[attr-defined]

    def toprope_role() -> Any:
        return Played

    modelapi(name=ROLE_PROVIDER)(toprope_role)
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get("get_model") is start:
            module.get_model = get_model  # type: ignore[attr-defined]
