"""Folders for temporary files that do not outlive their owner."""

import os
import subprocess
import sys
import tempfile
import time

from tests.support.run_harness import eventually
from toprope.sdk.wall.scratch import Scratch

OWNER = "import sys; from toprope.sdk.wall.scratch import Scratch; print(Scratch().path, flush=True); sys.stdin.read()"


def test_folders_of_killed_processes_go_and_claimed_young_and_foreign_ones_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    owners, old = [], time.time() - 3600
    for _ in range(2):
        owner = subprocess.Popen(
            [sys.executable, "-c", OWNER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"TMPDIR": str(tmp_path)},
        )
        owners.append((owner, owner.stdout.readline().strip()))
    (killed, left), (alive, claimed) = owners
    with killed:
        killed.kill()
    (tmp_path / "toprope-scratch-young").mkdir()
    (tmp_path / "another").mkdir()
    kept = tmp_path / "kept"
    kept.mkdir()
    (tmp_path / "toprope-scratch-link").symlink_to(kept)
    open(os.path.join(left, "data"), "w").close()
    for path in (left, claimed, tmp_path / "another", kept):
        os.utime(path, (old, old))
    mine = Scratch()
    eventually(lambda: not os.path.exists(left))
    stay = {mine.path, claimed, *(str(tmp_path / name) for name in ("toprope-scratch-young", "another", "kept"))}
    assert all(os.path.isdir(path) for path in stay)
    mine.remove()
    mine.remove()
    assert not os.path.exists(mine.path)
    with alive:
        alive.communicate()
