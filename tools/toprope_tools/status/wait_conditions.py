"""What a wait is for: the words of `until`, and whether a run meets them.

    end             the run has ended, however
    all ended       every run that is waited for has ended
    evaluation      a new evaluation            finding     a new finding of the keeper's diagnosis
    stall           it stands still             step 200    training has made so many steps
    training        it has reached that state (or passed it on its way); any state of a run

Several are alternatives. Words are few and forgiving in how they are written; what is none is refused with all of them,
because a wait for a word that nobody knows would only end by its time.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass

from toprope.errors import InvalidValue
from toprope.records.run.status import ENDED, LIVE, Event, Status
from toprope_tools.answers.base import clip

__all__ = ["Condition", "parse"]

EVENTS = ("end", "evaluation", "finding", "stall")
ALL_ENDED = "all ended"
_WAY = ("queued", "validating", "starting", "training", "evaluating", "completed")
"""States in the order in which a run passes them."""
_STATES = (*_WAY[:-1], "paused", "stopping", *sorted(ENDED))
_STEP = re.compile(r"steps?\s*(?:[=:]|>=|==)?\s*(\d{1,9})")
_STATE = re.compile(r"(?:state\s*[=:]?=?\s*)?([a-z]+)")
_ALL = re.compile(r"all[ _-](?:runs )?(?:have |are )?(?:ended|end|done|finished)")
_MOST = 16


@dataclass(frozen=True)
class Condition:
    """One alternative. `name` is how it is said back; `step` is set for a step. `of_all`: about all runs of a wait
    together, so that the end of one of them is not what it is for."""

    name: str
    step: int | None = None

    @property
    def of_all(self) -> bool:
        return self.name == ALL_ENDED

    def met(self, status: Status, news: Sequence[Event]) -> bool:
        """Whether it holds.

        Args:
            status: The run's, now.
            news: Its events that the caller was not told yet.
        """
        if self.step is not None:
            return int(status.progress.get("step") or 0) >= self.step
        if self.name == "end":
            return status.ended
        if self.of_all:
            return False  # no run meets it by itself
        if self.name == "finding":
            return any(event.kind == "finding" and event.data.get("level") != "over" for event in news)
        if self.name == "stall":
            return any(event.kind == "stall" and not event.data.get("over") for event in news)
        if self.name in EVENTS:
            return any(event.kind == self.name for event in news)
        return self._reached(status, news)

    def _reached(self, status: Status, news: Sequence[Event]) -> bool:
        if status.state == self.name:
            return True
        if self.name in _WAY and status.state in _WAY:
            return _WAY.index(status.state) >= _WAY.index(self.name)
        return any(event.kind == "state" and event.data.get("to") == self.name for event in news)


def parse(words: Sequence[str]) -> list[Condition]:
    """The conditions in a list of words.

    Raises:
        InvalidValue: One is none; the message has all that there are.
    """
    if len(words) > _MOST:
        raise InvalidValue(f"until: {len(words)} conditions are too many.", hint=f"Give at most {_MOST}.")
    return list(dict.fromkeys(_condition(word) for word in words))


def _condition(word: str) -> Condition:
    text = " ".join(word.lower().split())
    if text in ("ended", "done", "finished"):
        return Condition("end")
    if _ALL.fullmatch(text):
        return Condition(ALL_ENDED)
    if text.endswith("s") and text[:-1] in EVENTS:
        text = text[:-1]
    if text in EVENTS:
        return Condition(text)
    if found := _STEP.fullmatch(text):
        return Condition(f"step {int(found[1])}", int(found[1]))
    if (found := _STATE.fullmatch(text)) and found[1] in LIVE | ENDED:
        return Condition(found[1])
    near = difflib.get_close_matches(text, [*EVENTS, ALL_ENDED, *_STATES], n=1, cutoff=0.6)
    raise InvalidValue(
        f"until: {clip(word, 60)!r} is no condition.{f' Did you mean {near[0]!r}?' if near else ''}",
        hint=f"There are: {', '.join(EVENTS)}, {ALL_ENDED}, 'step N' (such as 'step 200'), and the states "
        f"{', '.join(_STATES)}. Several are alternatives; omit until to wait for any news.",
    )
