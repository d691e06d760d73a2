"""The cursor of check_status: a caller's place in the events of its runs.

Every run numbers its events, and a resumed run continues the numbers. A cursor holds the last number told for each run:
`sort-7f3k:12,sums-9d2c:4`. The server stores no place, so any server can answer the next call, and callers cannot take
news away from each other.
"""

from __future__ import annotations

from collections.abc import Mapping

from toprope.errors import InvalidValue
from toprope.records.run.folder import RUN_ID
from toprope.text_format import clip

_MOST = 64
"""Most runs of one cursor."""
_HINT = (
    "Pass the cursor of your last answer unchanged (run-id:number, separated by commas), or omit it for events that "
    "nobody has seen; run-id:0 starts at a run's first event. Nothing was changed."
)


def parse(cursor: str) -> dict[str, int]:
    """Parse a cursor into the number of the last event told, by run.

    Raises:
        InvalidValue: Not a valid cursor.
    """
    places: dict[str, int] = {}
    for part in cursor.replace(" ", "").split(","):
        run_id, colon, number = part.rpartition(":")
        if not colon or not RUN_ID.fullmatch(run_id) or not number.isdecimal() or len(number) > 12:
            raise InvalidValue(f"cursor: {clip(part, 80)!r} is not a place in a run's events.", hint=_HINT)
        places[run_id] = int(number)
    if len(places) > _MOST:
        raise InvalidValue(f"cursor: {len(places)} runs are too many for one cursor.", hint=_HINT)
    return places


def format_cursor(places: Mapping[str, int]) -> str:
    """Format places as a cursor."""
    return ",".join(f"{run_id}:{number}" for run_id, number in list(places.items())[-_MOST:])


def unknown_place(run_id: str, place: int, last: int) -> InvalidValue:
    """Return the error for a place beyond a run's last event."""
    return InvalidValue(f"cursor: {run_id} has {last} events so far, not {place}.", hint=_HINT)
