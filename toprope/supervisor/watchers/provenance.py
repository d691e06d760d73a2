"""Writes a run's manifest: its inputs as known at the start, then the policy and environment as they were loaded.

Hashing files and asking git may take a moment, so a thread of its own does it: a run never waits for its manifest, and
a manifest that cannot be written costs only a warning.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import queue
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

import toprope
from toprope.analysis.reproduction import differing_inputs
from toprope.machine import gpu_names, processor_name
from toprope.records.messages import Checked, Ready, Report
from toprope.records.run.digests import sha256_of
from toprope.records.run.folder import RunFolder
from toprope.records.run.manifest import (
    Code,
    Configuration,
    DatasetInputs,
    EnvironmentInputs,
    Hardware,
    Manifest,
    Policy,
    packages_in,
    site_packages_of,
)
from toprope.records.run.specification import DatasetSource, EnvironmentSource, Specification
from toprope.settings.sections.environment import members_of
from toprope.supervisor.watchers.watcher import RunControl, Watcher
from toprope.text_format import clip

CHANGES = "toprope.diff"
"""File in the run folder with the differences between the code and its commit."""
_LIBRARIES = (
    "torch", "transformers", "trl", "peft", "accelerate", "safetensors", "tokenizers", "datasets", "numpy", "msgspec",
    "pydantic",
)  # fmt: skip
_ROOT = Path(toprope.__file__).resolve().parent.parent
_MOST_CHANGES = 512 * 1024
_MOST_FILE = 1 << 30
_COMMIT = re.compile(r"[0-9a-f]{40}")
_MOST_POLICY = 4 << 30
_CARD, _MOST_FRONT, _MOST_LICENCES = "README.md", 64 * 1024, 8
_GIT_TIMEOUT_S = 15.0
_LAST_WAIT_S = 3.0


class ProvenanceWatcher(Watcher):
    """Writes the manifest of one run."""

    def __init__(self, control: RunControl) -> None:
        self._control = control
        self._work: queue.SimpleQueue[Callable[[Manifest], None] | None] = queue.SimpleQueue()
        self._failed: str | None = None
        self._loaded: set[str] = set()
        self._attempt = control.status().attempt
        self._thread = threading.Thread(target=self._run, name="manifest", daemon=True)
        self._thread.start()

    def on_report(self, component: str, report: Report) -> None:
        if component == "policy" and isinstance(report, Ready) and report.address:
            folder = Path(report.address)
            self._work.put(lambda manifest: self._add_policy(manifest, folder))
        if component == "environment" and isinstance(report, Checked):
            versions = report.versions
            self._work.put(lambda manifest: self._add_versions(manifest, versions))

    def on_tick(self, now: float) -> None:
        if self._failed:
            error, self._failed = self._failed, None
            self._control.record_event("warning", what=f"the manifest could not be written: {error}")

    def on_end(self) -> None:
        # A short run may end before its manifest is complete: wait a moment for the thread.
        self._work.put(None)
        self._thread.join(_LAST_WAIT_S)
        self.on_tick(0.0)

    def _add_policy(self, manifest: Manifest, folder: Path) -> None:
        manifest.policy = hash_policy(manifest.policy.model, folder)
        self._loaded.add("policy")

    def _add_versions(self, manifest: Manifest, versions: dict[str, str]) -> None:
        manifest.environment.versions = dict(sorted(versions.items()))
        self._loaded.add("environment")

    def _run(self) -> None:
        folder = self._control.folder
        try:
            original = Manifest.read(folder) if self._attempt > 1 else None
            manifest = collect_manifest(folder, self._control.specification, self._attempt)
            while True:
                self._write(folder, manifest, original)
                if (work := self._work.get()) is None:
                    return
                work(manifest)
                manifest.complete = self._loaded >= {"policy", "environment"}
        except Exception as error:  # an error of git, the disk or a damaged file must not end the run
            if folder.path.is_dir():
                self._failed = f"{type(error).__name__}: {error}"

    def _write(self, folder: RunFolder, manifest: Manifest, original: Manifest | None) -> None:
        if original is None:
            manifest.write(folder)
        elif manifest.complete:  # before that, inputs that have not loaded yet would look different
            differing = differing_inputs(original.inputs, manifest.inputs)
            later = {**original.later_attempts, str(self._attempt): differing}
            original.model_copy(update={"later_attempts": later}).write(folder)


def collect_manifest(folder: RunFolder, specification: Specification, attempt: int = 1) -> Manifest:
    """Collect the inputs of a run that are known before policy and environment have loaded.

    Args:
        folder: Gets the file with the differences between the code and its commit, if there are any.
        attempt: Each has a file of its own.
    """
    config = specification.config
    return Manifest(
        run_id=specification.run_id,
        kind=specification.kind,
        made_at=time.time(),
        reproduces=specification.reproduces,
        code=_code(folder, attempt),
        configuration=Configuration(
            sha256=_digest(config.model_dump(mode="json")),
            preset=specification.preset,
            beside_preset=specification.beside_preset,
            locks_sha256=_digest(specification.locks),
            deterministic=config.algorithm.deterministic,
            seed=config.algorithm.seed,
        ),
        environment=_environment(specification.environment, specification.config.environment.knobs),
        mixture=_mixture(specification),
        policy=Policy(model=config.policy.model),
        dataset=None if specification.dataset is None else _dataset(specification.dataset),
        hardware=_hardware(config.launcher.threads),
        python=f"{platform.python_implementation()} {platform.python_version()}",
        libraries={name: version for name in _LIBRARIES if (version := _version(name))},
    )


def _dataset(source: DatasetSource) -> DatasetInputs:
    return DatasetInputs(name=source.name, sha256=source.sha256, items=source.items)


def hash_policy(model: str, folder: Path) -> Policy:
    """Hash the files of a policy, but the card of a model of the Hub. Above 4 GB only their names and sizes are hashed,
    and the folder's own name, which is the commit in the Hub's cache.

    Args:
        model: Its name in the configuration.
        folder: Holds its files.
    """
    commit = folder.name if folder.parent.name == "snapshots" and _COMMIT.fullmatch(folder.name) else None
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not (commit and path.name == _CARD))
    sizes: dict[Path, int] = {}
    for path in files:
        with _temporary(path):
            sizes[path] = path.stat().st_size
    total = sum(sizes.values())
    hasher = hashlib.sha256()
    contents = total <= _MOST_POLICY
    if not contents:
        hasher.update(folder.name.encode())
    for path, size in sizes.items():
        name = path.relative_to(folder).as_posix()
        with _temporary(path):
            fingerprint = sha256_of(path) if contents else str(size)
            hasher.update(f"{name}\0{fingerprint}\n".encode())
    hashed = "contents" if contents else "names and sizes"
    licence, digest = _licence(folder / _CARD), hasher.hexdigest()
    return Policy(model=model, revision=commit, licence=licence, sha256=digest, hashed=hashed, bytes=total)


@contextlib.contextmanager
def _temporary(path: Path) -> Iterator[None]:
    """Pass over a hidden file that is renamed or removed meanwhile, as writers do with what they have not finished."""
    try:
        yield
    except FileNotFoundError:
        if not path.name.startswith("."):
            raise


def _licence(card: Path) -> str:
    """Return the licence in the front matter of a model's card; empty if it states none."""
    try:
        with card.open(encoding="utf-8", errors="replace") as file:
            _, front, _ = re.split(r"^---$", file.read(_MOST_FRONT), maxsplit=2, flags=re.MULTILINE)
        front = yaml.load(front, yaml.BaseLoader)  # noqa: S506 (makes only texts, lists and dicts, whatever its tags say)
        licence, name = front.get("license"), front.get("license_name")
    except Exception:  # anybody may have written it
        return ""
    listed = licence[:_MOST_LICENCES] if isinstance(licence, list) else [licence]
    text = ", ".join(entry for entry in listed if isinstance(entry, str) and entry not in ("null", "~"))
    return clip(f"other: {name}" if text == "other" and name and isinstance(name, str) else text, 100)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _code(folder: RunFolder, attempt: int) -> Code:
    code = Code(version=toprope.__version__)
    if not (_ROOT / ".git").exists():
        return code
    commit = _git("rev-parse", "HEAD")
    if commit is None:
        return code
    changes = _git("diff", "--no-ext-diff", "--no-color", "HEAD") or b""
    for name in (_git("ls-files", "--others", "--exclude-standard", "-z", "*.py", "*.yaml") or b"").split(b"\0"):
        path = _ROOT / os.fsdecode(name)
        if name and path.is_file():
            changes += b"untracked " + name + b" sha256 " + sha256_of(path).encode() + b"\n"
    code.commit = commit.decode().strip()
    if changes:
        code.changes_sha256 = hashlib.sha256(changes).hexdigest()
        code.changes_file = CHANGES if attempt == 1 else f"toprope-{attempt}.diff"
        cut = b"" if len(changes) <= _MOST_CHANGES else b"\n[cut: %d bytes in all]\n" % len(changes)
        path = folder.path / code.changes_file
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(changes[:_MOST_CHANGES] + cut)
    return code


