"""Where things lie for the person who owns this machine, and what they set for all runs.

Clients start servers with HOME, LOGNAME, PATH, SHELL, TERM and USER and nothing else, so every place has a default
under HOME, and the variables that runs need (HF_TOKEN, CUDA_VISIBLE_DEVICES, WANDB_API_KEY) come from settings.yaml in
the owner's configuration folder. Nothing is created until it is needed: clients start disposable servers as probes.

    home (TOPROPE_HOME)                 owner's configuration (TOPROPE_CONFIG)
      runs/       one folder a run        locks.yaml     instead of the shipped one; so is limits.yaml
      datasets/   files to train on       datasets/      the same
      policies/   embedded policies       presets/       before the shipped ones
      exports/    rollouts as files       strategies/    Python files that judge, make or score data
      index.db    drafts, stamps          environments/  one Python file each
      ledger.jsonl  experiments           settings.yaml  variables, more folders, default preset
      interpreters/  of environments      http-token     of `toprope serve --http`
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from toprope.errors import InvalidValue
from toprope.settings.endpoints import Endpoint, parse_endpoints
from toprope.settings.limits import Limits
from toprope.settings.locks import Locks
from toprope.settings.tools import LentTool
from toprope.settings.yamlfiles import check_keys, read_yaml
from toprope.shipped import CONFIGS

__all__ = ["DataLimit", "Home", "HttpDoor", "MachineLimit", "OwnerSettings", "ServeRole", "StatusLimit"]

MODELS = "models"
"""In the owner's variables: keys of models at endpoints, for a test that asks for such a model and for nothing else."""

RECIPIENTS = ("*", "policy", "api", "inference", "trainer", "environment", MODELS)
"""Who can be given variables: every component, or one."""


class StatusLimit(BaseModel):
    """How often an agent gets fresh numbers of one run: a share of the run's expected length, within bounds."""

    model_config = ConfigDict(extra="forbid")

    share: float = Field(0.02, ge=0, le=1)
    min_s: float = Field(30.0, ge=0, le=86_400)
    max_s: float = Field(1800.0, ge=0, le=86_400)
    waits: dict[str, Annotated[float, Field(ge=0, le=3600)]] = Field(default_factory=dict)
    """Seconds that a client holds out for one call, by the name it gives: {my-agent: 600}. Unknown ones get 45."""

    def interval(self, expected_s: float | None) -> float:
        """Seconds between fresh numbers of a run that is expected to take `expected_s`; unknown: the shortest."""
        return min(max(self.min_s, self.share * (expected_s or 0.0)), max(self.min_s, self.max_s))


class HttpDoor(BaseModel):
    """How `toprope serve --http` may be reached."""

    model_config = ConfigDict(extra="forbid")

    port: int = Field(8765, ge=0, le=65_535)
    """Where it listens unless told otherwise; 0: any port that is free."""
    hosts: list[str] = Field(default_factory=list)
    """Addresses beside loopback at which it may listen. Other machines can reach those."""
    names: list[str] = Field(default_factory=list)
    """More names by which clients may call it (the Host header), without a port: those of a proxy or a tunnel."""
    origins: list[str] = Field(default_factory=list)
    """Web pages that may call it (the Origin header), such as https://inspector.example."""


class ServeRole(BaseModel):
    """What servers offer their clients."""

    model_config = ConfigDict(extra="forbid")

    read_only: bool = False
    """Only what changes nothing."""
    tools: list[str] = Field(default_factory=list)
    """Sets of tools: plan, run, read; all when there are none."""


class DataLimit(BaseModel):
    """What agents may make of rollouts."""

    model_config = ConfigDict(extra="forbid")

    export: bool = True
    """Whether export_trajectories is allowed."""
    build: bool = True
    """Whether build_dataset is."""
    max_items: int = Field(5_000_000, ge=1)
    """Most items of an export or a data set."""
    at_once: int = Field(2, ge=1, le=64)
    """Exports and builds that go on beside each other."""


