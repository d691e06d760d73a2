"""Freezing a run's specification once more, to see whether it comes out the same."""

from __future__ import annotations

import time

import toprope
from toprope.errors import InvalidValue
from toprope.records.run.specification import Specification
from toprope.settings.fields import all_fields
from toprope.settings.locks import Locks
from toprope.workbench.launch.freeze import new_run_id
from toprope.workbench.launch.mixture_sources import hold_locks

__all__ = ["freeze_again"]


def freeze_again(run: Specification, locks: Locks, now: float | None = None) -> Specification:
    """The specification of a run that repeats another: the same but for its id, time, and the version of Toprope.

    Args:
        run: The one to repeat.
        locks: The owner's, as they are now.
        now: Seconds since the epoch; the clock where it is None.

    Raises:
        LockedField: The owner does not allow that configuration any more.
        InvalidValue: Its kind cannot be repeated.
    """
    if not run.run_kind.measures:
        raise InvalidValue(
            f"{run.run_id} is a run of kind {run.kind}, which cannot be repeated.", hint=run.run_kind.repeat_hint
        )
    now = time.time() if now is None else now
    own = [{"name": name, "default": value} for name, value in run.config.environment.knobs.items()]
    locks.enforce(run.config, all_fields(own))
    hold_locks(run.config, locks)
    return run.model_copy(
        update={
            "run_id": new_run_id(f"again-{run.environment.name.rsplit('/', 1)[-1]}", now),
            "created_at": now,
            "toprope_version": toprope.__version__,
            "config": run.config.model_copy(deep=True),
            "locks": locks.record(),
            "reproduces": run.run_id,
            "seed_group": None,
            "limits": None,
        }
    )
