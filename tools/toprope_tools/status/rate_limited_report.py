"""What a report of a live run leaves out: figures that are newer than what check_status may have told.

The limit on fresh numbers would be no limit if another tool gave them away. Evaluations are events and always pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from toprope.analysis.reports.results import Results
from toprope_tools.status.snapshot import told_numbers

if TYPE_CHECKING:
    from toprope_tools.workshop import Workshop

__all__ = ["as_told"]


def as_told(workshop: Workshop, report: Results) -> Results:
    """The report up to the step that was last told; fresh where fresh numbers are due, which are told then."""
    step = int(told_numbers(workshop, report.run_id)[0].get("step") or 0)
    if report.steps <= step:
        return report
    return report.model_copy(
        update={
            "steps": step,
            "rollouts": 0,
            "rollouts_per_second": None,
            "metrics": {},
            "counts": {},
            "time": {},
            "history": [point for point in report.history if point.step <= step],
        }
    )
