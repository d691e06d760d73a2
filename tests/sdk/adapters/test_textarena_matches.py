"""Rewards of TextArena's games, and seats of those for several players."""

from __future__ import annotations

import ast
import asyncio
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from toprope.sdk.adapters import gymnasium, textarena
from toprope.sdk.adapters._textarena import match
from toprope.sdk.adapters.textarena import TextArena
from toprope.sdk.authoring.environment import Task
from toprope.sdk.authoring.policy_client import PolicyRefused


@pytest.mark.parametrize(
    ("rewards", "told", "outcomes"),
    [
        ({0: 1, 1: -1}, {}, [1, -1]),
        ({0: 55, 1: 40}, {0: {"winner": False}, 1: {"winner": False}}, [0, 0]),
        ({0: 55, 1: 40}, {0: {"winner": False}, 1: {"winner": True}}, [-1, 1]),
        ({0: 12, 1: 40, 2: 40}, {}, [-1, 1, 1]),
        ({0: 7, 1: 7}, {}, [0, 0]),
        ({}, {}, []),
    ],
)
def test_points_become_outcomes(rewards: dict[int, float], told: dict[int, Any], outcomes: list[float]) -> None:
    assert list(match._as_outcomes(rewards, told).values()) == outcomes


def test_games_seat_as_many_as_their_author_names() -> None:
    class Four:
        def __init__(self, default_num_players: int = 4) -> None: ...

    class Plain: ...

    assert match._usual_players(Four, {}) == 4 and match._usual_players(Plain, {}) == 2
    assert match._usual_players(Four, {"default_num_players": 3}) == 3


@pytest.mark.parametrize(
    ("rewards", "seat", "reward", "won"),
    [({0: 1, 1: -1}, 0, 1.0, 1.0), ({0: 1, 1: -1}, 1, -1.0, 0.0), ({0: 0.5, 1: 1}, 0, 0.5, 0.0), ({}, 0, 0.0, 0.0)],
)
def test_who_has_the_largest_reward_above_0_wins(
    rewards: dict[int, float], seat: int, reward: float, won: float
) -> None:
    assert match._parts(0, {0: 0.4}, {}, alone=True)["won"] == 0.0 and match._parts(0, {0: 1}, {}, alone=True)["won"]
    parts = match._parts(seat, rewards, {"invalid_move": True})
    assert (parts["reward"], parts["won"], parts["forfeited"], parts["seat"]) == (reward, won, 1.0, float(seat))


@pytest.mark.parametrize(
    ("kind", "points", "reward", "won"),
    [
        ("KlondikeEnv", 1, 1 / 52, 0.0),
        ("KlondikeEnv", 52, 1.0, 1.0),
        ("KlondikeEnv", -1.0, -1.0, 0.0),
        ("SetEnv", 5, 0.25, 0.0),
        ("SetEnv", 20, 1.0, 1.0),
        ("GuessEnv", 1, 1.0, 1.0),
    ],
)
def test_points_of_a_single_player_are_shares_of_the_most(kind: str, points: float, reward: float, won: float) -> None:
    game = TextArena("Game-v0", SimpleNamespace(kwargs={}), type(kind, (), {}))
    game._game, game._luck = SimpleNamespace(close=lambda: ({0: points}, {})), nullcontext()
    game._over, game.turns = True, 1
    parts = game.score()
    assert (parts["reward"], parts["won"]) == (reward, won) and game.success(parts, reward) == bool(won)


class Talk:
    """A game for two that only its answers end."""

    turn = 0

    def get_observation(self) -> tuple[int, str]:
        return self.turn % 2, f"turn {self.turn}"

    def step(self, action: str) -> tuple[bool, dict[str, Any]]:
        self.turn += 1
        return False, {}

    def close(self) -> tuple[None, None]:
        return None, None


@pytest.mark.parametrize("answers", [1, 3])
def test_seat_whose_context_is_full_ends_the_game(answers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask(session: Any, messages: list[Any], judge: bool) -> dict[str, Any]:
        if messages[-1]["content"] == f"turn {answers}":
            raise PolicyRefused("the policy's server answered 400: the prompt leaves no room for an answer")
        return {"content": "hm", "finish_reason": "stop"}

    monkeypatch.setattr(match, "ask", ask)
    game = match.Match("Talk-v0", "", SimpleNamespace(kwargs={}, default_wrappers=()), Talk)
    monkeypatch.setattr(game, "_games", SimpleNamespace(started=lambda seed: (Talk(), nullcontext())), raising=False)
    game._players, game._whole, game.max_turns = 2, True, 9
    seat: Any = SimpleNamespace(timeout_s=5, opponent=None)
    played: Any = asyncio.run(game.group(Task("", data={"seed": 0, "seat": 0}), [seat, seat]))
    if answers == 1:  # the first text of a seat
        assert all(isinstance(one.error, PolicyRefused) for one in played)
        return
    assert [(one.error, one.turns, one.truncated, one.parts["reward"]) for one in played] == [
        (None, 2, False, 0.0),
        (None, 1, True, 0.0),
    ]


OWN = '''
import textarena as ta


class Countdown(ta.Env):
    """Say a number."""

    def __init__(self, start: int = 7, names=None):
        self.start, self.kept = start, {kept}

    def reset(self, num_players: int, seed=None): ...

    def step(self, action: str): ...
'''


def test_games_of_a_file_are_textarenas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gymnasium's adapter, which plays classes with `reset` and `step`, leaves them to it."""
    core, registration = ModuleType("textarena"), ModuleType("textarena.envs.registration")
    core.Env, registration.ENV_REGISTRY = object, {}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "textarena", core)
    monkeypatch.setitem(sys.modules, "textarena.envs", ModuleType("textarena.envs"))
    monkeypatch.setitem(sys.modules, "textarena.envs.registration", registration)
    for kept, kind in (("ta.SinglePlayerState", textarena.TextArena), ("ta.TwoPlayerState", match.Match)):
        file = tmp_path / f"{kind.__name__.lower()}.py"
        file.write_text(OWN.replace("{kept}", f"'{kept}'"))
        tree = ast.parse(file.read_text())
        [listed] = textarena.declared(file, tree)
        assert listed.name == file.stem and listed.description == "Say a number."
        assert gymnasium.declared(file, tree) == []
        environment = textarena.make(listed.target)
        assert isinstance(environment, kind) and environment.Knobs().start == 7  # type: ignore[attr-defined]
        assert environment.files == (str(file),) and environment.name == "textarena/Countdown"
    assert textarena.declared(file, ast.parse(OWN.replace("textarena", "gymnasium"))) == []
    [listed] = textarena.declared(tmp_path / "countdown" / "env.py", ast.parse(OWN))
    assert listed.name == "countdown", "TextArena calls the file of each game env.py"
    for players in ("num_players: int = 1, seed=None", "seed=None, options=None"):  # the latter is Gymnasium's
        tree = ast.parse(OWN.replace("num_players: int, seed=None", players))
        found = [listed.tags[0] for adapter in (textarena, gymnasium) for listed in adapter.declared(file, tree)]
        assert found == ["textarena" if "num_players" in players else "gymnasium"]
    solo, pair = (OWN.replace("{kept}", f"'{state}'") for state in ("ta.SinglePlayerState", "ta.TwoPlayerState"))
    file = tmp_path / "both.py"
    file.write_text(solo + pair.replace("Countdown", "Duel"))
    assert isinstance(textarena.make(f"{file}:Countdown"), textarena.TextArena)
    assert isinstance(textarena.make(f"{file}:Duel"), match.Match), "its file has a game for one player, too"
