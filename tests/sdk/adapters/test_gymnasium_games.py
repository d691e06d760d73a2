"""Games of the adapter `gymnasium`: closed when nobody plays on, made with the configuration that they want; RLVE."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from toprope.sdk.adapters._gymnasium import listing
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


VERIFIABLE = """
class VerifiableEnvironment:
    def __init__(self, answer_markers=("<a>", "</a>")):
        self.answer_markers = answer_markers

    def generator(self, seed, parameter):
        self.seed, self.parameter = seed, dict(parameter, seed=seed)
        return self._generate()

    def prompt_generator(self):
        return self._prompt_generate()

    def verifier(self, output):
        right = f"<a>{self.parameter['first'] + 1}</a>" in output
        return {"reward": 1.0 if right else -0.5, "accuracy": int(right)}
"""
COUNTING = '''
from Rlve.environment import VerifiableEnvironment

class Counting(VerifiableEnvironment):
    """Count on."""

    def __init__(self, word: str = "after", **kwargs):
        super().__init__(**kwargs)
        self.word = word

    def _generate(self):
        self.parameter["first"] = self.parameter["N"] * 1000 + self.parameter["seed"] // 1_000_003
        return self.parameter["seed"] >= 1_000_003  # the first try fails

    def _prompt_generate(self):
        return f"What comes {self.word} {self.parameter['first']}?"
'''
CONTROLLER = """
class ParameterController: ...

class Counting_ParameterController(ParameterController):
    def __init__(self):
        self.N = 3

    def update(self):
        self.N += 2

    def get_parameter_list(self):
        return [{"N": self.N}]
"""


def counting(folder: Path, text: str = COUNTING, name: str = "Rlve") -> Path:
    """A file of RLVE in its package."""
    package = folder / name
    files = {
        "environment.py": VERIFIABLE,
        "environments/counting/environment.py": text.replace("Rlve", name),
        "parameter_controllers/counting/parameter_controller.py": CONTROLLER,
    }
    for place, content in files.items():
        file = package / place
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
        for below in (file.parent, file.parent.parent, package):
            if below != folder:
                (below / "__init__.py").touch()
    return package / "environments" / "counting" / "environment.py"


def test_verifiable_environment_asks_once_at_the_difficulty_of_its_controller(tmp_path: Path) -> None:
    file = counting(tmp_path)
    [listed] = declared(file, ast.parse(file.read_text()))
    assert (listed.name, listed.description) == ("counting", "Count on.")
    several = COUNTING + "class Back(Counting):\n    pass\nclass Forth(Counting):\n    pass\n"
    assert [one.name for one in declared(file, ast.parse(several))] == ["counting-back", "counting-forth"]

    def played(answer: str, **knobs: object) -> tuple[str, float, bool]:
        rollout = begun(configure(make(listed.target), knobs=knobs))
        outcome = rollout.advance(answer).outcome
        return str(rollout._environment.messages[0]["content"]), outcome.reward, outcome.success

    assert played("so <a>3002</a>") == ("What comes after 3001?\nWrite the answer between <a> and </a>.", 1.0, True)
    assert played("5002", difficulty=1, word="behind")[0].startswith("What comes behind 5001?")
    assert played("5002", difficulty=1)[1:] == (-0.5, False)


def test_repeated_questions_of_a_verifiable_environment_are_one_task(tmp_path: Path) -> None:
    for questions in (1, 5):
        text = COUNTING.replace('self.parameter["seed"] // 1_000_003', f'self.parameter["seed"] % {questions}')
        file = counting(tmp_path, text, f"Rlve{questions}")
        [listed] = declared(file, ast.parse(file.read_text()))
        tasks = configure(make(listed.target)).tasks()
        assert len({next(tasks).content for _ in range(40)}) == questions


def test_class_that_counts_its_actions_gets_numbers(tmp_path: Path) -> None:
    """It has no action space; one that takes texts may count something else."""
    file = tmp_path / "sliding.py"
    for kind, prompt in (("int", "0\nAnswer with a number from 0 to 3."), ("str", "0")):
        file.write_text(
            "class Sliding:\n    action_size = 4\n\n    def reset(self, seed=None):\n        return 0\n\n"
            f"    def step(self, action: {kind}):\n        return action, float(action == 3), action == 3, {{}}\n"
        )
        [listed] = declared(file, ast.parse(file.read_text()))
        rollout = begun(configure(make(listed.target)))
        assert rollout._environment.messages[0]["content"] == prompt
        assert (rollout.advance("I go 3").outcome is not None) == (kind == "int")


BASE = """
from abc import ABC, abstractmethod

