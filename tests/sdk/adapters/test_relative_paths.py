"""Users' files that name data or modules relative to themselves, in a worker, which starts in its scratch folder."""

from __future__ import annotations

import asyncio
import json
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from toprope.sdk.adapters._shared.user_files import prepare, within_package
from toprope.sdk.authoring.loading import find_above
from toprope.sdk.wall.plan import Wall
from toprope.sdk.worker.client import WorkerClient

SCORE = """
    import json
    rows = [json.loads(line) for line in open("data/train.jsonl")]

    def score(prompt, completion):
        with open("notes.txt", "a") as notes:  # a new file
            notes.write(completion)
        return float(completion == open("right.txt").read())  # long after it was loaded
"""
SCRIPT = """
    from datasets import load_dataset
    from trl import GRPOConfig, GRPOTrainer

    def right(completions, **kwargs):
        return [float(one == open("right.txt").read()) for one in completions]

    rows = load_dataset("json", data_files="data/train.jsonl", split="train")
    GRPOTrainer(model="m", reward_funcs=right, train_dataset=rows, args=GRPOConfig(output_dir="out"))
"""


@pytest.mark.parametrize("described", [False, True], ids=["run", "described"])
@pytest.mark.parametrize(
    ("adapter", "text", "more"), [("score", SCORE, {}), ("trl", SCRIPT, {"script": True})], ids=["score", "trl"]
)
def test_data_beside_a_file_is_found_by_its_relative_path(
    tmp_path: Path, adapter: str, text: str, more: dict[str, Any], described: bool
) -> None:
    (empty := tmp_path / "empty").mkdir()
    folder = tmp_path / "project"
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "train.jsonl").write_text("".join(f'{{"prompt": "Say {n}."}}\n' for n in range(20)))
    (folder / "right.txt").write_text("yes")
    (folder / "mine.py").write_text(textwrap.dedent(text))
    source = {"adapter": adapter, "target": json.dumps({"file": str(folder / "mine.py"), **more})}

    async def rewards() -> list[float]:
        wall = Wall(reads=(str(folder),), home=str(tmp_path / "home"))
        async with await WorkerClient.start(wall=wall, cwd=empty if described else None, timeout=60) as worker:
            await worker.call("open", source=source, timeout=120)
            begun = await worker.call("begin", split="train", index=0, count=2)
            moves = [[handle, text, False] for handle, text in zip(begun["rollouts"], ("yes", "no"), strict=True)]
            turns = await worker.call("advance", moves=moves)
            assert [turn["outcome"]["error"] for turn in turns] == [None, None]
            return [turn["outcome"]["reward"] for turn in turns]

    assert asyncio.run(rewards()) == [1.0, 0.0]
    assert {entry.name for entry in folder.iterdir()} == {"data", "right.txt", "mine.py"}


def test_data_beside_a_file_is_found_from_the_root_of_its_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository, scratch = tmp_path / "repository", tmp_path / "scratch"
    folder = repository / "environments" / "sums"
    for made in (repository / ".git", folder, scratch):
        made.mkdir(parents=True)
    (folder / "rows.csv").write_text("1 + 1")
    (repository / "environments" / "other.csv").write_text("not of this file")
    monkeypatch.chdir(scratch)
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    prepare(folder / "mine.py")
    assert Path("environments/sums/rows.csv").read_text() == Path("rows.csv").read_text() == "1 + 1"
    Path("environments/sums/notes.txt").write_text("a new file")
    assert sorted(entry.name for entry in folder.parent.rglob("*")) == ["other.csv", "rows.csv", "sums"]
    assert not Path("environments/other.csv").exists()


def test_empty_folder_without_a_wall_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").touch()
    (empty := tmp_path / "empty").mkdir()
    monkeypatch.chdir(empty)
    monkeypatch.delenv("TOPROPE_WALLED", raising=False)
    prepare(tmp_path / "mine.py")
    assert Path.cwd() == empty


def test_package_behind_a_link_is_imported_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (folder := tmp_path / "package_of_this_test").mkdir()
    start = folder / "__init__.py"
    start.write_text("import no_such_module\n")
    (folder / "rules.py").touch()
    (folder / "task.py").write_text("from . import rules\nimport package_of_this_test.rules as whole\n")
    find_above(folder / "task.py")
    for _ in range(2):  # the first leaves no half of the package
        with pytest.raises(ModuleNotFoundError, match="no_such_module"):
            within_package(folder / "task.py")
    start.write_text("\n" * 9)
    module = within_package(folder / "task.py")
    assert module.rules is module.whole and module.__file__ == str(folder / "task.py")
