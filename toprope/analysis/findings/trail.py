"""What is remembered of a run's rows: recent means, the beginning, the best, in constant memory whatever its length.

Names are those of metrics.jsonl. Windows are counted in steps and follow the planned length of the run: a twentieth of
it, between 5 and 20 rows.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

from toprope.settings.schema import Config

__all__ = ["TRACKED", "Series", "Trail"]

TRACKED = (
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
    "policy/approx_kl",
    "staleness/mean",
    "staleness/min",
    "groups/delivered",
    "groups/waiting",
    "time/step",
    "time/wait",
)
_OTHER_NAMES = {"clip_ratio/region_mean": ("cispo_clip_ratio",), "time/wait": ("wait_seconds",)}
_SHORTEST, _LONGEST = 5, 20


class Series:
    """One metric over the run."""

    __slots__ = (
        "_recent",
        "_total",
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
        self.count = 0
        self.first: float | None = None
        self.last: float | None = None
        self.lowest: float | None = None
        """The lowest single value."""
        self.start: float | None = None
        """Mean of the first window, once it is full; it never changes afterwards."""
        self.start_spread = 0.0
        """Standard deviation within the first window."""
        self.best: float | None = None
        """The highest mean of a full window, and the row that it ended at."""
        self.best_at = 0

    def add(self, value: float, row: int) -> None:
        """Takes in a finite value."""
        recent = self._recent
        if len(recent) == self._window:
            self._total -= recent[0]
        recent.append(value)
        self._total += value
        self.count += 1
        self.last = value
        if self.first is None:
            self.first = value
        if self.lowest is None or value < self.lowest:
            self.lowest = value
        if self.count >= self._window:
            if self.count % 4096 == 0:  # what adding and taking away has left of rounding errors
                self._total = math.fsum(recent)
            mean = self._total / self._window
            if self.start is None:
                self.start, self.start_spread = mean, self.spread
            if self.best is None or mean > self.best:
                self.best, self.best_at = mean, row

    @property
    def mean(self) -> float | None:
        """Of the last window, or of what there is of it."""
        return self._total / len(self._recent) if self._recent else None

    @property
    def spread(self) -> float:
        """Standard deviation of single rows within the last window."""
        values = self._recent
        if len(values) < 2:
            return 0.0
        mean = sum(values) / len(values)
        return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))

    @property
    def values(self) -> tuple[float, ...]:
        """The last window."""
        return tuple(self._recent)

    @property
    def full(self) -> bool:
        return self.count >= self._window


class Trail:
    """Everything that rules may look at.

    Args:
        config: The run's configuration; thresholds and advice name its fields.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.steps = config.budget.steps
        self.window = max(_SHORTEST, min(_LONGEST, self.steps // 20))
        self.early = max(2 * self.window, min(60, self.steps // 10))
        """Rows before a run is judged by what did not happen."""
        self.rows = 0
        self.step = 0
        self.row: Mapping[str, Any] = {}
        """The newest row."""
        self._series = {name: Series(self.window) for name in TRACKED}
        self.entropy_at_best: float | None = None
        """The entropy of the window in which the reward was highest."""
        self.dropped: deque[tuple[float, float]] = deque(maxlen=self.window + 1)
        """(groups delivered or dropped as stale so far, dropped as stale so far), by row."""
        self._delivered = 0.0
        self.peak_move: float | None = None
        """The highest `moved_per_version` so far."""

    def __getitem__(self, name: str) -> Series:
        return self._series[name]

    def mean(self, name: str) -> float | None:
        """Of the last window; None where the metric was never there."""
        return self._series[name].mean

    def recent(self, name: str, otherwise: float = 0.0) -> float:
        """`mean`, or `otherwise`."""
        found = self._series[name].mean
        return otherwise if found is None else found

    def add(self, row: Mapping[str, Any]) -> None:
        """Takes in a row of metrics.jsonl. Values that are missing or no numbers are passed over."""
        self.rows += 1
        self.row = row
        self.step = int(row.get("step") or self.rows)
        for name, series in self._series.items():
            value = row.get(name)
            if value is None and name in _OTHER_NAMES:
                value = next((row[other] for other in _OTHER_NAMES[name] if row.get(other) is not None), None)
            if value is not None and math.isfinite(value):
                series.add(value, self.rows)
        reward = self._series["reward"]
        if reward.best_at == self.rows:
            self.entropy_at_best = self._series["entropy"].mean
        stale = float(row.get("dropped/stale") or 0.0)
        self._delivered += float(row.get("groups/delivered") or 0.0)
        self.dropped.append((self._delivered, stale))
        moved = self.moved_per_version
        if moved is not None and self["policy/moved"].count >= _SHORTEST:
            self.peak_move = moved if self.peak_move is None else max(self.peak_move, moved)

    @property
    def gain(self) -> float:
        """How far the recent reward is above the beginning's; 0 before the first window is over."""
        reward = self._series["reward"]
        return 0.0 if reward.start is None or reward.mean is None else reward.mean - reward.start

    @property
    def noise(self) -> float:
        """How far two windows' mean rewards differ by chance: three standard errors of a difference."""
        reward = self._series["reward"]
        single = max(reward.spread, reward.start_spread)
        return 3.0 * single * math.sqrt(2.0 / self.window)

    @property
    def moved_per_version(self) -> float | None:
        """Mean |change of a sampled token's log-probability| that one optimizer step makes, in nats, recently; what
        sampler and trainer compute differently from the same weights is left out.

        The change grows less than in proportion with the number of steps, so this errs to the low side for old groups.
        """
        moved, versions = self.mean("policy/moved"), self.mean("policy/moved_versions")
        if moved is None or not versions:
            return None
        return max(moved - self.recent("sampling/sampling_logp_difference/mean"), 0.0) / versions

    @property
    def stale_share(self) -> float:
        """Of the groups of the last window, the share that was dropped for its age."""
        if len(self.dropped) < 2:
            return 0.0
        (delivered, stale), (delivered_now, stale_now) = self.dropped[0], self.dropped[-1]
        lost = max(stale_now - stale, 0.0)
        # Those that the trainer itself dropped are in both counts; the API's own are in `dropped` alone.
        return min(1.0, lost / max(delivered_now - delivered + lost, 1.0))

    @property
    def thrown_off(self) -> bool:
        """Whether single steps have changed the policy beyond recognition, for no gain: what its answers look like
        since then says nothing about tasks or limits."""
        return self.peak_move is not None and self.peak_move >= 0.4 and self.gain <= self.noise
