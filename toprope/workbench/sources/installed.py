"""Environments in installed packages, found by each adapter in the files of each interpreter.

An ecosystem without an interpreter is one entry that says how to install it. An environment that several interpreters
have is one entry: it runs in the first one that can run it. If packages of different content have one name, the first
that can run keeps it, and the others' end with the names of their interpreters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from toprope.records.run.specification import EnvironmentSource
from toprope.sdk.adapters._shared.listing import Listed
from toprope.workbench.adapters import WITH_SOURCES_OF_THEIR_OWN, Adapter
from toprope.workbench.entries import Entry, Names, broken
from toprope.workbench.interpreters.known import Known
from toprope.workbench.sources.listing import entry_of, home_of, install_command


class InstalledSource:
    kind = "installed"

    def __init__(self, adapters: Callable[[], Sequence[Adapter]], interpreters: Callable[[], Sequence[Known]]) -> None:
        self._adapters, self._interpreters = adapters, interpreters
        self._cache: dict[tuple[str, Path], tuple[object, list[Listed]]] = {}

    def entries(self, names: Names) -> list[Entry]:
        """Return the environments by adapter and interpreter."""
        interpreters, entries = self._interpreters(), []
        gone = [interpreter for interpreter in interpreters if interpreter.problem]
        for interpreter in gone:
            hint = f"Remove it (toprope env remove {interpreter.name}) or add it again."
            entries.append(broken(interpreter.name, f"{interpreter.problem} {hint}", self.kind))
        for adapter in self._adapters():
            if adapter.problem:
                problem = f"Its adapter cannot be used: {adapter.problem}"
                entries.append(broken(adapter.name, problem, self.kind, ecosystem=adapter.name))
            elif adapter.name not in WITH_SOURCES_OF_THEIR_OWN and adapter.package:
                usable = [interpreter for interpreter in interpreters if not interpreter.problem]
                entries += self._entries_of(adapter, usable, names)
        return entries

    def _entries_of(self, adapter: Adapter, interpreters: Sequence[Known], names: Names) -> list[Entry]:
        if home_of(adapter, interpreters) is None:
            return [_missing(adapter)] if adapter.requirements else []
        if not adapter.lists_packages:
            return []
        entries: dict[str, Entry] = {}
        listings: list[tuple[Known, Listed, Entry]] = []
        for interpreter in interpreters:
            if not adapter.is_in(interpreter.site_packages):
                continue
            try:
                environments = self._list_cached(adapter, interpreter.site_packages)
            except Exception as error:  # A broken package must not hide the others.
                problem = f"{interpreter.site_packages} cannot be listed: {type(error).__name__}: {error}"
                name = f"{adapter.name}@{interpreter.name}" if interpreter.name else adapter.name
                entries[name] = broken(name, problem, self.kind, ecosystem=adapter.name)
                continue
            for listed in environments:
                plain = f"{adapter.name}/{listed.name}"
                listings.append((interpreter, listed, entry_of(listed, plain, self.kind, adapter, interpreter.python)))
        contents: dict[str, str] = {}
        listings.sort(key=lambda listing: listing[2].status != "ready")  # it keeps the order
        for interpreter, listed, plain_entry in listings:
            name = _choose_name(contents, plain_entry.name, listed.content, interpreter.name)
            contents.setdefault(name, listed.content)
            entries.setdefault(name, entry_of(listed, name, self.kind, adapter, interpreter.python))
        return [entry for entry in entries.values() if not names.claim(entry.name, f"{adapter.name} in packages")]

    def _list_cached(self, adapter: Adapter, site_packages: Path) -> list[Listed]:
        """Return an adapter's findings, cached until packages are installed or removed."""
        stamp = _stamp(site_packages)
        cached = self._cache.get((adapter.name, site_packages))
        if cached is None or cached[0] != stamp:
            cached = self._cache[adapter.name, site_packages] = (stamp, adapter.installed(site_packages))
        return cached[1]


def _choose_name(contents: dict[str, str], name: str, content: str, interpreter: str) -> str:
    """Return the name of the entry with this content, or one that is free.

    Args:
        contents: Content of the package by entry; empty if unknown, which is taken for the same.
        name: The name without that of an interpreter.
        content: That of the package.
        interpreter: Name of the interpreter that has it.
    """
    for entry_name, entry_content in contents.items():
        same_content = not content or not entry_content or content == entry_content
        if same_content and (entry_name == name or entry_name.startswith(f"{name}@")):
            return entry_name
    return f"{name}@{interpreter}" if name in contents else name


def _stamp(site_packages: Path) -> object:
    """Return a stamp that changes when packages are installed, removed or replaced."""
    return (
        site_packages.stat().st_mtime_ns,
        tuple(sorted((path.name, path.stat().st_mtime_ns) for path in site_packages.glob("*.dist-info"))),
    )


def _missing(adapter: Adapter) -> Entry:
    return Entry(
        name=adapter.name,
        description=adapter.description,
        source=InstalledSource.kind,
        status="needs install",
        problem=f"The owner installs it: {install_command(adapter.name)}",
        turns=None,
        environment=EnvironmentSource(name=adapter.name),
        ecosystem=adapter.name,
    )
