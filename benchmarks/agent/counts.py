"""Count the calls and tokens of a conversation, with waits and with polls instead of them.

A token is four bytes. A call counts with what a client puts into the model's context: the tool's name and its arguments
as compact JSON. An answer counts with its text and, if it came, its structure as compact JSON, as in a client that
shows both; a poll counts once. The list of tools, progress and protocol messages are not counted: they are the same for
both, or no model sees them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["EVERY_S", "Exchange", "Poll", "compact", "figures"]

EVERY_S = 30.0
"""Seconds between the polls of an agent that cannot wait."""


def compact(value: Any) -> bytes:
    """Encode as JSON without spaces."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


@dataclass(frozen=True)
class Exchange:
    """One call and its answer, in bytes. `wait`: the call waited, so a poller makes polls instead of it."""

    tool: str
    request: int
    text: int
    structure: int
    wait: bool = False

    @classmethod
    def of(
        cls, tool: str, arguments: Mapping[str, Any], text: str, structure: Mapping[str, Any] | None, *, wait: bool
    ) -> Exchange:
        """Measure a request and its answer."""
        request = compact({"name": tool, "arguments": dict(arguments)})
        said = 0 if structure is None else len(compact(structure))
        return cls(tool, len(request), len(text.encode()), said, wait)

    @property
    def answer(self) -> int:
        return self.text + self.structure

    @property
    def all(self) -> int:
        return self.request + self.answer


@dataclass(frozen=True)
class Poll:
    """One short status of all runs, in bytes."""

    request: int
    answer: int
    alone: int = 0
    """The answer if only every second poll is made."""

    @property
    def all(self) -> int:
        return self.request + self.answer


def figures(made: Sequence[Exchange], patient: Sequence[Exchange], polls: Sequence[Poll]) -> dict[str, Any]:
    """Return the ratios: the same script with polls instead of waits, divided by the script.

    Args:
        made: Every call of a client of unknown patience: the main figures.
        patient: The calls that a patient client needed for the same waits; the rest of the script is the same.
        polls: The polls instead of them. Every second one is the control: an agent that polls half as often.
    """
    rest = [one for one in made if not one.wait]
    same = sum(one.all for one in rest)
    own, other = sum(one.all for one in made), same + sum(one.all for one in patient)
    baseline = same + sum(poll.all for poll in polls)
    halved = same + sum(poll.request + (poll.alone or poll.answer) for poll in polls[1::2])
    return {
        "calls_ratio": _ratio(len(rest) + len(polls), len(made)),
        "tokens_ratio": _ratio(baseline, own),
        "calls_ratio_patient": _ratio(len(rest) + len(polls), len(rest) + len(patient)),
        "tokens_ratio_patient": _ratio(baseline, other),
        "calls_ratio_control": _ratio(len(rest) + len(polls[1::2]), len(made)),
        "tokens_ratio_control": _ratio(halved, own),
        "calls": len(made),
        "waits": len(made) - len(rest),
        "waits_patient": len(patient),
        "polls": len(polls),
        "tokens": own // 4,
        "tokens_waits": (own - same) // 4,
        "tokens_patient": other // 4,
        "tokens_polling": baseline // 4,
        "poll_tokens_mean": sum(poll.all for poll in polls) // 4 // max(1, len(polls)),
        "largest_answer_tokens": max((one.answer for one in [*made, *patient]), default=0) // 4,
    }


def _ratio(theirs: float, ours: float) -> float | None:
    return round(theirs / ours, 2) if ours else None
