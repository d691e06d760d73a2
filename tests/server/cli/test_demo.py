"""The demo's lines for events as a keeper writes them."""

from __future__ import annotations

from pathlib import Path

from toprope_server.cli.demo import event_line

from toprope.records.run.folder import RunFolder
from toprope.records.run.status import EventLog


def test_event_line_shows_states_and_evaluations(tmp_path: Path) -> None:
    log = EventLog(RunFolder(tmp_path))
    events = [
        log.append("state", **{"from": "queued", "to": "validating", "reason": ""}),
        log.append("evaluation", label="after", summary={"accuracy": 0.8125, "tasks": 200}),
        log.append("evaluation", label="after", summary={}),
        log.append("checkpoint", step=3, path="x", cursor=9),
    ]
    lines = [event_line(event.model_dump()) for event in events]
    assert lines == ["queued -> validating", "evaluation after: accuracy 0.812", None, None]
