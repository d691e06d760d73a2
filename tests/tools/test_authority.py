"""The owner's locks and limits hold on every way in that a tool offers."""

from __future__ import annotations

import json
import time

import pytest
import yaml
from toprope_server.cli.app import build
from toprope_server.mcp.tool_registry import ALL_TOOLS
from toprope_server.tool_specs.hermes import hermes_tools
from toprope_tools.data import build_dataset
from toprope_tools.experiments.config_history import reproduce_run, undo_edit
from toprope_tools.planning.config import edit_config
from toprope_tools.planning.environment_check import check_environment
from toprope_tools.runs.inference import test_inference as start_test
from toprope_tools.runs.training import resume_training, start_training
from typer.testing import CliRunner

from tests.support.tools_house import become, do, start_run
from tests.support.ways_past_locks import WAYS, recipe
from tests.tools.parameter_fields import SETS, SETS_NOTHING
from toprope.errors import InvalidValue, LockedField, NotFound, NotPossibleNow
from toprope.records.purse import FILE, Purse
from toprope.records.run.specification import EnvironmentSource, RewardSource, Specification, TrainPlan
from toprope.settings.presets import load_preset
from toprope.settings.schema import Config
from toprope.supervisor.capacity.budget_ledger import read_accounts
from toprope.workbench.approvals import Approvals
from toprope.workbench.catalog.catalog import Catalog
from toprope.workbench.data import begin, build_order
from toprope.workbench.launch.freeze import freeze
from toprope.workbench.launch.mixture_sources import Ingredients
from toprope.workbench.launch.open_runs import variables_to_resume
from toprope.workbench.launch.start import StartRequest

EVERY_TOOL = (*ALL_TOOLS, *hermes_tools)
MODEL = {"base_url": "http://127.0.0.1:9/v1", "model": "vendor/x"}
KNOBS = [{"name": "length", "type": "int", "default": 4, "ge": 1, "le": 9}]


def lock(shop, field, **bound):
    entry = {"field": field, "reason": "The owner says so.", **bound}
    (shop.home.configuration / "locks.yaml").write_text(yaml.safe_dump({"locks": [entry]}))


def limit(shop, text):
    (shop.home.configuration / "limits.yaml").write_text(text)


def settle(shop, **settings):
    shop.home.settings_file.write_text(yaml.safe_dump(settings))


def drafted(shop):
    """A draft of an environment that no worker has to load."""
    shop.home.ensure()
    preset = load_preset("cpu-embedded", shop.home.preset_folders)
    source = EnvironmentSource(name="dice", file="/nowhere/dice.py", attribute="Dice")
    return shop.drafts.create(source, preset, KNOBS, shop.home.locks())[0].id


def ended(shop, launcher, **config):
    """A training run that was stopped, with the given sections."""
    folder = start_run(shop, config=Config.model_validate(config))
    become(folder, "stopped", ended_at=time.time())
    launcher.leave(folder.run_id)
    return folder.run_id


def test_every_parameter_of_every_tool_is_known():
    for spec in EVERY_TOOL:
        sets, nothing = set(SETS.get(spec.name, {})), SETS_NOTHING.get(spec.name, frozenset())
        parameters = set(spec.build().parameters["properties"])
        assert parameters == sets | nothing, f"{spec.name}: say in parameter_fields what each parameter sets"
        assert not sets & nothing
    assert {*SETS, *SETS_NOTHING} <= {spec.name for spec in EVERY_TOOL}


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_a_parameter_does_not_pass_a_lock(house, way):
    shop, launcher = house
    settle(shop, models={"mine": {**MODEL, "prompt_usd": 0, "completion_usd": 0}})
    draft = drafted(shop)
    lock(shop, way.field, **way.bound)
    with pytest.raises(LockedField, match="The owner says so"):
        way.attack(shop, draft)
    assert not launcher.held and not shop.statuses() and not list(shop.home.path.glob("datasets/.jobs/*"))


def test_every_parameter_that_sets_named_fields_is_attacked():
    named = {
        (tool, parameter)
        for tool, ways in SETS.items()
        for parameter, fields in ways.items()
        if not any("*" in field for field in fields)
    }
    elsewhere = {("resume_training", "steps"), ("resume_training", "seconds")}  # test_continuation.py
    assert named - elsewhere <= {(way.tool.__name__, way.parameter) for way in WAYS}


