"""Plot a run: reward and success over steps, accuracy before and after; or the candidates of a sweep.

    python -P -m toprope.analysis.plots RUN_FOLDER [PICTURE]

The keeper starts this program at the end of a run: matplotlib is large, and an error in it must cost the plot only.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from toprope.analysis.plots.style import (
    GREY,
    LOSS,
    PLOT_STYLE,
    REWARD,
    SUCCESS,
    TOKENS,
    coincide,
    draw_curve,
    draw_words,
    points,
    smoothed,
)
from toprope.analysis.plots.sweep_plots import draw_sweep
from toprope.analysis.reports.headline import HELDOUT, named_split
from toprope.analysis.reports.report import gather
from toprope.analysis.reports.results import Accuracy, Results
from toprope.analysis.statistics.intervals import Proportion
from toprope.atomic import replacing
from toprope.errors import TopropeError
from toprope.extras import require
from toprope.records.run.folder import RunFolder
from toprope.records.run.kinds import kind_named
from toprope.records.run.metrics import read_history
from toprope.records.run.specification import Specification, SweepPlan
from toprope.records.run.status import Status
from toprope.records.sweep_journal import Standing, read_standing

_INCHES, _DPI = (12.0, 7.0), 100
_ROWS = 4096
"""More points than pixels across."""
_SHARES = (-0.02, 1.06)
_EACH = ("#7a4fa3", "#2e8b57", "#b8860b", "#a13d63", "#4169a1", "#6b6b2f", "#8b5a2b", "#3d8f8f")
"""Colours of environments."""


def draw(
    path: Path,
    results: Results,
    rows: Sequence[Mapping[str, Any]],
    sweep: tuple[Standing, SweepPlan] | None = None,
) -> None:
    """Write a PNG of 1200x700 pixels atomically.

    Args:
        path: Path of the picture.
        results: Gives title and held-out accuracies.
        rows: Rows of metrics.jsonl, one per step or thinned at even distances.
        sweep: Decisions and plan of a sweep; drawn instead of steps.
    """
    require("A picture", "matplotlib")
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    style: dict[Any, Any] = {**PLOT_STYLE, "font.size": 12, "axes.titlesize": 13}
    with plt.rc_context(style):
        layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12, wspace=0.04)
        figure = plt.figure(figsize=_INCHES, dpi=_DPI, layout=layout)
        figure.suptitle(_title(results), fontsize=14, fontweight="bold", x=0.012, ha="left")
        if sweep is not None:
            draw_sweep(figure.subplots(), *sweep)
        else:
            left, right = figure.subplots(1, 2, width_ratios=[2.6, 1])
            if kind_named(results.kind).demonstrates:
                _draw_loss(left, rows)
            else:
                _draw_steps(left, rows)
                _draw_environments(left, results, rows)
            _draw_heldout(right, results)
        try:
            with replacing(path, suffix=".png") as temporary:
                figure.savefig(temporary)
        finally:
            plt.close(figure)


def _title(results: Results) -> str:
    kind = kind_named(results.kind).title
    policy = f" with the policy {_short(results.model)}" if results.model else ""
    return f"{kind} on {_short(results.environment)}{policy}\nrun {results.run_id}"


def _short(text: str) -> str:
    return text if len(text) <= 40 else "…" + text[-39:]


def _draw_loss(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """Draw the loss on demonstrations, and the share of their tokens that the policy ranks first."""
    axes.set_title("Fine-tuning on demonstrations")
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("loss, nats per token", color=LOSS)
    accuracy_axes = axes.twinx()
    accuracy_axes.set_ylabel("token accuracy", color=TOKENS)
    accuracy_axes.set_ylim(*_SHARES)
    accuracy_axes.grid(visible=False)
    drawn = False
    for key, curve_axes, colour in (("loss", axes, LOSS), ("mean_token_accuracy", accuracy_axes, TOKENS)):
        if curve := points(rows, key):
            drawn = True
            draw_curve(curve_axes, curve, colour, 2.4)
    axes.margins(x=0.01)
    if not drawn:
        draw_words(axes, "no steps were trained")


def _draw_steps(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    axes.set_title("Training: mean over each step's rollouts")
    axes.set_xlabel("optimizer step")
    curves = {key: curve for key in ("reward", "success") if (curve := points(rows, key))}
    if len(curves) == 2 and coincide(curves["reward"], curves["success"]):
        curves = {"reward and success, which are equal": curves["success"]}
    bounded = all(0 <= value <= 1 for curve in curves.values() for _, value in curve)
    # The reward lies below in a wider line, so that success does not hide it where they meet.
    for name, curve in curves.items():
        colour, width = (REWARD, 3.6) if name == "reward" else (SUCCESS, 2.0)
        draw_curve(axes, curve, colour, width, name)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="best", frameon=True, framealpha=0.85, edgecolor="none")
        if bounded:
            axes.set_ylim(*_SHARES)
        axes.margins(x=0.01)
    else:
        draw_words(axes, "no steps were trained")


def _draw_environments(axes: Any, results: Results, rows: Sequence[Mapping[str, Any]]) -> None:
    """Draw the success of each environment, and mark the steps at which a curriculum raised its level."""
    labels = [label for label in _environments(rows) if label]
    for label, colour in zip(labels, _EACH, strict=False):
        if curve := points(rows, f"environments/{label}/success"):
            steps, values = [list(part) for part in zip(*curve, strict=True)]
            name = label if len(label) <= 32 else f"…{label[-31:]}"
            mean = smoothed(values, max(1, len(values) // 10))
            axes.plot(steps, mean, color=colour, linewidth=1.4, linestyle="--", label=f"success, {name}")
    for curriculum in results.curricula.values():
        for measure in curriculum["opened"]:
            axes.axvline(measure["step"], color=GREY, linestyle=":", linewidth=1.2)
            text = f"{curriculum['knob']} {curriculum['levels'][measure['level'] + 1]}"
            # x in data coordinates, y in axes coordinates.
            axes.annotate(
                text[:24],
                (measure["step"], 1.0),
                xycoords=("data", "axes fraction"),
                xytext=(3, -4),
                textcoords="offset points",
                rotation=90,
                va="top",
                fontsize=9,
                color=GREY,
            )
    if labels:
        axes.legend(loc="best", frameon=True, framealpha=0.85, edgecolor="none", fontsize=10)


def _environments(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the environment labels in the order of their first row."""
    head, tail = "environments/", "/share"
    keys = [key for key in (rows[-1] if rows else {}) if key.startswith(head) and key.endswith(tail)]
    return [key.removeprefix(head).removesuffix(tail) for key in keys]


