"""Feeds rows to the rules and turns what they see into findings: told once when one begins, again when it gets worse,
`over` when it has ended.

The keeper's watcher and whoever reads a stored metrics.jsonl use the same object. It keeps constant memory and costs a
fraction of a millisecond a row.

Against flapping: a level must hold for a rule's `patience` of rows before it is told, a finding is over only when its
rule has seen nothing for a whole window of rows, and each time that it comes back it takes twice as long to be over.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from toprope.analysis.findings.learning import LEARNING
from toprope.analysis.findings.rewards import REWARDS
from toprope.analysis.findings.rules import Rule, Sign
from toprope.analysis.findings.sampling import SAMPLING
from toprope.analysis.findings.trail import Trail
from toprope.records.run.findings import Finding, Level
from toprope.settings.schema import Config

__all__ = ["RULES", "Diagnosis", "diagnose", "headline", "ranked", "severity"]

_CAUSES_FIRST = (
    "nan",
    "scorer_errors",
    "constant_reward",
    "scorer_ignores_answers",
    "learning_rate_high",
    "served_version",
    "dropped_stale",
    "reward_without_success",
    "truncated",
    "all_wrong",
    "all_right",
    "staleness",
)
RULES: tuple[Rule, ...] = tuple(
    sorted(
        (*REWARDS, *LEARNING, *SAMPLING),
        key=lambda rule: _CAUSES_FIRST.index(rule.id) if rule.id in _CAUSES_FIRST else len(_CAUSES_FIRST),
    )
)
"""All rules over rows, in the order of the headline: causes stand before what follows from them."""

_SEVERITY = {"over": 0, "note": 1, "warning": 2, "critical": 3}
_LONGEST_CALM = 8


def severity(level: Level) -> int:
    """`over` is 0, `critical` 3."""
    return _SEVERITY[level]


@dataclass
class _State:
    """What one rule has seen of late."""

    told: Finding | None = None
    rising: int = 0
    """Rows in a row at a level above the one that was told."""
    quiet: int = 0
    """Rows in a row without a sign."""
    patience: int = 1
    calm: int = 1
    """Rows without a sign after which it is over."""


class Diagnosis:
    """The findings of one run, as they come and go.

    Args:
        config: The run's configuration.
        rules: Others than `RULES`.
    """

    def __init__(self, config: Config, rules: Iterable[Rule] = RULES) -> None:
        self.trail = Trail(config)
        self._rules = tuple(rules)
        window = self.trail.window
        self._states = {
            rule.id: _State(patience=min(rule.patience, max(1, window // 2)), calm=2 * window) for rule in self._rules
        }

    @property
    def open(self) -> list[Finding]:
        """What holds now, the most severe first; of equals the cause before what follows from it."""
        return ranked(state.told for state in self._states.values() if state.told is not None)

    def see(self, row: Mapping[str, Any]) -> list[Finding]:
        """Takes in the next row of metrics.jsonl; returns what is to be told.

        Args:
            row: Metrics by name; unknown ones are ignored, missing ones leave the rules that need them silent.
        """
        self.trail.add(row)
        told = []
        for rule in self._rules:
            finding = self._judge(rule, self._states[rule.id], rule.look(self.trail))
            if finding is not None:
                told.append(finding)
        return told

    def _judge(self, rule: Rule, state: _State, sign: Sign | None) -> Finding | None:
        if sign is None:
            state.rising = 0
            if state.told is None:
                return None
            state.quiet += 1
            if state.quiet < state.calm:
                return None
            ended = state.told.model_copy(
                update={"level": "over", "what": f"No longer: {state.told.what}", "next": "", "step": self.trail.step}
            )
            state.told, state.quiet = None, 0
            state.calm = min(2 * state.calm, _LONGEST_CALM * 2 * self.trail.window)
            return ended
        state.quiet = 0
        if state.told is not None and severity(sign.level) <= severity(state.told.level):
            state.rising = 0
            return None
        state.rising += 1
        if state.rising < state.patience:
            return None
        state.rising = 0
        state.told = _finding(rule, sign, self.trail.step)
        return state.told


def diagnose(rows: Iterable[Mapping[str, Any]], config: Config) -> list[Finding]:
    """Everything that would have been told of a run, oldest first.

    Args:
        rows: Of metrics.jsonl, in their order.
        config: The run's configuration.
    """
    diagnosis = Diagnosis(config)
    return [finding for row in rows for finding in diagnosis.see(row)]


def headline(findings: Iterable[Finding]) -> Finding | None:
    """The one to act on: the most severe of what holds at the end of `findings`, the cause before its consequences;
    None where nothing of note does."""
    held: dict[str, Finding] = {}
    for finding in findings:
        if finding.level == "over":
            held.pop(finding.rule, None)
        else:
            held[finding.rule] = finding
    return next((finding for finding in ranked(held.values()) if severity(finding.level) > 1), None)


def ranked(findings: Iterable[Finding]) -> list[Finding]:
    """By severity, then in the order of the rules; findings that no rule over rows made come first."""
    places = {rule.id: place for place, rule in enumerate(RULES)}
    return sorted(findings, key=lambda one: (-severity(one.level), places.get(one.rule, -1)))


def _finding(rule: Rule, sign: Sign, step: int) -> Finding:
    observed = {name: _rounded(value) for name, value in sign.observed.items()}
    return Finding(
        rule=rule.id,
        level=sign.level,
        what=sign.what,
        observed=observed,
        threshold=rule.threshold,
        source=rule.source,
        confidence=sign.confidence,
        next=sign.next,
        step=step,
    )


def _rounded(value: Any) -> Any:
    return float(f"{value:.3g}") if isinstance(value, float) else value
