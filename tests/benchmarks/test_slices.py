"""Slices of benchmarks that take seconds: each runs what the benchmark measures, on a small scale, and its control."""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import anyio
import psutil
import pytest

from benchmarks.environments import environments, worker_overhead
from benchmarks.environments.ecosystem_samples import interpreter
from benchmarks.environments.worker_overhead import measure, sources
from benchmarks.faults import disk, lifecycle
from benchmarks.faults.judge import Story
from benchmarks.faults.lives import Leftovers, harness_at, play
from benchmarks.learning import evolution, mixture, reproduce, sft_then_grpo
from benchmarks.models import fit, models, precision
from benchmarks.orchestrator import runs as orchestrator
from benchmarks.orchestrator.orchestrator import _control_failed
from benchmarks.performance import decode, growth, memory, train
from benchmarks.report import REFUSED
from benchmarks.server import load, many_runs, server
from benchmarks.server.memory_curve import by_minute, draw, leaking, settled_growth, with_leak
from benchmarks.training_agent import Done
from benchmarks.trajectory_api import kills, trajectory_api
from benchmarks.trajectory_api.trajectory import bodies, ours, run_folder
from benchmarks.trajectory_api.trajectory_api import mixed
from benchmarks.wrong_inputs import wrong_inputs
from toprope.records.run.folder import RunFolder
from toprope.records.sweep_journal import Scored, Standing
from toprope.training.policy.weight_sync import WeightsDiffer


def done(tmp_path: Path, before: float, after: float) -> Done:
    results = {
        "evaluations": {label: {"sampled": {"accuracy": one}} for label, one in (("before", before), ("after", after))}
    }
    return Done("run-a", tmp_path, results, 1.0)


def test_decoding_reports_the_logprobs_of_the_model(tmp_path):
    model, tokenizer = decode.make_model(tmp_path / "policy", "embedded")
    engine = decode.start_engine(model, tokenizer, 32)
    try:
        found = decode.decode(engine, decode.make_prompts(2), 4)
        with decode.concatenated_cache():
            concatenated = decode.decode(engine, decode.make_prompts(2), 4)
        assert decode.check_logprobs(model, engine) < 1e-3
        decode.converse(engine, talks=2, turns=3, first=260)
        assert engine._kept.has_continued
    finally:
        engine.stop()
    assert len(found) == len(concatenated) == 2


def test_growth_trains_and_samples_groups(tmp_path):
    engines = growth.Engines(tmp_path)
    try:
        sampled, trained = engines.decoding(0.1e6, 1, 4, 3), engines.training(0.1e6, 2, 4)
        [answers] = sampled()
        trained()
    finally:
        engines.close()
    assert [len(answer.token_ids) for answer in answers] == [4, 4, 4]
    assert growth.make_group(0, 4).masks[0][-4:] == growth.make_group(0, 4).tokens[0][-4:]


def test_exponents_are_told_apart():
    sizes = (8, 16, 32, 64, 128, 256)
    assert growth.exponent({n: 50.0 + n for n in sizes}) == pytest.approx(1.0), "the smallest size's work is not fixed"
    assert growth.exponent({n: 50.0 + n**1.3 for n in sizes}) > growth.GOAL
    assert math.isnan(growth.exponent(dict.fromkeys((1, 16, 32, 64, 128), 5.0))), "nothing was measured"
    assert growth.exponent({n: 5.0 + n * n for n in (1, 16, 32, 64, 128)}) > growth.GOAL


def test_memory_sees_what_a_process_holds():
    assert memory.control_mb() == pytest.approx(memory.CONTROL_MB, rel=0.2)
    own = memory.memory_of(psutil.Process())
    assert own.rss >= own.uss > 0


def test_an_architecture_works_and_changed_weights_are_seen(tmp_path, capsys):
    rows = []
    for engine in ("embedded", "transformers"):
        (folder := tmp_path / engine).mkdir()
        rows.append(models.try_architecture("Qwen3", folder, engine))
        assert rows[-1].works, rows[-1].refusal
        assert rows[-1].logprob_error <= models.LARGEST_ERROR < rows[-1].changed_error
    (folder := tmp_path / "refused").mkdir()
    rows.append(models.try_architecture("Falcon-H1", folder, "transformers"))
    assert rows[-1].refusal and rows[-1].in_words
    models.show(rows)
    assert "refused" in capsys.readouterr().out


