"""The run's lock has one holder, can be handed over, and is free when every copy is closed."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from toprope.supervisor.lock import RunLock, is_held


def test_lock_has_one_holder(tmp_path):
    path = tmp_path / "keeper.lock"
    assert not is_held(path)
    lock = RunLock.acquire(path)
    assert is_held(path) and RunLock.acquire(path, wait_s=0.01) is None
    lock.release()
    assert not is_held(path)
    RunLock.acquire(path).release()


def test_is_held_does_not_take_the_lock(tmp_path):
    path = tmp_path / "keeper.lock"
    RunLock.acquire(path).release()
    assert not is_held(path) and RunLock.acquire(path, wait_s=0.0) is not None


def test_inherited_lock_outlives_the_first_holder(tmp_path):
    path = tmp_path / "keeper.lock"
    lock = RunLock.acquire(path)
    code = """
import sys, pathlib
from toprope.supervisor.lock import RunLock
lock = RunLock.from_descriptor(int(sys.argv[1]), pathlib.Path(sys.argv[2]))
lock.write_holder(pid=1)
print(lock is not None, flush=True)
sys.stdin.read()
"""
    command = [sys.executable, "-P", "-c", code, str(lock.fileno()), str(path)]
    child = subprocess.Popen(command, pass_fds=(lock.fileno(),), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout.readline() == b"True\n"
    lock.release()
    assert is_held(path) and json.loads(path.read_text()) == {"pid": 1, "node": os.uname().nodename}
    child.communicate()
    assert not is_held(path)


def test_descriptor_of_another_file_is_refused(tmp_path):
    path, other = tmp_path / "keeper.lock", os.open(tmp_path / "other", os.O_RDWR | os.O_CREAT)
    RunLock.acquire(path).release()
    assert RunLock.from_descriptor(other, path) is None
    os.close(other)
