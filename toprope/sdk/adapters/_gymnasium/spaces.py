"""Read an environment: its longest episode, actions that are numbers, arguments and results of its calls."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any

from toprope.sdk.authoring.environment import Messages, as_messages, finite
from toprope.sdk.errors import EnvironmentMistake

__all__ = [
    "LARGEST_LIMIT",
    "LIMITS",
    "UNKNOWN_LIMIT",
    "count_of",
    "limit_of",
    "messages_of",
    "numbers",
    "pair_of",
    "parameters_of",
    "start_of",
    "stepped",
    "takes",
]

LIMITS = ("max_turns", "max_steps", "_max_episode_steps", "max_episode_steps")
"""Names of the largest number of steps."""
UNKNOWN_LIMIT, LARGEST_LIMIT = 50, 1000
_COUNTS = ("action_size", "num_actions", "n_actions")
"""Names of the number of actions in classes without an action space."""


def limit_of(game: Any) -> int:
    """Return the largest number of steps in an episode.

    Args:
        game: The environment; one that draws its limit knows it after a reset.

    Returns:
        At most `LARGEST_LIMIT`; `UNKNOWN_LIMIT` if it names none.
    """
    limit = next((value for name in LIMITS if isinstance(value := getattr(game, name, None), int) and value > 0), None)
    limit = limit or getattr(getattr(game, "spec", None), "max_episode_steps", None)
    return min(limit, LARGEST_LIMIT) if isinstance(limit, int) else UNKNOWN_LIMIT


def count_of(game: Any) -> int | None:
    """Return the number of actions if they are numbers; None for texts, and for several bits at once."""
    space = getattr(game, "action_space", None)
    if space is None:
        actions = parameters_of(game.step)[:1] if hasattr(game, "step") else []
        is_number = any(action.annotation in (int, "int") for action in actions)
        counts = [getattr(game, name, None) for name in _COUNTS] if is_number else []
        return next((count for count in counts if isinstance(count, int) and count > 0), None)
    count = None if type(space).__name__ == "MultiBinary" else getattr(space, "n", None)
    return None if count is None else int(count)


def start_of(game: Any) -> int:
    """Return the first of the actions that are numbers."""
    return int(getattr(getattr(game, "action_space", None), "start", 0))


def numbers(game: Any) -> str:
    """Return what the policy is told about actions that are numbers."""
    start = start_of(game)
    return f"Answer with a number from {start} to {start + (count_of(game) or 0) - 1}."


def pair_of(value: Any) -> tuple[Any, Mapping[str, Any]]:
    """Return the observation, and the dict beside it; an empty one if it stands alone."""
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping):
        return value
    return value, {}


def stepped(value: Any) -> tuple[Any, float, bool, Mapping[str, Any]]:
    """Observation, reward, done and the dict of a step, in any of the recognised forms.

    Raises:
        EnvironmentMistake: Another form, or the reward is not a finite number.
    """
    if isinstance(value, Mapping) and {"reward", "done"} <= value.keys():
        parts = value.get("observations"), value["reward"], value["done"], value.get("metadata") or {}
    elif isinstance(value, tuple) and len(value) == 5:
        parts = value[0], value[1], value[2] or value[3], value[4]
    elif isinstance(value, tuple) and len(value) in (3, 4):
        parts = value[0], value[1], value[2], value[3] if len(value) == 4 else {}
    else:
        raise EnvironmentMistake(
            f"step() returned {value!r:.80}: observation, reward, terminated, truncated and a dict are expected."
        )
    reward = finite(parts[1], "step() gave the reward")  # clipping would make nan the highest
    return parts[0], reward, bool(parts[2]), parts[3] if isinstance(parts[3], Mapping) else {}


def messages_of(observation: Any, info: Mapping[str, Any]) -> Messages:
    """An observation as messages, between the `prefix` and the `suffix` that GEM gives in the dict."""
    if isinstance(observation, list) and observation and all(isinstance(message, Mapping) for message in observation):
        return as_messages(observation, "an observation")
    text = "\n".join(str(part) for part in (info.get("prefix"), _text(observation), info.get("suffix")) if part)
    return [{"role": "user", "content": text.strip() or "(nothing)"}]


def _text(observation: Any) -> str:
    if getattr(observation, "ndim", 0) >= 3:
        raise EnvironmentMistake("The observation is an image, which is not supported.")
    if hasattr(observation, "tolist"):
        observation = observation.tolist()
    if isinstance(observation, Mapping):
        if isinstance(images := observation.get("images"), list) and images:
            raise EnvironmentMistake("The observation has images, which are not supported.")
        texts = [observation[name] for name in ("text", "prompt", "observation", "mission") if name in observation]
        if len(texts) == 1 and isinstance(texts[0], str):
            return texts[0]
        return json.dumps(observation, default=str, ensure_ascii=False)
    return "" if observation is None or observation == [] else str(observation)


def parameters_of(call: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the parameters of a function or class; none if it does not tell."""
    for evaluated in (True, False):  # An annotation may be a name that only type checkers import.
        try:
            return list(inspect.signature(call, eval_str=evaluated).parameters.values())
        except Exception:
            continue
    return []


def takes(call: Callable[..., Any], name: str) -> bool:
    """Return True if a call may have an argument of this name."""
    return any(parameter.name == name or parameter.kind is parameter.VAR_KEYWORD for parameter in parameters_of(call))
