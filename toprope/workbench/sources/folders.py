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


@dataclasses.dataclass(frozen=True)
class _Read:
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
        self._read: dict[Path, tuple[tuple[int, ...], _Read]] = {}

    def read(self, file: Path) -> _Read | None:
        """Return the declarations of a file; None if the file is gone."""
        try:
            stat = file.stat()
        except OSError:
            return None
        stamp = (stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size, stat.st_ino)
        known = self._read.get(file)
        if known is None or known[0] != stamp:
            known = self._read[file] = (stamp, self._fresh(file))
        return known[1]

    def read_whole(self, folder: Path) -> list[tuple[Adapter, Listed]]:
        """Return the environments that a folder is as a whole, if none of its files is one of the SDK."""
        found: list[tuple[Adapter, Listed]] = []
        for adapter in self._adapters():
            with contextlib.suppress(Exception):  # Its files are read instead.
                found += [(adapter, one) for one in adapter.in_folder(folder)]
        return found

    def _fresh(self, file: Path) -> _Read:
        found = tuple(discover_file(file))
        if found:  # SDK environments win over the conventions of other ecosystems.
            return _Read(found)
        try:
            tree = parse(file)
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
            return _Read(())
        theirs, failures = [], []
        for adapter in self._adapters():
            if not adapter.reads_files:
                continue
            try:
                theirs += [(adapter, one) for one in adapter.declared(file, tree)]
            except Exception as error:  # An error of one adapter must not hide other environments.
                failures.append(f"The adapter {adapter.name} cannot read {file}: {type(error).__name__}: {error}")
        return _Read((), tuple(theirs), tuple(failures))


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
        reads = [(file, read) for file in files if (read := self._reader.read(file))]  # others were removed since
        if any(one.attribute for _, read in reads for one in read.ours):
            wholes = []
        whole = {folder: found for folder in wholes if (found := self._reader.read_whole(folder))}
        entries = [self._theirs(*one, folder, names) for folder, found in whole.items() for one in found]
        for file, read in reads:
            if not whole.keys().isdisjoint(file.parents):
                continue
            listed = [found for found in read.ours if found.attribute or found.names_sdk or not self._placed]
            entries += [self._ours(found, names) for found in listed]
            entries += [self._theirs(adapter, listed, file, names) for adapter, listed in read.theirs]
            entries += [broken(file.stem, failure, self.kind) for failure in read.failures]
        return entries

    def _ours(self, found: Found, names: Names) -> Entry:
        problem = found.problem
        if self._placed and found.is_named_by_file:
            found = dataclasses.replace(found, name=placed_name(self._place, found.file, found.name))
            problem = "" if found.attribute else problem  # the name is valid now
        place = f"{found.file}:{found.line}"
        problem = problem or names.objection(found.name, place, f"Set another `name` in {found.attribute} ({place}).")
        return Entry(
            name=found.name,
            description=found.description,
            source=self.kind,
            status="broken" if problem else "ready",
            problem=problem,
            turns=found.max_turns,
            environment=EnvironmentSource(
                name=found.name,
                file=str(found.file),
                attribute=found.attribute or None,
                turns=None if found.decides_turns else found.max_turns,
                interpreter=self._python,
            ),
            tags=found.tags,
        )

    def _theirs(self, adapter: Adapter, listed: Listed, file: Path, names: Names) -> Entry:
        if self._placed:
            listed = dataclasses.replace(listed, name=placed_name(self._place, file, listed.name))
        elif NAME.fullmatch(listed.name) is None:
            listed = dataclasses.replace(listed, name=name_of(listed.name))
        python = self._python
        if python is None:
            known = home_of(adapter, self._interpreters())
            if known is None and not listed.problem:
                problem = f"It needs {adapter.package}. The owner installs it: {install_command(adapter.name)}"
                listed = dataclasses.replace(listed, problem=problem, needs="install")
            python = known.python if known is not None else None
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
    own: dict[str, Path] = {}
    for folder in folders:
        place = Path(folder).expanduser().absolute()
        own.setdefault(os.path.realpath(place), place)
    own.pop(os.path.realpath(shipped), None)
    return list(own.values())