def test_a_newer_lock_holds_for_what_was_made_before(house):
    shop, launcher = house
    draft = drafted(shop)
    do(edit_config, shop, draft_id=draft, changes={"optimizer.learning_rate": 0.009})
    do(edit_config, shop, draft_id=draft, changes={"optimizer.learning_rate": 0.0005})
    run = ended(shop, launcher, optimizer={"learning_rate": 0.009})
    lock(shop, "optimizer.learning_rate", max=0.001)
    before = len(shop.statuses())
    for attack in (
        lambda: do(resume_training, shop, run_id=run),
        lambda: do(reproduce_run, shop, run_id=run),
        lambda: variables_to_resume(shop.home, Specification.read(shop.runs.folder(run))),
    ):
        with pytest.raises(LockedField, match="The owner says so"):
            attack()
    assert len(shop.statuses()) == before and not launcher.held
    undone = do(undo_edit, shop, draft_id=draft, revision=2)
    assert shop.drafts.get(draft).config.optimizer.learning_rate <= 0.001, undone.text
    (shop.home.configuration / "locks.yaml").unlink()
    assert do(resume_training, shop, run_id=run).data.attempt == 2


def test_a_withdrawn_tool_is_withdrawn_from_what_was_made_before(house):
    shop, launcher = house
    settle(shop, tools={"wiki": {"url": "http://127.0.0.1:9/mcp"}})
    shop.home.ensure()
    preset = load_preset("cpu-embedded", shop.home.preset_folders)
    knobs = [{"name": "tools", "type": "list[str]", "default": ["wiki"]}]
    source = Catalog.of_home(shop.home).find("orchestrator").environment
    draft = shop.drafts.create(source, preset, knobs, shop.home.locks())[0].id
    run = do(start_training, shop, draft_id=draft).data.run_id
    become(shop.runs.folder(run), "stopped", ended_at=time.time())
    launcher.leave(run)
    settle(shop)
    for attack in (
        lambda: do(start_training, shop, draft_id=draft),
        lambda: do(start_training, shop, draft_id=draft, preview=True),
        lambda: do(reproduce_run, shop, run_id=run),
        lambda: do(resume_training, shop, run_id=run),
    ):
        with pytest.raises(LockedField, match="does not lend the tool 'wiki'"):
            attack()
    assert not launcher.held


def test_a_lost_run_does_not_resume_by_itself_against_a_newer_lock(house):
    shop, launcher = house
    folder = start_run(shop, config=Config.model_validate({"optimizer": {"learning_rate": 0.009}}))
    become(folder, "lost", ended_at=time.time(), resume_at=time.time() - 1)
    launcher.leave(folder.run_id)
    lock(shop, "optimizer.learning_rate", max=0.001)
    shop.runs._variables = lambda specification: variables_to_resume(shop.home, specification)
    status = shop.runs.status(folder.run_id)
    assert status.state == "lost" and status.resume_at is None and "The owner says so" in status.reason
    assert not launcher.held


def test_a_check_of_a_draft_is_held_to_newer_locks(house):
    shop, _ = house
    draft = drafted(shop)
    lock(shop, "environment.knobs.length", max=2)
    shop.catalog.find = lambda name: pytest.fail("nothing is loaded")
    with pytest.raises(LockedField, match="The owner says so"):
        do(check_environment, shop, name=draft)


def test_wrong_types_are_told_as_such(house):
    shop, _ = house
    draft = drafted(shop)
    lock(shop, "rollout.group_size", max=4)
    with pytest.raises(InvalidValue) as refused:
        do(edit_config, shop, draft_id=draft, changes={"rollout.group_size": "many"})
    assert not isinstance(refused.value, LockedField) and "whole number" in str(refused.value)
    (shop.home.configuration / "locks.yaml").write_text("locks: [{field: rollout.group_sise, max: 4, reason: x}]")
    with pytest.raises(InvalidValue, match="rollout.group_size") as wrong:
        shop.home.locks()
    assert "Fix the file" in wrong.value.hint and "get_config" not in wrong.value.hint


def test_the_shipped_locks_bound_every_learning_rate(house):
    shop, _ = house
    draft = drafted(shop)
    for field in ("optimizer.learning_rate", "sft.learning_rate", "ppo.value_learning_rate"):
        with pytest.raises(LockedField, match=field):
            do(edit_config, shop, draft_id=draft, changes={field: 0.5})
    assert shop.drafts.get(draft).config.ppo.value_learning_rate is None, "null follows optimizer.learning_rate"


def priced(shop, **price):
    settle(shop, models={"mine": MODEL | ({"prompt_usd": 10.0, "completion_usd": 50.0} | price)})


