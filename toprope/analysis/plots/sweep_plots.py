"""Plot a sweep: the score of each candidate over its accumulated steps, with lineage."""

from __future__ import annotations

from typing import Any

from toprope.analysis.plots.style import GREY, SUCCESS, draw_words
from toprope.records.run.specification import SweepPlan
from toprope.records.sweep_journal import Standing

_LINEAGE = "#9aa4ad"
_NAMED = 24
"""Number of candidates with labels."""


def draw_sweep(axes: Any, standing: Standing, plan: SweepPlan) -> None:
    """Draw the lineage of a sweep.

    Each scored candidate is a point over its accumulated optimizer steps, or over epochs if nothing is trained. A solid
    line leads to the candidate that continues its weights, a dotted one to a candidate made from its settings alone.

    Args:
        axes: Matplotlib axes.
        standing: The sweep's decisions.
    """
    trains = plan.evaluate == "train"
    axes.set_title(f"Candidates of the sweep ({plan.strategy}) by their score on validation tasks")
    axes.set_xlabel("optimizer steps behind the weights" if trains else "epoch")
    axes.set_ylabel("score")
    places: dict[str, tuple[float, float]] = {}
    for name, scored in standing.scores.items():
        if scored.score is not None:
            places[name] = (standing.line_steps(name) if trains else standing.born[name], scored.score)
    for name, (x, y) in places.items():
        candidate = standing.candidates[name]
        if candidate.parent in places:
            style = "-" if candidate.continues else ":"
            axes.plot(
                [places[candidate.parent][0], x], [places[candidate.parent][1], y], style, color=_LINEAGE, linewidth=1.2
            )
    best = standing.best.candidate if standing.best else ""
    for name, (x, y) in places.items():
        # The score is a success rate; the best candidate stands out by size and a ring, not by another colour.
        marker = {"markersize": 11, "markeredgecolor": "black"} if name == best else {"markersize": 6, "alpha": 0.55}
        axes.plot([x], [y], "o", color=SUCCESS, **marker)
        if len(places) <= _NAMED or name == best:
            axes.annotate(name, (x, y), xytext=(6, 4), textcoords="offset points", fontsize=9, color=GREY)
    failed = sum(decision.score is None for decision in standing.scores.values())
    if failed:
        text = f"{failed} without a score (failed, or stopped early)"
        axes.text(0.99, 0.02, text, transform=axes.transAxes, ha="right", color=GREY)
    final = standing.final
    if final is not None and final.measured is not None and final.measured.accuracy is not None:
        label = f"winner on {final.measured.tasks} held-out tasks: {final.measured.accuracy:.3f}"
        axes.axhline(final.measured.accuracy, color=SUCCESS, linewidth=1.4, linestyle="--", label=label)
        axes.legend(loc="best", frameon=True, framealpha=0.85, edgecolor="none")
    if not places:
        draw_words(axes, "no candidate has a score")
    axes.margins(0.06)
