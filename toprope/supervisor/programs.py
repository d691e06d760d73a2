"""The programs of a run, by the names of its members.

The supervisor knows the programs of `toprope.training` and `toprope.sweeps` by their module names only.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from toprope.records.run.specification import Specification

PLOT = "plot"
"""Not a member of the crew: the program that draws the plot at the end."""

PROGRAMS: Mapping[str, str] = {
    "policy": "toprope.training.policy",
    "api": "toprope.training.api",
    "inference": "toprope.training.inference",
    "trainer": "toprope.training.trainer",
    "environment": "toprope.training.driver",
    "conductor": "toprope.sweeps.conductor",
    PLOT: "toprope.analysis.plots",
}

STARTS_RUNS = frozenset({"conductor"})
"""Members that start runs. The keepers of these runs must outlive them, so the guards of such members release detached
processes. Such a member runs user code only in a worker, which has a guard of its own."""

IMPORTS_TORCH = frozenset({"inference", "trainer"})
"""Members that can be forked from one process that has imported PyTorch. A policy is often in place already, and its
program then ends without it."""

Programs = Mapping[str, Sequence[str]]
"""Component -> argv, in place of the programs above."""


def command_of(component: str, programs: Programs | None = None) -> list[str]:
    """Return the argv that starts a component."""
    if programs and component in programs:
        return list(programs[component])
    return [sys.executable, "-P", "-m", PROGRAMS[component]]


def members_of(specification: Specification) -> tuple[str, ...]:
    """Return the members of a run's crew in start order. A test of endpoints alone needs no policy here."""
    models = specification.test.models if specification.test else []
    if models and all(model.endpoint is not None for model in models):
        return ("environment",)
    return specification.run_kind.members


def optional_members_of(specification: Specification) -> frozenset[str]:
    """Return the members that may fail without ending the run: those of the policy, if endpoints are tested as well."""
    models = specification.test.models if specification.test else []
    if any(model.endpoint is not None for model in models):
        return frozenset({"policy", "inference"})
    return frozenset()
