"""How an environment's failures are named where they are counted: few names, so that a count says something."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from toprope.records.journal.groups import Outcome
from toprope.sdk.errors import WorkerError

__all__ = ["Errors", "reason_of"]

_KIND = re.compile(r"^([A-Za-z_][\w.]{0,60}?)(?::|$)")
_MOST_KINDS = 12
_OTHER = "other"


def reason_of(error: WorkerError) -> str:
    """Why a group came to nothing, of the few reasons that there are."""
    if error.kind != "ended":
        return "the environment failed"
    return "the environment hung" if error.type == "WorkerTimeout" else "the environment's process ended"


class Errors:
    """Counts the kinds of errors in which rollouts ended."""

    def __init__(self) -> None:
        self.rollouts = 0
        self.counted: Counter[str] = Counter()

    def add(self, outcomes: Iterable[Outcome]) -> None:
        for outcome in outcomes:
            self.rollouts += 1
            if outcome.error:
                kind = found[1] if (found := _KIND.match(outcome.error)) else outcome.error[:40]
                known = kind in self.counted or len(self.counted) < _MOST_KINDS
                self.counted[kind if known else _OTHER] += 1
