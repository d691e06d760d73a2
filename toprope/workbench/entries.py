"""What the catalog lists: one value for an environment of whatever source, and who has which name."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

from toprope.records.run.specification import EnvironmentSource

__all__ = ["Entry", "Names", "Source", "State", "broken"]

State = Literal["ready", "needs install", "needs network", "needs key", "broken"]


@dataclass(frozen=True)
class Entry:
    """An environment in the catalog. See `Catalog.entries`."""

    name: str
    description: str
    source: str
    """Where it was found: `shipped`, `folder`, `dataset`, `reasoning_gym`, `installed`, `server`, `hub`, ..."""
    status: State
    problem: str
    """Why it is not ready, and what to do; empty when it is."""
    turns: int | None
    """Most answers in a rollout; None where files do not tell."""
    environment: EnvironmentSource
    tags: tuple[str, ...] = ()
    ecosystem: str = "toprope"
    """Whose conventions it follows: the name of an adapter, or `toprope` for those written against our SDK."""
    tools: bool = False
    """Whether the policy gets tools, as far as files tell."""
    tasks: int | None = None
    """How many there are, where files tell."""

    @property
    def usable(self) -> bool:
        """Whether it is worth asking a worker: what needs a network or a key may have it here."""
        return self.status not in ("broken", "needs install")


@dataclass
class Names:
    """Who has which name, so that of two environments with the same name one is told to change."""

    _holders: dict[str, str] = field(default_factory=dict)

    def claim(self, name: str, holder: str) -> str:
        """Who has the name already; empty where `holder` has it now.

        Args:
            name: An environment's.
            holder: A file and line, or another text that tells it from all others.
        """
        other = self._holders.setdefault(name, holder)
        return "" if other == holder else other


class Source(Protocol):
    """Something that environments are found in. It reads files and runs nothing of theirs."""

    kind: str

    def entries(self, names: Names) -> list[Entry]:
        """Everything there is now, what is broken included."""
        ...


def broken(name: str, problem: str, source: str, *, ecosystem: str = "toprope", description: str = "") -> Entry:
    """An entry that says what is wrong where nothing else could be read."""
    return Entry(
        name=name,
        description=description,
        source=source,
        status="broken",
        problem=problem,
        turns=None,
        environment=EnvironmentSource(name=name),
        ecosystem=ecosystem,
    )
