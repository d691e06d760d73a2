"""Testing models by name, and asking policies: what is refused, what goes where, and real runs of both."""

from __future__ import annotations

import json
import time

import pytest
import yaml
from toprope_tools.planning.config import edit_config
from toprope_tools.planning.environments import describe_environment, list_environments, select_environment
from toprope_tools.results.results import get_results
from toprope_tools.runs.ask import ask_checkpoint
from toprope_tools.runs.inference import test_inference as start_test
from toprope_tools.runs.sweeps import start_sweep
from toprope_tools.runs.training import start_training
from toprope_tools.workshop import Workshop

from tests.support.services.openai_stand_in import OpenAiStandIn
from tests.support.tools_house import become, do
from toprope.atomic import write_json
from toprope.errors import EnvironmentFailed, InvalidValue, LockedField, NotFound, NotPossibleNow
from toprope.records.run.specification import Specification
from toprope.records.run.tested_models import ENDPOINT_KEY, AnsweredConversation, write_answers
from toprope.settings.fields import all_fields
from toprope.settings.locks import Locks
from toprope.settings.owner import Home
from toprope.settings.presets import load_preset
from toprope.shipped import CONFIGS

KEY = "sk-very-secret-0123456789"
SPY = '''
import os

from toprope.sdk import Environment, Task


class Spy(Environment):
    """Sorts letters, and fails if it can see a key."""

    def setup(self):
        assert not [name for name, value in os.environ.items() if "very-secret" in value]

    def tasks(self):
        for number in range(100):
            yield Task(f"Sort {number:03d}", reference="".join(sorted(f"{number:03d}")))

    def score(self):
        return float(self.answer.strip() == self.task.reference)
'''
ENDPOINT = {"base_url": "http://127.0.0.1:9/v1", "model": "vendor/x", "key": "MY_API_KEY"}


