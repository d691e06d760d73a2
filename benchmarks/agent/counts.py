"""Count the calls and tokens of a conversation, with waits and with polls instead of them.

A token is four bytes. A call counts with what a client puts into the model's context: the tool's name and its arguments
as compact JSON. An answer counts with its text and its structure as compact JSON, as in a client that shows both. In
the status that a poll gets, each thing is counted once; a client that leaves something out makes our side cheaper than
measured. The list of tools, progress and protocol messages are not counted: they are the same for both, or no model
sees them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["EVERY_S", "Exchange", "Poll", "compact", "figures", "polls_needed"]

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
    """One full status of a live run, in bytes: the call, each part of the answer, and the text and structure of
    get_results(detailed) at that moment (0 if it was not called).
    """

    run_id: str
    request: int
    parts: Mapping[str, int]
    detailed: int = 0

    def all(self, *left_out: str) -> int:
        return self.request + sum(size for name, size in self.parts.items() if name not in left_out)


def polls_needed(seconds: float, every_s: float = EVERY_S) -> int:
    """Return the number of polls until one sees what happens after `seconds`; the first comes after one interval."""
    return max(1, math.ceil(seconds / every_s))


def figures(ours: Sequence[Exchange], unknown_waits: Sequence[Exchange], polls: Sequence[Poll]) -> dict[str, Any]:
    """Return the ratios: the same script with polls instead of waits, divided by the script.

    Args:
        ours: Every call of the patient client.
        unknown_waits: The calls that an unknown client needed for the same waits; the rest of the script is the same.
        polls: The polls that the poller would have made.
    """
    rest = [one for one in ours if not one.wait]
    own, same = sum(one.all for one in ours), sum(one.all for one in rest)
    unknown = same + sum(one.all for one in unknown_waits)
    baseline = same + sum(poll.all() for poll in polls)
    request = polls[0].request if polls else 0
    detailed = [poll.detailed + request for poll in polls if poll.detailed]
    own_text = sum(one.request + one.text for one in ours)
    same_text = sum(one.request + one.text for one in rest)
    parts = {name: sum(poll.parts[name] for poll in polls) // 4 for name in (polls[0].parts if polls else ())}
    return {
        "calls_ratio": _ratio(len(rest) + len(polls), len(ours)),
        "calls_ratio_unknown_client": _ratio(len(rest) + len(polls), len(rest) + len(unknown_waits)),
        "tokens_ratio": _ratio(baseline, own),
        "tokens_ratio_unknown_client": _ratio(baseline, unknown),
        "tokens_ratio_text_only": _ratio(same_text + baseline - same, own_text),
        "tokens_ratio_polls_without_logs": _ratio(same + sum(poll.all("logs") for poll in polls), own),
        "tokens_ratio_polls_detailed_results": _ratio(same + sum(detailed), own) if detailed else None,
        "calls": len(ours),
        "waits": len(ours) - len(rest),
        "waits_unknown_client": len(unknown_waits),
        "polls": len(polls),
        "tokens": own // 4,
        "tokens_unknown_client": unknown // 4,
        "tokens_polling": baseline // 4,
        "poll_tokens_mean": sum(poll.all() for poll in polls) // 4 // max(1, len(polls)),
        "poll_tokens_by_part": parts,
        "largest_answer_tokens": max((one.answer for one in [*ours, *unknown_waits]), default=0) // 4,
    }


def _ratio(theirs: float, ours: float) -> float | None:
    return round(theirs / ours, 2) if ours else None
