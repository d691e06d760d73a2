"""Games of the adapter `gymnasium`: closed when nobody plays on, and made with the configuration that they want."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from toprope.sdk.adapters.gymnasium import declared, make
from toprope.sdk.errors import LoadError
from toprope.sdk.rollouts import Rollout, configure

COUNTED = """
made, closed = [], []

class Counted:
    def __init__(self):
        made.append(self)

    def reset(self, seed=None):
        if seed == 9 and len(made) > 1:
            raise RuntimeError("no such game")
        return f"Game {seed}", {}

    def step(self, action):
        if action == "fail":
            raise RuntimeError("no such move")
        return "on", 0.0, action == "end", False, {}

    def close(self):
        closed.append(self)
"""

SUMS = """
from base import BaseTextEnv

class Sums(BaseTextEnv):
    def __init__(self, env_config, extras={}):
        self.truth, self.most = extras["reward_spec"]["ground_truth"], env_config.get("turns", 1)

    def init(self, prompt):
        return prompt, {}

    def step(self, action):
        return {"observations": [], "reward": float(action == self.truth), "done": self.most == 1}
"""


def opened(file: Path, text: str) -> Any:
    file.write_text(text)
    return configure(make(declared(file, ast.parse(text))[0].target))


def begun(environment: Any, number: int = 0) -> Rollout:
    tasks = environment.tasks()
    rollout = Rollout(environment, [next(tasks) for _ in range(number + 1)][-1])
    rollout.begin()
    return rollout


def test_games_that_are_not_played_on_are_closed(tmp_path: Path) -> None:
    environment = opened(tmp_path / "counted.py", COUNTED)
    module = environment._user.module
    for _ in range(5):
        assert "no such move" in str(begun(environment).advance("fail").outcome.error)
    for _ in range(5):
        begun(environment).close()  # discarded
    games = set(map(id, module.made)), set(map(id, module.closed))
    assert len(module.closed) == len(games[1]) == 10 and games[1] <= games[0]
    before = len(module.made)
    for _ in range(5):
        assert begun(environment).advance("end").outcome.error is None
    assert len(module.made) - before <= 1 and len(module.closed) == 10, "games that end are reset for others"


def test_game_that_cannot_be_begun_is_closed(tmp_path: Path) -> None:
    environment = opened(tmp_path / "counted.py", COUNTED)
    module = environment._user.module
    first = begun(environment)  # takes the first game
    before = len(module.closed)
    with pytest.raises(RuntimeError, match="no such game"):
        environment._games.begin(9)
        environment._games.begin(9)
    assert len(module.closed) == before + 1
    assert first.advance("end").outcome.error is None


@pytest.mark.parametrize("kind", [dict, type("DictConfig", (dict,), {})])
def test_configuration_that_a_class_requires_is_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type
) -> None:
    package = None if kind is dict else SimpleNamespace(DictConfig=kind)
    monkeypatch.setitem(sys.modules, "omegaconf", package)
    (tmp_path / "base.py").write_text("class BaseTextEnv: pass\n")
    row = {"prompt": "1 + 2?", "reward_spec": {"ground_truth": "3"}}
    (tmp_path / "sums.jsonl").write_text(json.dumps(row) + "\n")
    environment = opened(tmp_path / "sums.py", SUMS)
    assert type(environment._arguments["env_config"]) is kind
    assert begun(environment).advance("3").outcome.success
    with pytest.raises(LoadError, match="wrong is not made with env_config: .*'solution'"):
        (tmp_path / "wrong.jsonl").write_text(json.dumps(row) + "\n")
        opened(tmp_path / "wrong.py", SUMS.replace('["ground_truth"]', '["solution"]').replace("Sums", "Wrong"))
