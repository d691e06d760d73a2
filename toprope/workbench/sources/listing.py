"""Convert an adapter's listing into a catalog entry."""

from __future__ import annotations

from collections.abc import Sequence

from toprope.records.run.specification import EnvironmentSource
from toprope.sdk.adapters._shared.listing import Listed
from toprope.workbench.adapters import Adapter
from toprope.workbench.entries import Entry, State
from toprope.workbench.interpreters.known import Known

_NEEDS: dict[str, State] = {
    "install": "needs install", "network": "needs network", "download": "needs network", "key": "needs key",
}  # fmt: skip


def install_command(name: str) -> str:
    """Return the command that makes an interpreter for an adapter."""
    return f"toprope env add {name}"


def home_of(adapter: Adapter, interpreters: Sequence[Known]) -> Known | None:
    """Return the first interpreter with the adapter's requirements, or None."""
    return next(
        (
            interpreter
            for interpreter in interpreters
            if not interpreter.problem and adapter.is_in(interpreter.site_packages)
        ),
        None,
    )


def entry_of(listed: Listed, name: str, source: str, adapter: Adapter, python: str | None) -> Entry:
    """Make the catalog entry of an environment that an adapter lists.

    Args:
        listed: Listing of the adapter.
        name: Name in the catalog.
        source: Source of the entry.
        python: Interpreter of the environment; None for Toprope's own.
    """
    status: State = _NEEDS.get(listed.needs, "broken") if listed.problem or listed.needs else "ready"
    return Entry(
        name=name,
        description=listed.description,
        source=source,
        status=status,
        problem=listed.problem or (f"It {status}." if status != "ready" else ""),
        turns=listed.turns,
        environment=EnvironmentSource(name=name, adapter=adapter.name, target=listed.target, interpreter=python),
        tags=listed.tags,
        ecosystem=adapter.name,
        tools=listed.tools,
        keeps=listed.needs == "download",
    )
