"""Style and smoothing that plots and report charts share. matplotlib is not imported here."""

from __future__ import annotations

from collections.abc import Sequence

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