@pytest.fixture(autouse=True)
def no_keys(monkeypatch, tmp_path):
    for name in ("OPENROUTER_API_KEY", "MY_API_KEY", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


def settle(shop, **settings):
    shop.home.configuration.mkdir(exist_ok=True)
    shop.home.settings_file.write_text(yaml.safe_dump(settings))


def drafted(shop, name="sort_letters", **named):
    return do(select_environment, shop, name=name, **named).data.draft_id


def test_missing_key_is_named_with_its_place(house):
    shop, launcher = house
    draft_id = drafted(shop)
    with pytest.raises(InvalidValue) as refused:
        do(start_test, shop, draft_id=draft_id, models=["openrouter"])
    text = str(refused.value)
    assert "OPENROUTER_API_KEY for openrouter/small, openrouter/medium, openrouter/large" in text
    assert str(shop.home.settings_file) in text and "models: {OPENROUTER_API_KEY" in text
    assert not launcher.held and not shop.statuses()


@pytest.mark.parametrize("name", ["https://evil.example/v1", "evil.example://x", "HTTP://x"])
def test_agent_gives_names_and_no_urls(house, name):
    shop, launcher = house
    with pytest.raises(InvalidValue, match="Name models, not URLs.*base, hermes"):
        do(start_test, shop, draft_id=drafted(shop), models=[name])
    assert not launcher.held


def test_unknown_model_is_answered_with_nearest_name(house):
    shop, _ = house
    settle(shop, models={"my-vllm": ENDPOINT})
    with pytest.raises(NotFound, match="Did you mean my-vllm"):
        do(start_test, shop, draft_id=drafted(shop), models=["myvllm"])
    for models, wrong in [([], "0 models"), (["openrouter", "hermes", "my-vllm", "base", "openrouter"], None)]:
        if wrong:
            with pytest.raises(InvalidValue, match=wrong):
                do(start_test, shop, draft_id=drafted(shop), models=models)


def test_any_model_at_a_named_endpoint_takes_its_key_and_no_prices(house):
    shop, launcher = house
    settle(shop, models={"mine": {**ENDPOINT, "prompt_usd": 1.0}}, variables={"models": {"MY_API_KEY": KEY}})
    draft_id = drafted(shop)
    names = ["mine:qwen/qwen3-8b:free", "mine:vendor/x"]
    tested = do(start_test, shop, draft_id=draft_id, models=names, tasks=3, group_size=2).data.run_id
    plan = Specification.read(shop.runs.folder(tested)).test
    first, second = plan.models
    assert (first.name, first.endpoint.model) == (names[0], "qwen/qwen3-8b:free")
    assert first.endpoint.base_url == ENDPOINT["base_url"] and first.endpoint.key == "MY_API_KEY"
    assert first.endpoint.prompt_usd is None and second.endpoint.prompt_usd == 1.0
    assert KEY in launcher.variables[tested]["environment"].values()
    for wrong in ("other:qwen/x", "mine:", "mine:a b", "base:x"):
        with pytest.raises(NotFound, match="NAME:MODEL"):
            do(start_test, shop, draft_id=draft_id, models=[wrong])
    with pytest.raises(InvalidValue, match="OPENROUTER_API_KEY for openrouter:qwen/qwen3-8b"):
        do(start_test, shop, draft_id=draft_id, models=["openrouter:qwen/qwen3-8b"])


@pytest.mark.parametrize("place", ["models", "*", "surroundings"])
def test_key_goes_to_driver_of_that_test_only(house, place, monkeypatch):
    shop, launcher = house
    variables = {"*": {"HTTPS_PROXY": "http://proxy"}, "trainer": {"X": "1"}}
    if place == "surroundings":
        monkeypatch.setenv("MY_API_KEY", KEY)
    else:
        variables.setdefault(place, {})["MY_API_KEY"] = KEY
    settle(shop, models={"mine": ENDPOINT}, variables=variables)
    draft_id = drafted(shop)
    tested = do(start_test, shop, draft_id=draft_id, models=["mine"], tasks=3, group_size=2).data.run_id
    given = launcher.variables[tested]
    assert given["environment"] == {f"{ENDPOINT_KEY}MY_API_KEY": KEY}
    assert KEY not in json.dumps({name: values for name, values in given.items() if name != "environment"})
    assert "models" not in given and given["trainer"] == {"X": "1"}
    folder = shop.runs.folder(tested)
    assert all(KEY.encode() not in path.read_bytes() for path in folder.path.rglob("*") if path.is_file())
    plan = Specification.read(folder).test
    assert [(model.name, model.endpoint.model, model.endpoint.key) for model in plan.models] == [
        ("mine", "vendor/x", "MY_API_KEY")
    ]
    trained = do(start_training, shop, draft_id=draft_id).data.run_id
    assert KEY not in json.dumps(launcher.variables[trained])


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"base_url": "ftp://x", "model": "m"}, "base_url"),
        ({"base_url": "https://user:pw@x/v1", "model": "m"}, "base_url"),
        ({"base_url": "https://x/v1", "model": "m", "key": KEY}, "key"),
        ({"base_url": "https://x/v1"}, "model"),
        ({"base_url": "https://x/v1", "model": "m", "price": 1}, "price"),
    ],
)
def test_mistake_in_owners_file_is_named_without_its_value(house, entry, said):
    shop, _ = house
    settle(shop, models={"mine": entry})
    with pytest.raises(InvalidValue, match=f"settings.yaml, models, mine: {said}") as wrong:
        shop.settings()
    assert KEY not in str(wrong.value) and "pw" not in str(wrong.value)


def test_hermes_preset_has_known_values_and_locks():
    home = Home(CONFIGS / "nowhere", CONFIGS / "nowhere")
    preset = load_preset("hermes", home.preset_folders)
    config = preset.config("x")
    assert (config.policy.model, config.policy.lora, config.policy.lora_rank) == ("Qwen/Qwen3-8B", True, 32)
    assert (config.optimizer.learning_rate, config.budget.steps, config.logging.save_steps) == (4e-5, 2500, 25)
    assert (config.rollout.max_new_tokens, config.policy.max_context) == (8192, 9000)
    assert (config.rollout.group_size, config.rollout.max_staleness, config.rollout.concurrency) == (16, 3, 2048)
    assert (config.logging.wandb, config.launcher.kind, config.environment.call_timeout_s) == ("online", "local", 3600)
    assert config.evaluation.every_steps == 25
    assert [model.model for model in preset.models.values()] == [
        "qwen/qwen3-8b", "z-ai/glm-4.7-flash", "minimax/minimax-m2.5"
    ]  # fmt: skip
    assert "WANDB_API_KEY" in preset.description
    locks = Locks({}).under(preset.locks)
    assert locks.adjust(config, all_fields())[1] == []
    assert locks.refusal("optimizer.learning_rate", 1e-5) and locks.refusal("policy.model", "embedded")


