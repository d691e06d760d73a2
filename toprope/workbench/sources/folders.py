"""Environments in Python files: those written with the SDK, and those of other ecosystems.

Changed files are read again. An unreadable file becomes an entry with the reason.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from toprope.records.run.specification import EnvironmentSource
from toprope.sdk.adapters._shared.listing import Listed
from toprope.sdk.discovery import NAME, Found, discover_file, environment_files, name_of, parse
from toprope.workbench.adapters import Adapter
from toprope.workbench.entries import Entry, Names, broken
from toprope.workbench.interpreters.known import Known
from toprope.workbench.sources.listing import entry_of, home_of, install_command
from toprope.workbench.sources.targets import files_of_targets


@dataclasses.dataclass(frozen=True)
class _Declarations:
    """Environments declared in a file: with the SDK, by adapter, and errors of adapters."""

    ours: tuple[Found, ...]
    theirs: tuple[tuple[Adapter, Listed], ...] = ()
    failures: tuple[str, ...] = ()


class FileReader:
    """Reads files and caches the result until they change.

    Args:
        adapters: Adapters to ask about each file.
    """

    def __init__(self, adapters: Callable[[], Sequence[Adapter]]) -> None:
        self._adapters = adapters
        self._cache: dict[Path, tuple[tuple[int, ...], _Declarations]] = {}

    def read(self, file: Path) -> _Declarations | None:
        """Return the declarations of a file; None if the file is gone."""
        try:
            stat = file.stat()
        except OSError:
            return None
        stamp = (stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size, stat.st_ino)
        cached = self._cache.get(file)
        if cached is None or cached[0] != stamp:
            cached = (stamp, self._parse(file))
            if not any(environment.problem for environment in cached[1].ours):  # its base may come into another file
                self._cache[file] = cached
        return cached[1]

    def read_whole(self, folder: Path) -> list[tuple[Adapter, Listed]]:
        """Return the environments that a folder is as a whole, if none of its files is one of the SDK."""
        environments: list[tuple[Adapter, Listed]] = []
        for adapter in self._adapters():
            with contextlib.suppress(Exception):  # Its files are read instead.
                environments += [(adapter, listed) for listed in adapter.in_folder(folder)]
        return environments

    def _parse(self, file: Path) -> _Declarations:
        ours = tuple(discover_file(file))
        if any(environment.attribute for environment in ours):  # They win over the conventions of other ecosystems.
            return _Declarations(ours)
        try:
            tree = parse(file)
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
            return _Declarations(ours)
        theirs, failures = [], []
        for adapter in self._adapters():
            if not adapter.reads_files:
                continue
            try:
                theirs += [(adapter, listed) for listed in adapter.declared(file, tree)]
            except Exception as error:  # An error of one adapter must not hide other environments.
                failures.append(f"The adapter {adapter.name} cannot read {file}: {type(error).__name__}: {error}")
        return _Declarations(() if theirs else ours, tuple(theirs), tuple(failures))


class FolderSource:
    """Lists the environments in a folder or a file.

    Args:
        place: The folder or file; a missing one counts as empty.
        kind: Source name of the entries.
        reader: Reads files.
        interpreters: Returns every known interpreter.
        python: Interpreter for this folder; None for Toprope's own, or that of the ecosystem.
        deep: Look into its folders as well.
        placed: Begin names with the folders between the place and a file, and leave out files that cannot be parsed
            unless they name the SDK: what lies there is often not meant as an environment.
    """

    def __init__(
        self,
        place: Path,
        kind: str,
        reader: FileReader,
        interpreters: Callable[[], Sequence[Known]],
        python: str | None = None,
        *,
        deep: bool = False,
        placed: bool = False,
    ) -> None:
        self._place, self.kind, self._deep, self._placed = place, kind, deep, placed
        self._reader, self._interpreters, self._python = reader, interpreters, python

    def entries(self, names: Names) -> list[Entry]:
        """Return the environments by file and line."""
        place = self._place
        files = [place] if place.is_file() else environment_files(place, deep=self._deep)
        return self.listed(files, [place] if self._deep and place.is_dir() else [], names)

    def listed(self, files: Sequence[Path], wholes: Sequence[Path], names: Names) -> list[Entry]:
        """Return the environments in files.

        Args:
            files: The files.
            wholes: Folders that can be environments as a whole, if no file has one of the SDK. Files in such an
                environment are left out.
            names: The names in use.
        """
        # Files that are gone by now are left out.
        declared = [(file, declarations) for file in files if (declarations := self._reader.read(file))]
        of_targets = files_of_targets(self._place) if self._place.is_dir() else set()
        if any(environment.attribute for _, declarations in declared for environment in declarations.ours):
            wholes = []
        by_folder = {folder: listings for folder in wholes if (listings := self._reader.read_whole(folder))}
        entries = [
            self._adapter_entry(adapter, listed, folder, names)
            for folder, in_folder in by_folder.items()
            for adapter, listed in in_folder
        ]
        for file, declarations in declared:
            if not by_folder.keys().isdisjoint(file.parents):
                continue
            ours = [
                environment
                for environment in declarations.ours
                if environment.attribute or environment.names_sdk or not self._placed
            ]
            entries += [self._sdk_entry(environment, names) for environment in ours]
            entries += [
                self._adapter_entry(adapter, listed, file, names)
                for adapter, listed in declarations.theirs
                if not (listed.problem and file in of_targets)
            ]
            entries += [broken(file.stem, failure, self.kind) for failure in declarations.failures]
        return entries

    def _sdk_entry(self, environment: Found, names: Names) -> Entry:
        problem = environment.problem
        if self._placed and environment.is_named_by_file:
            environment = dataclasses.replace(
                environment, name=placed_name(self._place, environment.file, environment.name)
            )
            problem = "" if environment.attribute else problem  # the name is valid now
        place = f"{environment.file}:{environment.line}"
        problem = problem or names.objection(
            environment.name, place, f"Set another `name` in {environment.attribute} ({place})."
        )
        return Entry(
            name=environment.name,
            description=environment.description,
            source=self.kind,
            status="broken" if problem else "ready",
            problem=problem,
            turns=environment.max_turns,
            environment=EnvironmentSource(
                name=environment.name,
                file=str(environment.file),
                attribute=environment.attribute or None,
                turns=None if environment.decides_turns else environment.max_turns,
                interpreter=self._python,
            ),
            tags=environment.tags,
        )

    def _adapter_entry(self, adapter: Adapter, listed: Listed, file: Path, names: Names) -> Entry:
        if self._placed:
            listed = dataclasses.replace(listed, name=placed_name(self._place, file, listed.name))
        elif NAME.fullmatch(listed.name) is None:
            listed = dataclasses.replace(listed, name=name_of(listed.name))
        python = self._python
        if python is None:
            home = home_of(adapter, self._interpreters())
            if home is None and not listed.problem:
                problem = f"It needs {adapter.package}. The owner installs it: {install_command(adapter.name)}"
                listed = dataclasses.replace(listed, problem=problem, needs="install")
            python = home.python if home is not None else None
        # Files of several authors often have tasks of equal names: later ones are told apart by their files.
        holder = f"{file}:{listed.target}"
        free = next((name for name in _longer_names(listed.name, file) if not names.claim(name, holder)), None)
        entry = entry_of(listed, free or listed.name, self.kind, adapter, python)
        if free is None:
            problem = names.objection(listed.name, holder, f"Rename the one in {file}.")
            return dataclasses.replace(entry, status="broken", problem=problem)
        return entry


def placed_name(place: Path, file: Path, name: str) -> str:
    """Return the name of an environment in a file or folder below a place: its own after the folders between."""
    return name_of("-".join([*file.relative_to(place).parts[:-1], name]))


def _longer_names(name: str, file: Path) -> Iterator[str]:
    """Yield the valid names for an environment: its own, then with its file, then with the folders above as well."""
    yield name
    longer = name
    for place in (file.stem, *(folder.name for folder in list(file.parents)[:2])):
        longer = f"{re.sub(r'[^a-z0-9_-]+', '-', place.lower()).strip('-_')}-{longer}"
        if NAME.fullmatch(longer):
            yield longer


def own_folders(folders: Iterable[Path], shipped: Path) -> list[Path]:
    """Return the owner's folders without duplicates and without the shipped one."""
    by_real_path: dict[str, Path] = {}
    for folder in folders:
        place = Path(folder).expanduser().absolute()
        by_real_path.setdefault(os.path.realpath(place), place)
    by_real_path.pop(os.path.realpath(shipped), None)
    return list(by_real_path.values())
