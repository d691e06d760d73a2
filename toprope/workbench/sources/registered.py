"""Environments that the owner added: folders, files, checkouts, servers at a URL, data sets of the Hub; and
scripts of installed projects.

Added virtual environments are interpreters, whose packages the source `installed` lists.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from toprope.errors import TopropeError
from toprope.records.run.specification import EnvironmentSource
from toprope.sdk.discovery import environment_files
from toprope.settings.yamlfiles import YAML_ENDINGS
from toprope.workbench.adapters import Adapter
from toprope.workbench.entries import Entry, Names, broken
from toprope.workbench.interpreters.known import Known
from toprope.workbench.interpreters.left_out import modules_from
from toprope.workbench.interpreters.registry import Added
from toprope.workbench.sources.datasets import dataset_in, dataset_target, entry_of_dataset
from toprope.workbench.sources.folders import FileReader, FolderSource
from toprope.workbench.sources.listing import home_of, install_command
from toprope.workbench.sources.targets import TargetSource, declared_adapter


class RegisteredSource:
    """Lists the environments that were added by name; `added` may raise TopropeError."""

    kind = "registered"

    def __init__(
        self,
        added: Callable[[], Mapping[str, Added]],
        adapters: Callable[[], Sequence[Adapter]],
        interpreters: Callable[[], Sequence[Known]],
        reader: FileReader,
    ) -> None:
        self._added, self._adapters, self._interpreters, self._reader = added, adapters, interpreters, reader
        self._reader_of_projects = FileReader(lambda: [known for known in adapters() if not known.lists_packages])

    def entries(self, names: Names) -> list[Entry]:
        """Return the entries by name."""
        try:
            added = self._added()
        except TopropeError as error:
            return [broken("environments.json", str(error), self.kind)]
        entries = []
        for addition in added.values():
            try:
                entries += self._entries_of(addition, names)
            except Exception as error:  # A broken folder must not hide the others.
                entries.append(broken(addition.name, f"{type(error).__name__}: {error}", self.kind))
        return entries

    def _entries_of(self, addition: Added, names: Names) -> list[Entry]:
        if addition.kind in ("folder", "git"):
            place = Path(addition.path or "")
            if not place.exists():
                problem = f"{place} does not exist. Remove it: toprope env remove {addition.name}"
                return [broken(addition.name, problem, addition.kind)]
            if place.suffix in YAML_ENDINGS:
                return self._entries_of_yaml(addition, place, names)
            return FolderSource(
                place, addition.kind, self._reader, self._interpreters, addition.python, deep=True
            ).entries(names)
        if addition.kind == "packages" and os.path.isabs(addition.given) and os.path.isdir(addition.given):
            return self._entries_of_project(addition, Path(addition.given), names)
        if addition.kind == "server":
            return [self._server_entry(addition, names)]
        if addition.kind == "dataset":
            return [_dataset_entry(addition, names)]
        return []

    def _entries_of_project(self, addition: Added, project: Path, names: Names) -> list[Entry]:
        """Return what no package of an installed project brings: scripts, which its wheel leaves out."""
        if addition.adapter is not None:  # the ecosystem's own project
            return []
        modules = modules_from(project, Path(addition.site_packages or ""))
        brought = {root / module for root in (project, project / "src") for module in modules}
        files = [file for file in environment_files(project, deep=True) if file not in brought]
        source = FolderSource(project, "folder", self._reader_of_projects, self._interpreters, addition.python)
        return [entry for entry in source.listed(files, [], names) if entry.status != "broken"]

    def _entries_of_yaml(self, addition: Added, file: Path, names: Names) -> list[Entry]:
        """Return the environment that a YAML file defines."""
        if declared_adapter(file) is None:
            return [entry_of_dataset(dataset_in(file, name=addition.name), addition.kind, names)]
        return TargetSource(
            [file], self._adapters, self._interpreters, name=addition.name, python=addition.python
        ).entries(names)

    def _server_entry(self, addition: Added, names: Names) -> Entry:
        adapter = next((known for known in self._adapters() if known.name == addition.adapter), None)
        if adapter is None or adapter.problem:
            problem = adapter.problem if adapter is not None else f"Unknown adapter {addition.adapter!r}."
            return broken(addition.name, problem, addition.kind)
        needs_no_home = addition.python is not None or adapter.urls_alone
        home = None if needs_no_home else home_of(adapter, self._interpreters())
        lacks = not needs_no_home and home is None
        entry = Entry(
            name=addition.name,
            description=f"The {adapter.name} server at {addition.url}",
            source=addition.kind,
            status="needs install" if lacks else "ready",
            problem=f"The owner installs what asks it: {install_command(adapter.name)}" if lacks else "",
            turns=None,
            environment=EnvironmentSource(
                name=addition.name,
                adapter=adapter.name,
                target=addition.url,
                interpreter=addition.python or (home.python if home is not None else None),
            ),
            tags=("server",),
            ecosystem=adapter.name,
        )
        return _reject_taken_name(entry, names)


def _dataset_entry(addition: Added, names: Names) -> Entry:
    """Return the entry of a Hub data set; knobs select the columns of question and answer."""
    hub_id = addition.given.removeprefix("hf:")
    description = f"The data set {hub_id} of the Hugging Face Hub"
    entry = Entry(
        name=addition.name,
        description=description,
        source="hub",
        status="needs network",
        problem="It is downloaded at the first use, and kept.",
        keeps=True,
        turns=1,
        environment=EnvironmentSource(
            name=addition.name,
            adapter="dataset",
            target=dataset_target(addition.name, description, {"path": addition.given}),
        ),
        tags=("dataset", "no-code"),
    )
    return _reject_taken_name(entry, names)


def _reject_taken_name(entry: Entry, names: Names) -> Entry:
    taken = names.objection(entry.name, f"added:{entry.name}", "Remove this one and add it with another --name.")
    return dataclasses.replace(entry, status="broken", problem=taken) if taken else entry
