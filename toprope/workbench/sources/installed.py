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
        self._read: dict[tuple[str, Path], tuple[object, list[Listed]]] = {}

    def entries(self, names: Names) -> list[Entry]:
        """Return the environments by adapter and interpreter."""
        interpreters, entries = self._interpreters(), []
        gone = [one for one in interpreters if one.problem]
        for one in gone:
            hint = f"Remove it (toprope env remove {one.name}) or add it again."
            entries.append(broken(one.name, f"{one.problem} {hint}", self.kind))
        for adapter in self._adapters():
            if adapter.problem:
                problem = f"Its adapter cannot be used: {adapter.problem}"
                entries.append(broken(adapter.name, problem, self.kind, ecosystem=adapter.name))
            elif adapter.name not in WITH_SOURCES_OF_THEIR_OWN and adapter.package:
                entries += self._of(adapter, [one for one in interpreters if not one.problem], names)
        return entries

    def _of(self, adapter: Adapter, interpreters: Sequence[Known], names: Names) -> list[Entry]:
        if home_of(adapter, interpreters) is None:
            return [_missing(adapter)] if adapter.requirements else []
        if not adapter.lists_packages:
            return []
        entries: dict[str, Entry] = {}
        listings: list[tuple[Known, Listed, Entry]] = []
        for one in interpreters:
            if not adapter.is_in(one.site_packages):
                continue
            try:
                found = self._listed(adapter, one.site_packages)
            except Exception as error:  # A broken package must not hide the others.
                problem = f"{one.site_packages} cannot be listed: {type(error).__name__}: {error}"
                name = f"{adapter.name}@{one.name}" if one.name else adapter.name
                entries[name] = broken(name, problem, self.kind, ecosystem=adapter.name)
                continue
            for listed in found:
                plain = f"{adapter.name}/{listed.name}"
                listings.append((one, listed, entry_of(listed, plain, self.kind, adapter, one.python)))
        contents: dict[str, str] = {}
        for one, listed, entry in sorted(listings, key=lambda each: each[2].status != "ready"):  # it keeps the order
            name = _name(contents, entry.name, listed.content, one.name)
            contents.setdefault(name, listed.content)
            entries.setdefault(name, entry_of(listed, name, self.kind, adapter, one.python))
        return [one for one in entries.values() if not names.claim(one.name, f"{adapter.name} in packages")]

    def _listed(self, adapter: Adapter, site_packages: Path) -> list[Listed]:
        """Return an adapter's findings, cached until packages are installed or removed."""
        stamp = _stamp(site_packages)
        known = self._read.get((adapter.name, site_packages))
        if known is None or known[0] != stamp:
            known = self._read[adapter.name, site_packages] = (stamp, adapter.installed(site_packages))
        return known[1]


def _name(contents: dict[str, str], name: str, content: str, interpreter: str) -> str:
    """Return the name of the entry with this content, or one that is free.

    Args:
        contents: Content of the package by entry; empty if unknown, which is taken for the same.
        name: The name without that of an interpreter.
        content: That of the package.
        interpreter: Name of the interpreter that has it.
    """
    for known, theirs in contents.items():
        if (known == name or known.startswith(f"{name}@")) and (not content or not theirs or content == theirs):
            return known
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
