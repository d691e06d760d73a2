"""Confirmations of starts by a person, as an agent meets them."""

from __future__ import annotations

import json
import time
from functools import partial

import pytest
from toprope_tools.planning.config import edit_config
from toprope_tools.runs import ask
from toprope_tools.runs.inference import test_inference as try_inference
from toprope_tools.runs.training import start_training

from tests.support.tools_house import become, do
from tests.tools.results.test_research import finish, owner
from toprope.errors import NotPossibleNow
from toprope.records.run.specification import AskPlan, ModelUnderTest, TestPlan
from toprope.workbench.approvals import Approvals
from toprope.workbench.launch.start import StartRequest


def test_confirmation_is_bound_to_the_preview(house, draft):
    shop, _ = house
    owner(shop, "confirm: always")
    with pytest.raises(NotPossibleNow, match="wants every start confirmed") as refused:
        do(start_training, shop, draft_id=draft)
    told = do(start_training, shop, draft_id=draft, preview=True).data.preview["hash"]
    assert f"toprope approve {told}" in refused.value.hint
    with pytest.raises(NotPossibleNow, match="names something else"):
        do(start_training, shop, draft_id=draft, confirm="0" * 12)
    Approvals(shop.home).approve(told)
    do(edit_config, shop, draft_id=draft, changes={"budget.steps": 77})
    with pytest.raises(NotPossibleNow, match=r"(?s)names something else.*77 steps") as changed:
        do(start_training, shop, draft_id=draft, confirm=told)
    assert told not in changed.value.hint and shop.statuses() == []
    before = Approvals(shop.home).pending()
    shown = do(start_training, shop, draft_id=draft, preview=True)
    again = shown.data.preview["hash"]
    assert "wants every start confirmed. The start asks for it." in shown.text
    assert Approvals(shop.home).pending() == before, "a preview asks nobody"
    with pytest.raises(NotPossibleNow, match="names something else"):
        do(start_training, shop, draft_id=draft, confirm=again, seeds=2)
    with pytest.raises(NotPossibleNow, match="wants every start confirmed"):
        do(start_training, shop, draft_id=draft, confirm=again)
    assert "budget.steps 77" in Approvals(shop.home).pending()[0].details["changes"]  # the owner sees what is special
    Approvals(shop.home).approve(again)
    assert do(start_training, shop, draft_id=draft).data.state == "queued"


def test_only_starts_above_the_owners_threshold_are_confirmed(house, draft):
    shop, _ = house
    owner(shop, "confirm: {above: {steps: 500}}")
    do(edit_config, shop, draft_id=draft, changes={"budget.steps": 501})
    with pytest.raises(NotPossibleNow, match="above 500 steps"):
        do(start_training, shop, draft_id=draft)
    do(edit_config, shop, draft_id=draft, changes={"budget.steps": 500})
    do(start_training, shop, draft_id=draft)
    owner(shop, "confirm: {above: {cost_usd: 1}}")
    do(edit_config, shop, draft_id=draft, changes={"budget.steps": 400})
    with pytest.raises(NotPossibleNow, match="an unknown amount"):
        do(start_training, shop, draft_id=draft)


def test_tests_and_questions_are_confirmed_if_they_cost_or_take_too_much(house, draft):
    shop, launcher = house
    owner(shop, "confirm: always\nprices: {cpu_hour_usd: 1}")
    starts = (
        lambda: do(try_inference, shop, draft_id=draft, tasks=4, group_size=2).data.run_id,
        lambda: ask._of_draft(shop, draft, lambda *_: AskPlan(conversations=[[]], max_new_tokens=1, asked="x")).run_id,
    )
    for start in starts:
        with pytest.raises(NotPossibleNow, match="wants every start confirmed"):
            start()
        [asked] = Approvals(shop.home).pending()
        Approvals(shop.home).approve(asked.hash)
        launcher.leave(start())
    owner(shop, "confirm: always")  # processors have no price
    for start in starts:
        launcher.leave(start())
    bounds = "confirm: {above: {cost_usd: 0.01, wall_hours: 1}}\nper_run: {wall_hours: %s}"
    owner(shop, bounds % 1)
    run_id = starts[0]()
    owner(shop, bounds % 2)
    with pytest.raises(NotPossibleNow, match="above 1 .*this may take up to 2"):
        starts[0]()
    now = time.time()
    become(shop.runs.folder(run_id), "completed", started_at=now - 1800, ended_at=now)  # half an hour was measured
    launcher.leave(starts[0]())
    with pytest.raises(NotPossibleNow, match="this may take up to 2"):
        do(try_inference, shop, draft_id=draft, tasks=5, group_size=2)


def test_estimates_of_tests_and_uses_come_from_alike_ones(house, draft):
    shop, launcher = house

    def request(plan):
        return StartRequest(shop.drafts.get(draft), plan, "x")

    def hours(plan):
        estimate = shop.starter.preview(request(plan))[0].estimates["wall_hours"]
        return estimate and estimate.high

    def took(plan, seconds):
        [made] = shop.starter.start(request(plan)).specifications
        become(shop.runs.folder(made.run_id), "completed", started_at=1e9, ended_at=1e9 + seconds)
        launcher.leave(made.run_id)

    use = partial(AskPlan, max_new_tokens=1, asked="x")
    questions, served = use(conversations=[[]] * 3), use(serve_s=1800.0)
    assert hours(served) == 0.5
    took(use(serve_s=3600.0), 3600 + 72)
    assert hours(served) == pytest.approx(0.52), "72 s to load"
    assert hours(questions) is None
    basis = shop.starter.preview(request(questions))[0].basis
    assert "no comparable run of this kind with at least as many answers" in basis and "short run" not in basis
    took(questions, 36)
    assert hours(questions) == pytest.approx(0.01)
    plan = TestPlan(tasks=4, group_size=1)
    took(plan.model_copy(update={"models": [ModelUnderTest(name="base")]}), 36)
    assert hours(plan) is None


def test_confirmed_values_stay_while_a_run_trains(house, draft):
    shop, launcher = house
    owner(shop, "confirm: always")
    told = do(start_training, shop, draft_id=draft, preview=True).data.preview["hash"]
    Approvals(shop.home).ask(told, "a run")
    Approvals(shop.home).approve(told)
    live = shop.runs.folder(do(start_training, shop, draft_id=draft, confirm=told).data.run_id)
    for step, seconds in ((10, 10.0), (40, 90.0)):
        now = time.time()
        live.metrics.write_text(json.dumps({"step": step, "train_seconds": seconds}) + "\n")
        become(live, "training", started_at=now - 200, training_at=now - 100)
        assert do(start_training, shop, draft_id=draft, preview=True).data.preview["hash"] == told
    finish(shop, launcher, live.run_id, 50)
    assert do(start_training, shop, draft_id=draft, preview=True).data.preview["hash"] != told


def test_threshold_counts_all_runs_of_group(house, draft):
    shop, _ = house
    owner(shop, "confirm: {above: {cpu_hours: 1}}\nper_run: {cpu_hours: 0.5}")
    assert not do(start_training, shop, draft_id=draft, preview=True, seeds=2).data.preview["estimates"]["cpu_hours"]
    do(start_training, shop, draft_id=draft, seeds=2)
    with pytest.raises(NotPossibleNow, match=r"above 1 CPU-hours.*may take up to 1\.5"):
        do(start_training, shop, draft_id=draft, seeds=3, again=True)
