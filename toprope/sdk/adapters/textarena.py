"""Single-player games of TextArena.

The target is the id of a game, such as `GuessTheNumber-v0`. Task n is the game with seed n; games with the same
beginning count as one task, so that held-out games are not trained on. Rollouts of a group play the same game with the
same randomness.

TextArena uses global random generators and shares a process here, so each rollout has its own generator states, which
are set around every call. A game is created and started once per task; rollouts play on copies.

`installed` reports from the package's files which games can start: some need word lists of NLTK (a download), some a
model at OpenRouter (a key), two need numpy, which the package does not require, and some do not parse with every
Python.
"""

from __future__ import annotations

import ast
import copy
import dataclasses
import hashlib
import importlib
import itertools
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from toprope.sdk.adapters._shared.listing import Listed, why_not
from toprope.sdk.adapters._shared.random_state import OwnRandom
from toprope.sdk.authoring.environment import Environment, Messages, Part, Task
from toprope.sdk.authoring.knobs import knob, nearest
from toprope.sdk.discovery import literal, parse
from toprope.sdk.errors import InvalidRequest, LoadError

__all__ = ["PACKAGE", "REQUIREMENTS", "TextArena", "installed", "make"]

PACKAGE = "textarena"
REQUIREMENTS = ("textarena==0.7.*", "numpy")
_ONE_PLAYER = "SinglePlayerState"
_VARIANTS = ("-train", "-raw")
"""Suffixes of ids for the same game with other observations; the knob `show` selects those instead."""
_LIMITS = ("max_turns", "num_guesses", "num_turns", "num_hands")
_UNKNOWN_LIMIT, _LARGEST_LIMIT = 200, 1000
_LARGE = 1000
"""Containers with more elements are word lists; games do not change them, so copies share them."""
_BEGUN = 64
"""Number of started games to cache for copies."""
_ALIKE = 8
"""Number of first games compared to see if seeds make a difference."""
_WORDS, _TAGGER = "corpora/words", "taggers/averaged_perceptron_tagger_eng"


class TextArena(Environment):
    """A game of TextArena."""

    tags = ("textarena", "game", "multi-turn")
    packages = ("textarena",)
    parts = {  # noqa: RUF012 - environments declare their parts so
        "reward": Part(1.0, -1.0, 1.0, "the game's reward: 1 if it is won, otherwise the share done"),
        "won": Part(0.0, description="1 if the game is won"),
        "forfeited": Part(0.0, description="1 if a second consecutive invalid move ended the game; shown"),
        "invalid_moves": Part(0.0, 0.0, 1e6, "number of invalid moves; shown"),
    }

    def __init__(self, target: str, specification: Any, kind: type) -> None:
        self.name = f"{PACKAGE}/{target}"  # type: ignore[misc]
        self.__doc__ = _described(target, specification.kwargs)
        self._specification, self._kind = specification, kind
        self.Knobs = _knobs(specification.kwargs)  # type: ignore[assignment]
        self.max_turns = _limit(specification.kwargs, None)

    def setup(self) -> None:
        knobs = {field.name: getattr(self.knobs, field.name) for field in dataclasses.fields(self.knobs)}
        self._whole = knobs.pop("show") == "whole"
        most = knobs.pop("turns")
        arguments = {**self._specification.kwargs, **knobs}
        self._begun: dict[int, tuple[Any, OwnRandom]] = {}
        with OwnRandom(0):
            try:
                self._made = self._kind(**arguments)
                game = self._begin(0)[0]
            except (AssertionError, ValueError, TypeError) as error:
                if knobs == _plain(self._specification.kwargs):
                    raise LoadError(f"{self.name} does not start: {why_not(error)}") from error
                raise InvalidRequest(f"{self.name} refuses these knobs: {why_not(error)}") from error
            except LookupError as error:
                raise LoadError(f"{self.name} does not start: {why_not(error)}") from error
        self.max_turns = most or _limit(arguments, getattr(game, "state", None))

    def tasks(self) -> Iterator[Task]:
        first = [self._task(seed) for seed in range(_ALIKE)]
        alike = len({key for _, key in first}) == 1
        for seed in itertools.count():
            text, key = first[seed] if seed < _ALIKE else self._task(seed)
            # If every game begins alike, tasks differ by randomness alone: use seeds as keys.
            yield Task(text, data={"seed": seed}, key=f"{key} {seed}" if alike else key)

    def reset(self, task: Task) -> Messages:
        begun, luck = self._begin(task.data["seed"])
        self._luck, self._over = copy.copy(luck), False
        with self._luck:
            self._game = self._wrapped = self._copied(begun)
            for wrapper in self._specification.default_wrappers or ():
                self._wrapped = wrapper(self._wrapped)
            return [{"role": "user", "content": self._seen()}]

    def step(self, text: str) -> tuple[Messages | None, bool]:
        with self._luck:
            self._over, _ = self._wrapped.step(action=text)
            if self._over:
                return None, True
            return [{"role": "user", "content": self._seen()}], False

    def score(self) -> dict[str, float]:
        with self._luck:
            rewards, told = self._game.close()
            given = None if not rewards else rewards.get(0)
            if given is None:  # Ran out of answers: give partial credit if reported.
                share = getattr(self._game, "_get_percentage_completion", None) or getattr(
                    self._game, "_progress", None
                )
                given = share() if callable(share) else 0.0
        mine: Mapping[str, Any] = (told or {}).get(0, {})
        # One game gives a reason instead of a reward; an invalid move costs 1 by default.
        value = min(max(float(given), -1.0), 1.0) if isinstance(given, int | float) else -1.0
        return {
            "reward": value,
            "won": float(self._over and value >= 1.0),
            "forfeited": float(bool(mine.get("invalid_move"))),
            "invalid_moves": float(max(0, self.turns - int(mine.get("turn_count", self.turns)))),
        }

    def success(self, parts: dict[str, float], reward: float) -> bool:
        return parts["won"] >= 1.0

    def _task(self, seed: int) -> tuple[str, str]:
        """Return the first observation, and the key of the game."""
        begun, luck = self._begin(seed)
        game = self._copied(begun)
        with copy.copy(luck):
            text = _text(game, game.get_observation())
        return text, _fingerprint(game, text)

    def _begin(self, seed: int) -> tuple[Any, OwnRandom]:
        """Return the started game of a seed, which must only be copied, with its generator states."""
        if seed not in self._begun:
            while len(self._begun) >= _BEGUN:
                del self._begun[next(iter(self._begun))]
            game, luck = self._copied(self._made), OwnRandom(seed)
            with luck:
                game.reset(num_players=1, seed=seed)
            self._begun[seed] = game, luck
        return self._begun[seed]

    def _copied(self, game: Any) -> Any:
        """Copy a game; large constant containers are shared."""
        shared = {id(one): one for one in _large(vars(game).values())}
        return copy.deepcopy(game, shared)

    def _seen(self) -> str:
        """Return the new observation, or all observations as TextArena's own agents see them."""
        if not self._whole:
            return _text(self._game, self._game.get_observation())
        return str(self._wrapped.get_observation()[1]).strip() or "(nothing)"


