"""Texts about cost: the preview of a start, the usage of a run, and the request to confirm a start."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from toprope.errors import Corrupt, NotPossibleNow
from toprope.records.run.folder import RunFolder
from toprope.records.run.usage import Usage
from toprope.text_format import ago, duration, plural
from toprope.untrusted import named
from toprope.workbench.drafts import Draft
from toprope.workbench.launch.preview import Estimate, Preview
from toprope.workbench.launch.start import ConfirmationNeeded

_SAID = (
    ("wall_hours", "time"),
    ("cpu_hours", "processors"),
    ("gpu_hours", "GPUs"),
    ("memory_gb", "memory of all processes"),
    ("disk_gb", "disk"),
    ("cost_usd", "cost"),
)


def said(preview: Preview) -> str:
    """Format a preview in a few lines."""
    runs = f"{preview.count} runs" if preview.count > 1 else "one run"
    parts = [
        f"{label} {_quantity(name, preview.estimates.get(name), preview.longest_s)}"
        for name, label in _SAID
        if _shows(preview, name)
    ]
    suffix = " each" if preview.count > 1 else ""
    steps = f" of at most {preview.steps} steps{suffix}" if preview.steps else ""
    lines = [f"What {runs}{steps} would take: {'; '.join(parts)}."]
    if preview.count > 1:
        wall = preview.estimates.get("wall_hours")
        total = (
            "" if wall is None else f"; {preview.count} one after the other take {_hours(wall.times(preview.count))}"
        )
        lines[0] += f" The time is that of one run{total}. The other figures are for all runs together."
    lines.append(preview.basis)
    if preview.caps:
        caps = ", ".join(f"{value:.3g} {name}" for name, value in preview.caps.items())
        lines.append(f"Each run is stopped with a checkpoint at: {caps}.")
    return "\n".join(lines)


def asked_about(draft: Draft, costs: str) -> str:
    """Return what a client shows a person: the draft that would start, by its own names, and what that would take."""
    environment, policy = named(draft.environment.name), named(draft.config.policy.model)
    return f"{draft.id} revision {draft.revision}: environment {environment}, policy {policy}.\n{costs}"


def structured(preview: Preview) -> dict[str, Any]:
    """Return the preview for an answer's structure; unknown quantities are null."""
    estimates = {
        name: None
        if estimate is None
        else {"value": _short(estimate.value), "low": _short(estimate.low), "high": _short(estimate.high)}
        for name, estimate in preview.estimates.items()
    }
    return {
        "estimates": estimates,
        "basis": preview.basis,
        "runs": preview.count,
        "steps": preview.steps,
        "caps": preview.caps,
        "hash": preview.hash,
    }


def used(
    folder: RunFolder, *, live: bool, members: Sequence[RunFolder] = ()
) -> tuple[list[str], dict[str, Any] | None]:
    """Return a run's usage so far as lines and as a structure; empty and None if it was not measured.

    A keeper measures now and then: of a live run the line says when.

    Args:
        folder: The run's.
        live: Its processes have not ended.
        members: Folders of the runs that it started, whose usage counts, too.
    """
    usage = _usage(folder)
    if usage is None:
        return [], None
    for member in filter(None, map(_usage, members)):
        for name in ("cpu_s", "gpu_s", "tokens_usd", "disk_bytes", "steps"):
            setattr(usage, name, getattr(usage, name) + getattr(member, name))
        usage.usd = None if usage.usd is None or member.usd is None else usage.usd + member.usd
        usage.peak_memory_bytes = max(usage.peak_memory_bytes, member.peak_memory_bytes)
    parts = [f"{duration(usage.wall_s)} of wall time", f"{usage.cpu_s:.3g} CPU-seconds"]
    if usage.gpu_s:
        parts.append(f"{usage.gpu_s / 3600:.3g} GPU-hours")
    parts += [f"{usage.peak_memory_bytes / 1e9:.2g} GB of memory at most", f"{usage.disk_bytes / 1e9:.2g} GB on disk"]
    if usage.cost_usd is not None:
        parts.append(f"{usage.cost_usd:.3g} USD")
    measured = f", as measured {ago(usage.at)}" if live and usage.at else ""
    measured += f", with its {plural(len(members), 'run')}" if members else ""
    return [f"Taken{measured}: {', '.join(parts)}."], usage.model_dump(mode="json", exclude={"version", "days"})


def _usage(folder: RunFolder) -> Usage | None:
    try:
        return Usage.read(folder)
    except Corrupt:
        return None


def ask_to_confirm(refused: ConfirmationNeeded) -> NotPossibleNow:
    """Word the refusal of a start that a person must confirm."""
    return NotPossibleNow(f"{refused.message}\n{said(refused.preview)}", hint=refused.hint)


def _shows(preview: Preview, name: str) -> bool:
    estimate = preview.estimates.get(name)
    return not (name == "gpu_hours" and estimate is not None and not estimate.high)


def _quantity(name: str, estimate: Estimate | None, longest_s: float | None) -> str:
    if estimate is None and name == "wall_hours" and longest_s is not None:
        return f"at most {duration(longest_s)} of training, and that of start and evaluations"
    if estimate is None:
        return "unknown"
    if name == "wall_hours":
        return _hours(estimate)
    unit = {"cpu_hours": " CPU-hours", "gpu_hours": " GPU-hours", "cost_usd": " USD"}.get(name, " GB")
    text = f"{estimate.value:.3g}{unit}"
    return (
        text
        if f"{estimate.low:.3g}" == f"{estimate.high:.3g}"
        else f"{text} ({estimate.low:.3g} to {estimate.high:.3g})"
    )


def _hours(estimate: Estimate) -> str:
    low, middle, high = (duration(value * 3600) for value in (estimate.low, estimate.value, estimate.high))
    return middle if low == high else f"{middle} ({low} to {high})"


def _short(value: float) -> float:
    return float(f"{value:.4g}")
