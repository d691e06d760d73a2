"""The programs of a run, by the names of its members.

The supervisor knows the programs of `toprope.training` and `toprope.sweeps` by their module names only.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from toprope.records.run.specification import Specification

PLOT = "plot"
"""Not a member of the crew: the program that draws the plot at the end."""

TRACKER = "tracker"
"""The member that copies a run's figures to experiment trackers. It ends last, and no run depends on it."""

PROGRAMS: Mapping[str, str] = {
    "policy": "toprope.training.policy",
    "api": "toprope.training.api",
    "inference": "toprope.training.inference",
    "trainer": "toprope.training.trainer",
    "environment": "toprope.training.driver",
    "conductor": "toprope.sweeps.conductor",
    TRACKER: "toprope.trackers",
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


def role_of(member: str) -> str:
    """Return the component that a member is: `environment` for `environment-2`, a further driver."""
    return member.partition("-")[0]


def command_of(component: str, programs: Programs | None = None) -> list[str]:
    """Return the argv that starts a component."""
    if programs and component in programs:
        return list(programs[component])
    return [sys.executable, "-P", "-m", PROGRAMS[role_of(component)]]


def torch_members_of(specification: Specification) -> frozenset[str]:
    """Return the members that compute with PyTorch here: none if a service trains and samples."""
    return frozenset() if specification.config.is_hosted else IMPORTS_TORCH.intersection(members_of(specification))


def members_of(specification: Specification) -> tuple[str, ...]:
    """Return the members of a run's crew in start order. A test of endpoints alone needs no policy here. Drivers after
    the first only sample for training."""
    models = specification.test.models if specification.test else []
    members = specification.run_kind.members
    if models and all(model.endpoint is not None for model in models):
        members = ("environment",)
    if specification.run_kind.samples:
        members = (*members, *(f"environment-{n}" for n in range(2, specification.config.launcher.driver_count + 1)))
    return (*members, TRACKER) if is_tracked(specification) else members


def is_tracked(specification: Specification) -> bool:
    """True if the run is copied to an experiment tracker: all kinds but questions, if the configuration names one."""
    logging = specification.config.logging
    return specification.run_kind.name != "ask" and (logging.wandb != "disabled" or bool(logging.trackers))


def optional_members_of(specification: Specification) -> frozenset[str]:
    """Return the members that may fail without ending the run: the tracker, all drivers but the first, and those of the
    policy if endpoints are tested as well."""
    models = specification.test.models if specification.test else []
    with_endpoints = any(model.endpoint is not None for model in models)
    drivers = {name for name in members_of(specification) if name.startswith("environment-")}
    return frozenset(drivers | ({TRACKER, "policy", "inference"} if with_endpoints else {TRACKER}))