def make(target: str) -> TextArena:
    """Make the environment of a game.

    Raises:
        LoadError: TextArena is not installed, the game is unknown, or its file does not load.
    """
    try:
        with OwnRandom(0):
            from textarena.envs.registration import ENV_REGISTRY
    except ModuleNotFoundError as error:
        raise LoadError(
            f"TextArena is not installed ({error}). Install it: {sys.executable} -m pip install textarena numpy"
        ) from error
    if target not in ENV_REGISTRY:
        plain = [name for name in ENV_REGISTRY if not name.endswith(_VARIANTS)]
        raise LoadError(f"TextArena has no game {target!r}. {nearest(target, plain, 'Games')[:2000]}")
    specification = ENV_REGISTRY[target]
    module, _, name = str(specification.entry_point).partition(":")
    try:
        with OwnRandom(0):
            kind = getattr(importlib.import_module(module), name)
    except SyntaxError as error:
        raise LoadError(
            f"{target} does not parse with Python {sys.version_info[0]}.{sys.version_info[1]}: {error}"
        ) from error
    except ModuleNotFoundError as error:
        raise LoadError(f"{target} needs {error.name}: {sys.executable} -m pip install {error.name}") from error
    source = Path(sys.modules[module].__file__ or "")
    if _ONE_PLAYER not in source.read_text("utf-8", "replace"):
        raise LoadError(f"{target} is a game for several players; only single-player games are supported.")
    return TextArena(target, specification, kind)


def installed(site_packages: Path) -> list[Listed]:
    """List the single-player games, with known problems."""
    folder = site_packages / PACKAGE
    try:
        tree = parse(folder / "envs" / "__init__.py")
    except (OSError, SyntaxError, ValueError):
        return []
    problems: dict[str, tuple[str, str] | None] = {}
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            continue
        if node.func.id not in ("register", "register_with_versions"):
            continue
        given = {one.arg: one.value for one in node.keywords if one.arg}
        name, entry = literal(given.pop("id", None)), literal(given.pop("entry_point", None))
        if not isinstance(name, str) or not isinstance(entry, str) or name.endswith(_VARIANTS):
            continue
        if entry not in problems:
            problems[entry] = _problem(site_packages, entry)
        problem = problems[entry]
        if problem is None:  # for several players
            continue
        arguments = {key: literal(value) for key, value in given.items() if key not in ("wrappers", "default_wrappers")}
        needs, why = problem
        limit = next((arguments[key] for key in _LIMITS if isinstance(arguments.get(key), int)), None)
        found.append(
            Listed(
                name=name, target=name, description=_described(name, arguments), tags=TextArena.tags, needs=needs,
                turns=None if limit is None else _limit(arguments, None), problem=why,
            )
        )  # fmt: skip
    return found