def test_a_model_without_a_price_is_refused_under_a_limit_on_cost(house):
    shop, launcher = house
    settle(shop, models={"mine": MODEL})
    draft = drafted(shop)
    limit(shop, "per_day: {cost_usd: 5}\nprices: {cpu_hour_usd: 0}\n")
    with pytest.raises(NotPossibleNow, match="prompt_usd and completion_usd of the model mine"):
        do(start_test, shop, draft_id=draft, models=["mine"])
    with pytest.raises(NotPossibleNow, match="prompt_usd and completion_usd of the model mine"):
        do(build_dataset, shop, name="x", recipe=recipe({"teacher": "mine"}))
    assert not launcher.held and not list(shop.home.datasets.glob(".jobs/*/order.json"))


def test_a_test_of_a_priced_model_reserves_what_is_left_and_no_other_spends_it(house):
    shop, launcher = house
    priced(shop)
    draft = drafted(shop)
    limit(shop, "per_day: {cost_usd: 0.01}\nprices: {cpu_hour_usd: 0}\n")
    run = do(start_test, shop, draft_id=draft, models=["mine"], tasks=4, group_size=2).data.run_id
    cap = Specification.read(shop.runs.folder(run)).limits.caps["cost_usd"]
    assert (cap.value, cap.limit) == (0.01, "per_day.cost_usd")
    for attack in (
        lambda: do(start_test, shop, draft_id=draft, models=["mine"]),
        lambda: do(build_dataset, shop, name="x", recipe=recipe({"teacher": "mine"})),
    ):
        with pytest.raises(NotPossibleNow, match=r"per_day\.cost_usd"):
            attack()
    # A crash: what the run spent stays spent, what it had reserved is free again.
    Purse(shop.runs.folder(run).path / FILE, cap.value, cap.limit).reserve(0.004)
    launcher.leave(run)
    [account] = read_accounts(shop.home.runs)
    assert account.held("cost_usd") == pytest.approx(0.004)
    second = do(start_test, shop, draft_id=draft, models=["mine"]).data.run_id
    assert Specification.read(shop.runs.folder(second)).limits.caps["cost_usd"].value == pytest.approx(0.006)


def test_a_program_that_builds_a_data_set_is_in_the_same_account(house, monkeypatch):
    shop, _ = house
    priced(shop)
    limit(shop, "per_day: {cost_usd: 1}\nper_run: {cost_usd: 0.4}\nprices: {cpu_hour_usd: 0}\n")
    monkeypatch.setattr("toprope.trajectories.jobs.jobs.Job.begin", lambda job, order, keys: None)
    job = begin(shop.home, build_order(shop.home, shop.catalog, "x", [], None, recipe({"teacher": "mine"})))
    frozen = json.loads((job.folder / "limits.json").read_text())
    assert frozen["caps"]["cost_usd"]["value"] == 0.4
    [account] = read_accounts(shop.home.runs)
    assert account.live and not account.is_run and account.held("cost_usd") == pytest.approx(0.4)
    Purse(job.folder / FILE, None).reserve(0.3)
    assert read_accounts(shop.home.runs)[0].held("cost_usd") == pytest.approx(0.4)
    # It is started again after a crash: what it spent counts against its own limit, too.
    begin(shop.home, build_order(shop.home, shop.catalog, "x", [], None, recipe({"teacher": "mine"})))
    assert json.loads((job.folder / "limits.json").read_text())["caps"]["cost_usd"]["value"] == pytest.approx(0.4)


def test_the_same_order_again_does_not_renew_the_limit_of_the_day(house, monkeypatch):
    """The attack: an agent repeats a data set's build after each end."""
    shop, _ = house
    priced(shop)
    limit(shop, "per_day: {cost_usd: 1}\nper_run: {cost_usd: 0.4}\nprices: {cpu_hour_usd: 0}\n")
    monkeypatch.setattr("toprope.trajectories.jobs.jobs.Job.begin", lambda job, order, keys: None)
    monkeypatch.setattr("toprope.trajectories.jobs.jobs.Job.is_awaited", lambda job, stored: False)
    caps = []
    with pytest.raises(NotPossibleNow, match=r"per_day\.cost_usd is 1 USD.* 0\.2 are left"):
        for _ in range(4):
            job = begin(shop.home, build_order(shop.home, shop.catalog, "x", [], None, recipe({"teacher": "mine"})))
            caps.append(json.loads((job.folder / "limits.json").read_text())["caps"]["cost_usd"]["value"])
            purse = Purse(job.folder / FILE, caps[-1], "cost_usd")
            left = caps[-1] - purse.total
            purse.settle(purse.reserve(left), left)
            (job.folder / "outcome.json").write_text("{}")
    assert caps == pytest.approx([0.4, 0.8])


