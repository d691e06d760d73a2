"""Containment: the trial of bubblewrap, its cached result, and leftover processes at each level."""

from __future__ import annotations

import json
import os
import sys

import psutil
import pytest

from benchmarks.faults.containment import left_over
from tests.support.run_harness import ended, until
from toprope.errors import ComponentFailed
from toprope.supervisor.keeper import containment

WHY_NOT = containment.probe_bubblewrap()
bubblewrap = pytest.mark.skipif(bool(WHY_NOT), reason=f"the level of bubblewrap does not hold here: {WHY_NOT}")


@pytest.mark.engines
@bubblewrap
def test_namespace_ends_with_killed_keeper_and_guard(harness):
    """Also the daemon that cleared its environment, and before any front end looks."""
    assert left_over(harness, "bubblewrap", "keeper and guard") == ([], [])


@pytest.mark.engines
@bubblewrap
def test_status_shows_outer_process_id(harness):
    harness.contained = "bubblewrap"
    runs, folder = harness.start({"trainer": {"endless": True}})
    status = until(runs, folder, "training")
    process = psutil.Process(status.crew["api"].pid)
    assert harness.token in process.cmdline() and "api" in process.cmdline()
    assert process.parent().cmdline()[-len(process.cmdline()) :] == process.cmdline(), "its parent is the guard"
    assert os.readlink(f"/proc/{process.pid}/ns/pid") != os.readlink("/proc/self/ns/pid")
    runs.stop(folder.run_id, 0)
    assert ended(runs, folder).state == "stopped"
    harness.check_nothing_left(folder)


@pytest.mark.engines
@bubblewrap
def test_killed_guard_in_namespace_is_no_exit(harness):
    harness.contained = "bubblewrap"
    runs, folder = harness.start({"trainer": {"endless": True}, "policy": {}}, restarts=0)
    status = until(runs, folder, "training")
    psutil.Process(status.crew["api"].pid).parent().kill()
    status = ended(runs, folder)
    assert status.state == "failed" and "lost its guard" in status.reason
    harness.check_nothing_left(folder)


def test_probe_reports_forbidden_bubblewrap(tmp_path, monkeypatch):
    (tmp_path / "bwrap").write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    if sys.platform.startswith("linux"):
        assert "No permissions to create new namespace" in containment.probe_bubblewrap()
    found = containment.choose_containment("auto")
    assert found.level == "guard" and found.why
    with pytest.raises(ComponentFailed, match="containment: bubblewrap"):
        containment.choose_containment("bubblewrap")


def test_probe_refuses_bwrap_without_namespace(tmp_path, monkeypatch):
    (tmp_path / "bwrap").write_text('#!/bin/sh\nwhile [ "$1" != -- ]; do shift; done\nshift\nexec "$@"\n')
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert containment.probe_bubblewrap()


def test_probe_result_is_cached_for_boot_and_time(tmp_path, monkeypatch):
    answers, cache = ["", "forbidden", "", ""], tmp_path / ".containment.json"
    monkeypatch.setattr(containment, "probe_bubblewrap", lambda: answers.pop(0))
    assert [containment.choose_containment("auto", cache).level for _ in range(3)] == ["bubblewrap"] * 3
    assert len(answers) == 3
    known = json.loads(cache.read_text())
    cache.write_text(json.dumps(known | {"here": known["here"] | {"boot": "another"}}))
    assert containment.choose_containment("auto", cache).level == "guard"
    known = json.loads(cache.read_text())
    cache.write_text(json.dumps(known | {"at": known["at"] - 120}))
    assert containment.choose_containment("auto", cache).level == "bubblewrap", "what forbade it may have been lifted"
    cache.write_text("{")
    assert containment.choose_containment("auto", cache).level == "bubblewrap"
    assert not answers and containment.choose_containment("guard", cache).level == "guard"


def test_start_fails_if_required_bubblewrap_is_missing(harness, monkeypatch, tmp_path):
    monkeypatch.setattr(containment, "probe_bubblewrap", lambda: "bwrap is not installed")
    harness.contained = "bubblewrap"
    with pytest.raises(ComponentFailed, match="bwrap is not installed"):
        harness.start()
    (status,) = harness.runs().list()
    assert status.state == "failed" and "containment: auto" in status.failure.hint
