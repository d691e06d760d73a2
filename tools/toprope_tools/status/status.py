"""How runs stand: at once, or when there is news.

Agents poll, and every poll costs them context. So fresh numbers of a run come at most once per interval, whoever asks
and through whichever server (the stamp lies in the index); within it the last ones are repeated in one line with their
age. What an agent must know at once always passes: changes of state, evaluations, findings, stalls, the end. Waiting is
the better call: it returns on news, costs one line when there was none, and with its cursor misses nothing in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from anyio import to_thread

from toprope.errors import InvalidValue
from toprope.records.run.status import LIVE
from toprope.workbench.launch.seeds import expand
from toprope_tools.answers import base as answers
from toprope_tools.answers.base import Answer, call
from toprope_tools.client_timeouts import UNKNOWN, Client, longest_wait_s
from toprope_tools.status import cursor as places
from toprope_tools.status.progress_line import numbers_line
from toprope_tools.status.run_list import list_runs, open_runs, run_item, run_row
from toprope_tools.status.status_text import Patience, tell
from toprope_tools.status.wait import Progress, wait_for_news
from toprope_tools.status.wait_conditions import parse

if TYPE_CHECKING:
    from toprope_tools.workshop import Workshop

__all__ = ["Progress", "check_status", "list_runs", "numbers_line", "open_runs", "run_row"]

MOST_RUNS = 20


async def check_status(
    workshop: Workshop,
    *,
    run_ids: Sequence[str] | None = None,
    wait_s: float | None = None,
    until: Sequence[str] | None = None,
    cursor: str | None = None,
    progress: Progress | None = None,
    client: Client = UNKNOWN,
) -> Answer:
    """Where runs stand, now or at the first news of any of them.

    Args:
        workshop: The server's.
        run_ids: Which; none: those of the cursor, and without one the answer names the open runs.
        wait_s: Longest wait in seconds, cut to what the client holds out; None or 0: none.
        until: What to wait for, see `toprope_tools.status.wait_conditions`; none: any news.
        cursor: The caller's place in the runs' events, from its last answer; none: what nobody was told yet is new.
        progress: Called at once and then at most twice a second while waiting.
        client: Who calls.

    Raises:
        NotFound: There is no such run.
        InvalidValue: Too many runs, a condition that is none, a cursor that is none.
    """
    conditions = parse(until or ())
    known = places.parse(cursor) if cursor else {}
    wanted = await to_thread.run_sync(expand, workshop.home.runs, run_ids or list(known))
    limit = (await to_thread.run_sync(workshop.settings)).status
    longest_s = longest_wait_s(client, limit.waits)
    if not wanted:
        return await to_thread.run_sync(_open, workshop, longest_s)
    if len(wanted) > MOST_RUNS:
        raise InvalidValue(f"{len(wanted)} runs are too many for one call.", hint=f"Ask for at most {MOST_RUNS}.")
    patience = Patience(max(wait_s or 0.0, 0.0), longest_s, tuple(one.name for one in conditions))
    waited = await wait_for_news(
        workshop,
        wanted,
        wait_s=patience.wait_s,
        until=conditions,
        places=known,
        limit=limit,
        progress=progress,
    )
    return await to_thread.run_sync(tell, workshop, waited, known, patience)


def _open(workshop: Workshop, longest_s: float) -> Answer:
    live = [run for run in workshop.statuses() if run.state in LIVE][:MOST_RUNS]
    if live:
        text = "Open runs (name them in run_ids to see how they stand):\n" + "\n".join(map(run_row, live))
        text += f"\nNext: {call('check_status', run_ids=[run.run_id for run in live], wait_s=round(longest_s))}"
    else:
        text = "No run is open. list_runs names those that ended; start_training starts one from a draft."
    return Answer(text, answers.StatusAnswer(runs=[], open_runs=[run_item(run) for run in live]))
