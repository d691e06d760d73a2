"""How a run's integrity is said: warnings always, everything else when somebody asks for the detail."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toprope.analysis.integrity import Check, Integrity, lone_wins
from toprope.analysis.statistics.run_samples import measured
from toprope.errors import TopropeError
from toprope.workbench.launch.seeds import group_of, members
from toprope_tools.answers.base import clip

if TYPE_CHECKING:
    from toprope_tools.workshop import Workshop

__all__ = ["believed"]


def believed(
    workshop: Workshop, run_id: str, found: Integrity | None, *, ended: bool, detailed: bool
) -> tuple[list[str], list[dict[str, Any]] | None]:
    """Lines and structure of a run's integrity; nothing for runs that do not train.

    Args:
        workshop: The server's.
        run_id: The run.
        found: What its report holds.
        ended: Whether it has ended: before that nothing is complete.
        detailed: All checks, those that found nothing as well.
    """
    if found is None or not (ended or detailed):
        return [], None
    checks = list(found.checks)
    if (seeds := _seeds(workshop, run_id)) is not None:
        checks.append(seeds)
    shown = checks if detailed else [check for check in checks if check.state == "warning"]
    lines = [f"Integrity, {check.name}: {check.state}. {clip(check.what, 400)}" for check in shown]
    return lines, [check.model_dump(mode="json") for check in shown] or None


def _seeds(workshop: Workshop, run_id: str) -> Check | None:
    """What this seed alone can do, where it has others beside it."""
    group = group_of(run_id)
    if group is None:
        return None
    found = []
    for other in members(workshop.home.runs, group[0]):
        try:
            found.append(measured(workshop.runs.folder(other), ""))
        except (TopropeError, OSError):
            continue  # not measured yet, or not at all
    return lone_wins(run_id, found)