def test_preset_hermes_brings_its_locks_to_its_own_drafts(house):
    shop, _ = house
    settle(shop, preset="hermes")
    draft_id = drafted(shop)
    for changes in ({"optimizer.learning_rate": 1e-5}, {"policy.model": "embedded"}, {"logging.wandb": "offline"}):
        with pytest.raises(LockedField, match="Fixed by Hermes|Hermes fixes|Weights & Biases"):
            do(edit_config, shop, draft_id=draft_id, changes=changes)
    # The owner's own locks stay above them: fewer workers, and no other launcher.
    assert 0 < shop.drafts.get(draft_id).config.rollout.concurrency < 2048
    with pytest.raises(LockedField):
        do(edit_config, shop, draft_id=draft_id, changes={"rollout.concurrency": 2048})
    other = drafted(shop, preset="cpu-embedded")
    do(edit_config, shop, draft_id=other, changes={"optimizer.learning_rate": 1e-5, "budget.steps": 10})
    with pytest.raises(LockedField, match="Fixed by Hermes"):
        settle(shop, preset="hermes", variables={"tracker": {"WANDB_API_KEY": "w"}})
        space = {"optimizer.learning_rate": {"min": 1e-5, "max": 1e-4}}
        do(start_sweep, shop, draft_id=draft_id, space=space)


def test_hermes_without_a_key_is_refused_at_the_start(house, monkeypatch):
    """A preview says which keys are missing, and checks and estimates the rest."""
    shop, launcher = house
    monkeypatch.setattr("toprope.workbench.launch.start.require", lambda *names, **extra: None)
    draft_id = drafted(shop, preset="hermes")
    shown = do(start_training, shop, draft_id=draft_id, preview=True)
    assert shown.data.state == "not started" and shown.text.count("Warning (key_missing)") == 2
    assert "TINKER_API_KEY" in shown.text and "the service holds the policy" in shown.text
    with pytest.raises(InvalidValue, match="no WANDB_API_KEY. Nothing was started.*offline"):
        do(start_training, shop, draft_id=draft_id)
    assert not launcher.held
    settle(shop, variables={"trainer": {"WANDB_API_KEY": "w"}})
    with pytest.raises(InvalidValue, match="no TINKER_API_KEY. Nothing was started"):
        do(start_training, shop, draft_id=draft_id)
    settle(shop, variables={"trainer": {"WANDB_API_KEY": "w", "TINKER_API_KEY": "t"}})
    assert "key_missing" not in do(start_training, shop, draft_id=draft_id, preview=True).text
    assert do(start_training, shop, draft_id=draft_id).data.run_id in launcher.held


def test_questions_are_checked_before_anything_starts(house):
    shop, launcher = house
    draft_id = drafted(shop)
    for named, said in [
        ({}, "either run_id"),
        ({"run_id": "x", "draft_id": draft_id}, "either run_id"),
        ({"draft_id": draft_id, "prompts": []}, "0 prompts"),
        ({"draft_id": draft_id, "prompts": ["x"] * 21}, "21 prompts"),
        ({"draft_id": draft_id, "prompts": [""]}, "Prompt 1 has 0 characters"),
        (
            {"draft_id": draft_id, "prompts": ["a", [{"role": "robot", "content": "x"}]]},
            "Prompt 2 .*not a message",
        ),
        ({"draft_id": draft_id, "max_new_tokens": 64}, "max_new_tokens must be from 1 to 63"),
        ({"draft_id": draft_id, "count": 3}, "would be the same"),
    ]:
        with pytest.raises(InvalidValue, match=said):
            do(ask_checkpoint, shop, **{"prompts": ["hello"], **named})
    run_id = do(start_training, shop, draft_id=draft_id).data.run_id
    with pytest.raises(NotPossibleNow, match="its checkpoints still change"):
        do(ask_checkpoint, shop, prompts=["x"], run_id=run_id)
    folder = shop.runs.folder(run_id)
    become(folder, "stopped", ended_at=time.time())
    launcher.leave(run_id)
    with pytest.raises(NotPossibleNow, match="has no checkpoint"):
        do(ask_checkpoint, shop, prompts=["x"], run_id=run_id)
    assert not launcher.held


