"""Catalog entries of environments, and the registry of their names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

from toprope.records.run.specification import EnvironmentSource

State = Literal["ready", "needs install", "needs network", "needs key", "broken"]


@dataclass(frozen=True)
class Entry:
    """An environment in the catalog. See `Catalog.entries`."""

    name: str
    description: str
    source: str
    """Its source: `shipped`, `folder`, `dataset`, `reasoning_gym`, `installed`, `server`, `hub`, ..."""
    status: State
    problem: str
    """Reason why it is not ready, and the remedy; empty if it is ready."""
    turns: int | None
    """Largest number of answers in a rollout; None if unknown from files."""
    environment: EnvironmentSource
    tags: tuple[str, ...] = ()
    ecosystem: str = "toprope"
    """The ecosystem: the name of an adapter, or `toprope` for the SDK."""
    tools: bool = False
    """True if the policy gets tools, as far as files tell."""
    keeps: bool = False
    """True if it needs the network once, and keeps what it loaded."""

    @property
    def usable(self) -> bool:
        """True if a worker may be able to open it; it may still need a network or a key."""
        return self.status not in ("broken", "needs install")


@dataclass
class Names:
    """The names in use, to detect two environments of the same name."""

    _holders: dict[str, str] = field(default_factory=dict)

    def claim(self, name: str, holder: str) -> str:
        """Register a name and return its earlier holder; empty if `holder` has it now.

        Args:
            name: Name of the environment.
            holder: A file and line, or another unique text.
        """
        other = self._holders.setdefault(name, holder)
        return "" if other == holder else other

    def objection(self, name: str, holder: str, remedy: str) -> str:
        """Claim a name; return the problem and its remedy if another holder has it, else an empty text."""
        other = self.claim(name, holder)
        return f"The name {name!r} is taken by {other}. {remedy}" if other else ""


class Source(Protocol):
    """A place with environments. It reads files and runs no user code."""

    kind: str

    def entries(self, names: Names) -> list[Entry]:
        """Return all present entries, broken ones included."""
        ...


def broken(name: str, problem: str, source: str, *, ecosystem: str = "toprope") -> Entry:
    """Return an entry that reports an unreadable environment."""
    return Entry(
        name=name,
        description="",
        source=source,
        status="broken",
        problem=problem,
        turns=None,
        environment=EnvironmentSource(name=name),
        ecosystem=ecosystem,
    )
