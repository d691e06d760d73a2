"""The ten tools of Hermes Agent through the official client: names, parameters, results, and our rules beneath."""

import json
import re
import time

import anyio
import pytest
import yaml
from mcp.client import Client
from mcp.types import Implementation
from toprope_server.mcp.app import TopropeServer
from toprope_server.mcp.roles import Role
from toprope_server.tool_specs.hermes import in_hermes_words
from toprope_tools.answers.answer import Answer
from toprope_tools.answers.runs import Started
from toprope_tools.hermes import _tested
from toprope_tools.workshop import Workshop

from tests.support.services.openai_stand_in import OpenAiStandIn
from tests.support.tools_house import become, make_workshop, start_run, step
from toprope.analysis.findings.rules import mended
from toprope.records.run.specification import TestPlan
from toprope.records.run.status import Finding
from toprope.settings.owner import Home

TEN = {
    "rl_list_environments": set(),
    "rl_select_environment": {"name"},
    "rl_get_current_config": set(),
    "rl_edit_config": {"field", "value"},
    "rl_start_training": {"again"},
    "rl_check_status": {"run_id"},
    "rl_stop_training": {"run_id"},
    "rl_get_results": {"run_id"},
    "rl_list_runs": set(),
    "rl_test_inference": {"num_steps", "group_size", "models"},
}


@pytest.fixture
def house(tmp_path):
    shop, launcher = make_workshop(tmp_path)
    yield shop, launcher
    launcher.close()


def settle(shop, **settings):
    shop.home.configuration.mkdir(exist_ok=True)
    shop.home.settings_file.write_text(yaml.safe_dump(settings))


def talk(shop, work, sets="hermes", server=None, **options):
    """Run an async function with a client, whose answers it gets as the JSON objects that Hermes' tools gave."""

    async def main():
        with anyio.fail_after(60):
            offered = server or TopropeServer(lambda: shop, role=Role.of(sets=sets))
            async with Client(offered, **options) as client:

                async def call(name, /, **arguments):
                    result = await client.call_tool(name, arguments)
                    told = json.loads(result.content[0].text)
                    assert bool(result.is_error) == ("error" in told and "status" not in told), told
                    return told

                return await work(client, call)

    return anyio.run(main)


def test_they_are_listed_only_if_the_owner_asks(house):
    async def listed(client, _):
        return {tool.name: tool for tool in (await client.list_tools()).tools}, client.instructions

    ours, _ = talk(house[0], listed, sets=None)
    assert not [name for name in ours if name.startswith("rl_")]
    theirs, instructions = talk(house[0], listed)
    assert {name: set(one.input_schema["properties"]) for name, one in theirs.items()} == TEN
    assert "rl_select_environment" in instructions and "fork_config" not in instructions
    both, _ = talk(house[0], listed, sets="hermes,plan,run,read")
    assert set(both) == set(ours) | set(theirs)
    reading, _ = talk(house[0], listed, server=TopropeServer(lambda: house[0], role=Role.of(True, "hermes")))
    assert set(reading) & set(TEN) == {
        "rl_list_environments", "rl_get_current_config", "rl_check_status", "rl_get_results", "rl_list_runs"
    }  # fmt: skip


