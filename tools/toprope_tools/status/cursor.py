"""Where a caller stands in the events of its runs: the cursor of check_status.

Every run numbers its events, and the numbers go on when it is resumed. A cursor says up to which number its holder was
told, run by run: `sort-7f3k:12,sums-9d2c:4`. It is all there is to know, so it holds whatever server answers next, and
no two callers can take each other's news away.
"""

from __future__ import annotations

from collections.abc import Mapping

from toprope.errors import InvalidValue
from toprope.records.run.folder import RUN_ID
from toprope_tools.answers.base import clip

__all__ = ["parse", "written"]

_MOST = 64
"""Runs of one cursor."""
_HINT = (
    "Pass the cursor of your last answer as it was given (run-id:number, several with commas between), or omit it for "
    "what nobody was told yet; run-id:0 tells a run from its beginning. Nothing was changed."
)


def parse(cursor: str) -> dict[str, int]:
    """Run -> number of the last event that the caller was told.

    Raises:
        InvalidValue: It is no cursor of ours.
    """
    places: dict[str, int] = {}
    for part in cursor.replace(" ", "").split(","):
        run_id, colon, number = part.rpartition(":")
        if not colon or not RUN_ID.fullmatch(run_id) or not number.isdecimal() or len(number) > 12:
            raise InvalidValue(f"cursor: {clip(part, 80)!r} is no place in a run's events.", hint=_HINT)
        places[run_id] = int(number)
    if len(places) > _MOST:
        raise InvalidValue(f"cursor: {len(places)} runs are too many for one cursor.", hint=_HINT)
    return places


def written(places: Mapping[str, int]) -> str:
    """The cursor of these places."""
    return ",".join(f"{run_id}:{number}" for run_id, number in list(places.items())[-_MOST:])


def unknown_place(run_id: str, place: int, last: int) -> InvalidValue:
    """The refusal of a place that a run's events have not reached."""
    return InvalidValue(f"cursor: {run_id} has {last} events so far, not {place}.", hint=_HINT)
