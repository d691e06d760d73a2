"""Turn metrics rows into findings: reported when one begins, again when it gets worse, and as `over` when it ends.

The keeper's watcher and readers of a stored metrics.jsonl use the same object. It needs constant memory and a fraction
of a millisecond per row.

To prevent flapping, a level must hold for a rule's `patience` of rows before it is reported, and a finding ends only
after a whole window without symptoms; that window doubles each time the finding returns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from toprope.analysis.findings.causes import Explanation, explanation, preset_values, related
from toprope.analysis.findings.configured import CONFIGURED
from toprope.analysis.findings.history import TrainingHistory
from toprope.analysis.findings.learning import LEARNING
from toprope.analysis.findings.mixture import MIXTURE
from toprope.analysis.findings.preset_distance import FAR_FROM_PRESET
from toprope.analysis.findings.rewards import REWARDS
from toprope.analysis.findings.rules import Rule, Symptom
from toprope.analysis.findings.sampling import SAMPLING
from toprope.records.run.curriculum import Curricula
from toprope.records.run.status import Finding, FindingLevel
from toprope.settings.schema import Config
from toprope.text_format import clip
from toprope.untrusted import marked

_CAUSES_FIRST = (
    "nan",
    "scorer_errors",
    "environment_errors",
    "constant_reward",
    "scorer_ignores_answers",
    "rewards_shuffled",
    "learning_rate_high",
    "served_version",
    "dropped_stale",
    "group_too_small",
    "batch_too_small",
    "kl_weight",
    "warmup_long",
    "sampling_extreme",
    "weight_decay",
    "reward_without_success",
    "truncated",
    "learning_rate_low",
    "budget_short",
    "far_from_preset",
    "all_wrong",
    "all_right",
    "environment_silent",
    "environment_behind",
    "environment_forgotten",
    "staleness",
)
RULES: tuple[Rule, ...] = tuple(
    sorted(
        (*REWARDS, *MIXTURE, *LEARNING, *SAMPLING, *CONFIGURED, FAR_FROM_PRESET),
        key=lambda rule: _CAUSES_FIRST.index(rule.id) if rule.id in _CAUSES_FIRST else len(_CAUSES_FIRST),
    )
)
"""All rules over rows, causes before their consequences."""

_BESIDE_ROWS = {"groups_given_up", "no_signal", "dropped_stale", "disk_full", "budget_near", "budget_spent"}
"""Rules of watchers."""
_PACE = frozenset({"trainer_waits", "sampler_waits"})
_SEVERITY = {"over": 0, "note": 1, "warning": 2, "critical": 3}
_LONGEST_CALM = 8
_WHOLE_RUN = {rule.id for rule in (*CONFIGURED, FAR_FROM_PRESET)} | {"learning_rate_low", "truncated", "all_wrong"}
"""Rules that judge an ended run once more as a whole, because a short run never lets them wait."""


def told(rule: object, text: object, limit: int) -> str:
    """Return a finding's sentence or advice on one line, in marks if its rule is none of ours."""
    ours = str(rule) in _BESIDE_ROWS or any(rule == known_rule.id for known_rule in RULES)
    return clip(str(text), limit) if ours else marked(text, limit)


def severity(level: FindingLevel) -> int:
    """Return the rank of a level, from `over` (0) to `critical` (3)."""
    return _SEVERITY[level]


@dataclass
class _State:
    """The recent history of one rule."""

    reported: Finding | None = None
    rising: int = 0
    """Consecutive rows at a level above the reported one."""
    quiet: int = 0
    """Consecutive rows without a symptom."""
    patience: int = 1
    calm: int = 1
    """Rows without a symptom after which the finding is over."""