def test_a_training_as_a_skill_for_hermes_does_it(house):
    shop, launcher = house

    async def work(_, call):
        listed = await call("rl_list_environments")
        assert listed["count"] == len(listed["environments"]) > 50
        [letters] = [one for one in listed["environments"] if one["name"] == "sort_letters"]
        assert letters["file_path"].endswith("template.py") and letters["class_name"] == "SortLetters"
        chosen = await call("rl_select_environment", name="sort_letters")
        assert chosen["file_path"] == letters["file_path"]
        config = await call("rl_get_current_config")
        fields = {one["name"]: one for one in config["configurable_fields"] + config["locked_fields"]}
        assert fields["group_size"]["current_value"] == 8 and fields["use_wandb"]["current_value"] is False
        assert fields["batch_size"]["current_value"] % 8 == 0 and fields["shortest"]["type"] == "integer"
        edited = await call("rl_edit_config", field="group_size", value=4)
        assert (edited["field"], edited["value"], edited["config"]["group_size"]) == ("group_size", 4, 4)
        assert (await call("rl_edit_config", field="batch_size", value=24))["config"]["batch_size"] == 24
        await call("rl_edit_config", field="total_steps", value=50)
        await call("rl_edit_config", field="longest", value=4)
        await call("rl_edit_config", field="rollout.temperature", value=0.9)
        started = await call("rl_start_training")
        run_id = started["run_id"]
        assert started["status"] == "starting" and started["config"]["total_steps"] == 50
        assert set(started["logs"]) == {"api", "trainer", "env"} and started["wandb_run_name"] == run_id
        folder = shop.runs.folder(run_id)
        config = yaml.safe_load((folder.path / "spec.json").read_text())["config"]
        assert (config["rollout"]["group_size"], config["rollout"]["groups_per_step"]) == (4, 6)
        assert config["environment"]["knobs"]["longest"] == 4 and config["rollout"]["temperature"] == 0.9
        become(folder, "training", training_at=time.time())
        step(folder, 3, total=50, success=0.25)
        seen = await call("rl_check_status", run_id=run_id)
        assert seen["status"] == "running" and seen["metrics"]["step"] == 3
        assert seen["metrics"]["percent_correct"] == 0.25 and seen["environment"] == "sort_letters"
        again = await call("rl_check_status", run_id=run_id)
        assert again["rate_limited"] is True and again["next_check_in_seconds"] > 1
        assert (await call("rl_list_runs"))["runs"][0]["status"] == "running"
        refused = (await call("rl_start_training"))["error"]
        assert run_id in refused and " start_training(" not in refused and "rl_start_training(again=true)" in refused
        twin = (await call("rl_start_training", again=True))["run_id"]
        assert twin != run_id and (await call("rl_stop_training", run_id=twin))["status"] == "stopped"
        stopped = await call("rl_stop_training", run_id=run_id)
        assert stopped["status"] == "stopped"
        assert "is not running" in (await call("rl_stop_training", run_id=run_id))["message"]
        results = await call("rl_get_results", run_id=run_id)
        assert results["status"] == "stopped" and "history" in results and "final_metrics" in results

    talk(shop, work)
    assert not launcher.held


def test_values_that_come_as_texts_are_read_and_a_changed_batch_is_told(house):
    async def work(_, call):
        await call("rl_select_environment", name="sort_letters")
        edited = await call("rl_edit_config", field="batch_size", value="64")
        assert (edited["config"]["batch_size"], edited["message"]) == (64, "Updated batch_size = 64")
        edited = await call("rl_edit_config", field="use_wandb", value="False")
        assert edited["config"]["use_wandb"] is False
        edited = await call("rl_edit_config", field="group_size", value="4")
        assert edited["message"].endswith("; batch_size is now 32, because a step takes 8 groups")
        fields = {one["name"]: one for one in (await call("rl_get_current_config"))["configurable_fields"]}
        assert fields["batch_size"]["description"].startswith("Answers per optimizer step")
        deep = (await call("rl_edit_config", field="batch_size", value="[" * 19_000))["error"]
        assert "is not a multiple of group_size 4" in deep
        refused = (await call("rl_edit_config", field="group_size", value="several"))["error"]
        assert "rl_get_current_config shows the fields and locks of the selected environment." in refused

    talk(house[0], work)


def test_warnings_and_findings_are_told(house):
    shop, _ = house
    settle(shop, preset="cpu-embedded")
    advice = mended("warning", "Answers are cut off.", {}, {"rollout.max_new_tokens": 64})
    found = Finding(rule="truncated", level="warning", what=advice.what, next=advice.next, step=9)

    async def work(_, call):
        await call("rl_select_environment", name="sort_letters")
        started = await call("rl_start_training")
        assert any(line.startswith("Warning (unknown_task)") for line in started["warnings"])
        assert any(" rl_edit_config " in line for line in started["warnings"])
        assert not any(re.search(r"\b(edit_config|test_inference|start_training)\b", w) for w in started["warnings"])
        run_id = started["run_id"]
        edit = "rl_edit_config rollout.max_new_tokens to 64, and rl_start_training again"
        for state, end, following in (("training", None, f"rl_stop_training, then {edit}"), ("stopped", 1.0, edit)):
            become(shop.runs.folder(run_id), state, training_at=time.time(), ended_at=end, findings=[found])
            expected = {"rule": "truncated", "level": "warning", "what": found.what, "next": following}
            assert (await call("rl_check_status", run_id=run_id))["findings"] == [expected]
            assert (await call("rl_get_results", run_id=run_id))["findings"] == [expected]

    talk(shop, work)


