"""Games of TextArena as values: started by seed, copied for each rollout, and compared by content."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from toprope.sdk.adapters._shared.keys import LARGE, held
from toprope.sdk.adapters._shared.listing import why_not, with_nltk_data
from toprope.sdk.adapters._shared.random_state import OwnRandom
from toprope.sdk.authoring.knobs import knob
from toprope.sdk.errors import InvalidRequest, LoadError

LIMITS = ("max_turns", "num_guesses", "num_turns", "num_hands")
"""Parameters of games that limit their length."""
_UNKNOWN_LIMIT, _LARGEST_LIMIT = 200, 1000
_ALIKE = 8
"""Number of first games compared to see if seeds make a difference."""
_BEGUN = 64
"""Number of started games to cache for copies."""


class Games:
    """Started games of one kind.

    Args:
        name: Of the environment, for errors.
        kind: The game's class.
        arguments: Of the class.
        players: Number of players.
        plain: Whether the arguments are the game's own.

    Raises:
        LoadError: It does not start.
        InvalidRequest: It refuses the arguments.
    """

    def __init__(self, name: str, kind: type, arguments: Mapping[str, Any], players: int, plain: bool) -> None:
        self._players = players
        self._begun: dict[int, tuple[Any, OwnRandom]] = {}
        with OwnRandom(0):
            try:
                self._game = with_nltk_data(lambda: kind(**arguments))
                self.state = getattr(with_nltk_data(lambda: self.begin(0))[0], "state", None)
            except (AssertionError, ValueError, TypeError) as error:
                if plain:
                    raise LoadError(f"{name} does not start: {why_not(error)}") from error
                raise InvalidRequest(f"{name} refuses these knobs: {why_not(error)}") from error
            except (LookupError, OSError) as error:  # an OSError: the package lacks a file
                raise LoadError(f"{name} does not start: {why_not(error)}") from error

    def begin(self, seed: int) -> tuple[Any, OwnRandom]:
        """Return the started game of a seed, which must only be copied, with its generator states."""
        if seed not in self._begun:
            while len(self._begun) >= _BEGUN:
                del self._begun[next(iter(self._begun))]
            self._begun[seed] = self.reset(seed)
        return self._begun[seed]

    def reset(self, seed: int) -> tuple[Any, OwnRandom]:
        """Start the game of a seed anew, with generator states of its own."""
        game, luck = self.copied(self._game), OwnRandom(seed)
        with luck:
            game.reset(num_players=self._players, seed=seed)
        return game, luck

    def copied(self, game: Any, around: Any = None) -> Any:
        """Copy a game, or what is around it; large constant containers are shared."""
        shared = {id(container): container for container in _large(vars(game).values())}
        return copy.deepcopy(game if around is None else around, shared)

    def started(self, seed: int) -> tuple[Any, OwnRandom]:
        """Return a copy of a started game, with generator states of its own."""
        begun, luck = self.begin(seed)
        own_luck = copy.copy(luck)
        with own_luck:
            return self.copied(begun), own_luck

    def tasks(self) -> Iterator[tuple[int, str, str]]:
        """Yield each seed with the first observation of its game, and the key of its task, without end."""
        first = [self._task(seed) for seed in range(_ALIKE)]
        alike = len({key for _, key in first}) == 1
        for seed in itertools.count():
            text, key = first[seed] if seed < _ALIKE else self._task(seed)
            # If every game begins alike, tasks differ by randomness alone: use seeds as keys.
            yield seed, text, f"{key} {seed}" if alike else key

    def _task(self, seed: int) -> tuple[str, str]:
        """Return the first observation, and the key of the game."""
        begun, luck = self.begin(seed)
        game = self.copied(begun)
        with copy.copy(luck):
            text = seen_text(game, game.get_observation())
        return text, _fingerprint(game, text)


def plain_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in arguments.items() if type(value) in (bool, int, float, str, list)}


def game_knobs(arguments: Mapping[str, Any], most_players: int = 1) -> type:
    """Return a dataclass of our knobs and of the game's parameters with JSON values."""
    fields: list[tuple[str, Any, Any]] = [
        ("show", Literal["new", "whole"],
         knob("new", help="new: each turn shows new observations; whole: all so far, as TextArena's agents see them")),
        ("turns", int, knob(0, ge=0, le=_LARGEST_LIMIT, help="most answers; 0: twice the game's own limit")),
    ]  # fmt: skip
    if most_players > 1:
        players = knob(0, ge=0, le=most_players, help="players of a game; 0: as its author named, or the fewest")
        fields.append(("players", int, players))
    for name, value in plain_arguments(arguments).items():
        if name not in ("show", "turns", "players"):
            fields.append((name, type(value), knob(value, help="the game's own setting")))
    return dataclasses.make_dataclass("Knobs", fields)


def answer_limit(arguments: Mapping[str, Any], state: Any) -> int:
    """Return the limit of answers: one invalid move per valid one."""
    limit = next((arguments[name] for name in LIMITS if isinstance(arguments.get(name), int)), None)
    limit = getattr(state, "max_turns", None) or limit
    return min(2 * limit + 1, _LARGEST_LIMIT) if isinstance(limit, int) else _UNKNOWN_LIMIT


def seen_text(game: Any, observed: tuple[int, Any]) -> str:
    """Return observations as text without the player's own moves, which the conversation has."""
    player, messages = observed
    lines = []
    for sender, message, _ in messages or ():
        if sender == player:
            continue
        role = (
            "" if not isinstance(sender, int) or sender < 0 else game.state.role_mapping.get(sender, f"Player {sender}")
        )
        lines.append(f"[{role}] {message}" if role else str(message))
    return "\n".join(lines).strip() or "(nothing new)"


def _fingerprint(game: Any, text: str) -> str:
    """Return a hash of a started game's state; equal for games that begin alike."""
    attributes = {name: value for name, value in vars(game).items() if name != "state"}
    state = json.dumps([held(attributes), held(getattr(game.state, "game_state", None)), text], default=str)
    return hashlib.sha256(state.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _large(values: Any, depth: int = 2) -> Iterator[Any]:
    """Return containers of more than `LARGE` elements in values and their attributes."""
    for value in values:
        if isinstance(value, list | tuple | set | frozenset | dict):
            if len(value) > LARGE:
                yield value
        elif depth and hasattr(value, "__dict__"):
            yield from _large(list(vars(value).values()), depth - 1)
