"""What the demo says of events, in the shape in which a keeper writes them."""

from __future__ import annotations

from pathlib import Path

from toprope_server.cli.demo import _event_line

from toprope.records.run.folder import RunFolder
from toprope.records.run.status import EventLog


def test_states_and_evaluations_are_told(tmp_path: Path) -> None:
    log = EventLog(RunFolder(tmp_path))
    happened = [
        log.append("state", **{"from": "queued", "to": "validating", "reason": ""}),
        log.append("evaluation", label="after", summary={"accuracy": 0.8125, "tasks": 200}),
        log.append("evaluation", label="after", summary={}),
        log.append("checkpoint", step=3, path="x", cursor=9),
    ]
    lines = [_event_line(event.model_dump()) for event in happened]
    assert lines == ["queued -> validating", "evaluation after: accuracy 0.812", None, None]