def test_checkpoint_is_asked_with_its_training_prompt(house, monkeypatch):
    shop, launcher = house
    draft_id = drafted(shop)
    do(edit_config, shop, draft_id=draft_id, changes={"policy.lora": True, "rollout.max_new_tokens": 9})
    run_id = do(start_training, shop, draft_id=draft_id).data.run_id
    folder = shop.runs.folder(run_id)
    for step in (5, 7):
        (folder.path / "checkpoints" / f"step-00000{step}" / "model").mkdir(parents=True)
        write_json(folder.path / "checkpoints" / f"step-00000{step}" / "state.json", {"step": step, "cursor": 1})
    checkpoint = {"step": 7, "path": "checkpoints/step-000007", "cursor": 1}
    become(folder, "completed", ended_at=time.time(), checkpoint=checkpoint)
    launcher.leave(run_id)
    monkeypatch.setattr("toprope_tools.runs.ask._WAIT_S", 0.2)
    late = do(ask_checkpoint, shop, prompts=["ab", [{"role": "user", "content": "cd"}]], run_id=run_id, temperature=1.0)
    assert late.data.state == "queued" and "get_results" in late.text and not late.data.answers
    asked = shop.runs.folder(late.data.run_id)
    specification = Specification.read(asked)
    assert specification.kind == "ask" and specification.config.policy.model == str(
        folder.path / "checkpoints" / "step-000007" / "model"
    )
    assert specification.config.policy.lora is False  # the checkpoint brings its adapters
    assert (specification.ask.max_new_tokens, specification.ask.temperature) == (9, 1.0)
    assert [[message["content"] for message in one] for one in specification.ask.conversations] == [["ab"], ["cd"]]
    write_answers(
        asked,
        [
            AnsweredConversation(
                messages=[{"role": "user", "content": "ab"}], answers=["x\u202e" * 40_000], truncated=[True]
            ),
            AnsweredConversation(messages=[{"role": "user", "content": "cd"}], error="no room"),
        ],
    )
    become(asked, "completed", ended_at=time.time())
    told = do(get_results, shop, run_id=late.data.run_id)
    assert "step 7 of" in told.text and "untrusted" in told.text and "(cut off)" in told.text
    assert "not answered: «no room»" in told.text and "\u202e" not in told.text
    assert len(told.text) < 3000 and len(json.dumps(told.data.results)) < 20_000
    (folder.path / "checkpoints" / "step-000007" / "state.json").write_text("{")
    again = do(ask_checkpoint, shop, prompts=["ab"], run_id=run_id, temperature=1.0)
    asked = Specification.read(shop.runs.folder(again.data.run_id))
    assert asked.config.policy.model.endswith("step-000005/model")
    assert "Step 5 of" in again.text or "step 5 of" in asked.ask.asked
    assert "step-000007 cannot be used: state.json is not valid JSON" in asked.ask.asked


def test_questions_keep_the_locks_of_the_preset(house, monkeypatch):
    shop, launcher = house
    presets = shop.home.configuration / "presets"
    presets.mkdir()
    locks = "{field: rollout.max_new_tokens, max: 5, reason: x}, {field: rollout.temperature, min: 0.5, reason: x}"
    (presets / "short.yaml").write_text(f"config: {{rollout: {{max_new_tokens: 5}}}}\nlocks: [{locks}]\n")
    monkeypatch.setattr("toprope_tools.runs.ask._WAIT_S", 0.1)
    draft_id = drafted(shop, preset="short")
    run_id = do(start_training, shop, draft_id=draft_id).data.run_id
    step = shop.runs.folder(run_id).path / "checkpoints" / "step-000005"
    (step / "model").mkdir(parents=True)
    write_json(step / "state.json", {"step": 5, "cursor": 1})
    checkpoint = {"step": 5, "path": "checkpoints/step-000005", "cursor": 1}
    become(shop.runs.folder(run_id), "completed", ended_at=time.time(), checkpoint=checkpoint)
    launcher.leave(run_id)
    for source in ({"run_id": run_id}, {"draft_id": draft_id}):
        for wrong in ({"max_new_tokens": 9}, {"temperature": 0.0}):
            with pytest.raises(LockedField):
                do(ask_checkpoint, shop, prompts=["x"], **source, **wrong)
        asked = do(ask_checkpoint, shop, prompts=["x"], **source).data.run_id
        plan = Specification.read(shop.runs.folder(asked)).ask
        assert (plan.max_new_tokens, plan.temperature) == (5, 0.5)


