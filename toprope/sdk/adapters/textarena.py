"""Games of TextArena for one player; `toprope.sdk.adapters._textarena.match` has those for several, and those that ask
a model.

The target is the id of a game, such as `GuessTheNumber-v0`, or `/path/file.py:Class`. Task n is the game with seed n;
games with the same beginning count as one task, so that held-out games are not trained on. Rollouts of a group play
the same game with the same randomness.

TextArena uses global random generators and shares a process here, so each rollout has its own generator states, which
are set around every call. A game is created and started once per task; rollouts play on copies.

`installed` reports from the package's files which games can start: some need word lists of NLTK (a download), two
need numpy, which the package does not require, and some do not parse with every Python.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from toprope.sdk.adapters._shared.listing import Listed
from toprope.sdk.adapters._shared.random_state import OwnRandom
from toprope.sdk.adapters._textarena.asked import ASKS, lead_to_judge
from toprope.sdk.adapters._textarena.files import declared, game_of, state_of
from toprope.sdk.adapters._textarena.games import LIMITS, Games, answer_limit, game_knobs, plain_arguments, seen_text
from toprope.sdk.adapters._textarena.match import Match, tags_of
from toprope.sdk.authoring.environment import Environment, Messages, Part, Task
from toprope.sdk.authoring.knobs import nearest
from toprope.sdk.discovery import imports_in, literal, parse
from toprope.sdk.errors import LoadError

__all__ = ["PACKAGE", "PYTHON", "REQUIREMENTS", "TextArena", "declared", "installed", "make"]

PACKAGE = "textarena"
REQUIREMENTS = ("textarena==0.7.*", "numpy")
PYTHON = ">=3.12"
_ONE_PLAYER = "SinglePlayerState"
_VARIANTS = ("-train", "-raw")
"""Suffixes of ids for the same game with other observations; the knob `show` selects those instead."""
_REPOSITORY = "https://github.com/LeonGuertler/TextArena"
_SHARES = ("_get_percentage_completion", "_progress", "_calculate_progress")
"""Names of methods that return the share of a game that is done."""
_MOST_POINTS = {"KlondikeEnv": 52, "SetEnv": 20}
"""Classes of games whose reward is a number of points, with the largest one; https://github.com/LeonGuertler/TextArena
(textarena/envs/Klondike/env.py, Set/env.py, 0.7)"""
_WORDS, _TAGGER = "corpora/words", "taggers/averaged_perceptron_tagger_eng"


class TextArena(Environment):
    """A game of TextArena."""

    listed = True
    tags = ("textarena", "game", "multi-turn")
    packages = ("textarena",)
    parts = {  # noqa: RUF012 - environments declare their parts so
        "reward": Part(1.0, -1.0, 1.0, "the game's reward: 1 if it is won, otherwise the share done"),
        "won": Part(0.0, description="1 if the game is won"),
        "forfeited": Part(0.0, description="1 if a second consecutive invalid move ended the game; shown"),
        "invalid_moves": Part(0.0, 0.0, 1e6, "number of invalid moves; shown"),
    }

    def __init__(self, target: str, specification: Any, kind: type) -> None:
        self.name = f"{PACKAGE}/{target}"
        self.__doc__ = _described(target, specification.kwargs, _kind_of_game(alone=True, asks=False))
        self._specification, self._kind = specification, kind
        self.Knobs = game_knobs(specification.kwargs)
        self.max_turns = answer_limit(specification.kwargs, None)

    def setup(self) -> None:
        knobs = {field.name: getattr(self.knobs, field.name) for field in dataclasses.fields(self.knobs)}
        self._whole = knobs.pop("show") == "whole"
        most = knobs.pop("turns")
        arguments = {**self._specification.kwargs, **knobs}
        unchanged = knobs == plain_arguments(self._specification.kwargs)
        self._games = Games(self.name, self._kind, arguments, 1, unchanged)
        self.max_turns = most or answer_limit(arguments, self._games.state)

    def tasks(self) -> Iterator[Task]:
        for seed, text, key in self._games.tasks():
            yield Task(text, data={"seed": seed}, key=key)

    def reset(self, task: Task) -> Messages:
        self._over = False
        self._game, self._luck = self._games.started(task.data["seed"])
        with self._luck:
            self._wrapped = self._game
            for wrapper in self._specification.default_wrappers or ():
                self._wrapped = wrapper(self._wrapped)
            return [{"role": "user", "content": self._observe()}]

    def step(self, text: str) -> tuple[Messages | None, bool]:
        with self._luck:
            self._over, _ = self._wrapped.step(action=text)
            if self._over:
                return None, True
            return [{"role": "user", "content": self._observe()}], False

    def score(self) -> dict[str, float]:
        with self._luck:
            rewards, infos = self._game.close()
            reward: Any = None if not rewards else rewards.get(0)
            is_outcome = isinstance(reward, int | float)
            if not is_outcome:
                # Out of answers, or a reason instead of a reward: partial credit if the game reports it.
                share = next((method for name in _SHARES if callable(method := getattr(self._game, name, None))), None)
                reward = share() if share is not None else 0.0 if reward is None else -1.0
        mine: Mapping[str, Any] = (infos or {}).get(0, {})
        value = float(reward)
        if value > 0.0:
            value /= _MOST_POINTS.get(self._kind.__name__, 1)
        value = min(max(value, -1.0), 1.0)
        return {
            "reward": value,
            "won": float(self._over and is_outcome and value >= 1.0),
            "forfeited": float(bool(mine.get("invalid_move"))),
            "invalid_moves": float(max(0, self.turns - int(mine.get("turn_count", self.turns)))),
        }

    def success(self, parts: dict[str, float], reward: float) -> bool:
        return parts["won"] >= 1.0

    def _observe(self) -> str:
        """Return the new observation, or all observations as TextArena's own agents see them."""
        if not self._whole:
            return seen_text(self._game, self._game.get_observation())
        return str(self._wrapped.get_observation()[1]).strip() or "(nothing)"


