"""The owner's clusters: clusters.yaml in the configuration folder.

    lab:
      kind: slurm                                # or ray
      python: /shared/toprope/.venv/bin/python   # the interpreter on its nodes, with Toprope installed
      setup: [. /etc/profile.d/modules.sh, module load cuda/12.4]   # lines of sh before it (Slurm)
      partition: gpu                             # defaults of launcher.partition and launcher.account
    farm:
      kind: ray
      address: https://ray.example.org:8265      # of the Jobs REST API
      token_file: ~/.config/ray-token            # a file that only the owner can read
      network: trusted
    cloud:
      kind: slurm
      mirror:                                    # it shares no folder with this machine
        host: login.example.org                  # this machine, as the nodes reach it
        home: /scratch/me/toprope                # a folder there
        key_file: ~/.config/toprope-cloud        # the same file here and there

Without `mirror`, the home with the folder of runs must lie on storage that all nodes see under the same path.
"""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, Field, field_validator, model_validator

from toprope.errors import InvalidValue, shown
from toprope.settings.sections.launcher import LauncherSection
from toprope.settings.yamlfiles import nearest, read_fields, read_yaml


class Mirror(BaseModel, extra="forbid", frozen=True):
    """The way from a cluster to a server that shares no folder with it. See `toprope.supervisor.mirror`."""

    host: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9.-]{0,252}$")
    """Name or address of the server's machine, to which the nodes connect."""
    ports: str = Field("", pattern=r"^(\d{4,5}-\d{4,5})?$")
    """Ports that the nodes can reach, one for each run at a time, such as 47000-47099; empty: the system chooses."""
    home: str = Field(pattern=r"^/[^\n]+$")
    """Folder of runs, policies and inputs on the cluster, which all of its nodes see."""
    key_file: str = Field(min_length=1)
    """File with a key of at least 32 characters, on both sides under this path and readable by its owner alone. Each
    run's own key is derived from it, so none travels."""
    checkpoint_mb: int = Field(2000, ge=0)
    """The newest checkpoint comes to the server at the end of a run if it is no larger; others come on demand."""
    most_mb: int = Field(20_000, ge=1)
    """Most that a run may take on the server."""

    def port_range(self) -> range:
        """Ports to try, in order; 0 lets the system choose."""
        first, _, last = self.ports.partition("-")
        return range(int(first), int(last) + 1) if first else range(1)

    def key(self) -> str:
        """The key that both sides have. Raises InvalidValue: See `read_secret`; or it is too short."""
        return cluster_key(Path(self.key_file))


def cluster_key(path: Path) -> str:
    """The key in a file. Raises InvalidValue: See `read_secret`; or it is too short."""
    key = read_secret(path, "key file")
    if len(key) < 32:
        raise InvalidValue(f"The key in {path} is shorter than 32 characters.", hint=f"openssl rand -hex 32 > {path}")
    return key


def read_secret(file: Path, description: str) -> str:
    """The text of a private file.

    Raises:
        InvalidValue: The file cannot be read, or others can read it.
    """
    path = file.expanduser()
    try:
        if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise InvalidValue(f"Others can read the {description} {path}.", hint=f"Run: chmod 600 {path}")
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidValue(f"The {description} {path} cannot be read: {error}.") from None


class Cluster(BaseModel, extra="forbid", frozen=True):
    """One cluster of the owner."""

    kind: Literal["slurm", "ray"]
    python: str = ""
    """Path of the interpreter on the nodes; empty: the path of the server's own."""
    setup: tuple[str, ...] = ()
    """Lines of sh to run before the keeper, such as `module load cuda/12.4`; no profile is read. Slurm only."""
    commands: str = ""
    """Folder of sbatch, squeue, scancel and scontrol; empty: they are found by PATH. Slurm only."""
    config: str = ""
    """The file slurm.conf; empty: Slurm's default. Clients pass few variables on to servers. Slurm only."""
    partition: str = ""
    account: str = ""
    """Used if launcher.partition and launcher.account are empty. Slurm only."""
    address: str = ""
    """URL of Ray's dashboard, which serves the Jobs REST API."""
    token_file: str = ""
    """File with Ray's token; readable by its owner alone."""
    network: Literal["tls", "trusted"] = "tls"
    """Between members on several nodes: mutual TLS made for each run, or `trusted`: the owner says that nobody else can
    listen to or reach the network between the nodes, and between them and the server if there is a mirror."""
    mirror: Mirror | None = None
    """None: cluster and server share the home."""

    @field_validator("address")
    @classmethod
    def _checked_address(cls, value: str) -> str:
        parts = urlsplit(value)
        if value and (parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.password):
            raise ValueError("must be an http or https URL with a host, and without user and password")
        return value.rstrip("/")

    @model_validator(mode="after")
    def _checked(self) -> Cluster:
        if self.kind == "ray" and not self.address:
            raise ValueError("a Ray cluster needs the address of its dashboard, such as http://head:8265")
        slurms = (self.setup, self.commands, self.config, self.partition, self.account)
        if self.kind == "ray" and any(slurms):
            raise ValueError(
                "setup, commands, config, partition and account are for Slurm; Ray's nodes are set up when Ray starts"
            )
        if self.kind == "slurm" and (self.address or self.token_file):
            raise ValueError("address and token_file are for Ray")
        return self

    def token(self) -> str:
        """The token in `token_file`; empty if the cluster has none.

        Raises:
            InvalidValue: The file cannot be read, or others can read it.
        """
        if not self.token_file:
            return ""
        return read_secret(Path(self.token_file), "token file")


class Clusters(BaseModel, extra="forbid", frozen=True):
    """All clusters of the owner, by name."""

    named: dict[str, Cluster] = Field(default_factory=dict)
    path: Path = Path("clusters.yaml")

    @classmethod
    def read(cls, path: Path) -> Clusters:
        """The clusters in a file; none if it is missing.

        Raises:
            InvalidValue: The file cannot be read or is wrong.
        """
        data = read_yaml(path) if path.exists() else {}
        clusters = {str(name): read_fields(Cluster, entry, f"{path}, {name}") for name, entry in data.items()}
        return cls(named=clusters, path=path)

    def chosen(self, launcher: LauncherSection) -> tuple[str, Cluster]:
        """Name and settings of the cluster for a run: the one that the run names, else the only one of its kind.

        Raises:
            InvalidValue: There is no such cluster, or several fit and the run names none.
        """
        fitting = [name for name, cluster in self.named.items() if cluster.kind == launcher.kind]
        if launcher.cluster:
            if launcher.cluster in fitting:
                return launcher.cluster, self.named[launcher.cluster]
            raise InvalidValue(
                f"launcher.cluster: {self.path} has no {launcher.kind} cluster {shown(launcher.cluster)}.",
                hint=nearest(launcher.cluster, fitting) if fitting else "The owner adds one to that file.",
            )
        if len(fitting) == 1:
            return fitting[0], self.named[fitting[0]]
        if fitting:
            raise InvalidValue(
                f"launcher.cluster must name one of the owner's {launcher.kind} clusters: {', '.join(fitting)}."
            )
        raise InvalidValue(
            f"launcher.kind is {launcher.kind}, and {self.path} has no {launcher.kind} cluster.",
            hint="The owner adds one to that file, or set launcher.kind to local.",
        )
