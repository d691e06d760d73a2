"""launch.json: the submission of a run's keeper to a cluster. Runs on the server's own machine have none.

It is written before anything is submitted, so that a run whose job waits, or whose submission was cut off, is never
taken for lost.

A cluster that shares no folder with the server keeps the run's checkpoints: kept.json names them with their sizes, and
wanted.json those that somebody asked for.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

from toprope.atomic import write_json
from toprope.errors import NotFound, NotPossibleNow
from toprope.records.run.folder import RunFolder, find_record, read_json

LAUNCH_VERSION = 1
_KEPT, _WANTED = "kept.json", "wanted.json"


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
    mirror: str = ""
    """HOST:PORT at which the cluster reaches the server, if both share no folder."""
    delivery: int = 0
    """Number of the job that only brings what the cluster kept of the attempt; 0: the attempt's own job."""
    deadline: float
    """A job that the engine does not know at this time was never submitted."""

    @property
    def place(self) -> str:
        """The part of its job in the run, which one job can have."""
        return f"{self.attempt}-{self.delivery}" if self.delivery else str(self.attempt)

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


def cluster_with_files(folder: RunFolder) -> str:
    """Name of the cluster that alone has the files of a run's trackers; empty if they are here.

    Raises:
        Corrupt: See `Launch.read`.
    """
    launch = Launch.read(folder)
    return launch.cluster if launch is not None and launch.mirror else ""


def kept_there(folder: RunFolder) -> dict[str, int]:
    """Bytes of the checkpoints that a cluster keeps, by name (step-000040); none for runs with a shared folder."""
    try:
        return dict(read_json(folder.path / _KEPT))
    except NotFound:
        return {}


def note_kept(folder: RunFolder, kept: dict[str, int]) -> None:
    """Replace what `kept_there` tells."""
    if kept != kept_there(folder):
        write_json(folder.path / _KEPT, kept)


def wanted(folder: RunFolder) -> list[str]:
    """Names of the checkpoints that somebody asked for and that have not arrived."""
    try:
        return list(read_json(folder.path / _WANTED))
    except NotFound:
        return []


def want_no_more(folder: RunFolder, name: str) -> None:
    """Forget that a checkpoint was asked for."""
    remaining = [wanted_name for wanted_name in wanted(folder) if wanted_name != name]
    write_json(folder.path / _WANTED, remaining)
    if not remaining:
        (folder.path / _WANTED).unlink()


def ask_for(folder: RunFolder, step: int | None = None) -> None:
    """Ask for a checkpoint that only the cluster has. Does nothing if it has none such.

    Args:
        step: None: the newest, or, while the run lives and has ever newer ones, any.

    Raises:
        NotPossibleNow: It is on its way.
    """
    kept = kept_there(folder)
    name = f"step-{step:06d}" if step is not None else max(kept, key=lambda kept_name: int(kept_name[5:]), default="")
    if name not in kept or (folder.checkpoints / name).is_dir():
        return
    if step is None and folder.newest_checkpoint() and read_json(folder.status).get("ended_at") is None:
        return
    write_json(folder.path / _WANTED, sorted({*wanted(folder), name}))
    raise NotPossibleNow(
        f"Step {int(name[5:])} of {folder.run_id} is on its cluster; it was asked for and comes "
        f"({kept[name] / 1e6:.0f} MB).",
        hint="Look at the run with check_status, then repeat the call in a minute.",
    )