def test_a_wrong_update_of_weights_is_no_refusal(tmp_path, monkeypatch, capsys):
    def differs(row, folder):
        row.changed_error = 1.0
        raise WeightsDiffer("Inference did not take over version 1.")

    monkeypatch.setattr(models, "_run", differs)
    monkeypatch.setattr(models, "make_model", lambda name, folder: folder)
    monkeypatch.setattr("sys.argv", ["models", "--engine", "embedded"])
    assert models.main() == 1
    printed = capsys.readouterr().out
    assert "missed: working_embedded, failed_without_words" in printed


def test_memory_that_training_takes_is_estimated(monkeypatch):
    for case in fit.CASES:
        config = case.config
        assert config.policy.max_context == case.prompt + config.rollout.max_new_tokens
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    tiny = fit.Case("tiny", fit._shape(128, 2, 65536, tied=False), "trainer", 8, fit._batch(2, 2, 8))
    peak, shape = fit.measure(tiny)
    expected = fit.estimate(tiny.config, shape, prompt=tiny.prompt)[0]
    assert expected.total > 2 * expected.parts["libraries"]
    assert expected.total == pytest.approx(peak, rel=fit.LIMIT_PERCENT / 100)


def test_server_without_torch_is_told_from_one_with_it(tmp_path):
    planted = server.start(server.with_torch(tmp_path, 1), tmp_path)
    ours = server.start([sys.executable, "-P", "-m", "toprope_server.cli", "serve"], tmp_path)
    assert planted[2] > ours[2] == 0 and planted[1] > ours[1]
    many = {"tools": [{"name": "a" * 20_000}]}
    assert server.control_failed(planted, planted[0] / 2, planted[1] / 2, many) == ""
    won = server.control_failed((1.0, 70.0, 0, None), 1.0, 70.0, {"tools": []})
    assert all(name in won for name in server.GOALS)


def test_home_of_many_runs_is_answered(tmp_path, monkeypatch):
    for name, value in {"RUNS": 24, "ROWS": 2000, "LONG_RUNS": 2, "LIVE": 2, "CALLS": 4}.items():
        monkeypatch.setattr(many_runs, name, value)
    folders, rows = many_runs.make_home(tmp_path)
    assert len(folders) == 24 and rows >= 2000
    session = server.Session([sys.executable, "-P", "-m", "toprope_server.cli", "serve"], str(tmp_path))
    try:
        session.list_tools()
        for wanted in many_runs.calls(folders).values():
            assert session.call(*wanted[0]) > 0
        milliseconds, differing = many_runs.ask_unexplained(session, folders[2:6])
        assert milliseconds > 0 and differing == 0
    finally:
        session.close()


def test_run_that_ends_somehow_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", os.environ.get("TMPDIR", ""))  # the harness sets it
    harness, left = harness_at(tmp_path / "light"), Leftovers()
    try:
        story = play(harness, random.Random(3), left)
    finally:
        harness.close()
    assert left.leftovers == [] and story.states
    assert lifecycle.MEMBERS == ("api", "inference", "trainer", "environment") and Story("x").kills == 0


def test_curves_are_compared_step_by_step(tmp_path):
    def run(name: str, losses: list[float]) -> RunFolder:
        folder = RunFolder.create(tmp_path, name)
        rows = [{"step": step, "loss": loss, "reward": 0.5} for step, loss in enumerate(losses, 1)]
        folder.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return folder

    first = run("a", [0.3, 0.2, 0.1])
    assert reproduce.curve_error(first, run("b", [0.3, 0.2, 0.1])) == 0
    assert reproduce.curve_error(first, run("c", [0.3, 0.25, 0.1])) == pytest.approx(0.05)
    assert reproduce.curve_error(first, run("d", [0.3, 0.2])) == float("inf")


def test_decisions_of_a_sweep_without_any_are_none():
    assert evolution.decisions(Standing()) == {"candidates": [], "survivors": {}, "winner": None}


