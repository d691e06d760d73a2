"""How components are held: what a trial of bubblewrap says, what is kept of it, and what is left at each level."""

from __future__ import annotations

import json
import os
import sys

import psutil
import pytest

from benchmarks.faults.containment import left_over
from tests.support.run_harness import RunHarness, ended, until
from toprope.errors import ComponentFailed
from toprope.supervisor.keeper import containment

WHY_NOT = containment.probe_bubblewrap()
bubblewrap = pytest.mark.skipif(bool(WHY_NOT), reason=f"the level of bubblewrap does not hold here: {WHY_NOT}")


@pytest.fixture
def harness(tmp_path):
    made = RunHarness(tmp_path)
    yield made
    made.close()


@pytest.mark.engines
@bubblewrap
def test_in_a_namespace_nothing_is_left_when_keeper_and_guard_are_killed_at_once(harness):
    """Not even the daemon that cleared its environment, and before anybody looks."""
    assert left_over(harness, "bubblewrap", "keeper and guard") == ([], [])


@pytest.mark.engines
@bubblewrap
def test_a_member_is_told_by_the_process_id_that_it_has_out_here(harness):
    harness.contained = "bubblewrap"
    runs, folder = harness.start({"trainer": {"endless": True}})
    status = until(runs, folder, "training")
    process = psutil.Process(status.crew["api"].pid)
    assert harness.token in process.cmdline() and "api" in process.cmdline()
    assert process.parent().cmdline()[-len(process.cmdline()) :] == process.cmdline(), "its parent is the guard"
    assert os.readlink(f"/proc/{process.pid}/ns/pid") != os.readlink("/proc/self/ns/pid")
    runs.stop(folder.run_id, 0)
    assert ended(runs, folder).state == "stopped"
    harness.nothing_left(folder)


@pytest.mark.engines
@bubblewrap
def test_a_killed_guard_in_a_namespace_is_a_lost_guard_and_no_exit(harness):
    harness.contained = "bubblewrap"
    runs, folder = harness.start({"trainer": {"endless": True}, "policy": {}}, restarts=0)
    status = until(runs, folder, "training")
    psutil.Process(status.crew["api"].pid).parent().kill()
    status = ended(runs, folder)
    assert status.state == "failed" and "lost its guard" in status.reason
    harness.nothing_left(folder)


def test_a_bwrap_that_may_not_is_found_out_and_told(tmp_path, monkeypatch):
    (tmp_path / "bwrap").write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    if sys.platform.startswith("linux"):
        assert "No permissions to create new namespace" in containment.probe_bubblewrap()
    found = containment.choose_containment("auto")
    assert found.level == "guard" and found.why
    with pytest.raises(ComponentFailed, match="containment: bubblewrap"):
        containment.choose_containment("bubblewrap")


def test_a_bwrap_that_does_nothing_of_what_it_is_told_does_not_pass(tmp_path, monkeypatch):
    (tmp_path / "bwrap").write_text('#!/bin/sh\nwhile [ "$1" != -- ]; do shift; done\nshift\nexec "$@"\n')
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert containment.probe_bubblewrap()


def test_a_trial_is_kept_for_this_boot_and_this_bwrap_and_not_for_ever(tmp_path, monkeypatch):
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


def test_a_run_that_insists_on_what_cannot_be_says_so(harness, monkeypatch, tmp_path):
    monkeypatch.setattr(containment, "probe_bubblewrap", lambda: "bwrap is not installed")
    harness.contained = "bubblewrap"
    with pytest.raises(ComponentFailed, match="bwrap is not installed"):
        harness.start()
    (status,) = harness.runs().list()
    assert status.state == "failed" and "containment: auto" in status.failure.hint
