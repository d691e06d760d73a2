"""The SDK with no other part of Toprope installed: a copy of its folder, and a Python without any package."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SDK = Path(__file__).resolve().parents[2] / "toprope" / "sdk"
MINE = """
from toprope.sdk import Environment, Part, Task, knob, play

class Count(Environment):
    '''Count the letters.'''
    parts = {"right": Part(description="1 when it is")}
    class Knobs:
        longest: int = knob(4, ge=1)
    def tasks(self):
        for n in range(1, 60):
            yield Task("How many letters: " + "a" * n, reference=str(n))
    def score(self):
        return self.answer == self.task.reference
"""


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("alone")
    shutil.copytree(SDK, root / "toprope" / "sdk", ignore=shutil.ignore_patterns("__pycache__"))
    (root / "count.py").write_text(MINE)
    return root


def bare(alone: Path, *arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-I", "-S", *arguments]
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=120, cwd=alone, env={})


def test_author_can_play_without_toprope(alone: Path) -> None:
    program = (
        f"import sys; sys.path.insert(0, {str(alone)!r})\n"
        "from count import Count, play\n"
        "print(play(Count, ['1']).reward, play(Count, ['x'], longest=2).reward)\n"
        "ours = [name for name in sys.modules if name.partition('.')[0] == 'toprope']\n"
        "print([name for name in ours if not name.startswith('toprope.sdk')])\n"
    )
    done = bare(alone, "-c", program)
    assert done.stdout == "1.0 0.0\n['toprope']\n", done.stderr
    assert (alone / "toprope" / "sdk" / "py.typed").is_file()  # its annotations count for programs that import it


def test_worker_serves_environment_without_toprope(alone: Path) -> None:
    source = {"file": str(alone / "count.py"), "attribute": "Count"}
    asked = [
        {"id": 1, "op": "open", "source": source},
        {"id": 2, "op": "tasks", "split": "train", "start": 0, "count": 1},
        {"id": 3, "op": "score", "split": "train", "index": 0, "answer": ""},
    ]
    done = bare(alone, "toprope/sdk/worker/program.py", text="".join(json.dumps(one) + "\n" for one in asked))
    opened, tasks, scored = map(json.loads, done.stdout.splitlines())
    assert opened["result"]["description"] == "Count the letters." and tasks["result"]["tasks"][0]["reference"]
    assert scored["ok"] and scored["result"]["reward"] == 0.0


def test_adapters_import_without_their_ecosystems(alone: Path) -> None:
    names = sorted(file.stem for file in (alone / "toprope/sdk/adapters").glob("*.py") if file.stem != "__init__")
    program = (
        f"import importlib, sys; sys.path.insert(0, {str(alone)!r})\n"
        f"for name in {names!r}: importlib.import_module('toprope.sdk.adapters.' + name)\n"
        "print('all')\n"
    )
    done = bare(alone, "-c", program)
    assert done.stdout == "all\n", done.stderr