def test_sweep_is_not_compared_with_a_search_that_scored_nothing():
    best, none = (Scored(candidate="c", score=score, why="") for score in (0.8, None))
    assert evolution.difference(best, best) == 0
    assert [evolution.difference(*pair) for pair in ((best, None), (best, none), (none, best), (None, best))] == [
        None
    ] * 4


def test_gains_are_counted_seed_by_seed(tmp_path):
    ours = [done(tmp_path, 0.1, after) for after in (0.5, 0.7, 0.55)]
    found = sft_then_grpo._gains("gain", ours, [done(tmp_path, 0.1, 0.4)] * 3)
    assert found["gain_by_seed"] == [10.0, 30.0, 15.0] and found["gain"] == 15.0
    assert found["gain_low"] < 18 < found["gain_high"]
    held = {"control_gain_points": -2.0, "dataset_items": [9], "dataset_items_wrong": 9, "accuracy_grpo": [0.5, 0.6]}
    assert sft_then_grpo.control_failed(held) == ""
    for wrong in ({"control_gain_points": 7.0}, {"dataset_items_wrong": 8}, {"accuracy_grpo": [0.5, 0.9]}):
        assert sft_then_grpo.control_failed(held | wrong)


def test_mixture_counts_what_improved_and_judges_its_control(tmp_path, monkeypatch):
    one = mixture.Learned("gym", 0.0, (0.1, 0.05, 0.15), (0.5, 0.4, 0.6), 0.1, True, 0.3)
    run = Done("run-a", tmp_path, {"steps": 5}, 2.0)
    figures = mixture.Outcome([one], 720, run, run, 1).figures()
    assert figures["mixture_improved"] == 1 and figures["mixture_demonstrations"] == 720
    one_answer = replace(one, constant=0.45)
    assert not one_answer.improved and not mixture.Outcome([one_answer], 720, run, run, 0).mixture_improved
    monkeypatch.setattr(mixture, "measure", lambda **_: mixture.Outcome([one], 720, run, run, 0))
    monkeypatch.setattr("sys.argv", ["mixture"])
    assert mixture.main() == 1, "one of three environments"
    assert "improved 1" in mixture.control_failed(figures)
    assert mixture.control_failed(figures | {"mixture_shuffled_improved": 0}) == ""


def test_models_that_the_orchestrator_lends_differ_in_use(tmp_path):
    orchestrator.lend_tools(tmp_path)
    lent: dict = {}
    exec((tmp_path / "config" / "models.py").read_text(), lent)
    part, rare = min(lent["FACTS"]), max(lent["FACTS"])
    assert lent["small"]("12 + 30") == lent["expert"]("12 + 30") == "42"
    assert lent["small"]("12 * 34") != lent["expert"]("12 * 34") == "408"
    assert lent["small"](part) != lent["expert"](part) and lent["expert"](part) in lent["FACTS"][part]
    assert lent["catalog"](part) == lent["FACTS"][part] and lent["expert"](rare) not in lent["catalog"](rare)
    saved = {"cost_reduction_percent": 40.0, "shuffled_cost_reduction_percent": 25.0, "shuffled_accuracy_lost": 0}
    saved |= {"shuffled_small_for_sums": 0.1, "shuffled_small_for_products": 0.1}
    saved |= {"shuffled_expert_for_rare": 0.1, "shuffled_expert_for_common": None}
    assert "cost_reduction_percent" in _control_failed(saved), "less than what was saved, but as much as the goal"
    lost = saved | {"shuffled_accuracy_lost": 1}
    assert _control_failed(lost) == ""
    assert "small_for_sums" in _control_failed(lost | {"shuffled_small_for_sums": 0.9})


def test_worker_is_compared_with_the_same_process(tmp_path):
    found = anyio.run(lambda: measure("a file", sources(tmp_path)["a file"], groups=4))
    assert found.groups == 4 and found.worker_ms > found.in_process_ms > 0
    late = anyio.run(lambda: measure("late", sources(tmp_path)["a file"], groups=2, late_s=worker_overhead._LATE_S))
    assert worker_overhead.control_failed({"worker_overhead_control_ms": late.worker_overhead_ms}) == ""
    assert worker_overhead.control_failed({"worker_overhead_control_ms": 0.3})


