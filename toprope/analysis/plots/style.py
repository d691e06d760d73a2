"""Style and smoothing that plots and report charts share. matplotlib is not imported here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

GREY = "#5b6570"
REWARD, SUCCESS, LOSS, TOKENS = "#c2571a", "#1f6f8b", "#a13d63", "#5f8f3e"
"""Success is the colour of accuracy as well, which counts successes."""
_OTHERS = ("#7a5195", "#8a6d3b", "#3b6fb5")
_OWN = {"reward": REWARD, "success": SUCCESS, "loss": LOSS, "mean_token_accuracy": TOKENS}
_SAME = 0.005
"""Shares that differ by less are one line in a picture."""
PLOT_STYLE: dict[str, object] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.titlelocation": "left",
    "axes.grid": True,
    "grid.color": "#e4e7ea",
    "axes.axisbelow": True,
    "text.parse_math": False,
}
"""Settings that all figures share; text is never parsed as mathematics, because labels come from outside."""


def colour_of(metric: str, place: int) -> str:
    """Return the colour of a metric in every picture; of one without its own, by its place among the lines."""
    return _OWN.get(metric) or _OTHERS[place % len(_OTHERS)]


def points(rows: Sequence[Mapping[str, Any]], key: str) -> list[tuple[float, float]]:
    """Return a metric as points of step and value, without values that are no numbers."""
    return [
        (float(row["step"]), float(row[key]))
        for row in rows
        if isinstance(row.get(key), int | float) and not isinstance(row[key], bool) and math.isfinite(row[key])
    ]


def draw_curve(
    axes: Any, curve: Sequence[tuple[float, float]], colour: str, width: float, label: str | None = None
) -> None:
    """Draw a curve, raw and smoothed over a twentieth of its points."""
    steps, values = [list(part) for part in zip(*curve, strict=True)]
    axes.plot(steps, values, color=colour, alpha=0.22, linewidth=1.0)
    mean = smoothed(values, max(1, len(values) // 20))
    axes.plot(steps, mean, color=colour, linewidth=width, label=label, marker="o" if len(steps) < 3 else None)


def draw_words(axes: Any, words: str) -> None:
    """Write words into the middle of a figure that has nothing to draw."""
    axes.text(0.5, 0.5, words, transform=axes.transAxes, ha="center", color=GREY)


def coincide(first: Sequence[tuple[float, float]], second: Sequence[tuple[float, float]]) -> bool:
    """True if one curve, as points of step and value, would hide the other."""
    return len(first) == len(second) and all(
        a[0] == b[0] and abs(a[1] - b[1]) < _SAME for a, b in zip(first, second, strict=True)
    )


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """Return the centred moving mean, over fewer values at both ends.

    Args:
        values: Any number of values.
        window: Number of values, at least 1.

    Returns:
        A list of the same length.
    """
    half = max(window, 1) // 2
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    means = []
    for index in range(len(values)):
        low, high = max(0, index - half), min(len(values), index + half + 1)
        means.append((sums[high] - sums[low]) / (high - low))
    return means