def _problem(site_packages: Path, entry: str) -> tuple[str, str] | None:
    """Return known problems of a game from its file as (needs, problem); None for multi-player games."""
    file = site_packages / (entry.partition(":")[0].replace(".", "/") + ".py")
    try:
        text = file.read_text("utf-8", "replace")
    except OSError:
        return None  # The number of players is unknown.
    if _ONE_PLAYER not in text:
        return None
    of_ours = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    same = of_ours in str(site_packages) or not re.search(r"python3\.\d+", str(site_packages))
    try:
        roots = _imported(parse(file))
    except (SyntaxError, ValueError) as error:
        return ("", f"its file does not parse with {of_ours}: {error}") if same else ("", "")
    for root in roots:
        there = (site_packages / root).is_dir() or (site_packages / f"{root}.py").is_file()
        if not there and root not in sys.stdlib_module_names and root != PACKAGE:
            return "install", f"needs {root}, which is not installed: pip install {root} in its interpreter"
    if "OpenRouter" in text:
        return "key", "its game master is a model at OpenRouter: OPENROUTER_API_KEY, and a network"
    wanted = [data for data, word in ((_WORDS, "words"), (_TAGGER, "pos_tag")) if "nltk" in text and word in text]
    if missing := [data for data in wanted if not _nltk_has(data, site_packages)]:
        names = " ".join(data.rpartition("/")[2] for data in missing)
        return "network", f"needs data of NLTK: python -m nltk.downloader {names} in its interpreter, once"
    return "", ""


def _imported(tree: ast.Module) -> set[str]:
    roots = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            roots |= {one.name.partition(".")[0] for one in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            roots.add(node.module.partition(".")[0])
    return roots


def _nltk_has(data: str, site_packages: Path) -> bool:
    """Return True if NLTK finds its data for an interpreter with these packages."""
    prefix = site_packages.parents[2] if len(site_packages.parents) > 2 else site_packages
    places: list[str | Path] = [
        *os.environ.get("NLTK_DATA", "").split(os.pathsep),
        Path.home() / "nltk_data",
        prefix / "nltk_data",
    ]
    places += [
        prefix / "share/nltk_data",
        prefix / "lib/nltk_data",
        "/usr/share/nltk_data",
        "/usr/local/share/nltk_data",
    ]
    places += ["/usr/lib/nltk_data", "/usr/local/lib/nltk_data"]
    return any(
        (Path(place) / data).is_dir() or (Path(place) / f"{data}.zip").is_file() for place in places if str(place)
    )


def _described(name: str, arguments: Mapping[str, Any]) -> str:
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name.partition("-v")[0])
    said = ", ".join(f"{key} {value}" for key, value in arguments.items() if isinstance(value, int | float | str))
    return f"{words}, a single-player game" + (f" ({said})" if said else "")


def _plain(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in arguments.items() if type(value) in (bool, int, float, str, list)}


def _knobs(arguments: Mapping[str, Any]) -> type:
    """Return a dataclass of our knobs and of the game's parameters with JSON values."""
    fields: list[tuple[str, Any, Any]] = [
        ("show", Literal["new", "whole"],
         knob("new", help="new: each turn shows new observations; whole: all so far, as TextArena's agents see them")),
        ("turns", int, knob(0, ge=0, le=_LARGEST_LIMIT, help="most answers; 0: twice the game's own limit")),
    ]  # fmt: skip
    for name, value in _plain(arguments).items():
        if name not in ("show", "turns"):
            fields.append((name, type(value), knob(value, help="the game's own setting")))
    return dataclasses.make_dataclass("Knobs", fields)


def _limit(arguments: Mapping[str, Any], state: Any) -> int:
    """Return the limit of answers: one invalid move per valid one."""
    own = next((arguments[name] for name in _LIMITS if isinstance(arguments.get(name), int)), None)
    own = getattr(state, "max_turns", None) or own
    return min(2 * own + 1, _LARGEST_LIMIT) if isinstance(own, int) else _UNKNOWN_LIMIT


def _text(game: Any, observed: tuple[int, Any]) -> str:
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
    kept = {name: value for name, value in vars(game).items() if name != "state"}
    held = json.dumps([_held(kept), _held(getattr(game.state, "game_state", None)), text], default=str)
    return hashlib.sha256(held.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _held(value: Any, depth: int = 8) -> Any:
    """Return a JSON form of a value that is equal in every process, without word lists."""
    if value is None or isinstance(value, str | int | float):
        return value
    if hasattr(value, "tolist"):  # arrays
        return value.tolist()
    if depth == 0 or (isinstance(value, list | tuple | set | frozenset | dict) and len(value) > _LARGE):
        return type(value).__name__
    if isinstance(value, Mapping):
        return [[str(key), _held(item, depth - 1)] for key, item in value.items()]
    if isinstance(value, list | tuple):
        return [_held(item, depth - 1) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    return _held(vars(value), depth - 1) if hasattr(value, "__dict__") and not callable(value) else type(value).__name__


def _large(values: Any, depth: int = 2) -> Iterator[Any]:
    """Return containers of more than `_LARGE` elements in values and their attributes."""
    for value in values:
        if isinstance(value, list | tuple | set | frozenset | dict):
            if len(value) > _LARGE:
                yield value
        elif depth and hasattr(value, "__dict__"):
            yield from _large(list(vars(value).values()), depth - 1)
