"""YAML files that name the target of an adapter: listed without running, described by a worker."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from toprope.workbench.catalog.catalog import Catalog
from toprope.workbench.catalog.describe import WorkerOptions

REWARDS = '''"""Sums of mine."""

def accuracy(completions, answer, **kwargs):
    return [float(c == a) for c, a in zip(completions, answer)]

def brief(completions, **kwargs):
    return [-len(c) / 100 for c in completions]
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "_rewards.py").write_text(REWARDS)
    rows = [json.dumps({"prompt": f"{n}+1", "answer": str(n + 1)}) for n in range(40)]
    (tmp_path / "sums.jsonl").write_text("\n".join(rows))
    (tmp_path / "sums.yaml").write_text(
        "adapter: trl\nfile: _rewards.py\nrows: sums.jsonl\nreward_funcs: [accuracy, brief]\nranges: {brief: [-1, 0]}\n"
        "success: accuracy\n"
    )
    (tmp_path / "mixed.yaml").write_text(
        "adapter: reasoning_gym\ndescription: Mixed.\ntasks:\n- {name: gcd, weight: 2}\n- {name: lcm}\n"
    )
    (tmp_path / "maze.yaml").write_text("adapter: gymnasium\nregistry: gem\nid: game:Sokoban-v0-easy\n")
    (tmp_path / "wrong.yaml").write_text("adapter: trl\nfile: x.py\nreward_func: [a]\n")
    (tmp_path / "unknown.yaml").write_text("adapter: nothing\n")
    (tmp_path / "gym.yaml").write_text("adapter: nemo_gym\nurl: http://127.0.0.1:9\nrows: sums.jsonl\n")
    return tmp_path


def test_target_files_are_listed_and_wrong_ones_are_explained(folder: Path) -> None:
    entries = {entry.name: entry for entry in Catalog([folder]).entries()}
    sums, mixed, gym = entries["sums"], entries["mixed"], entries["gym"]
    assert (sums.status, sums.ecosystem, sums.description, sums.turns) == ("ready", "trl", "Sums of mine.", 1)
    target = json.loads(sums.environment.target or "")
    assert target["file"] == str(folder / "_rewards.py") and target["rows"] == str(folder / "sums.jsonl")
    assert (mixed.status, mixed.description, mixed.environment.adapter) == ("ready", "Mixed.", "reasoning_gym")
    assert gym.tools and gym.turns is None
    assert entries["maze"].ecosystem == "gymnasium" and "Sokoban" in (entries["maze"].environment.target or "")
    assert entries["wrong"].status == "broken" and "reward_funcs" in entries["wrong"].problem
    assert (
        entries["unknown"].status == "broken"
        and "unknown adapter" in entries["unknown"].problem
        and "openenv" in entries["unknown"].problem
    )


def test_file_that_a_target_names_is_not_listed_as_broken_too(folder: Path) -> None:
    (folder / "_rewards.py").rename(folder / "rewards.py")
    catalog = Catalog([folder])
    assert any(entry.name == "rewards" and entry.status == "broken" for entry in catalog.entries())
    file = folder / "sums.yaml"
    file.write_text(file.read_text().replace("_rewards.py", "rewards.py"))
    assert not any(entry.name == "rewards" for entry in Catalog([folder]).entries())


def test_paths_in_lists_are_relative_to_the_file(folder: Path) -> None:
    (folder / "more.jsonl").write_text("")
    (folder / "shared").mkdir()
    (folder / "gym.yaml").write_text(
        "adapter: nemo_gym\nfolder: .\nrows: [sums.jsonl, more.jsonl]\npackages: [shared, /, nowhere]\n"
    )
    [gym] = [entry for entry in Catalog([folder]).entries() if entry.name == "gym"]
    target = json.loads(gym.environment.target or "")
    assert target["rows"] == [str(folder / "sums.jsonl"), str(folder / "more.jsonl")]
    assert target["packages"] == [str(folder / "shared"), "/", "nowhere"] and target["folder"] == str(folder)


def test_target_file_is_described_by_worker(folder: Path) -> None:
    catalog = Catalog([folder])
    described = asyncio.run(
        catalog.describe(catalog.find("sums"), WorkerOptions(load_timeout_s=120, call_timeout_s=60))
    )
    assert set(described.card.parts) == {"accuracy", "brief"} and described.card.name == "sums"
    scores = described.examples[0].scores
    assert scores["reference"].success and not scores["junk"].success
    assert "sha256 sums.jsonl" in described.card.versions and "sha256 _rewards.py" in described.card.versions


COPY = '''"""Copies."""

class Copy:
    def __init__(self, word="a"):
        self.word = word

    def reset(self):
        return f"Copy {self.word}", {}

    def step(self, action):
        right = action.strip() == self.word
        return "", float(right), True, False, {}
'''


@pytest.mark.parametrize(
    ("adapter", "target", "expected"),
    [
        ("openenv", "http://127.0.0.1:9", "http://127.0.0.1:9"),
        ("openenv", "server.py:app", "{folder}/server.py:app"),
        ("atropos", "server.py:Env", "{folder}/server.py:Env"),
        ("inspect_ai", "server.py@task", "{folder}/server.py@task"),
        ("textarena", "Wordle-v0", "Wordle-v0"),
        ("verifiers", "some_package", "some_package"),
        ("gem", "game:Sokoban-v0-easy", "game:Sokoban-v0-easy"),
    ],
)
def test_every_adapter_can_be_named_in_a_file(tmp_path: Path, adapter: str, target: str, expected: str) -> None:
    (tmp_path / "server.py").write_text("x = 1\n")
    given = {"adapter": adapter, "target": target, "description": "Mine.", "knobs": {"turns": 3}}
    (tmp_path / "mine.yaml").write_text(json.dumps(given))
    [entry] = [entry for entry in Catalog([tmp_path]).entries() if entry.name == "mine"]
    source = entry.environment
    assert (entry.ecosystem, entry.description, source.adapter) == (adapter, "Mine.", adapter)
    assert source.target == expected.format(folder=tmp_path) and source.knobs == {"turns": 3}
    (tmp_path / "mine.yaml").write_text(json.dumps({"adapter": adapter}))
    [entry] = [entry for entry in Catalog([tmp_path]).entries() if entry.name == "mine"]
    assert entry.status == "broken" and "target is missing" in entry.problem


def test_a_file_sets_the_defaults_of_knobs(tmp_path: Path) -> None:
    (tmp_path / "_copy.py").write_text(COPY)
    (tmp_path / "copy.yaml").write_text("adapter: gymnasium\nfile: _copy.py\nclass: Copy\nknobs: {turns: 3}\n")
    catalog = Catalog([tmp_path])
    options = WorkerOptions(load_timeout_s=120, call_timeout_s=60)
    described = asyncio.run(catalog.describe(catalog.find("copy"), options, examples=0))
    [turns] = [knob for knob in described.card.knobs if knob.name == "turns"]
    assert (turns.default, turns.value, described.card.max_turns) == (3, 3, 3)
