"""Charts of a report as self-contained SVG texts without scripts, fonts or external files.

matplotlib is large and is imported at the first chart.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from toprope.analysis.plots.style import GREY, PLOT_STYLE, SUCCESS, coincide, colour_of, draw_curve, points
from toprope.analysis.plots.sweep_plots import draw_sweep
from toprope.extras import require
from toprope.records.run.specification import SweepPlan
from toprope.records.sweep_journal import Standing

_MOST_POINTS = 400


@dataclass(frozen=True)
class Line:
    """A metric over steps: its key in the rows and its label."""

    key: str
    label: str


@dataclass(frozen=True)
class Bar:
    """A labelled share with its interval."""

    label: str
    value: float
    low: float | None = None
    high: float | None = None
    before: float | None = None
    """The share before training, drawn as a hollow mark."""
    colour: str = SUCCESS


def lines(title: str, rows: Sequence[Mapping[str, Any]], wanted: Sequence[Line], *, shares: bool = False) -> str | None:
    """Draw metrics over steps, raw and smoothed; None if the rows have none of them.

    Args:
        title: Title of the chart.
        rows: Rows of metrics.jsonl, oldest first.
        wanted: Metrics to draw; missing ones are left out.
        shares: Scale the axis from 0 to 1 if all values lie within.
    """
    drawn = [(line, curve) for line in wanted if (curve := _thin(points(rows, line.key)))]
    if not drawn:
        return None
    if len(drawn) == 2 and coincide(drawn[0][1], drawn[1][1]):
        first_line, second_line = drawn[0][0], drawn[1][0]
        drawn = [(Line(second_line.key, f"{first_line.label} and {second_line.label}, which are equal"), drawn[1][1])]
    with _figure(6.4, 3.0) as (figure, axes):
        axes.set_title(title)
        axes.set_xlabel("optimizer step")
        for number, (line, curve) in enumerate(drawn):
            # An earlier line is wider, so that a later one does not hide it where they meet.
            width = 2.0 + 1.4 * (len(drawn) - 1 - number)
            draw_curve(axes, curve, colour_of(line.key, number), width, line.label)
        flat = [value for _, curve in drawn for _, value in curve]
        if shares and min(flat) >= 0 and max(flat) <= 1:
            axes.set_ylim(-0.03, 1.05)
        if len(wanted) > 1:
            axes.legend(loc="best", frameon=True, framealpha=0.85, edgecolor="none")
        axes.margins(x=0.01)
        return _svg(figure)


def bars(title: str, wanted: Sequence[Bar]) -> str | None:
    """Draw shares with 95 % intervals from top to bottom, on an axis from 0 to 100 %; None if there are none."""
    if not wanted:
        return None
    with _figure(6.4, 0.95 + 0.34 * len(wanted)) as (figure, axes):
        axes.set_title(title)
        places = list(range(len(wanted)))[::-1]
        for place, bar in zip(places, wanted, strict=True):
            low = bar.value if bar.low is None else bar.low
            high = bar.value if bar.high is None else bar.high
            axes.plot([100 * low, 100 * high], [place, place], color=bar.colour, linewidth=3, alpha=0.45)
            axes.plot([100 * bar.value], [place], marker="o", markersize=7, color=bar.colour)
            if bar.before is not None:
                axes.plot([100 * bar.before], [place], marker="o", markersize=6, color=GREY, fillstyle="none")
        axes.set_yticks(places, [_short(bar.label) for bar in wanted])
        axes.set_xlim(-2, 102)
        axes.set_ylim(-0.6, len(wanted) - 0.4)
        hollow = any(bar.before is not None for bar in wanted)
        axes.set_xlabel(f"held-out accuracy, %{'; hollow: before training' if hollow else ''}")
        axes.grid(axis="y", visible=False)
        return _svg(figure)


def sweep(standing: Standing, plan: SweepPlan) -> str:
    """Draw the candidates of a sweep by score, with lineage and the winner."""
    with _figure(6.4, 4.0) as (figure, axes):
        draw_sweep(axes, standing, plan)
        return _svg(figure)


def _thin(curve: list[tuple[float, float]]) -> list[tuple[float, float]]:
    every = max(1, -(-len(curve) // _MOST_POINTS))
    if every == 1:
        return curve
    # Average stretches of points; dropping points would hide what lies between.
    stretches = [curve[start : start + every] for start in range(0, len(curve), every)]
    return [(part[-1][0], sum(value for _, value in part) / len(part)) for part in stretches]


def _short(label: str) -> str:
    return label if len(label) <= 44 else "…" + label[-43:]


@contextmanager
def _figure(width: float, height: float) -> Iterator[tuple[Any, Any]]:
    """Yield a figure with its axes in the report's style; sizes in inches."""
    require("A chart", "matplotlib")
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    style: dict[Any, Any] = {
        **PLOT_STYLE,
        "font.size": 10,
        "axes.titlesize": 11,
        # Text as outlines looks the same everywhere and cannot be markup.
        "svg.fonttype": "path",
        "svg.hashsalt": "toprope",
        "savefig.transparent": False,
    }
    with plt.rc_context(style):
        figure, axes = plt.subplots(figsize=(width, height), layout="constrained")
        try:
            yield figure, axes
        finally:
            plt.close(figure)


def _svg(figure: Any) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Type": None, "Format": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]