@pytest.mark.parametrize(
    ("tool", "arguments", "said"),
    [
        ("rl_get_current_config", {}, "rl_select_environment"),
        ("rl_start_training", {}, "No environment selected"),
        ("rl_test_inference", {}, "No environment selected"),
        ("rl_select_environment", {"name": "sort_leters"}, "sort_letters"),
        ("rl_check_status", {"run_id": "none"}, "no run 'none'"),
        ("rl_edit_config", {"field": "x"}, "value is missing"),
        ("rl_test_inference", {"num_steps": 0}, "from 1 to 1000"),
    ],
)
def test_refusals_are_json_with_cause_and_remedy(house, tool, arguments, said):
    told = talk(house[0], lambda _, call: call(tool, **arguments))
    assert list(told) == ["error"] and said in told["error"]
    assert not house[1].held


def test_locks_confirmations_and_unknown_fields_hold(house):
    shop, launcher = house
    settle(shop, preset="hermes")
    (shop.home.configuration / "limits.yaml").write_text("confirm: always\n")

    async def work(_, call):
        await call("rl_select_environment", name="sort_letters")
        config = await call("rl_get_current_config")
        locked = {one["name"]: one for one in config["locked_fields"]}
        assert locked["learning_rate"]["locked_value"] == 4e-5 and locked["use_wandb"]["locked_value"] is True
        assert {"tokenizer_name", "max_token_length", "total_steps", "max_batches_offpolicy"} <= set(locked)
        for field, value, part in (
            ("learning_rate", 1e-3, "Fixed by Hermes"),
            ("use_wandb", False, "Weights & Biases"),
            ("slurm", True, "Available fields: "),
            ("batch_size", 17, "multiple of group_size 16"),
        ):
            assert part in (await call("rl_edit_config", field=field, value=value))["error"]
        shop.home.settings_file.write_text("variables: {tracker: {WANDB_API_KEY: w}, trainer: {TINKER_API_KEY: t}}\n")
        assert "toprope approve" in (await call("rl_start_training"))["error"]

    talk(shop, work)
    assert not launcher.held


def test_a_person_is_asked_before_the_start(house):
    from mcp.types import ElicitResult

    shop, launcher = house
    shop.home.configuration.mkdir()
    (shop.home.configuration / "limits.yaml").write_text("confirm: always\n")
    answers = iter([False, True])

    async def person(_, question):
        assert "Start this training run?" in question.message
        return ElicitResult(action="accept", content={"start": next(answers)})

    async def work(_, call):
        await call("rl_select_environment", name="sort_letters")
        assert "did not agree" in (await call("rl_start_training"))["error"]
        assert (await call("rl_start_training"))["run_id"] in launcher.held

    talk(shop, work, elicitation_callback=person)


def test_each_client_of_a_server_has_its_own_selection(house):
    shop, _ = house
    server = TopropeServer(lambda: shop, role=Role.of(sets="hermes"))

    def as_client(name, work):
        return talk(shop, work, server=server, client_info=Implementation(name=name, version="1"))

    as_client("one", lambda _, call: call("rl_select_environment", name="sort_letters"))
    assert "No environment" in as_client("two", lambda _, call: call("rl_get_current_config"))["error"]
    assert as_client("one", lambda _, call: call("rl_get_current_config"))["environment"] == "sort_letters"