def test_data_sets_are_in_the_catalog_by_name(house, tmp_path):
    shop, _ = house
    folder = tmp_path / "config" / "environments"
    folder.mkdir()
    (folder / "sums.csv").write_text("a,b,total\n" + "".join(f"{n},{n},{2 * n}\n" for n in range(60)))
    (folder / "sums.yaml").write_text(
        "adapter: dataset\ndescription: Sums\npath: sums.csv\nprompt: '{a} + {b}'\nreference: total\nscorer: numeric\n"
    )
    (folder / "typo.yaml").write_text("adapter: dataset\npaht: sums.csv\n")
    listed = {one.name: one for one in do(list_environments, shop, query="no-code").data.environments}
    assert listed["dataset"].state == "not tried"
    assert (listed["sums"].state, listed["sums"].summary) == ("not tried", "Sums")
    assert "no key 'paht'. Did you mean path?" in listed["typo"].state
    told = do(describe_environment, shop, name="sums")
    assert sum(split["known"] for split in told.data.splits.values()) == 60 and "Remark:" not in told.text
    assert "rewards: reference 1, empty 0, junk 0, near_miss 0" in told.text
    with pytest.raises(InvalidValue, match="Columns: a, b, total"):
        do(describe_environment, shop, name="sums", knobs={"reference": "totl"})
    with pytest.raises(EnvironmentFailed, match="typo is broken"):
        do(describe_environment, shop, name="typo")
    bare = do(describe_environment, shop, name="dataset")
    assert "set its knob path" in bare.text and "scorer" in {knob["name"] for knob in bare.data.knobs}
    draft = shop.drafts.get(drafted(shop, "sums"))
    assert draft.config.environment.knobs["path"] == str(folder / "sums.csv")
    listed = {one.name: one for one in do(list_environments, shop, query="sums").data.environments}
    assert listed["sums"].state == "ready", "it was opened"


@pytest.mark.slow
def test_models_and_the_policy_are_tested_and_asked_in_real_runs(tmp_path, tiny_policy):
    server = OpenAiStandIn(lambda question: "".join(sorted(question.split()[-1].strip("."))))
    shop = Workshop.open(Home(tmp_path / "home", tmp_path / "config"))
    models = {
        name: {"base_url": server.url, "model": name, "key": "MY_API_KEY", "prompt_usd": 1, "completion_usd": 1}
        for name in ("right", "forbidden", "limited")
    }
    settle(shop, models=models, variables={"models": {"MY_API_KEY": KEY}})
    (tmp_path / "config" / "environments").mkdir()
    (tmp_path / "config" / "environments" / "spy.py").write_text(SPY)
    try:
        draft_id = drafted(shop, "spy")
        do(edit_config, shop, draft_id=draft_id, changes={"policy.model": str(tiny_policy), "policy.max_context": 200})
        named = {"models": ["right", "forbidden", "limited", "base"], "tasks": 4, "group_size": 2}
        runs = [do(start_test, shop, draft_id=draft_id, **named).data.run_id]
        do(edit_config, shop, draft_id=draft_id, changes={"policy.model": "/nowhere/at/all"})
        runs.append(do(start_test, shop, draft_id=draft_id, **named).data.run_id)
        found = []
        for run_id in runs:
            status = do(shop.runs.wait_end, run_id, 90)
            assert status.state == "completed", status.failure
            found.append(do(get_results, shop, run_id=run_id).data.results["tested"])
        for tested in found:
            right, forbidden, limited, base = tested["models"]
            assert forbidden["measured"] is None and "401" in forbidden["error"]
            assert limited["measured"]["tasks"] == 4
            assert right["cost_usd"] == pytest.approx(8 * 14 / 1e6)
            assert tested["environment_works"] is True and tested["best"] in ("right", "limited")
        # Whichever of the two runs asked first was told to slow down.
        assert sum(tested["models"][2]["retries"] for tested in found) > 0
        assert found[0]["models"][3]["measured"]["rollouts"] == 8 and found[0]["models"][3]["cost_usd"] is None
        assert found[1]["models"][3]["measured"] is None and "/nowhere/at/all" in found[1]["models"][3]["error"]
        do(edit_config, shop, draft_id=draft_id, changes={"policy.model": str(tiny_policy)})
        answered = do(ask_checkpoint, shop, draft_id=draft_id, prompts=["abc", "x" * 300], max_new_tokens=5)
        assert answered.data.state == "completed"
        assert len(answered.data.answers[0]["answers"]) == 1 and "no room" in answered.data.answers[1]["error"]
        assert {key for _, key, _ in server.seen} == {f"Bearer {KEY}"}
        files = [path for path in (tmp_path / "home").rglob("*") if path.is_file()]
        assert all(KEY.encode() not in path.read_bytes() for path in files)
    finally:
        server.close()
