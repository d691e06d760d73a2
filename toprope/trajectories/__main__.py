"""Export rollouts or a policy, or build a data set.

`python -P -m toprope.trajectories FOLDER` executes the order in that folder.
This is a separate process because it loads pyarrow, a tokenizer or a model, which the server never does, and may take
an hour.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

from toprope.atomic import write_json
from toprope.errors import TopropeError
from toprope.records.run.folder import read_json
from toprope.trajectories.jobs.execute import Work
from toprope.trajectories.jobs.jobs import hold
from toprope.trajectories.jobs.orders import Order

_NICE = 5
"""Niceness: training has priority."""


def main(arguments: list[str]) -> int:
    """Execute the order in the given folder; return 0 on success, 1 on failure."""
    folder = Path(arguments[0])
    descriptor = hold(folder)
    if descriptor is None:
        print("another process executes this order", flush=True)
        return 1
    os.nice(_NICE)
    signal.signal(signal.SIGTERM, _on_sigterm)
    failure: dict[str, Any]
    try:
        order = Order.model_validate(read_json(folder / "order.json"))

        def tell(doing: str, read: int, kept: int) -> None:
            write_json(folder / "progress.json", {"doing": doing, "read": read, "kept": kept})

        if order.policy is not None:
            from toprope.trajectories.jobs.policies import export_trained

            outcome = export_trained(order.policy, Path(order.target), tell)
        else:
            outcome = asyncio.run(Work(order, folder, tell).do())
    except TopropeError as error:
        failure = {"kind": type(error).__name__, "message": error.message, "hint": error.hint}
    except (KeyboardInterrupt, SystemExit):
        failure = {"kind": "NotPossibleNow", "message": "It was stopped.", "hint": "Repeat the call to continue."}
        failure["stopped"] = True
    except BaseException as error:
        traceback.print_exc()
        failure = {
            "kind": "ComponentFailed",
            "message": f"The data program failed: {type(error).__name__}: {str(error)[:300]}",
            "hint": f"Its log is {folder / 'job.log'}.",
        }
    else:
        write_json(folder / "outcome.json", outcome.model_dump(mode="json"))
        return 0
    write_json(folder / "failure.json", failure)
    return 1


def _on_sigterm(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
