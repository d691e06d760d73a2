"""launch.json: the submission of a run's keeper to a cluster. Runs on the server's own machine have none.

It is written before anything is submitted, so that a run whose job waits, or whose submission was cut off, is never
taken for lost.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

from toprope.atomic import write_json
from toprope.records.run.folder import RunFolder, find_record

LAUNCH_VERSION = 1


class Launch(BaseModel, frozen=True):
    """launch.json. Times are seconds since the epoch on the machine that submitted."""

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
    submitted_at: float
    deadline: float
    """A job that the engine does not know at this time was never submitted."""

    @classmethod
    def read(cls, folder: RunFolder) -> Launch | None:
        """The submission of a run; None if it was never submitted to a cluster.

        Raises:
            Corrupt: The file is damaged; TooNew if a newer version wrote it.
        """
        return find_record(folder.launch, LAUNCH_VERSION, cls)

    def write(self, folder: RunFolder) -> None:
        """Replace launch.json."""
        write_json(folder.launch, self.model_dump(mode="json"))
