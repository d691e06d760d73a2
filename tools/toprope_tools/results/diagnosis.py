"""The diagnosis of a run in its results: causes in order, what follows from each, and the edit that mends them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from toprope.analysis.findings.causes import Explanation
from toprope.analysis.findings.diagnosis import told as told_by
from toprope.analysis.findings.rules import said, setting
from toprope.analysis.statistics.accuracy_change import AccuracyChange
from toprope.records.run.folder import RunFolder
from toprope.records.run.kinds import kind_named
from toprope.records.run.status import Event, Finding, Status, read_events
from toprope.text_format import call, percent, plural
from toprope.untrusted import marked, named

_MOST = 6
_MOST_FIELDS = 8
_WITHOUT_CAUSE = {
    "none": "Its numbers show no cause: more steps, or easier tasks, are the next thing to try.",
    "unlike": "A run that starts with the code as it is now measures before and after alike.",
    "fell": "Its numbers show no cause of the fall: try a smaller optimizer.learning_rate, not more steps.",
}
WITHOUT_EFFECT = ("algorithm.seed", "logging.", "launcher.", "evaluation.")
"""Beginnings of fields that do not change what a policy learns."""


def findings_lines(status: Status, events: Sequence[Event], causes: Explanation) -> list[str]:
    """Return the causes in order, each with what follows from it, then notes, then one line of findings that are over.

    Args:
        causes: Causes among the current findings.
    """
    lines = ["Likely causes, the likeliest first:"] if causes.causes else []
    for place, cause in enumerate(causes.causes[:_MOST]):
        lines.append(f"{place + 1}. {_head(cause)}: {told_by(cause.rule, cause.what, 240)}{_mend(cause)}")
        lines += [
            f"   below it: {_head(finding)}: {told_by(finding.rule, finding.what, 120)}"
            for finding in causes.below.get(cause.rule, ())
        ]
    if len(causes.causes) > _MOST:
        lines.append(f"The structure has {plural(len(causes.causes) - _MOST, 'more cause')}.")
    cause_rules = {finding.rule for finding in causes.causes}
    cause_rules |= {finding.rule for below in causes.below.values() for finding in below}
    for finding in status.findings:
        if finding.rule not in cause_rules and finding.level == "note":
            lines.append(f"Finding {_head(finding)}: {told_by(finding.rule, finding.what, 240)}{_next(finding)}")
    covered_rules = {finding.rule for finding in status.findings} | cause_rules
    over: dict[str, Finding] = {}
    for finding in _findings_in(events):
        if finding.level != "over" and finding.rule not in covered_rules:
            over[finding.rule] = finding
    if over:
        listed = [
            f"{named(rule)} ({finding.level}{f', step {finding.step}' if finding.step else ''})"
            for rule, finding in list(over.items())[:_MOST]
        ]
        lines.append(f"Findings that are over: {', '.join(listed)}.")
    return lines


def restart_lines(folder: RunFolder) -> list[str]:
    """Return one line if components or workers ended and were started again: their numbers, and the last end."""
    ends = [event.data for event in read_events(folder.events, kinds=("restart",))]
    if not ends:
        return []
    counts = Counter(named(end.get("component", "")) for end in ends)
    listed = ", ".join(f"{name} {plural(count, 'time')}" for name, count in counts.items())
    return [f"Ended and started again: {listed}. The last end: {marked(ends[-1].get('reason', ''), 200)}"]


def mending_lines(
    run_id: str, preset: str, causes: Explanation, kind: str, *, change: AccuracyChange | None
) -> list[str]:
    """Return what differs from the preset and the calls that mend all causes; empty if the run did well.

    Args:
        kind: Of the run; only runs that train have something to mend.
        change: The change of its held-out accuracy; None if unknown.
    """
    if not kind_named(kind).trains or not (causes.causes or (change is not None and change.verdict != "rose")):
        return []
    lines = []
    if not causes.causes and change is not None:
        lines.append(_WITHOUT_CAUSE[change.verdict if change.comparable else "unlike"])
    if beside := beside_preset(causes, kind):
        lines.append(f"It differs from the preset {named(preset)} in {beside}.")
    if causes.changes:
        changes = json.dumps(causes.changes)
        if any(named(word) != word for pair in causes.changes.items() for word in pair if isinstance(word, str)):
            changes = marked(changes, 400)
        fork = call("fork_config", run_id=run_id)
        lines.append(f"Mend it: {fork}, then edit_config(draft_id=..., changes={changes}) and start_training.")
    return lines


def beside_preset(causes: Explanation, kind: str) -> str:
    """Format the fields that differ from the preset and change what a run of this kind learns; empty without any."""
    unused = WITHOUT_EFFECT if kind == "sft" else (*WITHOUT_EFFECT, "sft.")
    return differing({name: pair for name, pair in causes.differs.items() if not name.startswith(unused)}, 4)


def differing(differs: Mapping[str, Sequence[Any]], most: int = _MOST_FIELDS) -> str:
    """Format at most `most` fields with their value and the other one, such as the preset's, in brackets."""
    fields = list(differs.items())[:most]
    listed = [f"{named(name)} {setting(pair[1])} ({setting(pair[0])})" for name, pair in fields if len(pair) == 2]
    return ", ".join(listed) + (f" and {len(differs) - most} more" if len(differs) > most else "")


def causes_structure(causes: Explanation) -> dict[str, Any] | None:
    """Return the causes for programs: ranked, with fields and changes; None if there are none and nothing differs."""
    if not causes.causes and not causes.differs:
        return None
    ranked = [{"rule": cause.rule, "fields": list(cause.changes), "changes": cause.changes} for cause in causes.causes]
    return {"ranked": ranked, "changes": causes.changes, "differs": causes.differs}


def short_causes(causes: Explanation) -> str:
    """Return the first three causes in one sentence; empty without causes."""
    listed = [named(cause.rule) + (f" ({said(cause.changes)})" if cause.changes else "") for cause in causes.causes[:3]]
    return f"Likely causes, in order: {', '.join(listed)}." if listed else ""


def findings_told(status: Status, events: Sequence[Event], *, detailed: bool) -> list[dict[str, Any]]:
    """Return findings for the structure: the current ones, or with `detailed` all that were told, oldest first, with
    threshold and source."""
    if detailed:
        notes = [finding for finding in status.findings if finding.level == "note"]
        return [finding.model_dump(mode="json") for finding in [*_findings_in(events), *notes]]
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
    listed = [f"{names[name]} {percent(shares[name])}" for name in names if name in shares]
    return [f"The trainer's time: {', '.join(listed)}."]


def _head(finding: Finding) -> str:
    since = f", since step {finding.step}" if finding.step else ""
    return f"{named(finding.rule)} ({finding.level}{since})"


def _mend(cause: Finding) -> str:
    if cause.changes:
        return f" Mend: {said(cause.changes)}."
    return _next(cause)


def _next(finding: Finding) -> str:
    return f" Next: {told_by(finding.rule, finding.next, 240)}" if finding.next else ""


def _findings_in(events: Sequence[Event]) -> list[Finding]:
    findings = []
    for event in events:
        if event.kind == "finding":
            try:
                findings.append(Finding.model_validate(event.data))
            except ValidationError:  # of a version to come
                continue
    return findings
