"""Every benchmark imports and explains itself, cheap ones pass in short slices, and an interruption leaves nothing."""

from __future__ import annotations

import importlib
import itertools
import json
import os
import pkgutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

import benchmarks
from benchmarks import scratch
from benchmarks.__main__ import TARGETS
from benchmarks.__main__ import main as run_benchmark
from benchmarks.faults import containment
from benchmarks.faults.faults import campaign
from benchmarks.hosted import tinker
from benchmarks.house import install
from benchmarks.learning import rollouts
from benchmarks.learning.ppo import reference_error
from benchmarks.orchestrator.means import Measured, compared
from benchmarks.page import page
from benchmarks.performance import scale
from benchmarks.report import REFUSED
from benchmarks.scratch import end_process, processes_of
from benchmarks.server import conformance, data
from toprope.records.journal.rollout_browser import find_rollouts

ROOT = Path(__file__).resolve().parents[2]
MODULES = [found.name for found in pkgutil.walk_packages(benchmarks.__path__, "benchmarks.") if not found.ispkg]


def measured(accuracy: float, usd: float) -> Measured:
    return Measured(accuracy, accuracy - 0.05, accuracy + 0.05, 100, {"usd": usd, "energy": 0.1, "latency": 0.1})


def figures_of(output: str) -> dict[str, float]:
    return json.loads(output.splitlines()[-1])


