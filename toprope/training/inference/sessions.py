"""Sessions: what was sampled for a rollout, recorded where it was sampled.

The API key of a request names its session (`<run secret>.<session>`), so an environment needs to know nothing of
tokens. A request with n > 1 under a group's key `g` records one sub-session per answer, `g/0` ... `g/n-1`; a later turn
of answer i comes under `g/i`. A request under the bare secret records nothing (judges, simulated users).

Prompts of later turns are built from the ids of the earlier ones: sampled ids are never tokenised again, because the
tokenizer's own way to write a text need not be the one that the policy took.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import msgspec

from toprope.records.journal.groups import MASKED, PROMPT_LOGPROB

__all__ = ["LIFE_HEADER", "Segment", "Session", "SessionStore", "Turn", "join_turns"]


LIFE_HEADER = "x-toprope-life"
"""Names one life of a server: in answers its own, in requests the one that is meant. A server that was started again
knows nothing of the sessions before it, and would tokenise anew what had been sampled."""


class Turn(msgspec.Struct):
    """One request and its answer. `logprobs` has the length of `completion_ids`; natural logarithms."""

    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float]
    versions: list[tuple[int, int]]
    """Runs of (policy version, count) over the completion."""
    finish_reason: str
    prompt_text: str = ""
    completion_text: str = ""
    """Text of the completion with its special tokens, as the template would have to continue it."""


class Segment(msgspec.Struct):
    """One trainable sequence: T tokens, T masks (records.groups.MASKED or the id), T logprobs, versions as in Turn."""

    tokens: list[int]
    masks: list[int]
    logprobs: list[float]
    versions: list[tuple[int, int]]


def join_turns(turns: list[Turn]) -> list[Segment]:
    """Turns whose prompt continues the sequence before it become one segment; others start a new one."""
    segments: list[Segment] = []
    for turn in turns:
        known = segments[-1].tokens if segments else []
        if not segments or turn.prompt_ids[: len(known)] != known:
            segments.append(Segment([], [], [], []))
            known = []
        segment = segments[-1]
        between = turn.prompt_ids[len(known) :]
        segment.tokens += between + turn.completion_ids
        segment.masks += [MASKED] * len(between) + turn.completion_ids
        segment.logprobs += [PROMPT_LOGPROB] * len(between) + turn.logprobs
        segment.versions += turn.versions
    return segments


@dataclass
class Session:
    """The turns of one rollout, oldest first."""

    turns: list[Turn] = field(default_factory=list)

    def continued_by(self, text: str) -> Turn | None:
        """The latest turn that `text` (a rendered conversation) goes on from, if any."""
        for turn in reversed(self.turns):
            if text.startswith(turn.prompt_text + turn.completion_text):
                return turn
        return None


class SessionStore:
    """The sessions of one inference server, bounded: the one that was not used for longest is forgotten first."""

    def __init__(self, limit: int = 8192) -> None:
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self._limit = limit

    def __len__(self) -> int:
        return len(self._sessions)

    def get(self, key: str) -> Session | None:
        """The session of that key, None where nothing was recorded under it."""
        if (session := self._sessions.get(key)) is not None:
            self._sessions.move_to_end(key)
        return session

    def record(self, key: str, turn: Turn) -> None:
        """Adds a turn to a session, which is made if need be."""
        session = self._sessions.setdefault(key, Session())
        self._sessions.move_to_end(key)
        session.turns.append(turn)
        while len(self._sessions) > self._limit:
            self._sessions.popitem(last=False)

    def matching(self, key: str) -> dict[str, Session]:
        """The session of that key and its sub-sessions, by key."""
        below = key + "/"
        return {name: session for name, session in self._sessions.items() if name == key or name.startswith(below)}

    def close(self, key: str) -> int:
        """Forgets the session of that key and its sub-sessions; returns how many there were."""
        found = list(self.matching(key))
        for name in found:
            del self._sessions[name]
        return len(found)