def make(target: str) -> TextArena | Match:
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
    if ".py:" in target:
        user, kind, specification = game_of(target)
        text = user.path.read_text("utf-8", "replace")
        environment = _made(kind.__name__, specification, kind, _ONE_PLAYER in state_of(user, kind), ASKS in text)
        environment.files = user.files(None)
        return environment
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
    text = Path(sys.modules[module].__file__ or "").read_text("utf-8", "replace")
    return _made(target, specification, kind, _ONE_PLAYER in text, ASKS in text)


def _made(target: str, specification: Any, kind: type, alone: bool, asks: bool) -> TextArena | Match:
    """Make the environment of a game, which is for one player or asks a model."""
    if alone and not asks:
        return TextArena(target, specification, kind)
    if asks:
        lead_to_judge()
    described = _described(target, specification.kwargs, _kind_of_game(alone, asks))
    return Match(f"{PACKAGE}/{target}", described, specification, kind, asks=asks, alone=alone)


def installed(site_packages: Path) -> list[Listed]:
    """List the games, with known problems."""
    folder = site_packages / PACKAGE
    try:
        tree = parse(folder / "envs" / "__init__.py")
    except (OSError, SyntaxError, ValueError):
        return []
    problems: dict[str, tuple[bool, bool, str, str] | None] = {}
    games = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            continue
        if node.func.id not in ("register", "register_with_versions"):
            continue
        keywords = {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg}
        name, entry = literal(keywords.pop("id", None)), literal(keywords.pop("entry_point", None))
        if not isinstance(name, str) or not isinstance(entry, str) or name.endswith(_VARIANTS):
            continue
        if entry not in problems:
            problems[entry] = _problem(site_packages, entry)
        problem = problems[entry]
        if problem is None:
            continue
        arguments = {
            key: literal(value) for key, value in keywords.items() if key not in ("wrappers", "default_wrappers")
        }
        alone, asks, needs, why = problem
        limit = next((arguments[key] for key in LIMITS if isinstance(arguments.get(key), int)), None)
        games.append(
            Listed(
                name=name, target=name, description=_described(name, arguments, _kind_of_game(alone, asks)),
                tags=tags_of(asks, alone) if asks or not alone else TextArena.tags, needs=needs,
                turns=None if limit is None else answer_limit(arguments, None), problem=why,
            )
        )  # fmt: skip
    return games


def _problem(site_packages: Path, entry: str) -> tuple[bool, bool, str, str] | None:
    """Return whether a game is for one player, whether it asks a model, what it needs and its known problem, from its
    file; None without a file."""
    file = site_packages / (entry.partition(":")[0].replace(".", "/") + ".py")
    try:
        text = file.read_text("utf-8", "replace")
    except OSError:
        return None
    kind = _ONE_PLAYER in text, ASKS in text
    of_ours = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    same_python = of_ours in str(site_packages) or not re.search(r"python3\.\d+", str(site_packages))
    try:
        roots = {name.partition(".")[0] for level, name in imports_in(parse(file)) if not level}
    except (SyntaxError, ValueError) as error:
        return *kind, "", f"its file does not parse with {of_ours}: {error}" if same_python else ""
    for root in roots:
        is_present = (site_packages / root).is_dir() or (site_packages / f"{root}.py").is_file()
        if not is_present and root not in sys.stdlib_module_names and root != PACKAGE:
            added = f"The same toprope env add with --requirement {root} may add it, or choose another game."
            return *kind, "install", f"It imports {root}, which its interpreter lacks. {added}"
    reads = "__file__" in text and "open(" in text
    if reads and not any(
        data_file.is_file() and data_file.suffix not in (".py", ".pyc") for data_file in file.parent.rglob("*")
    ):
        return *kind, "install", f"The package leaves its data files out: toprope env add {_REPOSITORY}"
    needed = [data for data, word in ((_WORDS, "words"), (_TAGGER, "pos_tag")) if "nltk" in text and word in text]
    if missing := [data for data in needed if not _nltk_has(data, site_packages)]:
        names = " ".join(data.rpartition("/")[2] for data in missing)
        return *kind, "download", f"It downloads data of NLTK at its first use: {names}."
    return *kind, "", ""


def _nltk_has(data: str, site_packages: Path) -> bool:
    """Return True if NLTK finds its data where every worker with these packages looks, besides its own HOME."""
    prefix = site_packages.parents[2] if len(site_packages.parents) > 2 else site_packages
    shared = [Path(root, below) for root in (prefix, "/usr", "/usr/local") for below in ("share", "lib")]
    places = [root / "nltk_data" for root in (prefix, *shared)]
    return any((place / data).is_dir() or (place / f"{data}.zip").is_file() for place in places)


def _kind_of_game(alone: bool, asks: bool) -> str:
    players = "a single-player game" if alone else "a game for several players"
    return f"{players} with a model as master or jury" if asks else players


def _described(name: str, arguments: Mapping[str, Any], kind: str) -> str:
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name.partition("-v")[0])
    settings = ", ".join(f"{key} {value}" for key, value in arguments.items() if isinstance(value, int | float | str))
    return f"{words}, {kind}" + (f" ({settings})" if settings else "")
