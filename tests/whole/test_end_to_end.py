"""The main job with everything real: server over stdio, keeper, crew, TRL, a policy that learns."""

from __future__ import annotations

import io
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest
from mcp import Client
from rich.console import Console
from toprope_server.cli.demo import DemoReport, run_demo, server_parameters

from toprope.records.journal.groups import Counts
from toprope.records.run.folder import RunFolder
from toprope.records.run.metrics import read_rows
from toprope.records.run.specification import Specification
from toprope.records.run.status import Status, read_events

pytestmark = pytest.mark.slow

SHORT = {
    "budget.max_train_seconds": 150,  # more than the steps need: what is learned must not hang on the load
    "budget.steps": 300,
    "evaluation.heldout_tasks": 100,
    "evaluation.greedy": False,
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An owner's folders, in which the embedded policy is made by the first run that needs it."""
    folder = tmp_path_factory.mktemp("home")
    yield folder
    assert crew_processes(folder) == []


def variables(home: Path) -> dict[str, str]:
    return {"TOPROPE_HOME": str(home), "TOPROPE_CONFIG": str(home / "config")}


def crew_processes(home: Path) -> list[psutil.Process]:
    """Processes of any run under this home: keepers by their arguments, members by their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            inside = process.environ().get("TOPROPE_RUN_FOLDER", "") + " ".join(process.cmdline())
        except psutil.Error:
            continue
        if str(home / "runs") in inside:
            found.append(process)
    return found


def until(condition: Any, seconds: float, what: str) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what} did not come true within {seconds} s"
        time.sleep(0.05)
    return value


@pytest.fixture(scope="module")
def report(home: Path) -> DemoReport:
    """The demo, shorter: made policy, test, training, results."""

    async def run() -> DemoReport:
        return await run_demo(Console(file=io.StringIO()), changes=SHORT, variables=variables(home))

    return anyio.run(run)


def test_accuracy_rises_by_more_than_the_intervals(report: DemoReport) -> None:
    before, after = (report.results["evaluations"][label]["sampled"] for label in ("before", "after"))
    assert before["accuracy"] <= 0.1
    assert after["accuracy"] > before["high"] + 0.1
    assert report.results["rose"] is True
    assert before["tasks"] == after["tasks"] == 100
    assert report.start_answer_seconds < 3


def test_the_run_folder_tells_the_whole_story(report: DemoReport, home: Path) -> None:
    folder = RunFolder.open(home / "runs", report.run_id)
    status = Status.read(folder)
    assert status.state == "completed"
    states = [event.data["to"] for event in read_events(folder.events) if event.kind == "state"]
    assert states == ["validating", "starting", "training", "evaluating", "completed"]
    rows = read_rows(folder.metrics)
    assert [row["step"] for row in rows] == list(range(1, report.results["steps"] + 1))
    assert {"loss", "reward", "entropy", "grad_norm", "learning_rate", "success", "staleness/max"} <= set(rows[-1])
    assert rows[-1]["success"] > rows[0]["success"]
    assert max(row["version"] for row in rows) == len(rows)
    counts = Counts(**status.counts)
    assert counts.balanced()
    assert counts.committed >= len(rows) * 8
    assert not folder.crew.exists()
    assert folder.plot.read_bytes().startswith(b"\x89PNG")


def test_the_checkpoint_is_a_model_that_spells(report: DemoReport) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = Path(report.results["checkpoint"]) / "model"
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    examples = report.results["examples"]
    assert len(examples) == 6
    for example in examples:
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": example["prompt"]}], add_generation_prompt=True, return_tensors="pt"
        )["input_ids"]
        with torch.no_grad():
            made = model.generate(ids, max_new_tokens=7, do_sample=False, pad_token_id=tokenizer.pad_token_id)
        assert tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True) == example["after"]


def test_run_folder_has_no_secrets_or_heldout_tasks(report: DemoReport, home: Path) -> None:
    folder = RunFolder.open(home / "runs", report.run_id)
    evaluation = json.loads(folder.evaluation("after").read_text())
    assert set(evaluation) >= {"sampled", "examples"}
    assert "prompt" not in json.dumps(evaluation["sampled"])
    for path in folder.path.rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, path


def test_run_outlives_its_server_and_next_server_stops_it(home: Path) -> None:
    """SIGKILL of the server in mid-run."""

    async def first() -> str:
        async with Client(server_parameters(variables(home))) as client:
            before = {child.pid for child in psutil.Process().children()}
            made = await client.call_tool(
                "select_environment", {"name": "reasoning_gym/spell_backward", "preset": "cpu-embedded"}
            )
            draft_id = made.structured_content["draft_id"]
            await client.call_tool("edit_config", {"draft_id": draft_id, "changes": {"evaluation.heldout_tasks": 0}})
            started = await client.call_tool("start_training", {"draft_id": draft_id})
            run_id = started.structured_content["run_id"]
            folder = RunFolder.open(home / "runs", run_id)
            await anyio.to_thread.run_sync(
                lambda: until(lambda: Status.read(folder).state == "training", 60, "training")
            )
            [server] = [
                child
                for child in psutil.Process().children()
                if child.pid in before and "toprope_server.cli" in " ".join(child.cmdline())
            ]
            os.kill(server.pid, signal.SIGKILL)
            return run_id

    async def second(run_id: str) -> None:
        async with Client(server_parameters(variables(home))) as client:
            listed = (await client.call_tool("list_runs", {"state": "live"})).structured_content["runs"]
            assert [run["run_id"] for run in listed] == [run_id]
            status = (await client.call_tool("check_status", {"run_ids": [run_id]})).structured_content
            assert status["runs"][0]["state"] == "training"
            assert status["runs"][0]["numbers"]["step"] > 0
            stopped = (await client.call_tool("stop_training", {"run_id": run_id})).structured_content
            assert stopped["was_live"]

    run_id = anyio.run(first)
    folder = RunFolder.open(home / "runs", run_id)
    step = Status.read(folder).progress["step"]
    until(lambda: Status.read(folder).progress["step"] > step + 5, 30, "the run going on")
    anyio.run(second, run_id)
    status = until(lambda: Status.read(folder) if Status.read(folder).ended_at else None, 30, "the end")
    assert status.state == "stopped"
    assert status.checkpoint is not None
    assert (folder.path / status.checkpoint["path"] / "model" / "model.safetensors").is_file()
    until(lambda: not crew_processes(home), 10, "the crew's end")


@pytest.mark.parametrize("victim", ["inference", "environment"])
def test_component_death_fails_run_with_reason(report: DemoReport, home: Path, victim: str) -> None:
    """Where the configuration leaves no restarts; tests/training/driver/test_restarts.py has runs that go on."""
    changes = {"evaluation.heldout_tasks": 0, "launcher.restarts": 0}

    async def run() -> str:
        async with Client(server_parameters(variables(home))) as client:
            made = await client.call_tool(
                "select_environment", {"name": "reasoning_gym/spell_backward", "preset": "cpu-embedded"}
            )
            draft_id = made.structured_content["draft_id"]
            await client.call_tool("edit_config", {"draft_id": draft_id, "changes": changes})
            return (await client.call_tool("start_training", {"draft_id": draft_id})).structured_content["run_id"]

    run_id = anyio.run(run)
    folder = RunFolder.open(home / "runs", run_id)
    until(lambda: Status.read(folder).state == "training", 60, "training")
    pid = Status.read(folder).crew[victim].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    status = until(lambda: Status.read(folder) if Status.read(folder).ended_at else None, 30, "the end")
    assert status.state == "failed"
    assert status.failure is not None
    assert (status.failure.component, status.failure.signal) == (victim, "SIGKILL")
    assert status.failure.hint
    until(lambda: not crew_processes(home), 10, "the crew's end")


def test_dataset_file_trains_without_code(report: DemoReport, home: Path) -> None:
    """A JSONL file, adapters, evaluations along the way, wandb without a key; then the checkpoint is asked."""
    consonants, vowels = "bcdfghklmnprst", "aeiou"
    words = [a + b + c for a in consonants for b in vowels for c in consonants]
    (home / "datasets").mkdir()
    lines = [json.dumps({"word": word, "back": word[::-1]}) + "\n" for word in words[::2]]
    (home / "datasets" / "words.jsonl").write_text("".join(lines))
    prompt = "Spell this word backward (example: sun -> nus): {word}"
    changes = {
        "environment.knobs.path": "words.jsonl",
        "environment.knobs.prompt": prompt,
        "environment.knobs.reference": "back",
        "policy.lora": True,
        "evaluation.heldout_tasks": 40,
        "evaluation.greedy": False,
        "evaluation.every_steps": 30,
        "evaluation.validation_tasks": 20,
        "logging.wandb": "offline",
        "budget.max_train_seconds": 20,
    }

    async def call(client: Client, tool: str, **arguments: Any) -> Any:
        answer = await client.call_tool(tool, arguments)
        assert not answer.is_error, answer.content
        return answer.structured_content

    async def run() -> tuple[dict[str, Any], dict[str, Any]]:
        async with Client(server_parameters(variables(home))) as client:
            draft_id = (await call(client, "select_environment", name="dataset"))["draft_id"]
            await call(client, "edit_config", draft_id=draft_id, changes=changes)
            run_id = (await call(client, "start_training", draft_id=draft_id))["run_id"]
            with anyio.fail_after(150):
                while not Status.read(RunFolder.open(home / "runs", run_id)).ended_at:
                    await anyio.sleep(0.2)
            asked = await call(client, "ask_checkpoint", run_id=run_id, prompts=[prompt.format(word=words[3])])
            return await call(client, "get_results", run_id=run_id), asked

    told, asked = anyio.run(run)
    assert told["state"] == "completed", told
    results = told["results"]
    before, after = (results["evaluations"][label]["sampled"]["accuracy"] for label in ("before", "after"))
    assert after > before + 0.2
    along = [one for label, one in results["evaluations"].items() if label.startswith("step-")]
    assert along and all(one["split"] == "validation" and one["sampled"]["tasks"] == 20 for one in along)
    assert results["wandb"]["mode"] == "offline" and "url" not in results["wandb"]
    [offline] = results["trackers"]["wandb"]["folders"]
    assert list(Path(offline).glob("*.wandb"))
    assert (Path(results["weights"]) / "adapter_model.safetensors").is_file()
    assert asked["state"] == "completed"
    assert sorted(asked["answers"][0]["answers"][0]) == sorted(words[3])
    until(lambda: not crew_processes(home), 10, "the crew's end")


def test_fine_tuning_learns_from_a_data_set_of_a_run(report: DemoReport, home: Path) -> None:
    """The demo's right answers become a data set, from which a crew teaches the policy that the demo began with."""
    changes = {
        "algorithm.name": "sft",
        "sft.dataset": "spelled",
        "sft.epochs": 3,
        "sft.batch_size": 32,
        "sft.learning_rate": 0.002,
        "evaluation.heldout_tasks": 100,
        "evaluation.greedy": False,
    }

    async def run() -> tuple[dict[str, Any], str]:
        async with Client(server_parameters(variables(home))) as client:

            async def call(tool: str, **arguments: Any) -> dict[str, Any]:
                answer = await client.call_tool(tool, arguments)
                assert not answer.is_error, answer.content
                return answer.structured_content

            where = {"success": True, "per_task": 1}
            order = {"name": "spelled", "sources": [report.run_id], "where": where}
            while (built := await call("build_dataset", **order))["state"] != "done":
                await anyio.sleep(0.1)
            draft = await call("select_environment", name="reasoning_gym/spell_backward", preset="cpu-embedded")
            await call("edit_config", draft_id=draft["draft_id"], changes=changes)
            run_id = (await call("start_training", draft_id=draft["draft_id"]))["run_id"]
            with anyio.fail_after(120):
                while not Status.read(RunFolder.open(home / "runs", run_id)).ended_at:
                    await anyio.sleep(0.2)
            return built, run_id

    built, run_id = anyio.run(run)
    folder = RunFolder.open(home / "runs", run_id)
    status, frozen = Status.read(folder), Specification.read(folder)
    assert status.state == "completed", status.failure
    assert (status.kind, frozen.dataset.name, "api" in status.crew) == ("sft", "spelled@v1", False)
    rows = read_rows(folder.metrics)
    traces = map(json.loads, (folder.path / "traces.jsonl").read_text().splitlines())
    learned = sum("task_id" in trace for trace in traces)
    assert 500 < learned <= built["items"] and len(rows) == -(-3 * learned // 32)
    assert rows[-1]["loss"] < 0.7 * rows[0]["loss"]
    before, after = (status.evaluations[label]["accuracy"] for label in ("before", "after"))
    assert before <= 0.15 and after > before + 0.2
    until(lambda: not crew_processes(home), 10, "the crew's end")


def test_stopped_run_resumes_and_learns_as_if_not_stopped(home: Path) -> None:
    """Stopped in the middle through one server, resumed through another."""
    changes = {
        "budget.steps": 180,
        "budget.max_train_seconds": None,
        "evaluation.heldout_tasks": 100,
        "evaluation.greedy": False,
    }

    async def first() -> str:
        async with Client(server_parameters(variables(home))) as client:
            made = await client.call_tool(
                "select_environment", {"name": "reasoning_gym/spell_backward", "preset": "cpu-embedded"}
            )
            draft_id = made.structured_content["draft_id"]
            await client.call_tool("edit_config", {"draft_id": draft_id, "changes": changes})
            run_id = (await client.call_tool("start_training", {"draft_id": draft_id})).structured_content["run_id"]
            folder = RunFolder.open(home / "runs", run_id)
            await anyio.to_thread.run_sync(
                lambda: until(lambda: Status.read(folder).progress.get("step", 0) >= 80, 240, "step 80")
            )
            refused = await client.call_tool("resume_training", {"run_id": run_id})
            assert refused.is_error and "under its keeper" in refused.content[0].text
            await client.call_tool("stop_training", {"run_id": run_id})
            return run_id

    async def second(run_id: str) -> dict[str, Any]:
        async with Client(server_parameters(variables(home))) as client:
            return (await client.call_tool("resume_training", {"run_id": run_id})).structured_content

    run_id = anyio.run(first)
    folder = RunFolder.open(home / "runs", run_id)
    step = until(lambda: Status.read(folder).ended_at and Status.read(folder), 30, "the end").checkpoint["step"]
    assert step == read_rows(folder.metrics)[-1]["step"] >= 80
    resumed = anyio.run(second, run_id)
    assert (resumed["attempt"], resumed["from_step"]) == (2, step)
    status = until(lambda: Status.read(folder) if Status.read(folder).ended_at else None, 240, "the end")
    assert status.state == "completed", status.failure
    written = [row["step"] for row in map(json.loads, folder.metrics.read_text().splitlines()) if "step" in row]
    assert written == list(range(1, 181))
    rows = read_rows(folder.metrics)
    before, after = rows[step - 1], rows[step]
    assert [row["version"] for row in rows] == [row["step"] for row in rows]
    assert after["learning_rate"] < before["learning_rate"] and after["train_seconds"] > before["train_seconds"]
    assert after["rollouts"] > before["rollouts"] and after["staleness/max"] <= 8

    # The curve goes on where it was: a policy that had lost its weights would spell as it did at the start.
    def mean(some: list[dict[str, Any]]) -> float:
        return sum(row["success"] for row in some) / len(some)

    start, left, joined = mean(rows[:10]), mean(rows[step - 20 : step]), mean(rows[step : step + 20])
    assert joined > left - 0.1 and joined > start + (left - start) / 2
    labels = [event.data["label"] for event in read_events(folder.events) if event.kind == "evaluation"]
    assert labels == ["before", "after"]
    assert status.evaluations["after"]["accuracy"] > status.evaluations["before"]["accuracy"]
    assert status.evaluations["after"]["policy_version"] == 180
    assert Counts(**status.counts).balanced()
    until(lambda: not crew_processes(home), 10, "the crew's end")