def test_goals_of_environments_are_figures_that_parts_give(monkeypatch, capsys):
    goals = [name for _, wanted in environments.PARTS.values() for name in wanted]
    assert "planted_defects_missed" in goals and len(goals) == len(set(goals))
    found = {"planted_defects_missed": 0, "unplanted_flags": []}
    parts = {"checks": (lambda: found, environments.PARTS["checks"][1])}
    monkeypatch.setattr(environments, "PARTS", parts)
    assert environments.main([]) == 1
    assert "missed: good_tasks_flagged, named_defects_missed" in capsys.readouterr().out
    found["unplanted_flags"] = ["splits_leak"]
    assert environments.main([]) == 2


def test_machine_is_asked_if_it_is_quiet_before_the_part_with_times(monkeypatch, capsys):
    done = list[str]()
    found = dict.fromkeys(worker_overhead.GOALS, 0.05) | {"worker_overhead_control_ms": 2.5}
    found |= {"mixture_improved": 3, "mixture_shuffled_improved": 0}

    def part(name):
        return (lambda: done.append(name) or found, environments.PARTS[name][1])

    monkeypatch.setattr(environments, "PARTS", {name: part(name) for name in ("mixture", "overhead")})
    monkeypatch.setattr(environments, "wait_until_quiet", lambda: not done.append("asked"))
    told = ["--part", "mixture", "--part", "overhead"]
    assert environments.main(told) == 0 and done == ["mixture", "asked", "overhead"]
    found |= {"wall_start_ms": 51.0, "wall_call_ms": 0.2}
    assert environments.main(told) == 1 and "missed: wall_start_ms, wall_call_ms" in capsys.readouterr().out


def test_interpreter_whose_installation_broke_off_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    folder = tmp_path / ".cache" / "toprope" / "ecosystems" / "verifiers"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").touch()
    assert interpreter("verifiers") is None and interpreter("trl") == sys.executable
    (folder / "installed").touch()
    assert interpreter("verifiers") == str(folder / "bin" / "python")


def test_lost_and_doubled_groups_are_counted():
    assert kills.judged({1, 2, 3}, Counter([1, 2, 3])) == (0, 0)
    assert kills.judged({1, 2, 3}, Counter([1, 1, 3])) == (1, 1)


def test_batches_that_a_trainer_skips_and_doubles_are_found(tmp_path):
    assert kills.planted_found(tmp_path / "run", 1, print) == [1, 1]


@pytest.mark.parametrize(("sees", "lost", "status"), [(0, 0, 2), (1, 1, 1), (1, 0, 0)])
def test_checker_of_kills_that_counts_nothing_fails(sees, lost, status, monkeypatch):
    def campaign(root, rounds, seed, say, planted=None):
        if planted is None:
            return {"lost": lost, "duplicated": 0}
        planted |= {"lost": 4, "duplicated": 3}
        return {name: sees * count for name, count in planted.items()}

    monkeypatch.setattr(kills, "campaign", campaign)
    assert trajectory_api.main(["--only-kills"]) == status


def test_trajectory_api_takes_posts_and_gives_batches(tmp_path):
    with ours(run_folder(tmp_path)) as api:
        rate, p99 = mixed(api, bodies(8), True, 3.0)
    assert rate > 0 and p99 > 0


def test_load_stores_runs_and_ignores_the_first_minutes(tmp_path):
    harness = load.RunHarness(tmp_path)
    load.store_ended(harness, 3)
    assert [status.state for status in harness.runs().list()] == ["completed"] * 3
    samples = [(float(second), 100 if second < 360 else 110) for second in range(600)]
    assert settled_growth(samples, 600) == pytest.approx(10.0)
    assert settled_growth(samples, 300) is None
    even = [(float(second), 10**8) for second in range(1800)]
    draw(by_minute(even), tmp_path / "memory.png")
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
    assert settled_growth(even, 1800) == 0 < 5 < settled_growth(with_leak(even, 1800), 1800)
    shrinking = [(at, int(memory * (1 - 0.1 * at / 1800))) for at, memory in even]
    assert settled_growth(with_leak(shrinking, 1800), 1800) < 5, (
        "a server that shrinks hides a leak, so the control fails"
    )


def test_process_that_leaks_is_seen_to():
    with leaking(3.0, percent=50) as process:
        looks = load.Looks(process)
        _, first, *_ = looks.look()
        limit = time.monotonic() + 60
        while (grown := looks.look()[1]) < 1.3 * first:
            assert time.monotonic() < limit, (first, grown)
            time.sleep(0.05)
    assert not process.is_running()


