"""usage.json of a run: the resources that it has used over all attempts, as its keeper measured them.

The totals of a day are the sum of these files; there is no other record. A killed keeper leaves its last values.
"""

from __future__ import annotations

import time
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from toprope.atomic import write_json
from toprope.errors import Corrupt, NotFound
from toprope.records.run.folder import REPAIR_HINT, RunFolder, describe_misfits, read_json

USAGE_VERSION = 1


def day_of(at: float) -> str:
    """The calendar day of this machine at a moment, such as 2026-11-21."""
    return time.strftime("%Y-%m-%d", time.localtime(at))


class Spent(BaseModel):
    """Resources used within one day. `usd` is None if the price was not known."""

    model_config = ConfigDict(extra="ignore")

    wall_s: float = 0.0
    cpu_s: float = 0.0
    gpu_s: float = 0.0
    usd: float | None = None


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
        try:
            return cls.model_validate(read_json(folder.path / "usage.json", USAGE_VERSION))
        except NotFound:
            return None
        except ValidationError as error:
            raise Corrupt(
                f"{folder.path / 'usage.json'} cannot be read: {describe_misfits(error)}.", hint=REPAIR_HINT
            ) from None

    def write(self, folder: RunFolder) -> None:
        """Replace the file. Only the keeper may."""
        data: dict[str, Any] = self.model_dump(mode="json")
        write_json(folder.path / "usage.json", data)
