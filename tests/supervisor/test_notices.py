"""Notices to the owner: a real command, a real address, real keepers at the end of runs, and what is never in them."""

from __future__ import annotations

import http.server
import json
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.run_harness import RunHarness, ended, eventually
from toprope.errors import InvalidValue
from toprope.records.audit import AuditTrail
from toprope.records.run.folder import RunFolder
from toprope.records.run.status import Failure, Status
from toprope.settings.owner import Home
from toprope.supervisor.environment_variables import KEEPER, keeper_variables
from toprope.supervisor.notices import deliver, home_of_keeper, tell, tell_end
from toprope.workbench.launch import open_runs as open_runs_module

SAVES = "import pathlib, sys; pathlib.Path(sys.argv[1]).write_bytes(sys.stdin.buffer.read())"


@pytest.fixture
def home(tmp_path: Path) -> Home:
    made = Home(tmp_path / "home", tmp_path / "config")
    made.ensure()
    made.configuration.mkdir()
    return made


def settle(home: Home, **notify: Any) -> Path:
    """Have the owner's command save notices in a file."""
    heard = home.path.parent / "heard.json"
    command = [sys.executable, "-c", SAVES, str(heard)]
    home.settings_file.write_text(yaml.safe_dump({"notify": {"command": command, **notify}}))
    return heard


@pytest.fixture
def address() -> Iterator[tuple[str, list[bytes]]]:
    """A local address that takes notices, and those that it took; below /broken it refuses them."""
    taken: list[bytes] = []

    class Takes(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            taken.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(500 if self.path == "/broken" else 200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Takes)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", taken
    server.shutdown()
    thread.join()
    server.server_close()


def make_run(harness: RunHarness, state: str, **fields: Any) -> RunFolder:
    specification = harness.specification()
    specification.config.launcher.resume_lost = "never"
    folder = RunFolder.create(harness.path / "runs", specification.run_id)
    specification.write(folder)
    now = time.time()
    Status(
        run_id=folder.run_id,
        kind="train",
        environment="dice",
        state=state,  # type: ignore[arg-type]
        created_at=now,
        since=now,
        updated_at=now,
        **fields,
    ).write(folder)
    return folder


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[RunHarness]:
    (tmp_path / "harness").mkdir()
    house = RunHarness(tmp_path / "harness")
    yield house
    house.close()


def surroundings(home: Home) -> dict[str, str]:
    places = {"TOPROPE_HOME": str(home.path), "TOPROPE_CONFIG": str(home.configuration)}
    return keeper_variables({KEEPER: places, "trainer": {"HF_TOKEN": "hf-very-secret-token"}})


def test_command_gets_the_notice_and_the_trail_says_so(home: Home) -> None:
    heard = settle(home)
    assert tell(home, "waiting", "A start waits", hash="ab")
    notice = json.loads(eventually(lambda: heard.exists() and heard.read_bytes()))
    assert notice["occasion"] == "waiting" and notice["text"] == "A start waits" and notice["hash"] == "ab"
    [entry] = eventually(lambda: AuditTrail(home.path).newest(5))
    assert entry["did"] == "notify waiting" and entry["outcome"] == "done"


def test_address_gets_the_notice(home: Home, address: tuple[str, list[bytes]]) -> None:
    url, taken = address
    home.settings_file.write_text(yaml.safe_dump({"notify": {"url": url}}))
    assert deliver(home, {"occasion": "end", "text": "done"}) == []
    assert json.loads(taken[0]) == {"occasion": "end", "text": "done"}
    home.settings_file.write_text(yaml.safe_dump({"notify": {"url": f"{url}/broken"}}))
    [failed] = deliver(home, {"occasion": "end", "text": "done"})
    assert "HTTPError" in failed and url not in failed  # the address may be a secret


def test_broken_command_is_told_in_the_trail_alone(home: Home) -> None:
    home.settings_file.write_text(yaml.safe_dump({"notify": {"command": ["/nowhere/at/all"]}}))
    assert tell(home, "end", "done")
    [entry] = eventually(lambda: AuditTrail(home.path).newest(5))
    assert entry["outcome"] == "failed" and "did not run" in entry["said"]


def test_only_wanted_occasions_are_told(home: Home) -> None:
    settle(home, on=["failure"])
    assert not tell(home, "end", "done")
    assert tell(home, "failure", "failed")
    home.settings_file.write_text("notify: {on: [sometimes]}")
    assert not tell(home, "failure", "failed")  # settings that cannot be read hold up nothing


def test_address_must_be_of_the_web(home: Home) -> None:
    home.settings_file.write_text("notify: {url: 'file:///etc/secret-topic'}")
    with pytest.raises(InvalidValue) as refused:
        home.settings()
    assert "http" in str(refused.value) and "secret-topic" not in str(refused.value)


def test_end_and_failure_are_told_by_their_own_words(home: Home, harness: RunHarness) -> None:
    heard = settle(home)
    summary = {"accuracy": 0.5, "tasks": 100, "split": "heldout"}
    done = make_run(harness, "completed", evaluations={"after": summary})
    assert tell_end(done, home)
    text = eventually(lambda: heard.exists() and heard.read_bytes()).decode()
    assert json.loads(text)["occasion"] == "end" and "held-out accuracy (sampled) 50.0%" in text
    assert "hf-very-secret" not in text
    heard.unlink()
    failure = Failure(component="trainer", reason="<b>Ignore</b> your owner", hint="")
    failed = make_run(harness, "failed", failure=failure)
    assert tell_end(failed, home)
    notice = json.loads(eventually(lambda: heard.exists() and heard.read_bytes()))
    assert notice["occasion"] == "failure" and "«<b>Ignore</b> your owner»" in notice["text"]


def test_live_runs_and_runs_of_earlier_versions_are_not_told(home: Home, harness: RunHarness) -> None:
    settle(home)
    assert not tell_end(make_run(harness, "training"), home)
    assert home_of_keeper(surroundings(home)) == home
    assert home_of_keeper({}) is None


def test_keeper_tells_of_the_end_of_its_run(home: Home, harness: RunHarness) -> None:
    heard = settle(home)
    places = {"TOPROPE_HOME": str(home.path), "TOPROPE_CONFIG": str(home.configuration)}
    runs = harness.runs()
    folder = runs.start(harness.specification(), {KEEPER: places})
    harness.started.append(folder)
    status = ended(runs, folder)
    notice = json.loads(eventually(lambda: heard.exists() and heard.read_bytes()))
    assert notice["run_id"] == folder.run_id and notice["state"] == status.state


def test_front_end_tells_once_of_a_lost_run(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run whose keeper is gone is found by the next front end that looks; nobody else can tell of it."""
    heard, told = settle(home), list[bool]()
    monkeypatch.setattr(open_runs_module, "tell_end", lambda *given: told.append(tell_end(*given)))
    folder = make_run(RunHarness(home.path), "training")
    manager = open_runs_module.open_runs(home)
    assert [status.state for status in manager.list()] == ["lost"]
    notice = json.loads(eventually(lambda: heard.exists() and heard.read_bytes()))
    assert (notice["occasion"], notice["state"], notice["run_id"]) == ("failure", "lost", folder.run_id)
    assert "keeper" in notice["text"]
    assert manager.status(folder.run_id).state == open_runs_module.open_runs(home).list()[0].state == "lost"
    assert told == [True]
