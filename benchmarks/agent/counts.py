"""What a conversation costs an agent: its calls and their tokens, and the same with polls in place of waits.

A token is four bytes. Counted is what a client puts into the model's context: of a call the tool's name and its
arguments as compact JSON; of an answer its text and its structure as compact JSON, both, as a client does that shows
both. Of the status that a poll gets each thing is counted once. So whatever a client leaves out makes our side
cheaper than it is here. The list of tools, progress and what the protocol itself needs are not counted: they are the
same, or no model sees them.
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
    """JSON without blanks."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


@dataclass(frozen=True)
class Exchange:
    """One call and its answer, in bytes. `wait`: it was made to wait, so a poller makes others in its place."""

    tool: str
    request: int
    text: int
    structure: int
    wait: bool = False

    @classmethod
    def of(
        cls, tool: str, arguments: Mapping[str, Any], text: str, structure: Mapping[str, Any] | None, *, wait: bool
    ) -> Exchange:
        """From what was sent and what came back."""
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
    """One full status of a live run, in bytes: the call, each part of the answer, and what get_results(detailed) said
    of the run at that moment, text and structure (0: not asked)."""

    run_id: str
    request: int
    parts: Mapping[str, int]
    detailed: int = 0

    def all(self, *left_out: str) -> int:
        return self.request + sum(size for name, size in self.parts.items() if name not in left_out)


def polls_needed(seconds: float, every_s: float = EVERY_S) -> int:
    """Polls until one of them sees what happened after so many seconds; the first comes after the first interval."""
    return max(1, math.ceil(seconds / every_s))


def figures(ours: Sequence[Exchange], unknown_waits: Sequence[Exchange], polls: Sequence[Poll]) -> dict[str, Any]:
    """The ratios: the same script with polls in place of its waits, over the script.

    Args:
        ours: Every call of the patient client.
        unknown_waits: The calls that an unknown client needed for the same waits; the rest of the script is the same.
        polls: What the poller would have got.
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
