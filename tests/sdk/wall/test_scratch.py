"""Folders for temporary files that do not outlive their owner."""

import asyncio
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.support.run_harness import eventually
from toprope.sdk.wall import Wall, scratch
from toprope.sdk.wall.enclosure import Enclosure
from toprope.sdk.wall.scratch import Scratch
from toprope.sdk.worker.client import WorkerClient

OWNER = "import sys; from toprope.sdk.wall.scratch import Scratch; print(Scratch().path, flush=True); sys.stdin.read()"


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def make(place: Path, *, killed: bool) -> tuple[subprocess.Popen[str], str]:
    """Have another process make a folder, and perhaps kill it."""
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(place)},
    )
    assert owner.stdout is not None
    path = owner.stdout.readline().strip()
    if killed:
        with owner:
            owner.kill()
    return owner, path


def test_folders_of_killed_processes_go_and_others_stay(tmp_path):
    kept = tmp_path / "kept"
    alive, claimed = make(tmp_path, killed=False)
    _, left = make(tmp_path, killed=True)
    name = os.path.basename(left)
    prefix = name.rpartition("-")[0]
    young, elsewhere = tmp_path / f"{prefix}-new-y", tmp_path / "toprope-other0-abc"  # unclaimed; another machine's
    for folder in (young, elsewhere, kept):
        folder.mkdir()
    (tmp_path / f"{name}-link").symlink_to(kept)
    unclaimed = tmp_path / f"{prefix}-new-o"
    unclaimed.mkdir()
    os.utime(unclaimed, (1, 1))
    mine = Scratch()
    eventually(lambda: not os.path.exists(left) and not unclaimed.exists())
    assert all(os.path.isdir(path) for path in (mine.path, claimed, young, elsewhere, kept))
    mine.remove()
    mine.remove()
    assert not os.path.exists(mine.path)
    with alive:
        alive.communicate()


def test_folder_of_any_depth_and_any_time_goes(tmp_path):
    mine, here = Scratch(), os.open(".", os.O_RDONLY)
    try:
        os.chdir(mine.path)
        for _ in range(1500):
            os.mkdir("d")
            os.chdir("d")
    finally:
        os.fchdir(here)
        os.close(here)
    mine.remove()
    assert not os.path.exists(mine.path)
    _, left = make(tmp_path, killed=True)
    os.utime(left, (2**40, 2**40))
    scratch._sweep(str(tmp_path))
    assert not os.path.exists(left)


@pytest.mark.parametrize("place", ["prepare", "subprocess_exec"])
def test_cancelled_start_leaves_nothing(tmp_path, monkeypatch, place):
    """A folder that it made, locked, and the descriptor of the lock would stay as long as this process."""
    begun, cancelled = threading.Event(), threading.Event()
    prepare = Enclosure.prepare

    def prepare_slowly(*arguments: Any) -> Enclosure:
        begun.set()
        assert cancelled.wait(20)
        return prepare(*arguments)

    async def start_slowly(*arguments: Any, **named: Any) -> Any:
        begun.set()
        await asyncio.sleep(600)

    async def work() -> None:
        if place == "prepare":
            monkeypatch.setattr(Enclosure, "prepare", prepare_slowly)
        else:
            monkeypatch.setattr(asyncio.get_running_loop(), place, start_slowly)
        starting = asyncio.create_task(WorkerClient.start(wall=Wall()))
        assert await asyncio.to_thread(begun.wait, 20)
        starting.cancel()
        await asyncio.wait([starting])
        cancelled.set()

    before = len(os.listdir("/proc/self/fd"))
    asyncio.run(work())
    eventually(lambda: not list(tmp_path.iterdir()) and len(os.listdir("/proc/self/fd")) == before)


def test_sweep_without_a_place_for_files_is_none(tmp_path, monkeypatch):
    def refuse() -> str:
        raise FileNotFoundError("No usable temporary directory")

    monkeypatch.setattr(tempfile, "gettempdir", refuse)
    scratch.sweep_scratch()


def test_short_program_ends_after_its_sweep(tmp_path):
    _, left = make(tmp_path, killed=True)
    for number in range(300):
        (Path(left) / str(number)).mkdir()
    code = "from toprope.sdk.wall.scratch import sweep_scratch; sweep_scratch()"
    subprocess.run([sys.executable, "-c", code], env=os.environ | {"TMPDIR": str(tmp_path)}, check=True)
    assert not os.path.exists(left)
