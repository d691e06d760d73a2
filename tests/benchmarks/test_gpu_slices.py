"""The benchmark of a GPU, without one."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
import threading
from contextlib import suppress
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from benchmarks.models import engines, fit, gpu
from toprope.errors import InvalidValue


def test_memory_of_a_gpu_is_that_of_the_process_that_asks(monkeypatch):
    for listed, held in ((f"1, 7\n{os.getpid()}, 512\n", 512 * 2**20), (f"{os.getpid()}, [N/A]\n", 3e9)):
        monkeypatch.setattr(fit.subprocess, "check_output", lambda *_, listed=listed, **__: listed)
        monkeypatch.setattr(gpu.torch.cuda, "mem_get_info", lambda: (5e9, 8e9))
        assert fit._held_on_gpu() == held


def test_engine_beside_a_trainer_is_measured_and_the_control_sees_a_change(tmp_path, monkeypatch):
    for name, value in {"_REQUESTS": 2, "_UPDATES": 1}.items():
        monkeypatch.setattr(engines, name, value)
    bench = gpu.Bench(tmp_path, "tiny", "cpu", 4)
    assert bench.control_failed is None and "versions_wrong" not in bench.figures, "nothing was measured yet"
    bench.measure_engine("embedded")
    assert bench.control_failed == "" and bench.figures["versions_wrong"] == 0
    assert bench.figures["logprob_error_tiny_embedded"] < 1e-4
    for way in ("full", "lora"):
        times = [bench.figures[f"{name}_tiny_{way}_embedded"] for name in ("handed_seconds", "publish_seconds")]
        assert 0 < times[0] <= times[1]


def test_figures_of_a_run_on_a_gpu_are_its_worst_cases():
    rows = [{"time/step": 9.0, "time/wait": 9.0, "staleness/max": 9.0, "completions/mean_length": 9.0}] * 3
    rows += [{"time/step": 2.0, "time/wait": 0.1, "staleness/max": 1.0, "completions/mean_length": 50.0}] * 9
    rows += [{"time/step": 2.0, "time/wait": 0.1, "staleness/max": 3.0, "completions/mean_length": 50.0}]
    found = gpu.figures_of(rows, 64, operations=6e9, peak=100e12)
    expected = {"samples_per_second": 32, "step_seconds": 2, "trainer_wait_share": 0.05, "staleness_p95": 3}
    assert found == pytest.approx(expected | {"mfu": 64 * 50 * 6e9 / 2 / 100e12})
    cases = {"trainer_wait_share_a": 0.05, "trainer_wait_share_b": 0.2, "samples_ratio_to_trl_a": 2.0}
    assert gpu.worst(cases | {"samples_ratio_to_trl_b": 1.2}) == {
        "trainer_wait_share": 0.2,
        "samples_ratio_to_trl": 1.2,
    }


def test_whole_run_on_a_gpu_trains_on_groups_of_equal_rewards_too(tmp_path):
    changes = gpu.Bench(tmp_path, "tiny", "cpu", 4).changes("lora-4bit", "embedded")
    assert changes["algorithm.drop_zero_signal"] is False, (
        "random weights solve no task, so the run would wait for ever"
    )
    assert changes["policy.load_in_4bit"] and changes["budget.steps"] == 4


def test_stock_trl_is_given_settings_that_it_has(tmp_path, monkeypatch):
    from trl import GRPOConfig

    asked = []

    def run(side, policy, *words, python):
        asked.append((side, policy, words, python))
        return {"wall_s": 2.0}

    monkeypatch.setattr(gpu, "run_reference", run)
    bench = gpu.Bench(tmp_path, "tiny", "cpu", 7)
    bench.train_with_trl("lora", None)
    bench.train_with_trl("full", "/elsewhere/python")
    (side, policy, words, python), (_, _, others, other) = asked
    assert (side, policy, words[:4]) == ("trl", bench.model, (gpu._TRL_STEPS, gpu._TRL_WARM, 1, 0))
    assert (python, other) == (sys.executable, "/elsewhere/python")
    settings, with_vllm = json.loads(words[4]), json.loads(others[4])
    assert settings.pop("groups") * settings["per_device_train_batch_size"] == 16
    assert (settings.pop("lora_rank"), with_vllm.pop("lora_rank"), with_vllm.pop("groups")) == (32, 0, 2)
    assert with_vllm["use_vllm"] and "use_vllm" not in settings
    known = {one.name for one in dataclasses.fields(GRPOConfig)}
    assert set(settings) | set(with_vllm) <= known
    assert bench.figures["samples_per_second_tiny_lora_trl"] == 8.0


def test_peak_memory_of_a_gpu_is_noted_for_each_case(tmp_path, monkeypatch):
    bench, used = gpu.Bench(tmp_path, "tiny", "cpu", 4), iter([1e9, 5e9])
    with bench._peak("nothing"):
        pass
    assert not any("peak" in name for name in bench.figures) and bench.ways("full", "vllm") == {"": {}}
    seen = threading.Event()

    def read():
        found = next(used, None)
        if found is None:
            seen.set()
        return found or 2e9

    monkeypatch.setattr(gpu, "_used", read)
    monkeypatch.setattr(gpu, "_LOOK_S", 0.001)
    bench._device = "cuda"
    with bench._peak("full_vllm"):
        assert seen.wait(10)
    assert bench.figures["peak_gb_tiny_full_vllm"] == 5.0
    settings = [one for way in bench.ways("full", "vllm").values() for one in way.items()]
    assert settings == [("inference.sleep", True), ("inference.transfer", "gpu")]
    assert list(bench.ways("lora", "vllm")) == ["", "_sleep"] and bench.ways("full", "transformers") == {"": {}}


def test_case_that_fails_or_takes_too_long_is_counted_and_others_go_on(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(gpu, "_AGAIN_S", 0.2)
    bench = gpu.Bench(tmp_path, "tiny", "cpu", 4, limit_s=1, log=tmp_path / "log")
    with bench.case("a run"):
        raise BaseExceptionGroup("of a client", [SystemExit("run-1 is failed")])
    with bench.case("slow"):
        threading.Event().wait(60)
    with bench.case("deaf"):
        with suppress(TimeoutError):
            threading.Event().wait(60)
        threading.Event().wait(60)
    with bench.case("absent", optional=True):
        raise InvalidValue("vLLM is not installed")
    with bench.case("good"):
        bench._note("good", {"step_seconds": 1.0})
    with pytest.raises(SystemExit), bench.case("stopped"):
        raise SystemExit(143)
    assert bench.figures["cases_failed"] == 3 and bench.figures["step_seconds_tiny_good"] == 1.0
    printed = capsys.readouterr().out
    assert "a run failed: SystemExit: run-1 is failed" in printed and "slow failed: TimeoutError" in printed
    assert "absent is left out: vLLM" in printed
    logged = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [line.get("failed") for line in logged] == ["a run", "slow", "deaf", None]
    assert logged[3] == {"step_seconds_tiny_good": 1.0}


@pytest.mark.engines
def test_all_parts_of_the_benchmark_of_a_gpu_are_rehearsed(capsys):
    words = ["--rehearse", "--engines", "transformers", "--methods", "lora", "--steps", "5"]
    assert gpu.main(words) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    for name in ("samples_per_second_tiny_lora_transformers", "samples_per_second_tiny_lora_trl"):
        assert figures[name] > 0
    for name in gpu.GOALS:
        assert name in figures
    assert figures["versions_wrong"] == 0


def test_benchmark_of_a_gpu_says_that_there_is_none(capsys):
    if gpu.torch.cuda.is_available():
        pytest.skip("there is one")
    assert gpu.main([]) == 3 and "no NVIDIA GPU" in capsys.readouterr().out


def test_commands_for_a_gpu_have_options_and_versions_that_exist(monkeypatch, capsys):
    root = Path(__file__).resolve().parents[2]
    [_, block, *_] = re.split(r"^```(?:bash)?\n", (root / "docs" / "gpu.md").read_text(encoding="utf-8"), flags=re.M)
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: False)
    calls = [line.split()[5:] for line in block.splitlines() if "-m benchmarks gpu" in line]
    assert len(calls) == 2 and [gpu.main(words) for words in calls] == [3, 3]
    assert "--trl" in calls[0] and "no NVIDIA GPU" in capsys.readouterr().out
    pins = dict(re.findall(r"([a-z_]+)(?:\[vllm\])?==([0-9.]+)", block))
    supported = [one for one in map(Requirement, requires("trl")) if one.name == "vllm"]
    assert supported and all(pins["vllm"] in one.specifier for one in supported)
    locked = (root / "constraints.txt").read_text().splitlines()
    assert [f"{name}=={pins[name]}" in locked for name in ("trl", "peft", "reasoning_gym")] == [True] * 3
