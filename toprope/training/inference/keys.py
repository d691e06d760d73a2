"""Keys of sessions: what user code may hold of a run's secret.

An environment that plays its rollouts itself talks to inference under a key of each rollout's own. It is made of the
run's secret and does not tell it, and it opens nothing but asking the policy.
"""

from __future__ import annotations

import hashlib
import hmac

__all__ = ["JUDGE", "is_session_key", "session_key"]

JUDGE = "~"
"""The session of requests that are nobody's rollout: judges, simulated users. Nothing is recorded under it."""


def session_key(secret: str, session: str) -> str:
    """The key `<proof>.<session>` for one session."""
    return f"{_proof(secret.encode(), session)}.{session}"


def is_session_key(secret: bytes, proof: str, session: str) -> bool:
    """Whether `<proof>.<session>` was made for that session with that secret."""
    return bool(session) and hmac.compare_digest(proof.encode(), _proof(secret, session).encode())


def _proof(secret: bytes, session: str) -> str:
    return hmac.new(secret, b"session:" + session.encode(), hashlib.sha256).hexdigest()[:40]
