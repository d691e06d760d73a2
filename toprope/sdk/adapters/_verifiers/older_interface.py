"""What authors wrote for earlier versions of verifiers 0.1, carried out with 0.1.14.

Messages are objects since 0.1.14 and were dictionaries before, which reward functions expect (`isinstance(message,
dict)`): they get dictionaries that can be read as objects, too. Until 0.1.3 an environment had `is_completed(messages,
state)`, and `env_response` returned messages and state, also without being a coroutine.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from typing import Any

__all__ = ["adapt_hooks", "dictionaries", "with_dictionaries"]

_CLASSES = re.compile(r"\b(Assistant|System|Text|Tool|User)Message\b")
_CONVERSATIONS = frozenset({"prompt", "completion", "prompts", "completions"})
_BROKEN_OFF = ("error", "prompt_too_long")
"""Entries of a state after which no rollout goes on."""


def adapt_hooks(env: Any) -> None:
    """Have an environment, or each of a group, called as its author wrote its hooks."""
    for member in (getattr(env, "env_map", None) or {}).values():
        adapt_hooks(member)
    for name, adapted in (("is_completed", _completed), ("env_response", _responded), ("setup_state", _set_up)):
        own = getattr(type(env), name, None)
        if own is not None and str(getattr(own, "__module__", "")).partition(".")[0] != "verifiers":
            setattr(env, name, adapted(env, own))


def _completed(env: Any, own: Any) -> Any:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    takes_messages = sum(one.kind in kinds for one in inspect.signature(own).parameters.values()) > 2

    async def completed(state: Any, **more: Any) -> bool:
        if takes_messages and await _inherited(env, state):
            return True
        if any(state.get(name) for name in _BROKEN_OFF):
            return True
        given = (_conversation(state), state) if takes_messages else (state,)
        return bool(await _awaited(own(env, *given, **more)))

    return completed


async def _inherited(env: Any, state: Any) -> bool:
    """Return True by the conditions of verifiers, which its authors' method replaced."""
    import verifiers

    return bool(await verifiers.Environment.is_completed(env, state))


def _responded(env: Any, own: Any) -> Any:
    async def responded(messages: Any, state: Any, **more: Any) -> Any:
        said = await _awaited(own(env, messages, state, **more))
        if isinstance(said, tuple) and len(said) == 2:
            said, after = said
            _take(state, after)
        return said

    return responded


def _set_up(env: Any, own: Any) -> Any:
    async def set_up(state: Any, **more: Any) -> Any:
        after = await _awaited(own(env, state, **more))
        _take(state, after)
        return state

    return set_up


def _take(state: Any, after: Any) -> None:
    """Take over what a hook put into a state of its own."""
    if isinstance(after, dict) and after is not state:
        state.update(after)


async def _awaited(said: Any) -> Any:
    return await said if inspect.isawaitable(said) else said


def _conversation(state: Any) -> list[Any]:
    """Return the messages of a rollout so far."""
    steps = state.get("trajectory") or []
    return [*steps[-1]["prompt"], *steps[-1]["completion"]] if steps else list(state.get("prompt") or [])


class Message(dict[str, Any]):
    """A message, or a part of one, whose fields can be read as attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    def model_dump(self, **options: Any) -> dict[str, Any]:
        """Return a plain dictionary, as the object would."""
        return dict(self)


def dictionaries(value: Any) -> Any:
    """Return the objects in messages, conversations, and lists of these as dictionaries."""
    if isinstance(value, list):
        return [dictionaries(one) for one in value]
    if isinstance(value, dict):
        return Message({name: dictionaries(one) for name, one in value.items()})
    return dictionaries(value.model_dump()) if hasattr(value, "model_dump") else value


def with_dictionaries(function: Any) -> Any:
    """A function that gets its messages as dictionaries; one of verifiers, or whose file names its classes, does not
    need it."""
    module = str(getattr(function, "__module__", ""))
    if module.partition(".")[0] == "verifiers" or _names_classes(module):
        return function

    @functools.wraps(function)
    async def given(*arguments: Any, **named: Any) -> Any:
        told = {name: dictionaries(one) if name in _CONVERSATIONS else one for name, one in named.items()}
        said = function(*arguments, **told)
        return await said if inspect.isawaitable(said) else said

    return given


@functools.cache
def _names_classes(module: str) -> bool:
    try:
        return bool(_CLASSES.search(inspect.getsource(sys.modules[module])))
    except (KeyError, OSError, TypeError):
        return False
