"""Style and smoothing that plots and report charts share. matplotlib is not imported here."""

from __future__ import annotations

from collections.abc import Sequence

GREY = "#5b6570"
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
