"""The lifecycle of a run as checks and states, derived from its status.

    created -> validating -> validated -> training -> trained -> evaluating -> complete        error

A component serves only after its own checks, so the status of the crew tells which checks have passed, failed or are
open: the policy loads, the environment has tasks in every split and scores an answer, an owner's trainer accepts the
run.
"""

from __future__ import annotations

import re
from typing import Literal

from toprope.records.run.status import Status

State = Literal["created", "validating", "validated", "training", "trained", "evaluating", "complete", "error"]
Lifecycle = Literal["open", "passed", "failed"]
CHECKS = ("config", "agent", "dataset", "reward")

_READY = frozenset({"ready", "finished"})
_NEEDS = {"config": (), "agent": ("policy", "inference"), "dataset": ("environment",), "reward": ("environment",)}
"""Members that must serve for a check to have passed. Freezing has checked the configuration."""
_NAMED = re.compile(r"\bcheck_(config|agent|dataset|reward):")
_REWARD = re.compile(r"reward|scor", re.IGNORECASE)


def checks_of(status: Status) -> dict[str, Lifecycle]:
    """Return the state of each check."""
    crew, failed = status.crew, _failed_checks(status)
    begun = status.training_at is not None or bool(status.evaluations)
    states: dict[str, Lifecycle] = {}
    for name in CHECKS:
        members = [crew[member] for member in _NEEDS[name] if member in crew]
        ready = begun or (len(members) == len(_NEEDS[name]) and all(member.state in _READY for member in members))
        if status.run_kind.samples and "trainer" in crew and not begun and name != "config":
            ready = ready and crew["trainer"].state in _READY  # an owner's trainer checks them, too
        states[name] = "failed" if name in failed else "passed" if ready else "open"
    return states


def state_of(status: Status) -> State:
    """Return the lifecycle state of a run."""
    match status.state:
        case "completed":
            return "complete"
        case "failed" | "lost":
            return "error"
        case "queued":
            return "created"
        case "evaluating":
            # Before the first task of the evaluation, the run is a trained policy.
            return "evaluating" if "what" in status.progress or status.training_at is None else "trained"
        case "stopping" | "stopped" if status.checkpoint is not None:
            return "trained"
    if status.training_at is not None:
        return "training"
    if status.state == "validating" or "open" in checks_of(status).values():
        return "validating" if status.started_at is not None else "created"
    return "validated"


def _failed_checks(status: Status) -> set[str]:
    """Return the checks that ended the run: those that its failure names, or that of the member that failed first."""
    failure = status.failure
    if failure is None:
        return set()
    if checks := set(_NAMED.findall(failure.reason)):
        return checks
    if status.training_at is not None or status.evaluations:
        return set()
    if failure.component in ("policy", "inference"):
        return {"agent"}
    if failure.component == "environment":
        return {"reward"} if _REWARD.search(failure.reason) else {"dataset"}
    return set()
