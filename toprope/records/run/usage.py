"""usage.json of a run: the resources that it has used over all attempts, as its keeper measured them.

The totals of a day are the sum of these files and of what deleted runs leave in `.budget`. A killed keeper leaves its
last values.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock
from pydantic import BaseModel

from toprope.atomic import write_json
from toprope.records.purse import FILE as SPENDING
from toprope.records.purse import Purse, day_of, read_spending
from toprope.records.run.folder import RunFolder, find_record
from toprope.records.run.status import Status
from toprope.settings.limits import FrozenLimits

__all__ = ["SPENDING", "Spent", "Usage", "day_of", "purse_of", "spending_in", "wall_seconds"]

USAGE_VERSION = 1
_ACCOUNTS = SPENDING.replace(".", "*.")
"""The accounts of a run: that of the driver, and one of each other member that pays."""


class Spent(BaseModel):
    """Resources used within one day. `usd`, of processors and GPUs, is None if the price was not known."""

    wall_s: float = 0.0
    cpu_s: float = 0.0
    gpu_s: float = 0.0
    usd: float | None = None
    tokens_usd: float = 0.0
    """Spent and reserved at priced models, by the run's own account (see `toprope.records.purse`)."""

    @property
    def cost_usd(self) -> float | None:
        """All costs; None if none is known."""
        return None if self.usd is None and not self.tokens_usd else (self.usd or 0.0) + self.tokens_usd


class Usage(Spent):
    """Resources used in total."""

    version: int = USAGE_VERSION
    at: float = 0.0
    """Time of the measurement, seconds since the epoch."""
    disk_bytes: int = 0
    """Present size of the run's folder."""
    peak_memory_bytes: int = 0
    """Largest resident memory of all processes of the run together; shared memory counts for each."""
    steps: int = 0
    days: dict[str, Spent] = {}
    """The part of each day."""

    @classmethod
    def read(cls, folder: RunFolder) -> Usage | None:
        """The run's usage; None if none was written yet.

        Raises:
            Corrupt: It cannot be read.
        """
        spending = spending_in(folder.path)
        usage = find_record(folder.path / "usage.json", USAGE_VERSION, cls)
        if usage is None:
            if not spending:
                return None
            usage = cls()
        usage.count_tokens(spending)
        return usage

    def count_tokens(self, spending: Mapping[str, float]) -> None:
        """Set the cost of tokens from USD by day."""
        self.tokens_usd = sum(spending.values())
        for day, usd in spending.items():
            self.days.setdefault(day, Spent()).tokens_usd = usd

    def write(self, folder: RunFolder) -> None:
        """Replace the file and wait for the disk: a power cut must not leave an empty one. Only the keeper may."""
        data: dict[str, Any] = self.model_dump(mode="json")
        write_json(folder.path / "usage.json", data, durable=True)


def wall_seconds(usage: Usage | None, status: Status, now: float) -> float:
    """Return the seconds that all attempts of a run took without the queue; of this attempt alone if none were counted.

    Args:
        now: Seconds since the epoch. A live run is counted up to now, not only to the last measurement.
    """
    began, end = status.started_at or status.created_at, status.ended_at or now
    if usage is None or not usage.wall_s:
        return end - began
    if status.is_over or status.started_at is None:  # a resumed run in the queue has no start
        return usage.wall_s
    return usage.wall_s + max(0.0, end - max(usage.at, began))


def spending_in(folder: Path) -> dict[str, float]:
    """Return USD by day of all accounts of a run."""
    usd_by_day: dict[str, float] = {}
    for path in folder.glob(_ACCOUNTS):
        for day, usd in read_spending(path).items():
            usd_by_day[day] = usd_by_day.get(day, 0.0) + usd
    return usd_by_day


def purse_of(folder: RunFolder, limits: FrozenLimits | None, member: str = "") -> Purse:
    """Open an account of a run at priced models; what its other accounts, its processors and its GPUs cost counts
    towards the same cap.

    Args:
        member: The member that pays, if it is not the driver: an account has one writer.
    """
    account = folder.path / (_ACCOUNTS.replace("*", f"-{member}") if member else SPENDING)

    def beside_usd() -> float:
        usage = Usage.read(folder)
        others = (path for path in folder.path.glob(_ACCOUNTS) if path != account)
        machine = 0.0 if usage is None else usage.usd or 0.0
        return machine + sum(sum(read_spending(path).values()) for path in others)

    cap = None if limits is None else limits.caps.get("cost_usd")
    if cap is None:
        return Purse(account, None)
    return Purse(account, cap.value, cap.limit, beside_usd, FileLock(str(folder.path / ".spending.lock")))
