"""A real run beside a real dashboard: what every route and the app tell of it. No held-out text is among it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp.client import Client
from toprope_server.mcp.app import TopropeServer
from toprope_tools.planning.config import edit_config
from toprope_tools.planning.environments import select_environment
from toprope_tools.runs.training import start_training
from toprope_tools.workshop import Workshop

from tests.server.mcp.test_page_app import Shows
from tests.support.dashboard_page import DashboardProcess, make_bundle, next_change
from tests.support.tools_house import do
from toprope.settings.owner import Home

pytestmark = pytest.mark.slow

CANARY = "zebracanary"
ENVIRONMENT = f'''
from toprope.sdk import Environment, Task


class Copied(Environment):
    """Copies a letter. <img src=x onerror=alert(1)>"""

    def tasks(self, split):
        word = {{"heldout": "{CANARY}", "validation": "check", "train": "plain"}}[split]
        for number in range(40):
            yield Task(f"<script>{{word}}</script> {{number}}", reference=f"{{word}}{{number}}")

    def score(self):
        return len(self.answer) / 100
'''
CHANGES = {
    "policy.max_context": 160,
    "rollout.max_new_tokens": 6,
    "rollout.group_size": 2,
    "rollout.groups_per_step": 2,
    "budget.steps": 25,
    "evaluation.heldout_tasks": 12,
    "evaluation.validation_tasks": 6,
    "evaluation.every_steps": 10,
    "logging.save_steps": 10,
}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory, tiny_policy: Path) -> dict[str, bytes]:
    """All answers about a real run, by question; its changes while it lived are among them."""
    path = tmp_path_factory.mktemp("real")
    home = Home(path / "home", path / "config")
    (home.configuration / "environments").mkdir(parents=True)
    (home.configuration / "environments" / "copied.py").write_text(ENVIRONMENT)
    bundle = make_bundle(path / "page")
    (bundle / "app.html").write_text("app")
    shop = Workshop.open(home)
    draft = do(select_environment, shop, name="copied").data.draft_id
    do(edit_config, shop, draft_id=draft, changes={**CHANGES, "policy.model": str(tiny_policy)})
    page = DashboardProcess(home.path, home.configuration, bundle)
    try:
        page.enter()
        connection, stream = page.events()
        run_id = do(start_training, shop, draft_id=draft).data.run_id
        changes: list[dict[str, Any]] = []
        state, deadline = "", time.monotonic() + 240
        while state not in ("completed", "failed", "lost", "stopped"):
            assert time.monotonic() < deadline
            changes.append(next_change(stream))
            state = shop.runs.status(run_id).state
        connection.close()
        answers = _answers(page, run_id)
        answers["changes"] = json.dumps(changes).encode()
        assert state == "completed", answers["run"]
        answers |= anyio.run(_app_answers, shop, bundle, run_id)
        files = [one for one in shop.runs.folder(run_id).path.rglob("*") if one.is_file()]
        answers["run_id"] = run_id.encode()
        answers["files"] = b"".join(one.read_bytes() for one in files if one.suffix in (".json", ".jsonl"))
        return answers
    finally:
        page.close()


def _answers(page: DashboardProcess, run_id: str) -> dict[str, bytes]:
    run = f"/api/run/{run_id}"
    found = {}
    for name, path in {
        "now": "/api/now",
        "runs": "/api/runs",
        "run": run,
        "look": f"{run}/look?after=0.0.0",
        "newest": f"{run}/rollouts?order=newest",
        "worst": f"{run}/rollouts?order=worst",
        "changed": f"{run}/rollouts?order=most_changed",
        "group": f"{run}/group/1",
        "log": f"{run}/log/environment",
        "trainer": f"{run}/log/trainer",
        "compare": f"/api/compare?a={run_id}&b={run_id}",
        "sweeps": "/api/sweeps",
        "datasets": "/api/datasets",
        "ledger": "/api/ledger",
        "environments": "/api/environments?query=copied",
        "environment": "/api/environment?name=copied",
    }.items():
        status, _, found[name] = page.ask("GET", path)
        assert status == 200, (path, found[name])
    return found


async def _app_answers(shop: Workshop, bundle: Path, run_id: str) -> dict[str, bytes]:
    found = {}
    async with Client(TopropeServer(lambda: shop, bundle=bundle), extensions=[Shows()]) as client:
        for name, tool, arguments in (
            ("app show", "show", {"run_id": run_id}),
            ("app now", "look", {"what": "now"}),
            ("app run", "look", {"what": "run", "run_id": run_id}),
            ("app rollouts", "look", {"what": "rollouts", "run_id": run_id}),
            ("app group", "look", {"what": "group", "run_id": run_id, "group": 1}),
            ("app compare", "look", {"what": "compare", "a": [run_id], "b": [run_id]}),
        ):
            result = await client.call_tool(tool, arguments)
            assert not result.is_error, result
            found[name] = result.model_dump_json(by_alias=True).encode()
    return found


def test_no_answer_has_a_held_out_text(told: dict[str, bytes]) -> None:
    seen = [name for name, answer in told.items() if CANARY.encode() in answer]
    assert seen == []
    assert b"plain" in told["newest"] and b"plain" in told["app rollouts"]  # training tasks are shown


def test_run_is_told_from_its_start_to_its_end(told: dict[str, bytes]) -> None:
    run_id = told["run_id"].decode()
    changes = json.loads(told["changes"])
    kinds = {what for one in changes for what in one.get("runs", {}).get(run_id, ())}
    assert {"status", "metrics", "events"} <= kinds and any(one.get("list") for one in changes)
    run = json.loads(told["run"])
    live = run["live"]
    assert live["series"]["last_step"] == 25 and live["series"]["rows"] == 25
    assert [one["step"] for one in live["checkpoints"]] == [10, 20, 25]
    labels = [one["label"] for one in live["evaluations"]]
    assert labels[0] == "before" and labels[-1] == "after" and 10 <= int(labels[1].removeprefix("step-")) < 25
    assert live["verdict"]["split"] == "heldout" and live["verdict"]["after"]["tasks"] == 12
    account = live["account"]
    assert account["accepted"] == account["waiting"] + account["delivered"] + account["committed"] + sum(
        account["dropped"].values()
    )
    assert {one["name"] for one in live["crew"]} >= {"trainer", "inference", "api", "environment"}
    assert live["integrity"] and live["facts"]["cpu_s"] > 0
    assert live["events"][-1]["kind"] == "end"


def test_texts_of_environment_and_policy_are_marked(told: dict[str, bytes]) -> None:
    group = json.loads(told["group"])
    assert "<script>plain</script>" in json.dumps(group["asked"])
    for name in ("newest", "group", "environment"):
        _assert_marked(json.loads(told[name]))


def _assert_marked(value: Any, key: str = "") -> None:
    """Require that whatever the environment wrote is a value of `foreign`."""
    if isinstance(value, dict):
        for name, one in value.items():
            _assert_marked(one, name)
    elif isinstance(value, list):
        for one in value:
            _assert_marked(one, key)
    elif isinstance(value, str) and key != "foreign":
        assert "<script" not in value and "<img" not in value