def _draw_heldout(axes: Any, results: Results) -> None:
    labels = [label for label in ("before", "after") if label in results.evaluations]
    split = next((results.evaluations[label].split for label in reversed(labels)), "") or HELDOUT
    axes.set_title(f"{named_split(split).capitalize()} accuracy, 95 % intervals")
    axes.set_ylim(*_SHARES)
    axes.set_xlim(-0.65, 1.65)
    axes.set_xticks([0, 1], ["before", "after"])
    axes.grid(axis="x", visible=False)
    tasks = 0
    for key, colour, shift in (("sampled", SUCCESS, -0.09), ("greedy", GREY, 0.09)):
        shares: list[tuple[float, Proportion]] = []
        for label in labels:
            accuracy: Accuracy | None = getattr(results.evaluations[label], key)
            if accuracy is not None:
                shares.append((("before", "after").index(label) + shift, accuracy.proportion()))
        if not shares:
            continue
        places = [place for place, _ in shares]
        values = [share.value for _, share in shares]
        spread = [[s.value - s.low for _, s in shares], [s.high - s.value for _, s in shares]]
        axes.plot(places, values, color=colour, alpha=0.25, linewidth=1.2)
        marker, size = ("o", 8) if key == "sampled" else ("s", 6)
        axes.errorbar(
            places, values, yerr=spread, fmt=marker, color=colour, markersize=size, capsize=5, linewidth=2, label=key
        )
        for place, share in shares:
            outwards = shift < 0
            axes.annotate(
                f"{share.value:.3f}",
                (place, share.value),
                xytext=(-11 if outwards else 11, 0),
                textcoords="offset points",
                ha="right" if outwards else "left",
                va="center",
                color=colour,
                fontsize=11,
            )
            tasks = max(tasks, share.n)
    if tasks:
        axes.set_xlabel(f"{tasks} {'tasks that training never saw' if split == HELDOUT else 'tasks'}")
        axes.legend(loc="best", frameon=True, framealpha=0.85, edgecolor="none")
    else:
        draw_words(axes, "not measured")


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw plot.png of the run folder given first, or into the file given second."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if len(arguments) not in (1, 2):
        print("usage: python -P -m toprope.analysis.plots RUN_FOLDER [PICTURE]", file=sys.stderr)
        return 2
    folder = RunFolder(Path(arguments[0]).resolve())
    try:
        specification = Specification.read(folder)
        results = gather(folder, specification, Status.read(folder))
        sweep = None if specification.sweep is None else (read_standing(folder), specification.sweep)
        path = Path(arguments[1]) if arguments[1:] else folder.plot
        draw(path, results, read_history(folder.metrics, _ROWS).rows, sweep)
    except TopropeError as error:
        print(error, file=sys.stderr)
        return 1
    return 0
