"""The account of one spender at priced models: a run, or the program that builds a data set.

Each call is paid before it is made: the most that it can cost is written to the file, and replaced by the actual cost
once the answer is known. What a crash leaves open counts in full. Only one process at a time writes to an account.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from toprope.atomic import append, write_text
from toprope.errors import NotPossibleNow

FILE = "spending.jsonl"
"""Its name in the folder of a run, or of a program that is not a run."""
LIMITS = "limits.json"
"""In the folder of such a program: the limits that were frozen at its start."""
_COMPACT_AFTER = 256
"""Lines after which closed entries are replaced by one sum per day."""


def day_of(at: float) -> str:
    """The day at a moment, such as 2026-11-21; of UTC, because processes of one home may differ in their zone."""
    return time.strftime("%Y-%m-%d", time.gmtime(at))


class LimitReached(NotPossibleNow):
    """The call may cost more than the owner's limit leaves; it was not made."""

    used = needed = 0.0
    """USD spent and reserved under that limit, and USD that the call may cost; 0 if its price is unknown."""


class Purse:
    """Pays calls to priced models.

    Args:
        path: The account's file.
        cap: USD that the spender may spend in all, by this account and `beside`; None: unlimited.
        limit: Name of the limit that sets the cap, for messages.
        beside: Returns what the spender spends otherwise, in USD.
        lock: Held while a call is weighed and entered, if others spend from the same cap.
    """

    def __init__(
        self,
        path: Path,
        cap: float | None,
        limit: str = "",
        beside: Callable[[], float] = lambda: 0.0,
        lock: AbstractContextManager[object] | None = None,
    ) -> None:
        self._path, self.cap, self._limit, self._other_usd = path, cap, limit, beside
        self._lock: AbstractContextManager[object] = lock or nullcontext()
        self._closed, self._open = _read(path)
        self._lines = 0
        self._number = max(self._open, default=0)
        self.in_flight = 0
        """Calls of this process that may yet cost less than was reserved for them."""
        self._compact()

    @property
    def total(self) -> float:
        """USD spent and reserved so far."""
        return sum(self._closed.values()) + sum(usd for _, usd in self._open.values())

    def require(self, usd: float | None) -> None:
        """Pass a call that fits.

        Args:
            usd: The most that it can cost; None: unknown.

        Raises:
            LimitReached: It does not fit; or its price is unknown, and there is a cap.
        """
        if self.cap is None:
            return
        if usd is None:
            raise LimitReached(
                f"{self._limit} limits the cost, and the price of this call is unknown: it was not made.",
                hint="The owner adds prompt_usd and completion_usd to the model, in USD per million tokens.",
            )
        remaining = self.cap - self._other_usd() - self.total
        if usd > remaining:
            reached = LimitReached(
                f"{self._limit} allows {self.cap:.4g} USD here, {max(remaining, 0.0):.4g} USD are left, and this "
                f"call may cost {usd:.4g} USD: it was not made.",
                hint="Fewer or shorter answers cost less; the owner sets the limit in limits.yaml.",
            )
            reached.used, reached.needed = self.cap - remaining, usd
            raise reached

    def reserve(self, usd: float | None) -> int:
        """Pay a call in advance; return the number of the entry. On return it is on disk.

        Raises:
            LimitReached: See `require`.
        """
        with self._lock:
            self.require(usd)
            self._number += 1
            self._write(self._number, usd or 0.0, done=False)
        return self._number

    def settle(self, number: int, usd: float) -> None:
        """Replace a reservation by the actual cost."""
        self._write(number, usd, done=True)

    def _write(self, number: int, usd: float, *, done: bool) -> None:
        day = self._open[number][0] if number in self._open else day_of(time.time())
        line = json.dumps({"n": number, "day": day, "usd": usd, "done": done})
        append(self._path, line.encode() + b"\n")
        if done:
            self._open.pop(number, None)
            self._closed[day] = self._closed.get(day, 0.0) + usd
        else:
            self._open[number] = day, usd
        self._lines += 1
        if self._lines >= _COMPACT_AFTER:
            self._compact()

    def _compact(self) -> None:
        self._lines = 0
        if not self._closed and not self._open:
            return
        lines = [{"day": day, "usd": usd} for day, usd in self._closed.items()]
        lines += [{"n": n, "day": day, "usd": usd, "done": False} for n, (day, usd) in self._open.items()]
        write_text(self._path, "".join(json.dumps(line) + "\n" for line in lines), durable=True)


def read_spending(path: Path) -> dict[str, float]:
    """Return USD by day of an account; open entries count in full."""
    closed, still_open = _read(path)
    for day, usd in still_open.values():
        closed[day] = closed.get(day, 0.0) + usd
    return closed


def _read(path: Path) -> tuple[dict[str, float], dict[int, tuple[str, float]]]:
    """Return USD by day of the closed entries, and day and USD of the open ones by number."""
    closed: dict[str, float] = {}
    still_open: dict[int, tuple[str, float]] = {}
    for line in _lines(path):
        day, usd = str(line["day"]), float(line["usd"])
        number = line.get("n")
        if isinstance(number, int) and not line.get("done"):
            still_open[number] = day, usd
            continue
        if isinstance(number, int):
            still_open.pop(number, None)
        closed[day] = closed.get(day, 0.0) + usd
    return closed, still_open


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return
    for line in content.splitlines():
        try:
            entry = json.loads(line)
            float(entry["usd"]), entry["day"]
        except (ValueError, KeyError, TypeError):
            continue  # a crash cut it; the call that it was to pay was not made
        yield entry
