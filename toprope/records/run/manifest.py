"""manifest.json of a run: everything that its numbers depend on, for comparison with another run.

The keeper writes it when the run starts and completes it when policy and environment have loaded. It is indented for
people. Two manifests with equal `inputs` describe the same run.
"""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from toprope.atomic import write_json
from toprope.errors import Corrupt
from toprope.records.run.folder import RunFolder, find_record
from toprope.settings.schema import PolicySection

RUN_MANIFEST_VERSION = 1
_NAME = "manifest.json"


class Code(BaseModel):
    """Toprope itself."""

    version: str
    commit: str | None = None
    """Commit of the checkout; None for an installed package."""
    changes_sha256: str | None = None
    """Hash of the uncommitted changes, which are in `changes_file`; None if there are none."""
    changes_file: str | None = None


class Configuration(BaseModel):
    """The frozen configuration, in short; spec.json has all of it."""

    sha256: str
    preset: str | None = None
    beside_preset: dict[str, list[Any]] = {}
    """Fields that differ from the preset: the preset's value and the run's."""
    locks_sha256: str
    deterministic: bool = False
    seed: int


class EnvironmentInputs(BaseModel):
    """An environment of the run."""

    name: str
    source: str = ""
    sha256: str | None = None
    """Hash of its file, or of its adapter's."""
    files: dict[str, str] = {}
    """Hashes of files that its knobs name."""
    python: str = ""
    """Its interpreter; empty: ours."""
    versions: dict[str, str] = {}
    """Versions, in its interpreter, of the packages that it declares."""
    packages: dict[str, str] = {}
    """All packages installed in its own interpreter; empty if it runs in ours."""


class DatasetInputs(BaseModel):
    """The data set that a run of kind `sft` learns from."""

    name: str
    """`best@v2`"""
    sha256: str
    items: int


class Policy(BaseModel):
    """The model that training starts from."""

    model: str
    revision: str | None = None
    """Commit of a model of the Hub."""
    licence: str = ""
    """As the model's card states it, such as `apache-2.0` or `other: its name`; empty if it states none."""
    sha256: str | None = None
    hashed: str = ""
    """`contents`, or `names and sizes` if the contents are too large to read."""
    bytes: int = 0


class Hardware(BaseModel):
    """The machine."""

    cpu: str = ""
    architecture: str = ""
    system: str = ""
    threads: int = 0
    """Threads of each torch process."""
    cores: int = 0
    memory_gb: float = 0.0
    gpus: list[str] = []


class Manifest(BaseModel):
    """The content of manifest.json."""

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
    """The other environments of the run, by label."""
    policy: Policy
    dataset: DatasetInputs | None = None
    hardware: Hardware
    python: str
    libraries: dict[str, str] = {}
    complete: bool = False
    """True if policy and environment had loaded."""
    later_attempts: dict[str, dict[str, list[Any]]] = {}
    """Inputs that differ in attempts after the first."""

    @property
    def inputs(self) -> dict[str, Any]:
        """The parts that the run's numbers depend on."""
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
        data["policy"].pop("licence")
        for part in (data["environment"], *data["mixture"].values()):
            part.pop("source")
        return data

    @classmethod
    def path(cls, folder: RunFolder) -> Path:
        """Path of a run's manifest."""
        return folder.path / _NAME

    @classmethod
    def read(cls, folder: RunFolder) -> Manifest | None:
        """A run's manifest; None if it has none (an earlier version started it, or it has only begun).

        Raises:
            Corrupt: It cannot be read.
        """
        return find_record(cls.path(folder), RUN_MANIFEST_VERSION, cls)

    def write(self, folder: RunFolder) -> None:
        """Replace the manifest on disk, indented for people."""
        write_json(self.path(folder), self.model_dump(mode="json"), indent=1)


def pinned(policy: PolicySection, folder: RunFolder) -> PolicySection:
    """A run's configured policy, at the commit that the run began with if its manifest can be read and has one."""
    try:
        manifest = Manifest.read(folder)
    except Corrupt:
        manifest = None
    commit = manifest.policy.revision if manifest is not None else None
    return policy if commit is None else policy.model_copy(update={"revision": commit})


def site_packages_of(python: str | Path) -> Path | None:
    """The folder of packages of a virtual environment; None if `python` is not in one."""
    # Not resolved: the link leads out of the environment, to the Python that it was created with.
    prefix = Path(python).absolute().parent.parent
    if not (prefix / "pyvenv.cfg").is_file():
        return None
    return next((path for path in sorted(prefix.glob("lib/python*/site-packages")) if path.is_dir()), None)


def packages_in(site_packages: Path) -> dict[str, str]:
    """Versions of the installed distributions, by name, read without starting the interpreter."""
    versions = {}
    for distribution in metadata.distributions(path=[str(site_packages)]):
        name = distribution.metadata["Name"] if distribution.metadata is not None else None
        if name:
            versions[str(name)] = distribution.version or ""
    return dict(sorted(versions.items(), key=lambda pair: pair[0].lower()))
