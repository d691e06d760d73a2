"""Environments made of data and a scorer: `dataset`, which an agent configures, and the owner's YAML files.

    # environments/geography.yaml in the owner's configuration folder
    adapter: dataset
    description: Capitals of the world
    path: capitals.csv          # beside this file, or below an allowed folder; every other key is a knob
    prompt: "What is the capital of {country}?"
    reference: capital

Files are read and nothing is executed. The folders that may be read are part of the environment's source, which no tool
lets an agent change.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toprope.errors import InvalidValue
from toprope.records.run.specification import EnvironmentSource
from toprope.sdk.adapters import dataset
from toprope.sdk.discovery import NAME
from toprope.settings.yamlfiles import check_keys, read_yaml
from toprope.workbench.adapters import adapters
from toprope.workbench.entries import Entry, Names
from toprope.workbench.sources.placed import yaml_files
from toprope.workbench.sources.targets import declared_adapter

PLAIN = "dataset"


@dataclass(frozen=True)
class NamedDataset:
    """A data set in the catalog."""

    name: str
    description: str
    target: str
    """Target of the adapter, as JSON."""
    origin: str
    """Place of the declaration, for messages."""
    problem: str = ""


class DatasetSource:
    """Lists the environment `dataset` and the owner's data sets.

    Args:
        places: The owner's folders with environments.
        folders: Folders whose data files may be read.
        apart: Returns the folders in `places` that other sources list.
    """

    kind = "dataset"

    def __init__(
        self, places: Sequence[Path], folders: Sequence[Path], apart: Callable[[], Collection[Path]] = frozenset
    ) -> None:
        self._places, self._folders, self._apart = places, folders, apart

    def entries(self, names: Names) -> list[Entry]:
        """Return `dataset`, then the owner's data sets by folder and file."""
        named = named_datasets(self._places, self._folders, self._apart())
        found = [plain_dataset(self._folders), *named]
        return [self._entry(dataset, names) for dataset in found]

    def _entry(self, dataset: NamedDataset, names: Names) -> Entry:
        problem = dataset.problem
        if not problem and (holder := names.claim(dataset.name, dataset.origin)):
            problem = f"The name {dataset.name!r} is taken by {holder}. Rename {dataset.origin}."
        return Entry(
            name=dataset.name,
            description=dataset.description,
            source=self.kind,
            status="broken" if problem else "ready",
            problem=problem,
            turns=1,
            environment=EnvironmentSource(name=dataset.name, adapter="dataset", target=dataset.target),
            tags=("dataset", "no-code"),
        )


def dataset_target(name: str, description: str, knobs: dict[str, Any]) -> str:
    """Return the adapter's target for data outside the owner's folders: knobs alone."""
    return _target(name, description, (), (), knobs)


def plain_dataset(folders: Sequence[Path]) -> NamedDataset:
    """Return the environment `dataset`, which is configured by knobs alone."""
    target = _target(PLAIN, dataset.DESCRIPTION, folders, (), {})
    return NamedDataset(PLAIN, dataset.DESCRIPTION, target, "Toprope itself")


def named_datasets(places: Sequence[Path], folders: Sequence[Path], apart: Collection[Path] = ()) -> list[NamedDataset]:
    """Return the owner's data sets by folder and file name.

    Args:
        places: The owner's folders with environments.
        folders: Folders whose data files may be read.
        apart: Folders in `places` that other sources list.
    """
    return [
        _read(file, name, folders)
        for place in places
        for file, name in yaml_files(place, [PLAIN], apart)
        if declared_adapter(file) is None
    ]


def _read(file: Path, name: str, folders: Sequence[Path]) -> NamedDataset:
    try:
        given = check_keys(read_yaml(file), ["adapter", "description", *dataset.knob_names()], str(file))
        if NAME.fullmatch(name) is None:
            raise InvalidValue(
                f"{name!r} is not a valid environment name.",
                hint="Use lower-case letters, digits, '_' and '-': rename the file.",
            )
        if given.pop("adapter", None) != PLAIN:
            known = ", ".join(one.name for one in adapters())
            raise InvalidValue(f"{file}: adapter is missing.", hint=f"Name one: {known}.")
        description = given.pop("description", None)
        if not given.get("path"):
            raise InvalidValue(f"{file}: path is missing.", hint="Name the file with the data, or hf:<id>.")
    except InvalidValue as problem:
        return NamedDataset(name, "A data set", "{}", str(file), str(problem))
    files: list[Path] = []
    beside = file.parent / Path(str(given["path"])).expanduser()
    if beside.is_file():  # The owner names the file, so it may lie anywhere.
        given["path"] = str(beside)
        files = [beside]
    said = str(description) if description else f"Questions and answers of {Path(str(given['path'])).name}"
    return NamedDataset(name, said, _target(name, said, folders, files, given), str(file))


def _target(name: str, description: str, folders: Sequence[Path], files: Sequence[Path], knobs: dict[str, Any]) -> str:
    return json.dumps(
        {
            "name": name,
            "description": description,
            "folders": [str(folder) for folder in folders],
            "files": [str(file) for file in files],
            "knobs": knobs,
        },
        default=str,
    )
