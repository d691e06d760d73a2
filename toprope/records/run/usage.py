"""usage.json of a run: what it has taken so far, by its keeper's own measuring, over all attempts.

Whoever adds up a day reads these files; nobody keeps other books. A keeper that is killed leaves what it wrote last.
"""

from __future__ import annotations

import time
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from toprope.atomic import write_json
from toprope.errors import Corrupt, NotFound
from toprope.records.run.folder import LEFT, RunFolder, misfits, read_json

__all__ = ["Spent", "Usage", "day_of"]

USAGE_VERSION = 1


def day_of(at: float) -> str:
    """The calendar day of this machine at a moment, such as 2026-11-21."""
    return time.strftime("%Y-%m-%d", time.localtime(at))


class Spent(BaseModel):
    """What was taken within one day. `usd` is None where the price was not known."""

    model_config = ConfigDict(extra="ignore")

    wall_s: float = 0.0
    cpu_s: float = 0.0
    gpu_s: float = 0.0
    usd: float | None = None


class Usage(Spent):
    """What was taken in all."""

    version: int = USAGE_VERSION
    at: float = 0.0
    """When it was measured, seconds since the epoch."""
    disk_bytes: int = 0
    """Of the run's folder, now."""
    peak_memory_bytes: int = 0
    """The most that all processes of the run had in memory together (resident; what they share counts for each)."""
    steps: int = 0
    days: dict[str, Spent] = {}
    """What of it fell on which day."""

    @classmethod
    def read(cls, folder: RunFolder) -> Usage | None:
        """The run's usage; None where nothing was written yet.

        Raises:
            Corrupt: It cannot be read.
        """
        try:
            return cls.model_validate(read_json(folder.path / "usage.json", USAGE_VERSION))
        except NotFound:
            return None
        except ValidationError as error:
            raise Corrupt(f"{folder.path / 'usage.json'} is not a usage: {misfits(error)}.", hint=LEFT) from None

    def write(self, folder: RunFolder) -> None:
        """Replaces it. The keeper's right alone."""
        data: dict[str, Any] = self.model_dump(mode="json")
        write_json(folder.path / "usage.json", data)
