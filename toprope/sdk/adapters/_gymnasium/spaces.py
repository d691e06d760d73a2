"""Read an environment: its longest episode, actions that are numbers, and the results of reset and step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toprope.sdk.authoring.environment import finite
from toprope.sdk.errors import EnvironmentMistake

__all__ = ["LARGEST_LIMIT", "LIMITS", "UNKNOWN_LIMIT", "count_of", "limit_of", "numbers", "pair_of", "stepped"]

LIMITS = ("max_turns", "max_steps", "_max_episode_steps", "max_episode_steps")
"""Names of the largest number of steps."""
UNKNOWN_LIMIT, LARGEST_LIMIT = 50, 1000


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
    """Return the number of actions if they are numbers; None for texts."""
    count = getattr(getattr(game, "action_space", None), "n", None)
    return None if count is None else int(count)


def numbers(game: Any) -> str:
    """Return what the policy is told about actions that are numbers."""
    start = int(getattr(game.action_space, "start", 0))
    return f"Answer with a number from {start} to {start + int(game.action_space.n) - 1}."


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
