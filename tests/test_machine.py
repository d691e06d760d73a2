"""Facts about this machine."""

from __future__ import annotations

import os
import subprocess
import sys

import psutil
import pytest

from toprope.machine import processes_with


def test_process_with_the_id_of_an_earlier_one_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """psutil's own iterator returns the object of the earlier process, which says that it runs no more."""
    with subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=os.environ | {"FAMILY": "f3a1"}
    ) as child:
        earlier = psutil.Process(child.pid)
        monkeypatch.setattr(earlier, "_ident", (child.pid, 1.0))
        monkeypatch.setitem(psutil._pmap, child.pid, earlier)  # type: ignore[attr-defined]
        kept = [one for one in psutil.process_iter() if one.pid == child.pid]
        assert kept == [earlier] and not earlier.is_running()
        found = list(processes_with("FAMILY", "f3a1"))
        assert [one.pid for one in found] == [child.pid] and found[0].is_running()
        assert not list(processes_with("FAMILY", "another"))
        assert child.stdin
        child.stdin.close()
