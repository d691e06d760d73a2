"""What an environment says of itself: the length of its episodes, and actions that are numbers."""

from __future__ import annotations

from typing import Any

__all__ = ["LARGEST_LIMIT", "LIMITS", "UNKNOWN_LIMIT", "count_of", "limit_of", "numbers"]

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
    own = next((value for name in LIMITS if isinstance(value := getattr(game, name, None), int) and value > 0), None)
    own = own or getattr(getattr(game, "spec", None), "max_episode_steps", None)
    return min(own, LARGEST_LIMIT) if isinstance(own, int) else UNKNOWN_LIMIT


def count_of(game: Any) -> int | None:
    """Return the number of actions if they are numbers; None for texts."""
    count = getattr(getattr(game, "action_space", None), "n", None)
    return None if count is None else int(count)


def numbers(game: Any) -> str:
    """Return what the policy is told about actions that are numbers."""
    start = int(getattr(game.action_space, "start", 0))
    return f"Answer with a number from {start} to {start + int(game.action_space.n) - 1}."
