"""launch.json: the submission of a run's keeper to a cluster. Runs on the server's own machine have none.

It is written before anything is submitted, so that a run whose job waits, or whose submission was cut off, is never
taken for lost.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from toprope.atomic import write_json
from toprope.errors import Corrupt, NotFound
from toprope.records.run.folder import REPAIR_HINT, RunFolder, describe_misfits, read_json

LAUNCH_VERSION = 1


class Launch(BaseModel):
    """launch.json. Times are seconds since the epoch on the machine that submitted."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    version: int = LAUNCH_VERSION
    kind: Literal["slurm", "ray"]
    cluster: str
    """Its name in the owner's clusters.yaml."""
    network: Literal["tls", "trusted"] = "tls"
    """As in the owner's clusters.yaml."""
    nodes: int = 1
    attempt: int
    """The attempt of the run that was submitted."""
    name: str
    """Name of the job, by which it is found if the engine's answer was lost."""
    handle: str = ""
    """The engine's id of the job; empty until it answered."""
    submitted_at: float
    deadline: float
    """A job that the engine does not know at this time was never submitted."""

    @classmethod
    def read(cls, folder: RunFolder) -> Launch | None:
        """The submission of a run; None if it was never submitted to a cluster.

        Raises:
            Corrupt: The file is damaged; TooNew if a newer version wrote it.
        """
        try:
            return cls.model_validate(read_json(folder.launch, LAUNCH_VERSION))
        except NotFound:
            return None
        except ValidationError as error:
            raise Corrupt(f"{folder.launch} does not fit: {describe_misfits(error)}.", hint=REPAIR_HINT) from None

    def write(self, folder: RunFolder) -> None:
        """Replace launch.json."""
        write_json(folder.launch, self.model_dump(mode="json"))