class Diagnosis:
    """The findings of one run over time.

    Args:
        differs: Fields that differ from the preset: its value and the run's.
        unknown_task: The start warned that the policy does not know the task.
    """

    def __init__(
        self,
        config: Config,
        differs: Mapping[str, Sequence[Any]] | None = None,
        *,
        unknown_task: bool = False,
    ) -> None:
        self.differs = differs or {}
        self._preset = preset_values(self.differs)
        self.history = TrainingHistory(config, self._preset, unknown_task=unknown_task)
        window = self.history.window
        self._states = {
            rule.id: _State(patience=min(rule.patience, max(1, window // 2)), calm=2 * window) for rule in RULES
        }

    @property
    def open(self) -> list[Finding]:
        """The present findings, most severe first, then causes before consequences, each behind its cause."""
        return self.relate(state.reported for state in self._states.values() if state.reported is not None)

    def relate(self, findings: Iterable[Finding]) -> list[Finding]:
        """Rank findings, put each behind the one that it follows from, and say so in it.

        The pace of a run with a critical finding is left out: no faster run is of use.
        """
        found = ranked(findings)
        if any(finding.level == "critical" for finding in found):
            found = [finding for finding in found if finding.rule not in _PACE]
        return related(found, self._preset)

    def explain(self, others: Iterable[Finding] = (), *, ended: bool = False) -> Explanation:
        """Return the causes of what is wrong with the run.

        Args:
            others: Open findings of rules that do not read rows.
            ended: No more rows will come.
        """
        by_rule = {finding.rule: finding for finding in [*others, *self.open]}
        if ended and self.history.rows:
            self.history.over = True
            for rule in RULES:
                again = rule.id in _WHOLE_RUN and (rule.id not in by_rule or rule is FAR_FROM_PRESET)
                symptom = rule.look(self.history) if again else None
                if symptom is not None:
                    by_rule[rule.id] = _finding(rule, symptom, self.history.step)
        return explanation(self.relate(by_rule.values()), self.differs)

    def see_stored(self, rows: Iterable[Mapping[str, Any]], curricula: Curricula | None) -> None:
        """Add the rows of a run that has some already.

        Args:
            curricula: The run's; None if it has none.
        """
        opened = deque(sorted(curricula.moved_at() if curricula is not None else ()))
        for row in rows:
            while opened and int(row.get("step") or 0) > opened[0]:
                opened.popleft()
                self.history.restart()
            self.see(row)

    def see(self, row: Mapping[str, Any]) -> list[Finding]:
        """Add the next row of metrics.jsonl and return the findings to report.

        Args:
            row: Metrics by name. Unknown ones are ignored; a rule whose metric is missing stays silent.
        """
        history = self.history
        history.add(row)
        reports = []
        for rule in RULES:
            symptom, state = rule.look(history), self._states[rule.id]
            if symptom is None and state.reported is None:
                state.rising = 0
                continue
            if symptom is None and rule.lasts(history):
                state.rising = state.quiet = 0
                continue
            if rule.id == FAR_FROM_PRESET.id and symptom is not None and not self._names_more(symptom):
                symptom = None
            finding = self._judge(rule, state, symptom)
            if finding is not None:
                reports.append(finding)
        placed = {finding.rule: finding for finding in self.open} if reports else {}
        present = []
        for finding in reports:
            if finding.level == "over" or finding.rule in placed:
                present.append(finding if finding.level == "over" else placed[finding.rule])
            else:  # left out beside another: it was not told, so neither will its end be
                self._states[finding.rule].reported = None
        return present

    def _names_more(self, symptom: Symptom) -> bool:
        """Return True if a symptom names a field that no open finding of another rule changes."""
        open_ones = (state.reported for rule, state in self._states.items() if rule != FAR_FROM_PRESET.id)
        return not set(symptom.changes) <= {
            name for finding in open_ones if finding is not None for name in finding.changes
        }

    def _judge(self, rule: Rule, state: _State, symptom: Symptom | None) -> Finding | None:
        if symptom is None:
            state.rising = 0
            if state.reported is None:
                return None
            state.quiet += 1
            if state.quiet < state.calm:
                return None
            ended = state.reported.model_copy(
                update={
                    "level": "over",
                    "what": f"No longer: {state.reported.what}",
                    "next": "",
                    "step": self.history.step,
                }
            )
            state.reported, state.quiet = None, 0
            state.calm = min(2 * state.calm, _LONGEST_CALM * 2 * self.history.window)
            return ended
        state.quiet = 0
        if state.reported is not None and severity(symptom.level) <= severity(state.reported.level):
            state.rising = 0
            return None
        state.rising += 1
        if state.rising < state.patience:
            return None
        state.rising = 0
        state.reported = _finding(rule, symptom, self.history.step)
        return state.reported


def diagnose(
    rows: Iterable[Mapping[str, Any]], config: Config, differs: Mapping[str, Sequence[Any]] | None = None
) -> list[Finding]:
    """Return all findings that a run would have reported, oldest first.

    Args:
        rows: Rows of metrics.jsonl, in order.
        differs: Fields that differ from the preset: its value and the run's.
    """
    diagnosis = Diagnosis(config, differs)
    return [finding for row in rows for finding in diagnosis.see(row)]


def headline(findings: Iterable[Finding]) -> Finding | None:
    """Return the most severe present finding that follows from no other; None if there is none."""
    open_by_rule: dict[str, Finding] = {}
    for finding in findings:
        if finding.level == "over":
            open_by_rule.pop(finding.rule, None)
        else:
            open_by_rule[finding.rule] = finding
    grave = [finding for finding in ranked(open_by_rule.values()) if severity(finding.level) > 1]
    return next((finding for finding in grave if finding.follows not in open_by_rule), None)


def ranked(findings: Iterable[Finding]) -> list[Finding]:
    """Sort by severity, then in the order of the rules; findings without a rule over rows come first."""
    places = {rule.id: place for place, rule in enumerate(RULES)}
    return sorted(findings, key=lambda finding: (-severity(finding.level), places.get(finding.rule, -1)))


def _finding(rule: Rule, symptom: Symptom, step: int) -> Finding:
    observed = {name: _round(value) for name, value in symptom.observed.items()}
    return Finding(
        rule=rule.id,
        level=symptom.level,
        what=symptom.what,
        observed=observed,
        threshold=rule.threshold,
        source=rule.source,
        confidence=symptom.confidence,
        next=symptom.next,
        changes=dict(symptom.changes),
        step=step,
    )


def _round(value: Any) -> Any:
    return float(f"{value:.3g}") if isinstance(value, float) else value