def test_a_run_made_from_another_has_the_models_that_the_owner_lends_now(house):
    shop, launcher = house
    settle(shop, models={"mine": {**MODEL, "prompt_usd": 0, "completion_usd": 0}})
    limit(shop, "per_day: {cost_usd: 5}\nprices: {cpu_hour_usd: 0}\n")
    run = do(start_test, shop, draft_id=drafted(shop), models=["mine"], tasks=2, group_size=2).data.run_id
    become(shop.runs.folder(run), "stopped", ended_at=time.time())
    launcher.leave(run)
    settle(shop, models={"mine": {**MODEL, "prompt_usd": 1000.0, "completion_usd": 1000.0}})
    again = do(reproduce_run, shop, run_id=run).data.run_id
    assert Specification.read(shop.runs.folder(again)).test.models[0].endpoint.prompt_usd == 1000.0
    become(shop.runs.folder(again), "stopped", ended_at=time.time())
    launcher.leave(again)
    settle(shop, models={})
    for attack in (
        lambda: do(reproduce_run, shop, run_id=run),
        lambda: variables_to_resume(shop.home, Specification.read(shop.runs.folder(run))),
    ):
        with pytest.raises(NotFound, match="no model 'mine'"):
            attack()


def test_calls_to_priced_models_are_confirmed_like_training(house):
    shop, launcher = house
    priced(shop)
    draft = drafted(shop)
    limit(shop, "confirm: always\n")
    for attack in (
        lambda: do(start_test, shop, draft_id=draft, models=["mine"]),
        lambda: do(build_dataset, shop, name="x", recipe=recipe({"teacher": "mine"})),
    ):
        with pytest.raises(NotPossibleNow, match="confirmed"):
            attack()
    assert not launcher.held and len(Approvals(shop.home).pending()) == 2
    do(start_test, shop, draft_id=draft)  # the draft's own policy costs no money
    first = next(one for one in Approvals(shop.home).pending() if "kind test" in one.text)
    Approvals(shop.home).approve(first.hash)
    with pytest.raises(NotPossibleNow, match="confirmed"):
        do(start_test, shop, draft_id=draft, models=["mine"], tasks=9)
    assert do(start_test, shop, draft_id=draft, models=["mine"]).data.run_id
    with pytest.raises(NotPossibleNow, match="confirmed"):
        do(start_test, shop, draft_id=draft, models=["mine"])


def test_an_approval_holds_for_the_code_that_was_there(house, tmp_path):
    shop, launcher = house
    limit(shop, "confirm: always\n")
    files = [tmp_path / f"{name}.py" for name in ("dice", "reward", "helper")]
    for file in files:
        file.write_text("import helper\n")
    preset = load_preset("cpu-embedded", shop.home.preset_folders)
    source = EnvironmentSource(name="dice", file=str(files[0]), attribute="Dice")
    source.rewards = [RewardSource(name="r", file=str(files[1]), attribute="r")]
    shop.home.ensure()
    draft = shop.drafts.get(shop.drafts.create(source, preset, KNOBS, shop.home.locks())[0].id)
    specification = freeze(draft, shop.home.locks(), TrainPlan(), policy_cache="", ingredients=Ingredients(source))
    request = StartRequest(draft, TrainPlan())
    with pytest.raises(NotPossibleNow, match="confirmed") as asked:
        shop.starter.start_frozen([specification], request)
    Approvals(shop.home).approve(asked.value.preview.hash)
    for file in files:
        file.write_text("another")
        with pytest.raises(NotPossibleNow, match="confirmed"):
            shop.starter.start_frozen([specification], request)
        file.write_text("import helper\n")
    assert not launcher.held
    shop.starter.start_frozen([specification], request)


def test_a_start_that_is_refused_for_another_reason_keeps_its_approval(house):
    shop, _ = house
    limit(shop, "confirm: always\n")
    draft = drafted(shop)
    for options in ({}, {"again": True}):
        told = do(start_training, shop, draft_id=draft, preview=True).data.preview["hash"]
        Approvals(shop.home).ask(told, "a run")
        Approvals(shop.home).approve(told)
        if not options:
            do(start_training, shop, draft_id=draft)
            assert not Approvals(shop.home).pending(), "it is used"
    with pytest.raises(NotPossibleNow, match="running already"):
        do(start_training, shop, draft_id=draft)
    assert Approvals(shop.home).has(told)
    do(start_training, shop, draft_id=draft, again=True)
    assert not Approvals(shop.home).pending()


