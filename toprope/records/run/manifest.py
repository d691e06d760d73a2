"""manifest.json of a run: everything that its numbers depend on, so that a second run can be held against it.

The keeper writes it when the run starts and completes it when policy and environment have loaded. It is for people,
too: indented, plain names. What a run depends on is in `inputs`; two manifests with equal inputs describe the same run.
"""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from toprope.atomic import write_json
from toprope.errors import Corrupt, NotFound
from toprope.records.run.folder import LEFT, RunFolder, misfits, read_json

__all__ = ["Manifest", "packages_in", "site_packages_of"]

RUN_MANIFEST_VERSION = 1
_NAME = "manifest.json"


class _Section(BaseModel):
    model_config = ConfigDict(extra="ignore")


class Code(_Section):
    """Toprope itself."""

    version: str
    commit: str | None = None
    """Of the checkout that it runs from; None where it was installed."""
    changes_sha256: str | None = None
    """Hash of what differs from the commit, None where nothing does. The difference lies in `changes_file`."""
    changes_file: str | None = None


class Configuration(_Section):
    """What was frozen; spec.json has the whole of it."""

    sha256: str
    preset: str | None = None
    beside_preset: dict[str, list[Any]] = {}
    """Fields that differ from the preset: its value, the run's."""
    locks_sha256: str
    deterministic: bool = False
    seed: int


class EnvironmentInputs(_Section):
    """What is trained on."""

    name: str
    source: str = ""
    sha256: str | None = None
    """Of the file that holds it, or of the adapter's."""
    files: dict[str, str] = {}
    """Hashes of files that its knobs name."""
    python: str = ""
    """The interpreter that it runs in; empty: ours."""
    versions: dict[str, str] = {}
    """Packages that it says it depends on, from its own interpreter."""
    packages: dict[str, str] = {}
    """Everything that is installed in an interpreter of its own; empty where it runs in ours."""


class DatasetInputs(_Section):
    """What a run of kind `sft` learns from, where it is a data set."""

    name: str
    """`best@v2`"""
    sha256: str
    items: int


class Policy(_Section):
    """The model that training starts from."""

    model: str
    sha256: str | None = None
    hashed: str = ""
    """`contents`, or `names and sizes` where the contents are too large to read."""
    bytes: int = 0


class Hardware(_Section):
    """The machine."""

    cpu: str = ""
    architecture: str = ""
    system: str = ""
    threads: int = 0
    """Of each torch process."""
    cores: int = 0
    memory_gb: float = 0.0
    gpus: list[str] = []


class Manifest(BaseModel):
    """See the module."""

    model_config = ConfigDict(extra="ignore")

    version: int = RUN_MANIFEST_VERSION
    run_id: str
    kind: str
    made_at: float
    reproduces: str | None = None
    """The run that this one repeats."""
    code: Code
    configuration: Configuration
    environment: EnvironmentInputs
    mixture: dict[str, EnvironmentInputs] = {}
    """The environments beside it, by label."""
    policy: Policy
    dataset: DatasetInputs | None = None
    hardware: Hardware
    python: str
    libraries: dict[str, str] = {}
    complete: bool = False
    """Whether policy and environment had loaded."""
    later_attempts: dict[str, dict[str, list[Any]]] = {}
    """For attempts after the first: inputs that were different then."""

    @property
    def inputs(self) -> dict[str, Any]:
        """What the run's numbers depend on."""
        chosen = {
            "code",
            "configuration",
            "environment",
            "mixture",
            "policy",
            "dataset",
            "hardware",
            "python",
            "libraries",
        }
        data = self.model_dump(mode="json", include=chosen)
        data["code"].pop("changes_file")
        for one in (data["environment"], *data["mixture"].values()):
            one.pop("source")
        return data

    @classmethod
    def path(cls, folder: RunFolder) -> Path:
        """Where a run's manifest lies."""
        return folder.path / _NAME

    @classmethod
    def read(cls, folder: RunFolder) -> Manifest | None:
        """A run's manifest; None where it has none (an earlier version started it, or it has only begun).

        Raises:
            Corrupt: It cannot be read.
        """
        try:
            return cls.model_validate(read_json(cls.path(folder), RUN_MANIFEST_VERSION))
        except NotFound:
            return None
        except ValidationError as error:
            raise Corrupt(f"{cls.path(folder)} is not a manifest: {misfits(error)}.", hint=LEFT) from None

    def write(self, folder: RunFolder) -> None:
        """Replaces the manifest on disk, in lines for people."""
        write_json(self.path(folder), self.model_dump(mode="json"), indent=1)


def site_packages_of(python: str | Path) -> Path | None:
    """Where the packages of a virtual environment's Python lie; None where `python` is of none."""
    # Not resolved: the link leads out of the environment, to the Python that it was made with.
    prefix = Path(python).absolute().parent.parent
    if not (prefix / "pyvenv.cfg").is_file():
        return None
    return next((path for path in sorted(prefix.glob("lib/python*/site-packages")) if path.is_dir()), None)


def packages_in(site_packages: Path) -> dict[str, str]:
    """Distributions and their versions, by name."""
    found = {}
    for one in metadata.distributions(path=[str(site_packages)]):
        name = one.metadata["Name"] if one.metadata is not None else None
        if name:
            found[str(name)] = one.version or ""
    return dict(sorted(found.items(), key=lambda pair: pair[0].lower()))
