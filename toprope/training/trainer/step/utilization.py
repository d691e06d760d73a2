"""The share of the time in which inference samples, as inference itself counts it.

The trainer writes it beside its own share, so that a row of metrics shows which of the two waits for the other.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections import deque
from collections.abc import Callable
from urllib.parse import urlsplit

_EVERY_S = 1.0
_OVER_S = 15.0
"""An engine may count a batch only when it ends, so shorter spans would jump between 0 and 1."""
_TIMEOUT_S = 5.0


class SamplerMeter:
    """Asks inference in a thread of its own, so that no step waits for the answer.

    Args:
        find: The address of inference; None while it is away.
        secret: The run's secret.
    """

    def __init__(self, find: Callable[[], str | None], secret: str) -> None:
        self._find, self._secret = find, secret
        self._readings: deque[tuple[float, float]] = deque()
        threading.Thread(target=self._watch, name="sampler meter", daemon=True).start()

    def share(self) -> float | None:
        """Share of the last 15 seconds; None if it is unknown."""
        readings = list(self._readings)
        if len(readings) < 2 or readings[-1][0] < time.monotonic() - _OVER_S:
            return None
        return min(1.0, (readings[-1][1] - readings[0][1]) / (readings[-1][0] - readings[0][0]))

    def _watch(self) -> None:
        while True:
            time.sleep(_EVERY_S)
            url = self._find()
            if url is None:
                continue
            try:
                busy_s = self._ask(url)
            except (OSError, http.client.HTTPException, ValueError, KeyError):
                continue  # it restarts, or is an engine that does not count
            now = time.monotonic()
            if self._readings and busy_s < self._readings[-1][1]:
                self._readings.clear()  # it has restarted
            self._readings.append((now, busy_s))
            while self._readings[0][0] < now - _OVER_S:
                self._readings.popleft()

    def _ask(self, url: str) -> float:
        parts = urlsplit(url)
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port or 80, timeout=_TIMEOUT_S)
        try:
            connection.request("GET", "/v1/policy", headers={"Authorization": f"Bearer {self._secret}"})
            return float(json.loads(connection.getresponse().read())["busy_s"])
        finally:
            connection.close()