def test_requests_of_others_undo_neither_a_decision_of_the_owner_nor_a_request(house):
    shop, _ = house
    approvals = Approvals(shop.home)
    shop.home.ensure()
    approved, refused = "a" * 16, "b" * 16
    for told in (approved, refused):
        approvals.ask(told, "a run", {"draft_id": "d-2"})
    approvals.approve(approved)
    approvals.refuse(refused)
    waits = "c" * 16
    approvals.ask(waits, "a run", {"draft_id": "d-1"})
    for number in range(105):
        assert approvals.ask(f"{number:016}", "a run", {"draft_id": "d-2"})
    assert approvals.has(approved) and approvals.refused(refused)
    assert {one.hash for one in approvals.pending()} == {approved, waits, *(f"{n:016}" for n in range(95, 105))}
    with pytest.raises(NotPossibleNow, match="100 starts wait"):
        for number in range(200, 300):
            approvals.ask(f"{number:016}", "a run", {"draft_id": f"d-{number}"})
    assert len(approvals.pending()) == 101 and approvals.named(waits)


def test_requests_without_a_draft_push_out_no_other(house):
    shop, _ = house
    shop.home.ensure()
    approvals = Approvals(shop.home)
    for number in range(100):
        approvals.ask(f"{number:016}", "a data set")
    assert len(approvals.pending()) == 100
    with pytest.raises(NotPossibleNow, match="100 starts wait"):
        approvals.ask("f" * 16, "a data set")


def test_approvals_expire_and_are_used_once(house, monkeypatch):
    shop, _ = house
    approvals = Approvals(shop.home)
    shop.home.ensure()
    approvals.ask("0123456789abcdef", "a run")
    assert not approvals.use("0123456789abcdef"), "a request is no approval"
    [asked] = approvals.pending()
    approvals.approve("0123456789abcdef")
    [approved] = approvals.pending()
    assert approved.at == asked.at and approved.expires_at > asked.expires_at, "it expires a day after the decision"
    approvals.ask("0123456789abcdef", "a run")
    assert approvals.use("0123456789abcdef") and not approvals.use("0123456789abcdef")
    approvals.ask("0123456789abcdef", "a run")
    approvals.approve("0123456789abcdef")
    monkeypatch.setattr("toprope.workbench.approvals.EXPIRES_S", -1.0)
    assert not approvals.use("0123456789abcdef") and approvals.pending() == []


def test_a_person_approves_by_first_digits_and_sees_the_start(house, monkeypatch):
    shop, _ = house
    shop.home.ensure()
    monkeypatch.setenv("TOPROPE_HOME", str(shop.home.path))
    monkeypatch.setenv("TOPROPE_CONFIG", str(shop.home.configuration))
    approvals = Approvals(shop.home)
    one, like_it, decided = "4f2a9c01" + "0" * 16, "4f2a9c01" + "1" * 16, "4f2a9c01" + "2" * 16
    for told in (one, decided):
        approvals.ask(told, f"a run {told[-1]}")
    approvals.refuse(decided)
    for short in ("4f2a9c0", "4f2a9c02", "*" * 8):
        assert approve(short).exit_code == 1
    declined = approve("4f2a9c01", "n\n")
    assert declined.exit_code == 1 and f"{one}: a run 0. Approve it?" in declined.stdout
    assert not approvals.has(one)
    with pytest.raises(InvalidValue, match="only a part"):
        approvals.approve("4f2a9c01")
    assert approve("4f2a9c01", "y\n").exit_code == 0
    assert approvals.has(one) and approvals.refused(decided)
    approvals.ask(like_it, "a run 1")
    assert approve("4f2a9c01", "y\n").exit_code == 0, "the first is decided"
    assert approvals.has(like_it)
    for told in (one, like_it):
        approvals.forget(told)
        approvals.ask(told, "a run")
    assert "2 starts that wait begin with 4f2a9c01" in approve("4f2a9c01", "y\n").stderr
    assert approve(one).exit_code == 0, "a whole hash needs no question"


def approve(hash, typed=""):
    return CliRunner().invoke(build(), ["approve", hash], input=typed)