class BaseGame(ABC):
    @abstractmethod
    def reset(self, seed=None): ...

    def step(self, action):
        return "on", self.judged(action), True, {}

    @abstractmethod
    def judged(self, action): ...
"""

MAZE = """
from {place} import BaseGame

class Maze(BaseGame):
    def reset(self, seed=None):
        return f"Maze {{seed}}"

    def judged(self, action):
        return 1.0 if action == "out" else 0.0

class Lazy(BaseGame):
    def reset(self, seed=None):
        return "none"

class Wrapper(Maze):
    def __init__(self, env):
        self.env = env

class Talk(BaseGame):
    def reset(self, conversation):
        return conversation

    judged = Maze.judged
"""


@pytest.mark.parametrize("place", ["bases_of_games", ".bases_of_games", "mazes.bases_of_games", "mazes"])
def test_class_with_a_base_of_the_author_s_own_is_listed_and_played(
    tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    (tmp_path / "setup.py").touch()
    (package := tmp_path / "mazes").mkdir()
    (package / "bases_of_games.py").write_text(BASE)
    (package / "__init__.py").write_text("from .bases_of_games import BaseGame\n")
    file = package / "maze.py"
    file.write_text(MAZE.format(place=place).partition("class Lazy")[0])
    environment = opened(file, file.read_text())
    for answer, reward in (("out", 1.0), ("in", 0.0)):
        assert begun(environment).advance(answer).outcome.parts["reward"] == reward


def test_many_classes_with_bases_are_listed_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file with models of data has thousands; each file is read once, and so are those that it imports from."""
    read: list[str] = []

    def parsed(file: Path) -> ast.Module:
        read.append(file.name)
        return ast.parse(file.read_bytes())

    monkeypatch.setattr(listing, "parse", parsed)
    (tmp_path / "bases.py").write_text("class Base: pass\nclass Other(Elsewhere): pass\n")
    models = "".join(f"class Model{n}(Base, Other, Unknown):\n    field: int = {n}\n" for n in range(300))
    circle = "class One(Two): pass\nclass Two(One):\n    def reset(self, seed=None): ...\n"
    tree = ast.parse("from bases import Base, Other\nfrom library import Unknown\n" + models + circle)
    walked, walk = [], ast.walk
    monkeypatch.setattr(ast, "walk", lambda node: walked.append(node) or walk(node))
    assert declared(tmp_path / "models.py", tree) == []
    assert read == ["bases.py"] and len([node for node in walked if node is tree]) < 10


def test_bases_wrappers_and_classes_of_other_libraries_are_not_listed(tmp_path: Path) -> None:
    def listed(text: str) -> list[str]:
        found = declared(tmp_path / "games.py", ast.parse(text))
        return [json.loads(one.target)["class"] for one in found]

    (tmp_path / "bases_of_games.py").write_text(BASE)
    assert listed(MAZE.format(place="bases_of_games")) == ["Maze"] and listed(BASE) == []
    assert listed(MAZE.format(place="a_library.bases")) == [], "nobody knows how it is played"
    assert listed("from games import BaseGame\n" + MAZE.format(place="games")) == [], "a file that imports itself"
    methods = "    def reset(self, seed=None): return ''\n    def step(self, action): return '', 0.0, True, {}\n"
    assert listed(f"class One(gym.Env if has_gym else object):\n{methods}") == ["One"]
    assert listed(f"class One(other.Base if has_gym else object):\n{methods}") == []
