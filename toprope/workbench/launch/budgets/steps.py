"""The optimizer steps of a run."""

from __future__ import annotations

from toprope.records.run.specification import Specification


def steps_of(specification: Specification) -> int:
    """Return the most optimizer steps of a run: of its demonstrations and epochs, or of its budget; 0 if nothing is
    trained."""
    config, kind = specification.config, specification.run_kind
    if not kind.demonstrates:
        return config.budget.steps if kind.trains or kind.starts_runs else 0
    section, dataset = config.sft, specification.dataset
    rows = section.tasks * section.traces_per_task if dataset is None else dataset.items
    return -(-rows * section.epochs // section.batch_size)
