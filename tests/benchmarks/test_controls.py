"""Benchmarks judge what they promise, and refuse what they cannot measure."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import nullcontext

import pytest

from benchmarks.cluster import house as cluster_house
from benchmarks.faults import disk
from benchmarks.findings import findings
from benchmarks.house import house
from benchmarks.performance import scale
from benchmarks.report import REFUSED, machine
from benchmarks.wrong_inputs import wrong_inputs


def told(capsys: pytest.CaptureFixture[str]) -> dict:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_full_disk_is_judged_by_everything_that_is_promised(monkeypatch, capsys):
    found = {"paused": True, "still_paused_after_3_s": True, "steps_told_while_full": 41, "end": "completed"}
    found |= {"rows_missing": 0, "checkpoint_step": disk.STEPS, "damaged_checkpoints": 0}
    found |= {"stopped_while_full": "stopped", "checkpoint_after_stop": True, "states_before_it_was_full": []}
    monkeypatch.setattr(disk, "small_disk", nullcontext)
    monkeypatch.setattr(disk.os, "geteuid", lambda: 0)
    monkeypatch.setattr(sys, "platform", "linux")
    wrong = {"checkpoint_step": None, "damaged_checkpoints": 1, "checkpoint_after_stop": False}
    for name, value in (*wrong.items(), ("still_paused_after_3_s", False), ("", None)):
        monkeypatch.setattr(disk, "measure", lambda home, name=name, value=value: found | {name: value})
        assert disk.main() == int(bool(name)) and (f"missed: {name}" in capsys.readouterr().out) == bool(name)


def test_stored_rates_are_told_as_those_of_their_day_and_machine(tmp_path, monkeypatch, capsys):
    def measure(self, workers, seconds, wait_s=scale.WAIT_S, lock=False):
        costs = scale.Costs(dict.fromkeys(("driver", "inference", "api"), 1e-6), [1e-6] if not wait_s else [])
        return (1 if lock else workers) / scale.WAIT_S, costs

    monkeypatch.setattr(scale._Runs, "measure", measure)
    monkeypatch.setattr(scale._Runs, "__init__", lambda self, root: None)
    monkeypatch.setattr(scale._Runs, "close", lambda self: None)
    file = tmp_path / "rates.json"
    monkeypatch.setattr(sys, "argv", ["scale", "--kept", str(file)])
    assert scale.main() == 0
    file.write_text(json.dumps(json.loads(file.read_text()) | {"on": "2020-01-02"}))
    capsys.readouterr()
    assert scale.main() == 0
    found = told(capsys)
    assert found["arguments"] == f"--kept {file}" and (found["on"], found["machine"]) == ("2020-01-02", machine())
    file.write_text(json.dumps(json.loads(file.read_text()) | {"machine": "another"}))
    assert scale.main() == REFUSED and "measurements of another" in told(capsys)["refused"]


def test_preset_that_did_not_complete_makes_no_mending_trivial(monkeypatch, capsys, tmp_path):
    def done(state, low):
        return findings.Done("run-a", state, {}, "", 0.1, low, 0.2, 0.0, 5.0, 6.0)

    class Runner:
        def __init__(self, *_):
            pass

        def train(self, environment, changes, name):
            return done(*runs.pop(0))

        def each(self, work, tasks, at_once):
            return [work(one) for one in tasks]

    monkeypatch.setattr(findings, "Runner", Runner)
    for second in (("failed", None), ("completed", None), ("stopped", 0.5)):
        runs = [("completed", 0.7), second]
        draft = findings.Draft("sick-1", findings.ENVIRONMENTS[0], {"a": 1}, {})
        monkeypatch.setattr(findings, "draw", lambda *_, draft=draft: [draft])
        monkeypatch.setattr(sys, "argv", ["findings", "--drafts", "1", "--keep", str(tmp_path)])
        assert findings.main() == REFUSED and f"run-a is {second[0]}" in told(capsys)["refused"]


@pytest.mark.parametrize(
    ("status", "output", "errors"),
    [(0, "", 0), (1, "a.py:1: error: x\nb.py:2: error: y\n", 2), (1, "No module named mypy", 1), (2, "", 1)],
)
def test_types_that_were_not_checked_count_as_an_error(status, output, errors, monkeypatch):
    done = subprocess.CompletedProcess([], status, stdout=output, stderr="")
    monkeypatch.setattr(house.subprocess, "run", lambda *_, **__: done)
    assert house.type_errors() == errors


def test_words_that_match_no_wrong_input_are_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["wrong_inputs", "no", "such", "case"])
    assert wrong_inputs.main() == REFUSED and "'no such case'" in told(capsys)["refused"]


def test_nodes_that_are_made_by_half_leave_no_bridge(monkeypatch):
    asked = []

    def ip(*words):
        asked.append(words)
        if "netns" in words:
            raise subprocess.CalledProcessError(1, words)

    monkeypatch.setattr(cluster_house.Net, "_ip", staticmethod(ip))
    monkeypatch.setattr(cluster_house.subprocess, "run", lambda words, **_: asked.append(tuple(words[1:])))
    with pytest.raises(subprocess.CalledProcessError):
        cluster_house.Net(["head"])
    bridge = asked[0][2]
    assert ("link", "del", bridge) in asked
