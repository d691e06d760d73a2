"""Findings and the failure of a run for the page; next steps in the words of its reader."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from toprope.analysis.findings.rules import after_end
from toprope.records.run.status import Event, Status
from toprope.text_format import clip
from toprope_tools.page import shapes
from toprope_tools.page.items import LEVELS
from toprope_tools.page.shapes import foreign, plain

Worded = Callable[[str, str | None], str]
"""Words a message, which proposes calls of tools, for a reader; the run that it is about, for steps that name none."""


def as_written(message: str, _: str | None) -> str:
    """Return the message with its calls of tools, which agents read."""
    return message


def findings_of(events: Sequence[Event], status: Status, worded: Worded = as_written) -> list[shapes.Span]:
    """The findings of a run with the steps over which they held; open ones first, the gravest first."""
    spans: list[shapes.Span] = []
    open_now: dict[str, shapes.Span] = {}
    for event in events:
        if event.kind != "finding":
            continue
        data, rule = event.data, clip(str(event.data.get("rule", "")), 60)
        step = data.get("step") if isinstance(data.get("step"), int) else None
        if data.get("level") == "over":
            if (span := open_now.pop(rule, None)) is not None:
                span.to_step, span.open = step, False
            continue
        span = _span(rule, data, step)
        if (earlier := open_now.get(rule)) is not None:
            span.from_step = earlier.from_step
            spans.remove(earlier)
        open_now[rule] = span
        spans.append(span)
    present = {finding.rule: finding for finding in status.findings}
    for rule, span in open_now.items():
        span.open = rule in present
    # Notes are no events.
    untold = [finding for rule, finding in present.items() if rule not in open_now]
    spans += [_span(finding.rule, finding.model_dump(), finding.step) for finding in untold]
    for span in spans:
        advice = after_end(span.next) if status.ended else span.next
        span.next = clip(worded(advice, status.run_id), 400)
    return sorted(spans, key=_rank)


def _rank(span: shapes.Span) -> tuple[bool, int]:
    """Open findings first, the gravest first."""
    return not span.open, LEVELS.index(span.level) if span.level in LEVELS else 9


def _span(rule: str, data: Mapping[str, Any], step: int | None) -> shapes.Span:
    observed = data.get("observed") if isinstance(data.get("observed"), dict) else {}
    return shapes.Span(
        rule=rule,
        level=str(data.get("level", "note")),
        what=clip(str(data.get("what", "")), 400),
        observed={clip(str(name), 60): plain(figure) for name, figure in (observed or {}).items()},
        threshold=clip(str(data.get("threshold", "")), 300),
        source=clip(str(data.get("source", "")), 300),
        confidence=clip(str(data.get("confidence", "")), 10),
        next=clip(str(data.get("next", "")), 400),
        follows=clip(str(data["follows"]), 60) if data.get("follows") else None,
        from_step=step,
        to_step=None,
        open=True,
    )


def failure_of(status: Status, worded: Worded = as_written) -> shapes.Failed | None:
    """The failure of a run; None without one."""
    failure = status.failure
    if failure is None:
        return None
    return shapes.Failed(
        component=clip(failure.component, 40),
        kind="" if failure.kind == "unknown" else clip(failure.kind, 40),
        reason=foreign(failure.reason, 600),
        hint=clip(worded(failure.hint, status.run_id), 400),
        excerpt=[foreign(line, 300) for line in failure.excerpt[-20:]],
    )
