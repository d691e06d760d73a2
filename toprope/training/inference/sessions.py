"""Sessions: the sampled turns of each rollout, recorded where they were sampled, and the keys that name them.

The API key of a request names its session (`<run secret>.<session>`), so an environment needs to know nothing about
tokens. A request with n > 1 under a group's key `g` records one sub-session per answer, `g/0` ... `g/n-1`; a later turn
of answer i comes under `g/i`. A request under the bare secret records nothing (judges, simulated users).

Environment-managed rollouts talk to inference under a key of their own. It is derived from the run's secret without
revealing it, and it only permits asking the policy.

Prompts of later turns reuse the ids of earlier turns. Sampled ids are never tokenised again, because a tokenizer may
encode a text differently than the policy wrote it.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections import OrderedDict
from dataclasses import dataclass, field

import msgspec

from toprope.records.journal.groups import MASKED, PROMPT_LOGPROB
from toprope.settings.schema import Config, RolloutSection

LIFE_HEADER = "x-toprope-life"
"""Identifies one process of the server: its own in answers, the expected one in requests. A restarted server does not
know earlier sessions, and would tokenise anew what had been sampled."""

UNRECORDED = "~"
"""The session of requests that belong to no rollout, such as those of judges and simulated users."""

OPPONENT = "opponent"
"""Model name of a fixed opponent's weights, for unrecorded requests."""
_LEAST = 8192
"""Sessions that every store has room for, those of evaluations among them."""


def new_session() -> str:
    """A name for a session. It never was another's, because inference keeps what a driver that was killed left open."""
    return f"g{secrets.token_hex(8)}"


def session_key(secret: str, session: str) -> str:
    """The key `<proof>.<session>` for one session."""
    return f"{_proof(secret.encode(), session)}.{session}"


def is_session_key(secret: bytes, proof: str, session: str) -> bool:
    """True if `<proof>.<session>` was derived from that secret for that session."""
    return bool(session) and hmac.compare_digest(proof.encode(), _proof(secret, session).encode())


def _proof(secret: bytes, session: str) -> str:
    return hmac.new(secret, b"session:" + session.encode(), hashlib.sha256).hexdigest()[:40]


class SessionSampling(msgspec.Struct):
    """Sampling settings of a session, for requests that name none."""

    temperature: float
    top_p: float
    max_tokens: int
    stop: list[str]
    fixed: bool = False
    """The temperature stands even if a request names another one: the trainer computes with it, and evaluations
    record it."""

    @classmethod
    def of(cls, rollout: RolloutSection) -> SessionSampling:
        """The settings of a run's rollouts."""
        return cls(rollout.temperature, rollout.top_p, rollout.max_new_tokens, list(rollout.stop))


class Turn(msgspec.Struct):
    """One request and its answer."""

    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float]
    """Natural logarithms, one per id of the completion."""
    versions: list[tuple[int, int]]
    """Runs of (policy version, count) over the completion."""
    finish_reason: str
    prompt_text: str = ""
    completion_text: str = ""
    """Text of the completion with its special tokens, as the chat template must continue it."""


class Segment(msgspec.Struct):
    """One trainable sequence of T tokens."""

    tokens: list[int]
    masks: list[int]
    """T entries: `records.journal.groups.MASKED`, or the token's id if it was sampled."""
    logprobs: list[float]
    """T entries; `PROMPT_LOGPROB` for masked tokens."""
    versions: list[tuple[int, int]]
    """Runs of (policy version, count) over the sampled tokens."""


def join_turns(turns: list[Turn]) -> list[Segment]:
    """Join turns into segments: a turn whose prompt continues the last sequence extends it, others start a new one."""
    segments: list[Segment] = []
    for turn in turns:
        former = segments[-1].tokens if segments else []
        if not segments or turn.prompt_ids[: len(former)] != former:
            segments.append(Segment([], [], [], []))
            former = []
        segment = segments[-1]
        between = turn.prompt_ids[len(former) :]
        segment.tokens += between + turn.completion_ids
        segment.masks += [MASKED] * len(between) + turn.completion_ids
        segment.logprobs += [PROMPT_LOGPROB] * len(between) + turn.logprobs
        segment.versions += turn.versions
    return segments


@dataclass
class Session:
    """The turns of one rollout, oldest first."""

    turns: list[Turn] = field(default_factory=list)

    def find_continued_turn(self, text: str) -> Turn | None:
        """The latest turn that `text`, a rendered conversation, continues."""
        for turn in reversed(self.turns):
            if text.startswith(turn.prompt_text + turn.completion_text):
                return turn
        return None


class SessionStore:
    """The sessions of one inference server; forgets the least recently used one above `limit`."""

    def __init__(self, limit: int = _LEAST) -> None:
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self._sampling: OrderedDict[str, SessionSampling] = OrderedDict()
        self._limit = limit

    @classmethod
    def of(cls, config: Config) -> SessionStore:
        """A store with room for all rollouts of a run at once, and as many that nobody closed."""
        rollout = config.rollout
        return cls(max(_LEAST, 2 * rollout.concurrency * rollout.group_size * config.launcher.driver_count))

    def __len__(self) -> int:
        return len(self._sessions)

    def open(self, key: str, sampling: SessionSampling) -> None:
        """Set the sampling settings of a session and its sub-sessions."""
        self._sampling[key] = sampling
        while len(self._sampling) > self._limit:
            self._sampling.popitem(last=False)

    def sampling(self, key: str) -> SessionSampling | None:
        """The settings with which a session, or the one that it belongs to, was opened."""
        return self._sampling.get(key.partition("/")[0])

    def get(self, key: str) -> Session | None:
        """The session of that key, or None if nothing was recorded under it."""
        if (session := self._sessions.get(key)) is not None:
            self._sessions.move_to_end(key)
        return session

    def record(self, key: str, turn: Turn) -> None:
        """Add a turn to a session, which is created if it is new."""
        session = self._sessions.setdefault(key, Session())
        self._sessions.move_to_end(key)
        session.turns.append(turn)
        while len(self._sessions) > self._limit:
            self._sessions.popitem(last=False)

    def matching(self, key: str) -> dict[str, Session]:
        """The session of that key and its sub-sessions, by key."""
        prefix = key + "/"
        return {name: session for name, session in self._sessions.items() if name == key or name.startswith(prefix)}

    def close(self, key: str) -> int:
        """Forget the session of that key and its sub-sessions; returns how many there were."""
        self._sampling.pop(key, None)
        names = list(self.matching(key))
        for name in names:
            del self._sessions[name]
        return len(names)
