"""System calls that a worker's filter refuses by their arguments, and those beside them that libraries need."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.sdk.wall.conftest import asked, landlock
from toprope.sdk.wall import Wall, kernel, plan

TRIED = """
import concurrent.futures as pool, ctypes, fcntl, os, socket, subprocess, sys, threading
libc = ctypes.CDLL(None, use_errno=True)
def ioprio(which):
    if libc.syscall(IOPRIO_SET, which, 0, 0): raise OSError(ctypes.get_errno(), "")
def placed(number):
    before = os.sched_getaffinity(number)
    os.sched_setaffinity(number, {min(before)})
    assert os.sched_getaffinity(number) == before
def tried(*arguments):
    try: call, *given = arguments; call(*given)
    except PermissionError: return "refused"
    return "done"
"""


def answers(folder: Path, calls: str) -> Any:
    """Have a worker make calls, and return `refused` or `done` for each.

    Args:
        folder: An empty folder.
        calls: A list of the parameters of `tried`.
    """
    file = folder / "code" / "calls.py"
    file.parent.mkdir()
    tried = TRIED.replace("IOPRIO_SET", str(kernel.number("ioprio_set")))
    file.write_text(f"{tried}\ndef work(): return [tried(*one) for one in [{calls}]]\n")
    return asked(Wall(reads=(str(file.parent),)), file)[0]


@landlock
def test_a_worker_slows_no_other_process_of_its_user(tmp_path: Path) -> None:
    mine = "os.getpriority(os.PRIO_USER, 0)"
    assert answers(tmp_path, f"(os.setpriority, os.PRIO_USER, 0, {mine}), (ioprio, 3)") == ["refused"] * 2
    assert answers(tmp_path / "code", "(os.nice, 0), (os.setpriority, 0, 0, os.nice(0)), (ioprio, 1)") == ["done"] * 3


@landlock
def test_a_worker_places_only_itself_on_processors(tmp_path: Path) -> None:
    calls = ", ".join(
        f"(os.sched_setaffinity, {pid}, os.sched_getaffinity(0))" for pid in ("0", "os.getpid()", "os.getppid()")
    )
    assert answers(tmp_path, calls) == ["done"] * 3
    calls = (
        "(placed, os.getppid()), (placed, subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(2)']).pid),"
        " (lambda: pool.ThreadPoolExecutor(1).submit(lambda: placed(threading.get_native_id())).result(),)"
    )
    assert answers(tmp_path / "code", calls) == ["done"] * 3


@landlock
def test_pairs_of_sockets_are_connected(tmp_path: Path) -> None:
    kinds = ("STREAM", "SEQPACKET", "STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC", "DGRAM", "RAW")
    calls = ", ".join(f"(socket.socketpair, socket.AF_UNIX, socket.SOCK_{kind})" for kind in kinds)
    assert answers(tmp_path, calls) == ["done"] * 3 + ["refused"] * 2


@landlock
def test_older_kernels_let_nothing_be_emptied_or_signalled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Landlock before version 3 does not govern truncate(2), and before version 6 it lets signals out."""
    planned = plan.plan_for
    monkeypatch.setattr(
        "toprope.sdk.wall.enclosure.plan_for", lambda *given, **named: replace(planned(*given, **named), mounts=False)
    )
    monkeypatch.setattr(kernel, "landlock_abi", lambda: 2)
    calls = (
        "(os.truncate, __file__, 0), (os.open, __file__, os.O_TRUNC), (os.open, __file__, os.O_RDONLY),"
        "(lambda: open('new', 'w').truncate(0),), (fcntl.fcntl, 0, 8, os.getppid()), (fcntl.fcntl, 0, 15, bytes(8)),"
        "(fcntl.ioctl, 0, 0x8901, bytes(4)), (fcntl.ioctl, 0, 0x8902, bytes(4)), (fcntl.fcntl, 0, 3)"
    )
    assert answers(tmp_path, calls) == [*["refused"] * 2, *["done"] * 2, *["refused"] * 4, "done"]
