"""Conditions that end a wait: the words of `until`, and a test of whether a run meets them.

    end             the run has ended, in any way
    all ended       all runs of the wait have ended
    evaluation      a new evaluation            finding     a new finding of the keeper's diagnosis
    stall           the run makes no progress   step 200    training has reached this step
    training        the run has reached or passed this state; any state of a run

Several conditions are alternatives. Spelling is lenient. An unknown word is refused with a list of all words, because
the wait would otherwise last until its time limit.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass

from toprope.errors import InvalidValue
from toprope.records.run.status import ENDED, LIVE, Event, Status
from toprope.text_format import clip

EVENTS = ("end", "evaluation", "finding", "stall")
ALL_ENDED = "all ended"
_WAY = ("queued", "validating", "starting", "training", "evaluating", "completed")
"""States in the order that a run passes them."""
_STATES = (*_WAY[:-1], "paused", "stopping", *sorted(ENDED))
_STEP = re.compile(r"steps?\s*(?:[=:]|>=|==)?\s*(\d{1,9})")
_STATE = re.compile(r"(?:state\s*[=:]?=?\s*)?([a-z]+)")
_ALL = re.compile(r"all[ _-](?:runs )?(?:have |are )?(?:ended|end|done|finished)")
_MOST = 16


@dataclass(frozen=True)
class Condition:
    """One alternative."""

    name: str
    """The word in answers."""
    step: int | None = None
    """Set if the condition is a step."""

    @property
    def of_all(self) -> bool:
        """True if it concerns all runs of a wait together."""
        return self.name == ALL_ENDED

    @property
    def stays_met(self) -> bool:
        """True if a run that has met it meets it ever after; of the others each wait needs a new event."""
        return self.step is not None or self.name not in EVENTS or self.name == "end"

    def met(self, status: Status, news: Sequence[Event]) -> bool:
        """Return whether a run meets it.

        Args:
            status: The run's present status.
            news: Its events that the caller has not seen.
        """
        if self.step is not None:
            return int(status.progress.get("step") or 0) >= self.step
        if self.name == "end":
            return status.ended and not status.goes_on
        if self.of_all:
            return False  # one run alone cannot meet it
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
    """Parse the words of `until`.

    Raises:
        InvalidValue: Not a condition; the hint lists all conditions.
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
        f"until: {clip(word, 60)!r} is not a condition.{f' Did you mean {near[0]!r}?' if near else ''}",
        hint=f"Conditions: {', '.join(EVENTS)}, {ALL_ENDED}, 'step N' (such as 'step 200'), and the states "
        f"{', '.join(_STATES)}. Several are alternatives; omit until to wait for any news.",
    )
