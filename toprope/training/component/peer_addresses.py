"""Where a peer of the crew is, and when to try a call to it again.

A member that dies is started again by the keeper and comes back at another address. So a client asks for the address
before every try, waits while there is none, and tries again, each time after a longer pause, where nobody answers.
"""

from __future__ import annotations

from collections.abc import Callable

from toprope.errors import ComponentFailed

__all__ = ["AWAY_S", "PATIENCE_S", "Address", "Backoff", "PeerAway", "resolver"]

PATIENCE_S = 30.0
"""Seconds for which a call is repeated while the peer cannot be reached where it is said to be."""
AWAY_S = 3600.0
"""Seconds for which a peer that the keeper is starting again is waited for; the keeper gives up long before."""

_LONGEST_PAUSE_S = 1.0

Address = str | Callable[[], str | None]
"""A base URL, or what gives the present one: None while the peer is away."""


class PeerAway(ComponentFailed):
    """A peer could not be reached for too long. It may be there again later."""


def resolver(address: Address) -> Callable[[], str | None]:
    """The present base URL, without its last slash.

    Raises:
        ValueError: A fixed address is no http URL.
    """
    if isinstance(address, str):
        fixed = _checked(address)
        return lambda: fixed
    current = address

    def now() -> str | None:
        found = current()
        return None if found is None else _checked(found)

    return now


def _checked(url: str) -> str:
    if not url.startswith("http://"):
        raise ValueError(f"{url!r} is no http URL")
    return url.rstrip("/")


class Backoff:
    """When to try one call again. Times are monotonic, in seconds.

    Args:
        what: The peer, for messages.
        patience_s: Seconds after the first failure until it is given up.
        away_s: Seconds until an absent peer is given up.
    """

    def __init__(self, what: str, patience_s: float = PATIENCE_S, away_s: float = AWAY_S) -> None:
        self._what, self._patience_s, self._away_s = what, patience_s, away_s
        self._since: float | None = None
        self._away_since: float | None = None
        self._tries = self._looks = 0

    def after_error(self, error: BaseException, now: float, url: str = "") -> float:
        """Seconds to wait after a broken connection; none after the first, which may just have been idle too long.

        Raises:
            PeerAway: The patience is over.
        """
        self._away_since = None
        if self.over(now):
            at = f" at {url}" if url else ""
            raise PeerAway(f"{self._what}{at} cannot be reached: {type(error).__name__}: {error}.") from error
        self._tries += 1
        return 0.0 if self._tries == 1 else min(_LONGEST_PAUSE_S, 0.02 * 2.0 ** min(self._tries, 10))

    def after_absence(self, now: float) -> float:
        """Seconds to wait for a peer that has no address now.

        Raises:
            PeerAway: It did not come back.
        """
        if self._away_since is None:
            self._away_since, self._since, self._tries, self._looks = now, None, 0, 0
        if now - self._away_since > self._away_s:
            raise PeerAway(f"{self._what} went away and did not come back within {self._away_s:g} s.")
        self._looks += 1
        return min(0.25, 0.01 * 2.0 ** min(self._looks, 10))

    def over(self, now: float) -> bool:
        """Whether the patience that began with the first call of this is over."""
        if self._since is None:
            self._since = now
        return now - self._since > self._patience_s