class MachineLimit(BaseModel):
    """What runs may have of this machine, all together. What is not set is found out."""

    model_config = ConfigDict(extra="forbid")

    threads: int | None = Field(None, ge=1)
    """CPU threads for training; tests may use as many beside it."""
    gpus: list[str] | None = None
    """GPUs by the ids of CUDA_VISIBLE_DEVICES; an empty list: none."""
    disk_floor_mb: float | None = Field(None, ge=0)
    """A run pauses when its disk has less room than this and a checkpoint; by default 2 % of it, at most 500 MB."""


class OwnerSettings(BaseModel):
    """settings.yaml of the owner."""

    model_config = ConfigDict(extra="forbid")

    variables: dict[str, dict[str, str]] = Field(default_factory=dict)
    """Environment variables by component, `*` for every one: {policy: {HF_TOKEN: ...}}. Each key goes to the component
    that needs it and no other; the file should be readable by the owner alone."""
    installs: Literal["ask", "allow"] = "ask"
    """Whether agents may install ecosystems and packages for environments; else they name the command to the owner."""
    environments: list[str] = Field(default_factory=list)
    """More folders with environments, one Python file each."""
    tools: dict[str, LentTool] = Field(default_factory=dict)
    """Tools that the environment `orchestrator` may lend to policies, beside its own."""
    trainers: list[str] = Field(default_factory=list)
    """Folders with trainers of one's own, for algorithm.trainer. What lies there runs as the trainer of a run."""
    datasets: list[str] = Field(default_factory=list)
    """More folders whose files the environment `dataset` may read."""
    models: dict[str, Endpoint] = Field(default_factory=dict)
    """Models at OpenAI-compatible endpoints that test_inference may be asked for, by name."""
    preset: str = "cpu-embedded"
    """The preset of a draft that names none."""
    status: StatusLimit = Field(default_factory=StatusLimit)
    machine: MachineLimit = Field(default_factory=MachineLimit)
    """Beyond it runs are queued."""
    containment: Literal["auto", "bubblewrap", "guard"] = "auto"
    """How the processes of runs are held: in pid namespaces by bubblewrap where that works, always, or never."""
    data: DataLimit = Field(default_factory=DataLimit)
    """Exports and data sets."""
    serve: ServeRole = Field(default_factory=ServeRole)
    """Read when a server starts."""
    http: HttpDoor = Field(default_factory=HttpDoor)
    """The HTTP door."""

    @classmethod
    def read(cls, path: Path) -> OwnerSettings:
        """The settings in a file; the defaults where there is none.

        Raises:
            InvalidValue: The file is wrong; the message names the key. Values are not repeated: they may be secrets.
        """
        if not path.is_file():
            return cls()
        data = check_keys(read_yaml(path), cls.model_fields, str(path))
        data["models"] = parse_endpoints(data.get("models"), f"{path}, models")
        for component, values in check_keys(data.get("variables") or {}, RECIPIENTS, f"{path}, variables").items():
            if isinstance(values, dict):
                # YAML reads CUDA_VISIBLE_DEVICES: 0 as a number; a variable is always text.
                data["variables"][component] = {
                    key: str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value
                    for key, value in values.items()
                }
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            problems = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors(include_input=False)]
            raise InvalidValue(f"{path}: {'; '.join(problems)}.", hint="Mend the file.") from None


