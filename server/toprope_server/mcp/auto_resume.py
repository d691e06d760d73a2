"""Looking at the runs while a server is there, so that one whose keeper was lost goes on without anybody asking.

Clients start disposable servers as probes, so the first look waits a little, and there is none where there are no runs.
A look costs milliseconds, finishes what lost keepers left, and gives those runs their next attempt that are to go on by
themselves; see `toprope.supervisor.runs.auto_resume_policy`.
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

__all__ = ["look_after_runs"]

logger = logging.getLogger("toprope.server")

FIRST_AFTER_S = 2.0
EVERY_S = 20.0


async def look_after_runs(
    home: Home | None = None, first_after_s: float = FIRST_AFTER_S, every_s: float = EVERY_S
) -> None:
    """Looks now and then until it is cancelled. What goes wrong is logged, and the next look tries again.

    Args:
        home: Whose runs; the owner's by default.
        first_after_s: Seconds until the first look.
        every_s: Seconds between looks.
    """
    shop: Workshop | None = None
    said = ""
    await anyio.sleep(first_after_s)
    while True:
        try:
            shop = await to_thread.run_sync(_look, home, shop)
            said = ""
        except Exception as error:  # settings that cannot be read, a disk that is gone: calls say so, too
            if str(error) != said:
                said = str(error)
                logger.warning("The runs could not be looked at: %s", error)
        await anyio.sleep(every_s)


def _look(home: Home | None, shop: Workshop | None) -> Workshop | None:
    # Loaded at the first look: whoever only lists tools does not wait for it.
    from toprope.settings.owner import Home

    home = home or Home.locate()
    if not home.runs.is_dir() or not os.listdir(home.runs):
        return shop
    if shop is None:
        from toprope_tools.workshop import Workshop

        shop = Workshop.open(home)
    shop.statuses()
    return shop
