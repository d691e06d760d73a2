"""Interpreters stay for those who will use them, and runs take those that are there."""

from __future__ import annotations

import fcntl
import os
import sys
from pathlib import Path

import pytest

from tests.support.tools_house import become, make_workshop
from toprope.errors import InvalidValue
from toprope.records.run.specification import AskPlan, EnvironmentSource, Specification
from toprope.settings.owner import Home
from toprope.trajectories.jobs.jobs import Job
from toprope.trajectories.jobs.orders import Order
from toprope.workbench.interpreters.store import digests_in_use
from toprope.workbench.launch.freeze import freeze_question
from toprope.workbench.launch.open_runs import variables_to_resume


@pytest.fixture
def shop(tmp_path):
    shop, launcher = make_workshop(tmp_path)
    shop.home.ensure()
    yield shop
    launcher.close()


def specification(shop, run_id, **fields):
    source = EnvironmentSource(name="tiny", adapter="dataset", target="{}")
    fields = {"environment": source, "config": {}, **fields}
    return Specification.model_validate(
        {"run_id": run_id, "kind": "train", "created_at": 0, "toprope_version": "0",
         "policy_cache": str(shop.home.policies), **fields}
    )  # fmt: skip


def test_interpreters_of_runs_that_may_go_on_are_kept(shop):
    source = EnvironmentSource(name="tiny", adapter="dataset", target="{}", interpreter="/store/abc/bin/python")
    folder = shop.runs.start(specification(shop, "tiny-1", environment=source))
    assert digests_in_use(shop.home, ["abc", "other"]) == {"abc"}
    shop.runs.launcher.leave("tiny-1")
    for state, more, goes_on in (
        ("lost", {"resume_at": 5.0}, True), ("lost", {"resume_at": None}, False),
        ("stopped", {}, True), ("completed", {}, False),
    ):  # fmt: skip
        become(folder, state, ended_at=1.0, **more)
        assert digests_in_use(shop.home, ["abc"], resumable=True) == ({"abc"} if goes_on else set()), state
        assert not digests_in_use(shop.home, ["abc"]), "its checkout may be removed"


def test_interpreters_of_live_data_jobs_are_kept(tmp_path: Path) -> None:
    home = Home(tmp_path / "home", tmp_path / "config")
    source = EnvironmentSource(name="tiny", adapter="dataset", target="{}", interpreter="/store/abc/bin/python")
    order = Order(kind="build", environments={"tiny": source})
    job = Job.of(home.datasets / ".jobs", order)
    job.folder.mkdir(parents=True)
    (job.folder / "order.json").write_text(order.model_dump_json())
    assert not digests_in_use(home, ["abc"])
    held = os.open(job.folder / "job.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(held, fcntl.LOCK_EX)
    assert digests_in_use(home, ["abc", "other"]) == {"abc"}
    os.close(held)


def test_questions_take_the_engine_that_is_there_now(shop, monkeypatch):
    run = specification(shop, "tiny-1", engine_python="/gone/python")
    run.config.inference.engine = "vllm"
    monkeypatch.setattr("toprope.workbench.launch.start.engine_python", lambda home, name: sys.executable)
    asked = freeze_question(run, run.config.policy, shop.home.locks(), AskPlan(max_new_tokens=4, asked=""))
    [started] = shop.starter.start_frozen([asked]).specifications
    assert started.engine_python == sys.executable


def test_run_without_its_interpreter_is_not_resumed(shop):
    variables_to_resume(shop.home, specification(shop, "tiny-1", engine_python=sys.executable))
    with pytest.raises(InvalidValue, match="does not exist any more"):
        variables_to_resume(shop.home, specification(shop, "tiny-1", engine_python="/gone/python"))
