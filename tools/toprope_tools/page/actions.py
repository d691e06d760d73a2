"""Actions of a person in the dashboard: stop, resume, decide what waits, note. Each is a line of the audit trail."""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

from anyio import to_thread
from pydantic import BaseModel, Field, ValidationError

from toprope.errors import InvalidValue, TopropeError
from toprope.records.audit import AuditTrail, shorten
from toprope.records.experiments import Decision
from toprope.records.run.folder import describe_misfits
from toprope.supervisor.environment_variables import secret_values
from toprope.workbench.approvals import Approvals
from toprope_tools.experiments.ledger import note_experiment
from toprope_tools.runs.logs import owners_secrets
from toprope_tools.runs.training import resume_training, stop_training

if TYPE_CHECKING:
    from toprope_tools.workshop import Workshop

BY = {"client": "dashboard"}


class _Given(BaseModel, extra="forbid"):
    """Refuses unknown fields."""


class Resume(_Given):
    """The budget with which a completed run goes on; empty for others."""

    steps: int | None = Field(None, ge=1)
    seconds: float | None = Field(None, gt=0)


class Decide(_Given):
    """The answer to a start that waits: `approve` or `refuse`."""

    answer: str = Field(pattern="^(approve|refuse)$")


class Note(_Given):
    """A new experiment, or an amendment of one. See `note_experiment`."""

    experiment_id: str | None = Field(None, max_length=40)
    run_ids: list[str] | None = Field(None, max_length=32)
    hypothesis: str | None = Field(None, max_length=4000)
    outcome: str | None = Field(None, max_length=4000)
    decision: Decision | None = None
    question: str | None = Field(None, max_length=4000)
    goal: str | None = Field(None, max_length=1000)


class Nothing(_Given):
    """No arguments."""


Done = dict[str, Any]
_Act = Callable[["Workshop", str, Any], Awaitable[Done]]


async def _stop(workshop: Workshop, run_id: str, _: Nothing) -> Done:
    found = await stop_training(workshop, run_id=run_id)
    return {"said": _first(found.text), "state": found.data.model_dump().get("state")}


async def _resume(workshop: Workshop, run_id: str, given: Resume) -> Done:
    found = await resume_training(workshop, run_id=run_id, steps=given.steps, seconds=given.seconds, by_owner=True)
    return {"said": _first(found.text), "run_id": found.data.model_dump().get("run_id")}


async def _decide(workshop: Workshop, hash: str, given: Decide) -> Done:
    approvals = Approvals(workshop.home)
    if given.answer == "approve":
        await to_thread.run_sync(approvals.approve, hash)
        return {"said": "Approved for one start. The agent repeats its call to start it."}
    await to_thread.run_sync(approvals.refuse, hash)
    return {"said": "Refused. The same start is refused from now on."}


async def _note(workshop: Workshop, _: str, given: Note) -> Done:
    found = await note_experiment(workshop, **given.model_dump(exclude_none=True))
    experiment = found.data.model_dump().get("experiment") or {}
    return {"said": _first(found.text), "experiment_id": experiment.get("id")}


ACTIONS: Mapping[str, tuple[str, str, type[_Given], _Act]] = {
    "stop": ("stop_training", "run_id", Nothing, _stop),
    "resume": ("resume_training", "run_id", Resume, _resume),
    "ask": ("approve", "hash", Decide, _decide),
    "note": ("note_experiment", "", Note, _note),
}
"""By its name in an address: its name in the diary, the argument that the address has, its body, and what does it."""


async def act(workshop: Workshop, name: str, target: str, body: object) -> Done:
    """Do what a person asked for, and note it in the audit trail.

    Raises:
        InvalidValue: Arguments are missing or wrong; nothing was changed.
        TopropeError: As the tool of that name.
    """
    did, argument, shape, work = ACTIONS[name]
    began, outcome, said = time.monotonic(), "failed", ""
    arguments = {**({argument: target} if argument else {}), **(body if isinstance(body, dict) else {})}
    changed: dict[str, Any] = {}
    try:
        try:
            given = shape.model_validate(body)
        except ValidationError as error:
            raise InvalidValue(f"{describe_misfits(error)}. Nothing was changed.") from None
        done = await work(workshop, target, given)
        outcome, said = "done", str(done["said"])
        if name == "ask":
            did = given.model_dump()["answer"]
        changed = {key: done[key] for key in ("run_id", "experiment_id", "state") if done.get(key)}
        return {"done": True, **done}
    except TopropeError as error:
        outcome, said = "refused", error.message
        raise
    finally:
        entry = {
            "by": BY,
            "did": did,
            "outcome": outcome,
            **({"changed": shorten(changed)} if changed else {}),
            "ms": round(1000 * (time.monotonic() - began)),
        }
        await to_thread.run_sync(_record, workshop, entry, arguments, said)


def _record(workshop: Workshop, entry: dict[str, Any], arguments: dict[str, Any], said: str) -> None:
    """Add a line to the trail.

    Raises:
        OSError: It cannot be written: what a person decides must leave a trace.
    """
    try:
        secrets = owners_secrets(workshop)
    except TopropeError:
        secrets = secret_values(os.environ)
    told = {**entry, **({"said": shorten(_first(said), secrets)} if said else {})}
    AuditTrail(workshop.home.path).append({**told, "arguments": shorten(arguments, secrets)})


def _first(text: str) -> str:
    return text.partition("\n")[0]