def test_load_says_that_its_server_ended():
    ended = subprocess.Popen([sys.executable, "-c", ""])
    looks = load.Looks(psutil.Process(ended.pid))
    while looks.process.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    try:
        with pytest.raises(RuntimeError, match="server ended"):
            looks.look()
    finally:
        ended.wait()


def test_judge_of_wrong_inputs_knows_bad_answers():
    assert wrong_inputs._control_failed() == ""


def test_formats_are_compared_seed_by_seed(tmp_path, monkeypatch, capsys):
    def trained(name: str, after: float, passes: float) -> Done:
        folder = tmp_path / name
        folder.mkdir()
        rows = [{"step": step, "time/passes": passes * (1 + step)} for step in range(3)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
        return replace(done(folder, 0.0, after), folder=folder)

    found = precision.compared(
        [trained("a", 0.9, 0.1), trained("b", 0.8, 0.2)], [trained("c", 0.8, 0.05), trained("d", 0.88, 0.1)]
    )
    assert found["accuracy_difference"] == -0.01 and found["passes_ratio"] == 0.5
    monkeypatch.setattr(precision, "cpu_computes_bfloat16", lambda: False)
    assert precision.main([]) == REFUSED and "emulate" in capsys.readouterr().out


def test_time_to_a_share_is_found_in_rows():
    found = {"success": [0.1] * 30 + [0.9] * 60, "elapsed_s": list(range(90))}
    assert train.seconds_to(0.8, found) == pytest.approx(29 + 0.875 * train.WINDOW, abs=1)
    assert train.seconds_to(0.95, found) is None


def test_time_to_a_share_on_a_busy_machine_meets_no_goal(monkeypatch, capsys):
    class Runs:
        policy = None

        def __init__(self, home):
            pass

        def train(self, steps, seed, seconds=None, **more):
            share = {"success": [1.0] * train.WINDOW, "elapsed_s": [3.0] * train.WINDOW}
            return {"wall_s": 0.2 if more else 0.1, "cpu_s": 0.1} | share

    def reference(side, *_):
        if side == "floor":
            return {"train_s": 0.1, "decode_s": 0.1}
        return {"wall_s": 0.5, "cpu_s": 0.5, "success": [1.0] * train.WINDOW, "elapsed_s": [9.0] * train.WINDOW}

    monkeypatch.setattr(train, "Runs", Runs)
    monkeypatch.setattr(train, "run_reference", reference)
    for asked, status in (([True, True], 0), ([True, False], 1), ([False, True], 1)):
        monkeypatch.setattr(train, "wait_until_quiet", iter(asked).__next__)
        assert train.main(["--rounds", "1"]) == status
        assert ("missed: seconds_ratio_to_0_8" in capsys.readouterr().out) == bool(status)
    assert train.main(["--rounds", "1", "--no-learning"]) == 0


def test_arms_of_equal_seconds_ask_again_if_the_machine_is_quiet(monkeypatch, capsys):
    found = {"gain_points": 9.0, "gain_points_seconds": 9.0, "control_gain_points": 0.0}
    found |= {"dataset_items": [9], "dataset_items_wrong": 9, "accuracy_grpo": [0.5]}

    async def measured(*_):
        return found | {"quiet": quiet}

    monkeypatch.setattr(sft_then_grpo, "measured", measured)
    monkeypatch.setattr(sft_then_grpo, "wait_until_quiet", lambda: True)
    for quiet in (True, False):
        assert sft_then_grpo.main([]) == int(not quiet)
        assert ("missed: gain_points_seconds\n" in capsys.readouterr().out) != quiet


@pytest.mark.skipif(not sys.platform.startswith("linux") or os.geteuid() != 0, reason="mounting needs root on Linux")
def test_small_disk_is_filled_to_the_last_byte(tmp_path):
    try:
        with disk.small_disk(tmp_path) as home:
            disk.fill(home / "fill")
            assert os.statvfs(home).f_bavail == 0
    except Exception as error:
        if "mount" in str(error):
            pytest.skip("this machine mounts no disk here")
        raise
