"""Slices of benchmarks that train: real crews on a small scale, and what each benchmark reads from them."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.learning import evolution, sft_then_grpo
from benchmarks.performance import memory, train
from benchmarks.report import REFUSED
from benchmarks.training_agent import training_agent
from toprope.records.sweep_journal import read_standing
from toprope.settings.owner import Home


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home for all of them: its policy takes most of a run's time to make."""
    folder = tmp_path_factory.mktemp("slices") / "home"
    (folder / "config").mkdir(parents=True)
    return folder


def test_step_is_measured_beside_trl_and_plain_torch(home, monkeypatch):
    monkeypatch.setattr(train, "WARM", 3)
    runs = train.Runs(home)
    ours = runs.train(12, seed=0)
    assert len(ours["success"]) >= 12 and ours["elapsed_s"] == sorted(ours["elapsed_s"])
    theirs = train.run_reference("trl", runs.policy, 6, 3, 1, 0)
    floor = train.run_reference("floor", runs.policy, 6, 3)
    assert len(theirs["success"]) == 6 and theirs["wall_s"] > 0 and min(floor.values()) > 0
    assert ours["wall_s"] > 0 and ours["cpu_s"] > 0


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="smaps_rollup exists on Linux only")
def test_every_component_of_a_run_is_in_a_sample(home):
    samples = asyncio.run(memory._measure(home, 3.0))
    whole = [sample for sample in samples if not memory.missing(sample)]  # a slow machine starts them one by one
    highest = max(whole, key=lambda sample: sum(one.pss for one in sample))
    assert all(0 < one.uss <= one.pss + 1 and one.pss <= one.rss + 1 for one in highest)
    for word in ("driver", "worker"):
        assert memory.missing([one for one in highest if word not in one.name]) == [word]


def test_memory_that_is_hidden_is_not_left_out(monkeypatch, capsys):
    def hides(process):
        raise PermissionError

    monkeypatch.setattr(memory, "memory_of", hides)
    monkeypatch.setattr(memory.psutil, "process_iter", lambda: [memory.psutil.Process()])
    words = ["python", "-m", "toprope.supervisor.keeper", "/home/run-a"]
    monkeypatch.setattr(memory.psutil.Process, "cmdline", lambda one: words)
    with pytest.raises(PermissionError, match=r"memory of toprope.supervisor.keeper /home/run-a can be read by root"):
        memory._sample(Path("/home"))

    async def measure(*_):
        raise PermissionError("the memory of a keeper can be read by root only")

    monkeypatch.setattr(memory, "_measure", measure)
    monkeypatch.setattr(memory, "control_mb", lambda: 64.0)
    monkeypatch.setattr(memory.subprocess, "run", lambda *_, **__: None)
    monkeypatch.setattr(sys, "platform", "linux")
    assert memory.main([]) == REFUSED and "by root only" in capsys.readouterr().out


def test_decisions_of_a_small_sweep_follow_its_scores(tiny_policy, tmp_path, monkeypatch):
    monkeypatch.setattr(evolution, "POPULATION", 2)
    small = {"evaluation.validation_tasks": 8, "evaluation.heldout_tasks": 8, "policy.model": str(tiny_policy)}
    monkeypatch.setattr(evolution, "DRAFT", evolution.DRAFT | small)
    place = Home(tmp_path / "home", tmp_path / "config")
    folder, killed, _ = asyncio.run(evolution.sweep(place, epochs=1, steps=2))
    standing = read_standing(folder)
    assert not killed and len(standing.runs) == 2 and not evolution.same(folder, standing)
    assert not evolution._left(place)
    found = evolution.decisions(standing)
    assert found["winner"] in standing.candidates and found == evolution.decisions(read_standing(folder))

    # Another survivor than the scores say, and a run that was started twice.
    journal = folder.path / "sweep.jsonl"
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    [chosen, *_] = [line for line in lines if line["what"] == "survivors"]
    others = [name for name in standing.candidates if name not in chosen["ids"]]
    assert others
    again = next(line for line in lines if line["what"] == "started")
    chosen["ids"] = others
    copy = tmp_path / "copy" / folder.run_id
    shutil.copytree(folder.path, copy)
    (copy / "sweep.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*lines, again]))
    changed = type(folder)(copy)
    assert evolution.same(changed, read_standing(changed)) == ["started stands there twice", "the survivors of epoch 1"]


def test_sft_and_grpo_share_the_steps_of_grpo_alone(home, monkeypatch):
    # Short words: some answers of the source are right after a few steps.
    easy = {"environment.knobs.min_word_len": 3, "environment.knobs.max_word_len": 3}
    small = {"evaluation.heldout_tasks": 20, "evaluation.validation_tasks": 8}
    monkeypatch.setattr(sft_then_grpo, "_GRPO", sft_then_grpo._GRPO | easy | small)
    monkeypatch.setattr(sft_then_grpo, "_SFT", sft_then_grpo._SFT | {"sft.epochs": 1, "sft.save_epochs": 1})
    monkeypatch.setattr(sft_then_grpo, "_ITEMS", 32)

    async def trained():
        console = Console(stderr=True)
        async with training_agent(home, console) as agent:
            arms = sft_then_grpo._Arms(agent, 14)
            source = await arms.train("the source", 100, {"budget.steps": 8})
            items = await arms.dataset("best", source, {"success": True})
            wrong = await arms.dataset("wrong", source, {"max_reward": 0.5, "limit": items})
            return items, wrong, source, *await arms.tuned(source, "best", 0)

    items, wrong, source, sft, then = asyncio.run(trained())
    assert 0 < items == wrong <= 32
    assert sum(one.results["steps"] for one in (source, sft, then)) == 14
    assert all(one.results["seconds"]["training"] > 0 for one in (source, sft, then))
    gains = sft_then_grpo._gains("gain_points", [then], [source])
    assert gains["gain_points_by_seed"] == [round(100 * (then.accuracy("after") - source.accuracy("after")), 2)]


def test_control_of_sft_then_grpo_fails_for_each_reason():
    fair = {"control_gain_points": -1.0, "dataset_items": [9], "dataset_items_wrong": 9, "accuracy_grpo": [0.5]}
    assert not sft_then_grpo.control_failed(fair)
    for change, words in (
        ({"control_gain_points": 6.0}, "wrong answers gained"),
        ({"dataset_items_wrong": 7}, "only 7 wrong answers"),
        ({"accuracy_grpo": [0.9]}, "ceiling"),
    ):
        assert words in sft_then_grpo.control_failed(fair | change)