def _git(*arguments: str) -> bytes | None:
    """Return the output of a git command in our own checkout, None if it fails. Takes no lock there."""
    command = ["git", "-C", str(_ROOT), "-c", "core.fsmonitor=false", *arguments]
    variables = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        done = subprocess.run(
            command, env=variables, stdin=subprocess.DEVNULL, capture_output=True, timeout=_GIT_TIMEOUT_S
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout if done.returncode == 0 else None


def _mixture(specification: Specification) -> dict[str, EnvironmentInputs]:
    """The other environments of a mixture, by label."""
    plans = members_of(specification.config.environment)[1:]
    return {
        plan.label: _environment(source, plan.section.knobs)
        for plan, source in zip(plans, specification.mixture, strict=False)
    }


def _environment(source: EnvironmentSource, knobs: Mapping[str, Any]) -> EnvironmentInputs:
    if source.file:
        path: Path | None = Path(source.file)
    else:
        path = _ROOT / "toprope" / "sdk" / "adapters" / f"{source.adapter}.py" if source.adapter else None
    exists = path is not None and path.is_file()
    names = [value for value in knobs.values() if isinstance(value, str)]
    names += [reward.file for reward in source.rewards]
    files = {name: sha256_of(Path(name)) for name in names if _is_small_file(name)}
    return EnvironmentInputs(
        name=source.name,
        source=source.place,
        sha256=sha256_of(path) if path is not None and exists else None,
        files=files,
        python=source.interpreter or "",
        packages=_installed_in(source.interpreter),
    )


def _installed_in(interpreter: str | None) -> dict[str, str]:
    """Versions of the packages in the environment's own interpreter, as far as its folders show them."""
    site = site_packages_of(interpreter) if interpreter else None
    return packages_in(site) if site is not None else {}


def _is_small_file(name: str) -> bool:
    try:
        return os.path.isabs(name) and os.path.isfile(name) and os.path.getsize(name) <= _MOST_FILE
    except (OSError, ValueError):
        return False


def _hardware(threads: int) -> Hardware:
    import psutil

    return Hardware(
        cpu=processor_name(),
        architecture=platform.machine(),
        system=f"{platform.system()} {platform.release()}",
        threads=threads,
        cores=os.cpu_count() or 0,
        memory_gb=round(psutil.virtual_memory().total / 2**30, 1),
        gpus=gpu_names(),
    )