def test_keys_of_lent_tools_are_not_shown(tmp_path):
    home = Home(tmp_path / "home", tmp_path / "config")
    home.configuration.mkdir()
    weather = {"command": ["weather"], "variables": {"API_KEY": "weather-4711-key"}}
    home.settings_file.write_text(yaml.safe_dump({"tools": {"weather": weather}}))
    shop = Workshop.open(home)

    async def work(_, call):
        chosen = await call("rl_select_environment", name="orchestrator")
        return chosen, await call("rl_list_environments")

    chosen, listed = talk(shop, work)
    assert chosen["file_path"] == "orchestrator" and "4711" not in json.dumps([chosen, listed])


def test_hints_name_the_tools_that_are_offered(house):
    async def work(_, call):
        return (await call("rl_get_results", run_id="no-such-run-1234"))["error"]

    assert "\nrl_list_runs names" in talk(house[0], work)
    assert "\nlist_runs names" in talk(house[0], work, sets="hermes,read")
    ours = 'Next: check_status(run_ids=["a"], wait_s=45); get_config shows it; rl_stop_training ends it; read_logs.'
    theirs = "Next: rl_check_status; rl_get_current_config shows it; rl_stop_training ends it; read_logs."
    assert in_hermes_words(ours, {}) == theirs


def test_equal_calls_at_once_share_one_test(house, monkeypatch):
    shop, launcher = house
    starts = []

    async def start(*_, **__):
        await anyio.sleep(0.05)
        starts.append(start_run(shop, "test", test=TestPlan(tasks=1, group_size=1)).run_id)
        become(shop.runs.folder(starts[-1]), "stopped", ended_at=time.time())
        launcher.leave(starts[-1])
        return Answer("", Started(run_id=starts[-1], kind="test", draft_id="d", revision=1, state="queued"))

    monkeypatch.setattr("toprope_tools.runs.inference.test_inference", start)

    async def work(_, call):
        await call("rl_select_environment", name="sort_letters")
        told = []

        async def test():
            told.append((await call("rl_test_inference", num_steps=1, group_size=1))["run_id"])

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(test)
            tasks.start_soon(test)
        await test()
        return told

    told = talk(shop, work)
    assert told[0] == told[1] == starts[0] and told[2] == starts[1] and len(starts) == 2


def test_models_are_measured_in_a_real_run(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    models = OpenAiStandIn(lambda question: "".join(sorted(question.split()[-1].strip("."))))
    shop = Workshop.open(Home(tmp_path / "home", tmp_path / "config"))
    known = {name: {"base_url": models.url, "model": name} for name in ("right", "mute")}
    settle(shop, models=known, status={"waits": {"patient": 50}})

    async def work(_, call):
        await call("rl_select_environment", name="sort_letters")
        return await call("rl_test_inference", num_steps=3, group_size=2, models=["right", "mute"])

    try:
        told = talk(shop, work, client_info=Implementation(name="patient", version="1"))
    finally:
        models.close()
    plan = {"num_steps": 3, "group_size": 2, "rollouts_per_model": 6, "total_rollouts": 12}
    assert told["test_config"] == plan and told["environment_file"].endswith("template.py")
    right, mute = told["models_tested"]
    assert (right["model"], right["steps_tested"], right["total_completions"]) == ("right", 3, 6)
    assert right["accuracy"] == right["step_success_rate"] == 1.0 and right["steps"][2]["scores"] == [1.0, 1.0]
    assert mute["correct_completions"] == 0 and mute["steps_with_correct"] == 0
    assert told["summary"]["best_model"] == "right" and told["summary"]["models_succeeded"] == 2


def test_answers_without_a_score_are_no_steps():
    """Of three tasks, one answer is an error and two have no verdict."""
    measured = {"rollouts": 4, "tasks": 2}
    told = _tested({"name": "a", "model": "a", "scores": [[1.0, 0.0], [], [1.0]], "measured": measured})
    assert [one["step"] for one in told["steps"]] == [1, 3] and told["steps_tested"] == 2
    assert (told["total_completions"], told["accuracy"], told["step_success_rate"]) == (4, 0.5, 1.0)
    failed = _tested({"name": "a", "model": "a", "scores": [], "measured": None, "error": "no key"})
    assert (failed["total_completions"], failed["accuracy"], failed["step_success_rate"]) == (0, 0, 0)
