"""Games of an environment with `reset` and `step`: made, begun by seeds, reused, and copied if copies are safe.

A game whose `reset` takes no seed is not reused, because its own generator would run on: it is made anew by each seed.
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from toprope.sdk.adapters._gymnasium.spaces import count_of, messages_of, numbers, pair_of, parameters_of, takes
from toprope.sdk.adapters._shared.listing import why_not, with_nltk_data
from toprope.sdk.adapters._shared.random_state import OwnRandom
from toprope.sdk.authoring.environment import Messages
from toprope.sdk.errors import OURS, LoadError

__all__ = ["COMPARED", "Games"]

COMPARED = 8
"""Number of first games compared to see if observations tell tasks apart."""
_SLOW_S = 1.0
"""Seconds from which a game is kept for copies and the log has its time."""
_KEPT = 64
"""Number of begun games to keep for copies."""


class Games:
    """The games of one environment.

    Args:
        name: Of the environment, for errors.
        maker: Makes a game.
        arguments: Of the maker.
        copied: True if a copy of a game is a game of its own, as it is not if a server holds the game.
    """

    def __init__(self, name: str, maker: Callable[..., Any], arguments: Mapping[str, Any], *, copied: bool) -> None:
        self._name, self._maker, self._arguments, self._copied = name, maker, arguments, copied
        self._idle: list[Any] = []
        self._made = 0
        self._kept: dict[int, tuple[Messages, Any, OwnRandom]] = {}
        self._looked_at: Any = None
        """A game that is not reused; closed when the next one is begun, so that it can be looked at until then."""
        self._kept_new: Any = None
        """A new game, if making one is slow."""
        self.is_reused = True
        """True if a game may be reset for another rollout; known once there is a first one."""
        self._takes_seed = any(parameter.name == "seed" for parameter in parameters_of(maker))
        start = arguments.get("seed")
        self.start = start if isinstance(start, int) else 0
        """Seed of the first game that is made by its seed."""

    def make(self, **more: Any) -> Any:
        """Make a game.

        Raises:
            LoadError: Its class refuses the arguments.
        """
        options = {**self._arguments, **more}
        try:
            game = with_nltk_data(lambda: self._maker(**options))
        except (AssertionError, TypeError, ValueError, LookupError, ImportError) as error:
            kinds = ", ".join(f"{key}: {type(options[key]).__name__}" for key in sorted(options))  # values may be keys
            with_these = f" with {kinds}" if options else ""
            raise LoadError(f"{self._name} is not made{with_these}: {why_not(error)}") from error
        self._made += 1
        return game

    def first(self) -> Any:
        """Make the first game, which then waits to be begun."""
        began = time.monotonic()
        with OwnRandom(0):
            game = self.make()
        seconds = time.monotonic() - began
        _tell("making a game", seconds)
        reset = getattr(game, "reset", None)
        self.is_reused = callable(reset) and takes(reset, "seed")
        if self.is_reused:
            if seconds >= _SLOW_S:
                self._kept_new = self._copy(game)
            self._idle.append(game)
        else:
            self._looked_at = game
        return game

    def begin(self, seed: int, *, keep: bool = False, anew: bool = False) -> tuple[Messages, Any, OwnRandom]:
        """Reset a game with a seed, or copy the kept game of that seed.

        Args:
            keep: True if the caller plays the game and gives it back. If not, it must not change it.
            anew: True to reset one in any case.

        Returns:
            The first messages, the game, and its generator states.
        """
        if seed in self._kept and not anew:
            messages, begun, luck = self._kept[seed]
            if (game := self._copy(begun) if keep else begun) is not None:
                return copy.deepcopy(messages), game, copy.copy(luck)
        luck, began = OwnRandom(seed), time.monotonic()
        self._close_looked_at()
        game = self._idle.pop() if self._idle else self._copy(self._kept_new)
        try:
            with luck:
                if game is None:
                    by_seed = self._takes_seed and not self.is_reused
                    game = self.make(**({"seed": self.start + seed} if by_seed else {}))
                observation, info = pair_of(game.reset(seed=seed) if self.is_reused else game.reset())
            seconds = time.monotonic() - began
            messages = messages_of(observation, info)
        except BaseException:
            if game is not None:
                with suppress(Exception):
                    self.discard(game)
            raise
        if count_of(game) is not None:
            messages[-1]["content"] += f"\n{numbers(game)}"
        if seconds >= _SLOW_S and not anew and (begun := self._copy(game)) is not None:
            while len(self._kept) >= _KEPT:
                del self._kept[next(iter(self._kept))]
            self._kept[seed] = copy.deepcopy(messages), begun, copy.copy(luck)
        if not keep:
            _tell(f"reset(seed={seed})", seconds)
            self.give_back(game)
        return messages, game, luck

    def give_back(self, game: Any) -> None:
        """Take back a game, to be reset for another rollout."""
        if not self.is_reused:
            self._close_looked_at()
            self._looked_at = game
        elif len(self._idle) < self._made:  # copies would pile up
            self._idle.append(game)

    def discard(self, game: Any) -> None:
        """Close a game that is not given back, because its rollout failed or nobody plays it on."""
        self._made = max(self._made - 1, len(self._idle))
        if callable(close := getattr(game, "close", None)):
            close()

    def _close_looked_at(self) -> None:
        game, self._looked_at = self._looked_at, None
        if callable(close := getattr(game, "close", None)):
            with suppress(Exception):
                close()

    def _copy(self, game: Any) -> Any:
        """Return a copy, or None if copies are not safe or not possible."""
        if not self._copied or game is None:
            return None
        try:
            return copy.deepcopy(game)
        except Exception:  # an author's object may raise anything
            self._copied = False
            self._kept.clear()
            self._kept_new = None
            return None


def _tell(what: str, seconds: float) -> None:
    """Write to the log, whose last line an error shows, what was slow."""
    if seconds >= _SLOW_S:
        print(f"{OURS}{what} took {seconds:.1f} s", file=sys.stderr, flush=True)
