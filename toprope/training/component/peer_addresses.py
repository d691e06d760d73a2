"""Addresses of peers in a crew, and the pauses between attempts to reach one.

The keeper restarts a component that died, and it comes back at another address. So a client resolves the address before
every attempt, waits while there is none, and pauses longer after each failed attempt.
"""

from __future__ import annotations

from collections.abc import Callable

from toprope.errors import ComponentFailed

PATIENCE_S = 30.0
"""Seconds for which a call is repeated while the peer does not answer at its address."""
AWAY_S = 3600.0
"""Seconds to wait for a peer that the keeper restarts; the keeper gives up long before."""

_MAX_PAUSE_S = 1.0

Address = str | Callable[[], str | None]
"""A base URL, or a function that returns the present one, None while the peer is away."""


class PeerAway(ComponentFailed):
    """A peer could not be reached for too long. It may return later."""


def resolver(address: Address) -> Callable[[], str | None]:
    """A function that returns the present base URL, without a trailing slash.

    Raises:
        ValueError: The address is not an http URL.
    """
    if isinstance(address, str):
        fixed = _check_url(address)
        return lambda: fixed
    current = address

    def resolve() -> str | None:
        url = current()
        return None if url is None else _check_url(url)

    return resolve


def _check_url(url: str) -> str:
    if not url.startswith("http://"):
        raise ValueError(f"{url!r} is not an http URL")
    return url.rstrip("/")


class Backoff:
    """The pauses between attempts of one call. Times are monotonic, in seconds.

    Args:
        peer: The peer's name, for messages.
        patience_s: Seconds from the first failure until the call fails.
        away_s: Seconds until the call fails if the peer has no address.
    """

    def __init__(self, peer: str, patience_s: float = PATIENCE_S, away_s: float = AWAY_S) -> None:
        self._peer, self._patience_s, self._away_s = peer, patience_s, away_s
        self._since: float | None = None
        self._away_since: float | None = None
        self._failures = self._absences = 0

    def after_error(self, error: BaseException, now: float, url: str = "") -> float:
        """Seconds to wait after a broken connection; 0 after the first, which may only have been idle too long.

        Raises:
            PeerAway: The patience is over.
        """
        self._away_since = None
        if self.over(now):
            at = f" at {url}" if url else ""
            raise PeerAway(f"{self._peer}{at} cannot be reached: {type(error).__name__}: {error}.") from error
        self._failures += 1
        return 0.0 if self._failures == 1 else min(_MAX_PAUSE_S, 0.02 * 2.0 ** min(self._failures, 10))

    def after_absence(self, now: float) -> float:
        """Seconds to wait for a peer that has no address.

        Raises:
            PeerAway: The peer did not come back.
        """
        if self._away_since is None:
            self._away_since, self._since, self._failures, self._absences = now, None, 0, 0
        if now - self._away_since > self._away_s:
            raise PeerAway(f"{self._peer} went away and did not come back within {self._away_s:g} s.")
        self._absences += 1
        return min(0.25, 0.01 * 2.0 ** min(self._absences, 10))

    def over(self, now: float) -> bool:
        """True once the patience is over, which begins at the first call of this method."""
        if self._since is None:
            self._since = now
        return now - self._since > self._patience_s