@pytest.mark.parametrize("name", [name for name in MODULES if not name.endswith("__main__")])
def test_benchmark_module_imports_and_has_docstring(name):
    assert (importlib.import_module(name).__doc__ or "").strip()


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_benchmark_prints_help(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmarks", name, "--help"])
    try:
        status = run_benchmark()
    except SystemExit as ended:  # raised by argparse
        status = ended.code
    assert status == 0
    assert f"make bench-{name.replace('_', '-')}" in capsys.readouterr().out


def test_readme_lists_every_benchmark():
    text = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    assert [name for name in TARGETS if f"`{name.replace('_', '-')}`" not in text] == []


def test_unknown_benchmark_is_refused_with_names(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmarks", "demos"])
    assert run_benchmark() == 2
    assert "demo, disk" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("module", "peer", "missing", "words"),
    [
        (tinker, "PYTHON", Path("/nowhere/python"), "make tools-tinker installs what is missing: /nowhere/python"),
        (install, "RELEASE_TOOLS", Path("/nowhere"), "make tools-release"),
        (conformance, "NODE_TOOLS", Path("/nowhere"), "make tools-node"),
        (page, "ready", lambda: False, "make tools-page"),
        (containment.containment, "probe_bubblewrap", lambda: "no namespaces", "no namespaces"),
    ],
)
def test_benchmark_without_its_peer_refuses_with_words(module, peer, missing, words, monkeypatch, capsys):
    monkeypatch.setattr(module, peer, missing)
    monkeypatch.setattr(sys, "argv", ["benchmark"])
    assert (containment if module is containment.containment else module).main() == REFUSED
    assert words in figures_of(capsys.readouterr().out)["refused"]


def test_slice_of_fault_campaign_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", os.environ.get("TMPDIR", ""))  # the campaign sets it
    said: list[str] = []
    figures, tally = campaign(tmp_path, light_rounds=1, real_rounds=0, accuracy_rounds=0, seed=4, say=said.append)
    assert tally.everything == [], "\n".join(said)
    assert figures["runs"] == 1 and figures["kills"] >= 1


def test_slice_of_rollouts_browses_whole_journal(capsys, monkeypatch):
    monkeypatch.setattr(rollouts, "TASKS", 50)
    monkeypatch.setattr(rollouts, "_cost_of_text", lambda dice: {"text_cost_ratio": 9.0})  # its goal is of long ones
    assert rollouts.main(["--groups", "90"]) == 0
    figures = figures_of(capsys.readouterr().out)
    assert figures["groups"] == 90 and figures["index_calls"] == 1
    assert 0 < figures["page_cost_share"] and 0.1 < figures["control_page_cost_share"]


@pytest.mark.parametrize("order", ["newest", "best", "worst", "most_changed"])
def test_pages_of_a_wrong_order_are_told(order, capsys, monkeypatch):
    """A page with two of its groups exchanged."""

    def found(folder, query, **more):
        page = find_rollouts(folder, query, **more)
        groups = list(page.groups)
        if query.order == order and query.after is None:
            groups[:2] = groups[1::-1]
        return replace(page, groups=groups)

    monkeypatch.setattr(rollouts, "TASKS", 50)
    monkeypatch.setattr(rollouts, "find_rollouts", found)
    assert rollouts.main(["--groups", "90"]) == 1
    assert figures_of(capsys.readouterr().out)["pages_out_of_order"] == 1


def test_slice_of_data_exports_and_deduplicates_exactly(capsys):
    assert data.main(["--items", "160", "--texts", "200"]) == 0
    assert figures_of(capsys.readouterr().out)["count_errors"] == 0


@pytest.mark.parametrize(("platform", "unit"), [("linux", 1 << 10), ("darwin", 1 << 20)])
def test_peak_memory_is_told_in_the_unit_of_the_system(platform, unit, monkeypatch):
    monkeypatch.setattr(sys, "platform", platform)
    assert data.peak_mb(93 * unit) == 93


@pytest.mark.parametrize(("threshold", "wrong"), [(0.7, False), (0.6, True), (0.3, True)])
def test_removal_with_too_low_a_threshold_is_an_error(threshold, wrong, monkeypatch):
    removal = data.deduplicate
    monkeypatch.setattr(data, "deduplicate", lambda items, given: removal(items, min(given, threshold)))
    figures = data.deduplicated(600)
    assert (figures["dedupe_wrong"] > 0) == wrong and figures["control_dedupe_wrong"] > 0


def test_judge_of_near_duplicates_that_sees_none_proves_nothing(monkeypatch, capsys):
    monkeypatch.setattr(data, "similarity", lambda one, other: 0.0)
    monkeypatch.setattr(
        data, "exported", lambda *_: {"export_errors": 0, "export_rss_mb": 90, "planted_errors_found": 1}
    )
    assert data.main(["--texts", "200"]) == 2
    assert "control_dedupe_missed is 0" in capsys.readouterr().out


def test_slice_of_scale_measures_a_run_and_simulates_one_that_is_full(tmp_path):
    runs = scale._Runs(tmp_path)
    try:
        rate, costs = runs.measure(2, 1.0, wait_s=0.1)
    finally:
        runs.close()
    assert rate > 0 and all(cost >= 0 for cost in costs.per_group.values())
    free, full = scale.Costs({}, []), scale.Costs({"inference": scale.WAIT_S}, [])
    assert scale.simulate(8, free) == pytest.approx(8 * scale.simulate(1, free), rel=0.05)
    assert scale.simulate(8, full) < 4 * scale.simulate(1, full)


def test_page_that_works_longer_must_be_seen_to():
    assert page.control_failed({"control_update_cpu_ms": 80.0}, []) == ""
    seen = page.control_failed({"control_update_cpu_ms": 9.0}, ["axe_violations"])
    assert "axe_violations, update_cpu_ms" in seen and page.GOALS["requests_a_second_10_pages"] == ">= 8"


def test_ppo_reference_agrees_with_product():
    assert reference_error() < 1e-4


def test_cost_of_right_answers_is_compared_seed_by_seed():
    figures = compared([measured(0.8, 0.04), measured(1.0, 0.04)], [measured(0.8, 0.02), measured(0.8, 0.02)])
    assert figures["usd_per_correct_fixed"] == [0.05, 0.04] and figures["usd_per_correct_adaptive"] == [0.025, 0.025]
    assert figures["cost_reduction_percent_by_seed"] == [50.0, 37.5]
    assert figures["cost_reduction_percent"] == pytest.approx(43.75)
    assert figures["cost_reduction_percent_low"] < 43.75 < figures["cost_reduction_percent_high"]
    assert figures["accuracy_difference"] == pytest.approx(-0.1) and figures["accuracy_lost"] == 1
    assert measured(0.0, 0.02).usd_per_correct == float("inf")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_demo_benchmark_leaves_nothing_behind(tmp_path, number):
    benchmark = subprocess.Popen(
        [sys.executable, "-P", "-m", "benchmarks", "demo"],
        cwd=ROOT,
        env=os.environ | {"TOPROPE_BENCH_DIR": str(tmp_path), "TOPROPE_BENCH_WAIT_S": "0"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        limit = time.monotonic() + 120
        while not any("toprope.supervisor.keeper" in words_of(one) for one in processes_of(tmp_path)):
            assert benchmark.poll() is None and time.monotonic() < limit, "no run was started"
            time.sleep(0.1)
        benchmark.send_signal(number)
        assert benchmark.wait(60) == 128 + number
    finally:
        benchmark.kill()
        benchmark.wait()
    assert list(tmp_path.iterdir()) == [] and processes_of(tmp_path) == []


def test_signal_ends_a_benchmark_that_swallows_the_exit(tmp_path):
    program = """
import time
from benchmarks import scratch
scratch._UNWOUND_WITHIN_S = 0.1
with scratch.scratch("outer"), scratch.scratch("deaf"):  # as `python -m benchmarks` nests them
    print("ready", flush=True)
    while True:
        try:
            time.sleep(60)
        except SystemExit:
            pass
"""
    variables = os.environ | {"TOPROPE_BENCH_DIR": str(tmp_path)}
    benchmark = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, env=variables, stdout=subprocess.PIPE)
    with benchmark:
        try:
            assert benchmark.stdout is not None and benchmark.stdout.readline() == b"ready\n"
            benchmark.terminate()
            assert benchmark.wait(60) == 128 + signal.SIGTERM
        finally:
            benchmark.kill()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("hidden", [("environ", "cwd"), ("cmdline", "cwd"), ("cmdline", "environ")])
def test_process_that_hides_the_rest_is_found(hidden, tmp_path, monkeypatch):
    program = "import time; print(flush=True); time.sleep(600)"
    command, variables = [sys.executable, "-c", program, str(tmp_path)], os.environ | {"PLACE": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=tmp_path, env=variables) as process:
        assert process.stdout is not None and process.stdout.readline()

        def hides(one):
            raise psutil.AccessDenied(one.pid)

        try:
            for name in hidden:
                monkeypatch.setattr(psutil.Process, name, hides)
            assert [one.pid for one in processes_of(tmp_path)] == [process.pid]
        finally:
            process.kill()


def test_processes_are_ended_however_long_the_search_takes(tmp_path, monkeypatch):
    hours = itertools.count(step=3600.0)
    monkeypatch.setattr(scratch, "time", SimpleNamespace(monotonic=lambda: next(hours)), raising=False)
    command = [sys.executable, "-c", "import time; print(flush=True); time.sleep(600)", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        try:
            scratch.end_processes(tmp_path)
            assert processes_of(tmp_path) == []
        finally:
            process.kill()


def test_processes_of_a_folder_whose_name_begins_alike_are_left_alone(tmp_path):
    mine, others = tmp_path / "h", tmp_path / "h2"
    words = [str(others), f"--home={others}/runs", f"{mine}.old", f"{mine}-2", "toprope.supervisor.keeper"]
    command = [sys.executable, "-c", "import time; print(flush=True); time.sleep(600)"]
    started = [subprocess.Popen([*command, *words], stdout=subprocess.PIPE)]
    mentioned = (str(mine), f"--home={mine}/", f'{{"home": "{mine}"}}', f"{mine}/bin:/bin")
    started += [subprocess.Popen([*command, *words, word], stdout=subprocess.PIPE) for word in mentioned]
    try:
        for process in started:
            assert process.stdout is not None and process.stdout.readline()
        assert {one.pid for one in processes_of(mine)} == {one.pid for one in started[1:]}
        scratch.end_processes(mine, keepers_only=True)
        assert [process.poll() is None for process in started] == [True, *[False] * 4]
    finally:
        for process in started:
            with process:
                process.kill()


def test_process_that_does_not_react_is_killed():
    program = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        end_process(process, within_s=0.1)
        assert process.returncode == -signal.SIGKILL


def test_exit_that_python_ignored_is_raised_again(tmp_path):
    program = """
import os, signal, time
from benchmarks import scratch

class Callback:
    def __del__(self):  # an exit that arises here is ignored
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(1000):
            pass

scratch._UNWOUND_WITHIN_S = 3600
with scratch.scratch("callback") as place:
    try:
        Callback()
        time.sleep(60)
    finally:
        print("unwound", flush=True)
"""
    variables = os.environ | {"TOPROPE_BENCH_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=variables, stdout=subprocess.PIPE, timeout=50)
    assert done.returncode == 128 + signal.SIGTERM and done.stdout == b"unwound\n"
    assert list(tmp_path.iterdir()) == []


def words_of(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
