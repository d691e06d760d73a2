"""A summary of a run's metrics rows in constant memory: recent means, the first window, the best window.

Names are those of metrics.jsonl. A window is a twentieth of the planned steps, between 5 and 20 rows.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from operator import attrgetter
from typing import Any

from toprope.settings.schema import Config
from toprope.settings.sections.environment import members_of

TRACKED = (
    "loss",
    "reward",
    "reward_std",
    "success",
    "entropy",
    "grad_norm",
    "kl",
    "frac_reward_zero_std",
    "frac_reward_zero_std/all_wrong",
    "frac_reward_zero_std/all_right",
    "frac_reward_zero_std/other",
    "errors/share",
    "parse_failures",
    "completions/clipped_ratio",
    "clip_ratio/region_mean",
    "sampling/sampling_logp_difference/mean",
    "policy/moved",
    "policy/moved_versions",
    "staleness/mean",
    "staleness/min",
    "groups/delivered",
    "groups/waiting",
    "time/step",
    "time/wait",
    "utilization/sampler",
)
_OTHER_NAMES = {"clip_ratio/region_mean": ("cispo_clip_ratio",), "time/wait": ("wait_seconds",)}
_SHORTEST, _LONGEST = 5, 20


BY_ENVIRONMENT = ("success", "frac_reward_zero_std", "errors_share", "share")
"""Metrics of each environment of a mixture that the rules read."""
_ENVIRONMENT = "environments/"
_OF_TASKS = (
    *("reward", "reward_std", "success", "entropy", "grad_norm", "parse_failures", "completions/clipped_ratio"),
    *(name for name in TRACKED if name.startswith("frac_reward_zero_std")),
)
"""Metrics whose baselines hold for one difficulty of the tasks only."""


class Series:
    """One metric over the course of a run."""

    __slots__ = (
        "_recent",
        "_total",
        "_spread",
        "_window",
        "best",
        "best_at",
        "count",
        "first",
        "last",
        "lowest",
        "start",
        "start_spread",
    )

    def __init__(self, window: int) -> None:
        self._window = window
        self._recent: deque[float] = deque(maxlen=window)
        self._total = 0.0
        self._spread: float | None = None
        self.count = 0
        self.first: float | None = None
        self.last: float | None = None
        self.lowest: float | None = None
        """The lowest single value."""
        self.start: float | None = None
        """Mean of the first full window; constant afterwards."""
        self.start_spread = 0.0
        """Standard deviation within the first window."""
        self.best: float | None = None
        """The highest mean of a full window, and the row at which it ended."""
        self.best_at = 0

    def add(self, value: float, row: int) -> None:
        """Add a finite value."""
        recent = self._recent
        if len(recent) == self._window:
            self._total -= recent[0]
        recent.append(value)
        self._total += value
        self._spread = None
        self.count += 1
        self.last = value
        if self.first is None:
            self.first = value
        if self.lowest is None or value < self.lowest:
            self.lowest = value
        if self.count >= self._window:
            if self.count % 4096 == 0:  # Remove rounding errors that additions and subtractions left.
                self._total = math.fsum(recent)
            mean = self._total / self._window
            if self.start is None:
                self.start, self.start_spread = mean, self.spread
            if self.best is None or mean > self.best:
                self.best, self.best_at = mean, row

    @property
    def mean(self) -> float | None:
        """Mean of the last window, or of the rows so far."""
        return self._total / len(self._recent) if self._recent else None

    @property
    def spread(self) -> float:
        """Standard deviation of single rows within the last window."""
        if self._spread is None:  # Several rules ask in each row.
            values = self._recent
            n = len(values)
            self._spread = math.dist(values, [math.fsum(values) / n] * n) / math.sqrt(n - 1) if n > 1 else 0.0
        return self._spread

    @property
    def values(self) -> tuple[float, ...]:
        """The last window."""
        return tuple(self._recent)

    @property
    def full(self) -> bool:
        return self.count >= self._window


class TrainingHistory:
    """The input of the rules.

    Args:
        config: The run's configuration; thresholds and advice depend on it.
        preset: The preset's values of the fields in which the configuration differs from it.
        unknown_task: The start warned that the policy does not know the task.
    """

    def __init__(self, config: Config, preset: Mapping[str, Any] | None = None, *, unknown_task: bool = False) -> None:
        self.config, self.unknown_task = config, unknown_task
        self.preset = preset or {}
        scheduled = any(plan.section.reward_weights_end for plan in members_of(config.environment))
        self.aim = "success" if scheduled else "reward"
        """The metric that tells if a run learns. Weights that change on the way change the rewards of equal answers."""
        self.steps = config.budget.steps
        self.window = max(_SHORTEST, min(_LONGEST, self.steps // 20))
        self.early = max(2 * self.window, min(60, self.steps // 10))
        """Rows before rules about missing progress apply."""
        self.rows = 0
        self.step = 0
        self.row: Mapping[str, Any] = {}
        """The newest row."""
        self._series = {name: Series(self.window) for name in TRACKED}
        self.environments: dict[str, dict[str, Series]] = {}
        """The series of each environment of a mixture, by label and name (`BY_ENVIRONMENT`)."""
        self.entropy_at_best: float | None = None
        """Entropy of the window in which `aim` was highest."""
        self.dropped: deque[tuple[float, float]] = deque(maxlen=self.window + 1)
        """Per row: (groups delivered or dropped as stale so far, groups dropped as stale so far)."""
        self._delivered = 0.0
        self.restarted = False
        """Harder tasks followed, so that the first window is not the run's start."""
        self.over = False
        """The run has ended, so that rules about the whole run apply to short ones, too."""
        self.peak_move: float | None = None
        """The highest `moved_per_version` so far."""

    def __getitem__(self, name: str) -> Series:
        return self._series[name]

    def mean(self, name: str) -> float | None:
        """Return the mean of the last window; None if the metric never occurred."""
        return self._series[name].mean

    def recent(self, name: str) -> float:
        """Return `mean(name)`, or 0 if it is None."""
        return self._series[name].mean or 0.0

    def add(self, row: Mapping[str, Any]) -> None:
        """Add a row of metrics.jsonl. Missing values and values that are not numbers are skipped."""
        self.rows += 1
        self.row = row
        self.step = int(row.get("step") or self.rows)
        for name, series in self._series.items():
            value = row.get(name)
            if value is None:
                if name not in _OTHER_NAMES:
                    continue
                value = next(
                    (row[other_name] for other_name in _OTHER_NAMES[name] if row.get(other_name) is not None), None
                )
            if value is not None and math.isfinite(value):
                series.add(value, self.rows)
        self._add_environments(row)
        if self._series[self.aim].best_at == self.rows:
            self.entropy_at_best = self._series["entropy"].mean
        stale = float(row.get("dropped/stale") or 0.0)
        self._delivered += float(row.get("groups/delivered") or 0.0)
        self.dropped.append((self._delivered, stale))
        moved = self.moved_per_version
        if moved is not None and self["policy/moved"].count >= _SHORTEST:
            self.peak_move = moved if self.peak_move is None else max(self.peak_move, moved)

    def restart(self) -> None:
        """Forget the baselines of rewards, because harder tasks follow: a curriculum has opened a level."""
        self._series |= {name: Series(self.window) for name in _OF_TASKS}
        self.environments, self.entropy_at_best, self.restarted = {}, None, True

    def _add_environments(self, row: Mapping[str, Any]) -> None:
        for key, value in row.items():
            if not key.startswith(_ENVIRONMENT):
                continue
            head, _, name = key.rpartition("/")
            label = head.removeprefix(_ENVIRONMENT)
            if label == head or name not in BY_ENVIRONMENT or value is None or not math.isfinite(value):
                continue
            series_by_metric = self.environments.get(label)
            if series_by_metric is None:
                series_by_metric = self.environments[label] = {metric: Series(self.window) for metric in BY_ENVIRONMENT}
            series_by_metric[name].add(value, self.rows)

    @property
    def planned_steps(self) -> int:
        """Steps that the run can make: those of its budget, or those that its training time allows at its pace."""
        limit, spent = self.config.budget.max_train_seconds, self.row.get("train_seconds")
        if limit is None or not spent or self.step < 2:
            return self.steps
        return min(self.steps, max(self.step, int(limit * self.step / spent)))

    def judged(self, rows: int) -> bool:
        """Return True if there are that many rows with rewards, or the run is over and has at least five.

        Fine-tuning on demonstrations has no rewards, so rules that ask this stay silent.
        """
        count = self["reward"].count
        return count >= rows or (self.over and count >= _SHORTEST)

    def towards(self, field: str, computed: Any) -> Any:
        """Return the preset's value if the field differs from it in the direction of `computed`, else `computed`."""
        present, usual = attrgetter(field)(self.config), self.preset.get(field)
        if isinstance(usual, bool) or not isinstance(usual, int | float) or present is None:
            return computed if usual is None else usual
        return usual if (usual > present) == (computed > present) else computed

    @property
    def gain(self) -> float:
        """Recent mean of `aim` minus that of the first window; 0 before the first window is full."""
        aim = self._series[self.aim]
        return 0.0 if aim.start is None or aim.mean is None else aim.mean - aim.start

    @property
    def noise(self) -> float:
        """Difference of two windows' means of `aim` by chance: three standard errors of a difference."""
        aim = self._series[self.aim]
        single = max(aim.spread, aim.start_spread)
        return 3.0 * single * math.sqrt(2.0 / self.window)

    @property
    def moved_per_version(self) -> float | None:
        """Recent mean |change of a sampled token's log-probability| per optimizer step, in nats.

        The difference between sampler and trainer at equal weights is subtracted. The change grows less than linearly
        with the number of steps, so this is too low for old groups.
        """
        moved, versions = self.mean("policy/moved"), self.mean("policy/moved_versions")
        if moved is None or not versions:
            return None
        return max(moved - self.recent("sampling/sampling_logp_difference/mean"), 0.0) / versions

    @property
    def stale_share(self) -> float:
        """Share of the last window's groups that were dropped as stale."""
        if len(self.dropped) < 2:
            return 0.0
        (delivered, stale), (delivered_now, stale_now) = self.dropped[0], self.dropped[-1]
        lost = max(stale_now - stale, 0.0)
        # Both counts include groups that the trainer dropped; only `dropped` includes those that the API dropped.
        return min(1.0, lost / max(delivered_now - delivered + lost, 1.0))

    @property
    def thrown_off(self) -> bool:
        """True if single steps changed the policy drastically for no gain, so that its answers tell nothing."""
        return self.peak_move is not None and self.peak_move >= 0.4 and self.gain <= self.noise
