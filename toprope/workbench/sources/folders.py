"""Environments in Python files: those written with the SDK, and those of other ecosystems.

Changed files are read again. An unreadable file becomes an entry with the reason.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path

from toprope.records.run.specification import EnvironmentSource
from toprope.sdk.adapters._shared.listing import Listed
from toprope.sdk.discovery import NAME, Found, discover_file, environment_files, name_of, parse, subfolders
from toprope.workbench.adapters import Adapter
from toprope.workbench.entries import Entry, Names, broken
from toprope.workbench.interpreters.known import Known
from toprope.workbench.sources.listing import entry_of, home_of, install_command
from toprope.workbench.sources.placed import is_apart, placed_name


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
        root: The owner's folder that the place is in; names begin with the folders between. None: names are as given.
        apart: Folders that other sources list.
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
        root: Path | None = None,
        apart: Collection[Path] = (),
    ) -> None:
        self._place, self.kind, self._deep = place, kind, deep
        self._root, self._apart = root, apart
        self._reader, self._interpreters, self._python = reader, interpreters, python

    def entries(self, names: Names) -> list[Entry]:
        """Return the environments by file and line."""
        place = self._place
        files = [place] if place.is_file() else environment_files(place, deep=self._deep)
        if (root := self._root) is not None:
            files = [file for file in files if not is_apart(file, root, self._apart)]
        reads = [(file, read) for file in files if (read := self._reader.read(file))]  # others were removed since
        has_ours = any(one.attribute for _, read in reads for one in read.ours)
        if self._deep and place.is_dir() and not has_ours and (whole := self._reader.read_whole(place)):
            return [self._theirs(adapter, listed, place, names) for adapter, listed in whole]
        entries = []
        for file, read in reads:
            entries += [self._ours(found, names) for found in read.ours]
            entries += [self._theirs(adapter, listed, file, names) for adapter, listed in read.theirs]
            entries += [broken(file.stem, failure, self.kind) for failure in read.failures]
        return entries

    def _ours(self, found: Found, names: Names) -> Entry:
        problem = found.problem
        if self._root is not None and found.is_named_by_file:
            found = dataclasses.replace(found, name=placed_name(self._root, found.file, found.name))
            problem = "" if found.attribute else problem  # the name is valid now
        if not problem and (holder := names.claim(found.name, f"{found.file}:{found.line}")):
            problem = (
                f"The name {found.name!r} is taken by {holder}. Set another `name` in {found.attribute} "
                f"({found.file}:{found.line})."
            )
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
                interpreter=self._python,
            ),
            tags=found.tags,
        )

    def _theirs(self, adapter: Adapter, listed: Listed, file: Path, names: Names) -> Entry:
        if self._root is not None:
            listed = dataclasses.replace(listed, name=placed_name(self._root, file, listed.name))
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
            taken = names.claim(listed.name, holder)
            problem = f"The name {listed.name!r} is taken by {taken}. Rename the one in {file}."
            return dataclasses.replace(entry, status="broken", problem=problem)
        return entry


class OwnFolderSource:
    """Lists the environments in one of the owner's folders, and in the folders in it as if each had been added.

    Args:
        place: The owner's folder.
        reader: Reads files.
        interpreters: Returns every known interpreter.
        apart: Returns the folders that other sources list.
    """

    kind = "folder"

    def __init__(
        self,
        place: Path,
        reader: FileReader,
        interpreters: Callable[[], Sequence[Known]],
        apart: Callable[[], Collection[Path]],
    ) -> None:
        self._place, self._reader, self._interpreters, self._apart = place, reader, interpreters, apart

    def entries(self, names: Names) -> list[Entry]:
        """Return the environments by file and line, those of the folder itself first."""
        found = FolderSource(self._place, self.kind, self._reader, self._interpreters).entries(names)
        apart = self._apart()
        for folder in subfolders(self._place):
            if folder not in apart:
                source = FolderSource(
                    folder, self.kind, self._reader, self._interpreters, deep=True, root=self._place, apart=apart
                )
                found += source.entries(names)
        return found


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
    own = (Path(folder).expanduser().absolute() for folder in folders)
    return [folder for folder in dict.fromkeys(own) if folder != shipped]
