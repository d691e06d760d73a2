"""The diagnosis of a run in its results: current findings, past findings, and the next step for each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from toprope.records.run.status import Event, Finding, Status
from toprope.text_format import clip, percent, plural

_MOST = 6


def findings_lines(status: Status, events: Sequence[Event]) -> list[str]:
    """Return the current findings, the most severe first, then one line of findings that are over."""
    lines = []
    for finding in status.findings[:_MOST]:
        where = f", since step {finding.step}" if finding.step else ""
        line = f"Finding {finding.rule} ({finding.level}{where}): {clip(finding.what, 240)}"
        lines.append(line + (f" Next: {clip(finding.next, 240)}" if finding.next else ""))
    if len(status.findings) > _MOST:
        lines.append(f"The structure has {plural(len(status.findings) - _MOST, 'more finding')}.")
    held = {finding.rule for finding in status.findings}
    over: dict[str, Finding] = {}
    for finding in _told(events):
        if finding.level != "over" and finding.rule not in held:
            over[finding.rule] = finding
    if over:
        said = [f"{rule} ({finding.level}, step {finding.step})" for rule, finding in list(over.items())[:_MOST]]
        lines.append(f"Findings that are over: {', '.join(said)}.")
    return lines


def findings_told(status: Status, events: Sequence[Event], *, detailed: bool) -> list[dict[str, Any]]:
    """Return findings for the structure: the current ones, or with `detailed` all that were told, oldest first, with
    threshold and source."""
    if detailed:
        notes = [finding for finding in status.findings if finding.level == "note"]
        return [finding.model_dump(mode="json") for finding in [*_told(events), *notes]]
    short = {"rule", "level", "observed", "next", "step", "confidence"}
    return [finding.model_dump(mode="json", include=short) for finding in status.findings]


def time_line(shares: dict[str, float]) -> list[str]:
    """Return a line on the use of the trainer's time, if it is known."""
    if not shares:
        return []
    names = {
        "wait": "waiting for groups",
        "passes": "forward and backward",
        "prepare": "preparing batches",
        "rest": "optimizer, publishing, saving",
    }
    said = [f"{names[name]} {percent(shares[name])}" for name in names if name in shares]
    return [f"The trainer's time: {', '.join(said)}."]


def _told(events: Sequence[Event]) -> list[Finding]:
    found = []
    for event in events:
        if event.kind == "finding":
            try:
                found.append(Finding.model_validate(event.data))
            except ValidationError:  # of a version to come
                continue
    return found
