"""Resume runs whose keeper was lost, while a server lives.

Clients start disposable servers as probes, so the first check waits a little, and nothing is checked if there are no
runs. A check costs milliseconds, finishes what lost keepers left, and starts the next attempt of the runs that resume
automatically; see `toprope.supervisor.runs.auto_resume_policy`.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

import anyio
from anyio import to_thread

if TYPE_CHECKING:
    from toprope_tools.workshop import Workshop

    from toprope.settings.owner import Home

logger = logging.getLogger("toprope.server")

FIRST_AFTER_S = 2.0
EVERY_S = 20.0


async def resume_lost_runs(
    home: Home | None = None,
    first_after_s: float = FIRST_AFTER_S,
    every_s: float = EVERY_S,
    *,
    read_only: bool = False,
) -> None:
    """Check the runs until cancelled. A failed check is logged, and the next one tries again.

    Args:
        home: The home with the runs; the owner's by default.
        first_after_s: Seconds until the first check.
        every_s: Seconds between checks.
        read_only: Only mark lost runs, start none.
    """
    workshop: Workshop | None = None
    last_error = ""
    await anyio.sleep(first_after_s)
    while True:
        try:
            workshop = await to_thread.run_sync(_check, home, workshop, read_only)
            last_error = ""
        except Exception as error:  # unreadable settings, a lost disk: tool calls report them, too
            if str(error) != last_error:
                last_error = str(error)
                logger.warning("Cannot check the runs: %s", error)
        await anyio.sleep(every_s)


def _check(home: Home | None, workshop: Workshop | None, read_only: bool) -> Workshop | None:
    # Imported at the first check: a probe does not wait for it.
    from toprope.settings.owner import Home

    home = home or Home.locate()
    if not home.runs.is_dir() or not os.listdir(home.runs):
        return workshop
    if workshop is None:
        from toprope_tools.workshop import Workshop

        workshop = Workshop.open(home)
        if read_only:
            workshop.runs.only_mark_lost()
    workshop.statuses()
    return workshop