@dataclass(frozen=True)
class Home:
    """The owner's two folders and the places within. Paths only: nothing is read or made until asked."""

    path: Path
    configuration: Path

    @classmethod
    def locate(cls, environ: Mapping[str, str] | None = None) -> Home:
        """The folders that TOPROPE_HOME and TOPROPE_CONFIG name, else the platform's own for user data and settings."""
        environ = os.environ if environ is None else environ
        return cls(
            _folder(environ.get("TOPROPE_HOME"), "user_data_path"),
            _folder(environ.get("TOPROPE_CONFIG"), "user_config_path"),
        )

    @property
    def runs(self) -> Path:
        return self.path / "runs"

    @property
    def policies(self) -> Path:
        return self.path / "policies"

    @property
    def index(self) -> Path:
        return self.path / "index.db"

    @property
    def ledger(self) -> Path:
        return self.path / "ledger.jsonl"

    @property
    def interpreters(self) -> Path:
        """Virtual environments that were made for environments."""
        return self.path / "interpreters"

    @property
    def checkouts(self) -> Path:
        """Repositories that the owner added."""
        return self.path / "checkouts"

    @property
    def environments_file(self) -> Path:
        """What the owner added to the environments."""
        return self.path / "environments.json"

    @property
    def datasets(self) -> Path:
        """Data sets that were built, by name and version, beside files to train on."""
        return self.path / "datasets"

    @property
    def exports(self) -> Path:
        return self.path / "exports"

    @property
    def settings_file(self) -> Path:
        return self.configuration / "settings.yaml"

    @property
    def locks_file(self) -> Path:
        """The owner's locks where there is a file of them, else the shipped ones."""
        own = self.configuration / "locks.yaml"
        return own if own.exists() else CONFIGS / "locks.yaml"

    @property
    def limits_file(self) -> Path:
        """The owner's limits where there is a file of them, else the shipped ones."""
        own = self.configuration / "limits.yaml"
        return own if own.exists() else CONFIGS / "limits.yaml"

    @property
    def strategies(self) -> Path:
        """The owner's own strategies of sweeps, one Python file each."""
        return self.configuration / "strategies"

    @property
    def preset_folders(self) -> list[Path]:
        return [self.configuration / "presets", CONFIGS / "presets"]

    def settings(self) -> OwnerSettings:
        """The owner's settings as they are on disk now."""
        return OwnerSettings.read(self.settings_file)

    def locks(self) -> Locks:
        """The owner's locks as they are on disk now."""
        return Locks.read(self.locks_file)

    def limits(self) -> Limits:
        """The owner's limits as they are on disk now."""
        path = self.limits_file
        return Limits.read(path, owners=path.parent == self.configuration)

    def environment_folders(self, settings: OwnerSettings) -> list[Path]:
        """The owner's folders with environments. A relative path is one within the owner's configuration folder."""
        own = [self.configuration / Path(folder).expanduser() for folder in settings.environments]
        return [*own, self.configuration / "environments"]

    def strategy_folders(self, settings: OwnerSettings) -> list[Path]:
        """Where users' strategies, scorers and generators for data may lie: beside the owner's environments too."""
        return [self.configuration / "strategies", *self.environment_folders(settings)]

    def trainer_folders(self, settings: OwnerSettings) -> list[Path]:
        """The folders whose classes may train. A relative path is one within the configuration folder."""
        return [self.configuration / Path(folder).expanduser() for folder in settings.trainers]

    def lent_tools(self, settings: OwnerSettings) -> dict[str, dict[str, Any]]:
        """The owner's tools as workers are told of them."""
        return {name: tool.declaration(self.configuration) for name, tool in settings.tools.items()}

    def dataset_folders(self, settings: OwnerSettings) -> list[Path]:
        """The folders whose files may be trained on. A relative path is one within the configuration folder."""
        own = [self.configuration / Path(folder).expanduser() for folder in settings.datasets]
        return [self.path / "datasets", self.configuration / "datasets", *own]

    def ensure(self) -> Home:
        """Makes the home folder, readable by its owner only.

        Raises:
            InvalidValue: It cannot be made or written to.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise InvalidValue(
                f"The home folder {self.path} cannot be made: {error.strerror or error}.",
                hint="Set TOPROPE_HOME to a folder that you may write to.",
            ) from None
        return self


def _folder(named: str | None, default: str) -> Path:
    if named:
        return Path(named).expanduser().absolute()
    import platformdirs  # only where no folder is named

    found: Any = getattr(platformdirs, default)("toprope", appauthor=False)
    return Path(found)
