"""Named data sets: `datasets/<name>/<version>/` below the home, each version written once and never changed.

    items.jsonl (or <split>.jsonl)   the items
    dataset.json                     digests, counts, lineage: what it was made of, and how
    README.md                        the card, with the front matter that the Hugging Face Hub reads

A version is written in a temporary folder, synced and renamed into place. Its digest covers names and contents of its
item files, and training verifies it first. Building the same items again makes no new version.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

import toprope
from toprope.atomic import fsync, write_json, write_text
from toprope.errors import Corrupt, InvalidValue, NotFound, shown
from toprope.records.run.digests import sha256_of
from toprope.records.run.folder import REPAIR_HINT, read_record
from toprope.settings.yamlfiles import nearest

NAME = re.compile(r"^[a-z0-9][a-z0-9_.-]{0,63}$")
_VERSION = re.compile(r"^v(\d{1,6})$")
_RECORD, _CARD = "dataset.json", "README.md"
_RECORD_VERSION = 1
_STALE_S = 7 * 86_400.0
INBOX_FILE = "inbox.jsonl"


class Stored(BaseModel):
    """A file of a version."""

    items: int
    bytes: int
    sha256: str


class DatasetRecord(BaseModel):
    """dataset.json of a version."""

    version: int = _RECORD_VERSION
    name: str
    dataset_version: str
    made_at: float
    toprope_version: str = toprope.__version__
    description: str = ""
    digest: str
    """Digest over names and contents of all files."""
    items: int
    files: dict[str, Stored]
    """Files by name."""
    lineage: dict[str, Any] = {}
    """`runs` with the counts read from each, `where`, `strategy` with its digest, `recipe`, `sources`."""
    counts: dict[str, Any] = {}
    """Numbers of items read, generated, kept, and left out by reason."""


@dataclass(frozen=True)
class Version:
    """A version on disk."""

    path: Path
    record: DatasetRecord

    @property
    def name(self) -> str:
        """`name@v2`."""
        return f"{self.record.name}@{self.record.dataset_version}"

    @property
    def card(self) -> Path:
        return self.path / _CARD

    @property
    def files(self) -> list[Path]:
        """The item files: `items.jsonl`, or one per split with `train.jsonl` first."""
        return [self.path / name for name in sorted(self.record.files, key=lambda name: (name != "train.jsonl", name))]

    def training_file(self) -> Path:
        """The file to train on: that of the split `train` if there are splits.

        Raises:
            InvalidValue: There are splits, and no `train` among them.
        """
        file = self.files[0]
        if file.name != "train.jsonl" and list(self.record.files) != ["items.jsonl"]:
            raise InvalidValue(
                f"{self.name} has no split 'train' to train on; its splits: "
                f"{', '.join(path.stem for path in self.files)}.",
                hint="Build a version whose recipe calls the split to train on 'train', or one without splits.",
            )
        return file

    def require_sound(self) -> None:
        """Verify the digest of every file.

        Raises:
            Corrupt: A file is missing or was changed.
        """
        for path in self.files:
            stored = self.record.files[path.name]
            try:
                digest = sha256_of(path)
            except OSError as error:
                raise Corrupt(f"{path} cannot be read: {error.strerror or error}.", hint=REPAIR_HINT) from None
            if digest != stored.sha256:
                raise Corrupt(
                    f"{path} was changed after it was written as {self.name}: its SHA-256 differs.",
                    hint="A version never changes. Build a new one.",
                )


class DatasetStore:
    """The data sets below a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def names(self) -> list[str]:
        """Return the names of data sets with a version or with posted items."""
        if not self.path.is_dir():
            return []
        names = [folder.name for folder in self.path.iterdir() if NAME.fullmatch(folder.name) and folder.is_dir()]
        return sorted(name for name in names if self.versions(name) or self.inbox(name).is_file())

    def versions(self, name: str) -> list[str]:
        """Return the versions of a data set, oldest first."""
        folder = self.path / name
        if not NAME.fullmatch(name) or not folder.is_dir():
            return []
        versions = [
            version_folder.name
            for version_folder in folder.iterdir()
            if _VERSION.fullmatch(version_folder.name) and (version_folder / _RECORD).is_file()
        ]
        return sorted(versions, key=lambda version: int(version[1:]))

    def inbox(self, name: str) -> Path:
        """Return the inbox file, in which posted items wait for a version."""
        return self.path / name / INBOX_FILE

    def find(self, name: str) -> Version:
        """Return a version by `name@v2`, `name@2`, or `name` for the newest.

        Raises:
            NotFound: No such version; the message names the nearest data set.
            Corrupt: Its record cannot be read.
        """
        base, _, wanted = name.strip().partition("@")
        versions = self.versions(base)
        if not versions:
            dataset_names = [dataset_name for dataset_name in self.names() if self.versions(dataset_name)]
            hint = nearest(base, dataset_names) if dataset_names else "build_dataset makes one."
            raise NotFound(f"There is no data set {shown(base)}.", hint=hint)
        version = versions[-1] if not wanted else wanted if wanted.startswith("v") else f"v{wanted}"
        if version not in versions:
            raise NotFound(f"{base} has no version {shown(wanted)}.", hint=f"Versions: {', '.join(versions)}.")
        return self._read(self.path / base / version)

    def _read(self, path: Path) -> Version:
        return Version(path, read_record(path / _RECORD, _RECORD_VERSION, DatasetRecord))

    @contextmanager
    def making(self, name: str) -> Iterator[Path]:
        """Yield an empty folder for item files, which `keep` turns into a version; it is removed otherwise.

        Raises:
            InvalidValue: Not a valid data set name.
        """
        check_name(name)
        folder = self.path / name
        is_new = not folder.exists()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for abandoned in folder.glob(".making-*"):  # left by processes that were killed long ago
            if time.time() - abandoned.stat().st_mtime > _STALE_S:
                shutil.rmtree(abandoned, ignore_errors=True)
        aside = Path(tempfile.mkdtemp(prefix=".making-", dir=folder))
        try:
            yield aside
        finally:
            shutil.rmtree(aside, ignore_errors=True)
            if is_new:
                with suppress(OSError):  # it holds a version
                    folder.rmdir()

    def keep(
        self,
        name: str,
        aside: Path,
        files: Mapping[str, int],
        *,
        lineage: Mapping[str, Any],
        counts: Mapping[str, Any],
        description: str = "",
        card: Callable[[DatasetRecord], str] | None = None,
    ) -> tuple[Version, bool]:
        """Turn the written folder into the next version.

        Args:
            name: Name of the data set.
            aside: The folder that `making` yielded.
            files: Number of items by item file in it.
            lineage: See DatasetRecord.
            counts: See DatasetRecord.
            description: Purpose of the data set.
            card: Composes the card from the record.

        Returns:
            The version, and True if it is new; False if the newest version has the same items.
        """
        stored = {
            file_name: Stored(
                items=items, bytes=(aside / file_name).stat().st_size, sha256=sha256_of(aside / file_name)
            )
            for file_name, items in files.items()
        }
        whole = hashlib.sha256(
            "".join(f"{file_name}\0{stored[file_name].sha256}\n" for file_name in sorted(stored)).encode()
        ).hexdigest()
        versions = self.versions(name)
        if versions:
            with suppress(Corrupt):  # An unreadable version is passed over.
                newest = self._read(self.path / name / versions[-1])
                if newest.record.digest == whole:
                    return newest, False
        number = int(versions[-1][1:]) + 1 if versions else 1
        while True:
            record = DatasetRecord(
                name=name,
                dataset_version=f"v{number}",
                made_at=time.time(),
                description=description,
                digest=whole,
                items=sum(files.values()),
                files=stored,
                lineage=json.loads(json.dumps(dict(lineage), default=str)),
                counts=dict(counts),
            )
            write_json(aside / _RECORD, record.model_dump(mode="json"), durable=True)
            write_text(aside / _CARD, card(record) if card is not None else f"# {name}\n", durable=True)
            for file in aside.iterdir():
                file.chmod(0o400)
            fsync(aside)
            target = self.path / name / f"v{number}"
            try:
                os.rename(aside, target)
            except OSError:
                if not target.exists():
                    raise
                number += 1  # Another process was faster; a folder that is not empty is never replaced.
                for file in aside.iterdir():
                    file.chmod(0o600)
                continue
            fsync(target.parent)
            return Version(target, record), True


def check_name(name: str) -> None:
    """Validate the name of a data set.

    Raises:
        InvalidValue: Not a valid data set name.
    """
    if not NAME.fullmatch(name):
        raise InvalidValue(
            f"{shown(name)} is not a valid data set name.",
            hint="Use at most 64 lower-case letters, digits, '_', '.' and '-', beginning with a letter or digit.",
        )
