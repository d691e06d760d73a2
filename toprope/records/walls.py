"""The owner's decisions about the walls around environments, and their way to the processes that start workers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from toprope.settings.locks import Locks
from toprope.settings.owner import EnvironmentRights, Home

ENV_WALLS = "TOPROPE_WALLS"
"""Carries `Walls` as JSON to keepers, to those of their components that start workers, and to data programs."""


NetworkName = Literal["allow", "own", "deny"]


def allowed_network(locks: Locks, wanted: NetworkName = "allow") -> NetworkName:
    """The network of an environment outside a run: the wanted one, or the next narrower one that the locks allow."""
    names: tuple[NetworkName, ...] = ("allow", "own", "deny")
    for name in names[names.index(wanted) :]:
        if not locks.refusal("environment.network", name):
            return name
    return "deny"


@dataclass(frozen=True)
class Walls:
    """The owner's decisions as a process that starts workers needs them. The default has no exceptions."""

    required: bool = False
    """Start no worker without a wall."""
    closed: tuple[str, ...] = ()
    """Folders that no worker sees, although one may lie within its sources: Toprope's home and configuration."""
    homes: str | None = None
    """Folder with the HOME of each environment; None: it lasts as long as the worker."""
    rights: dict[str, dict[str, Any]] = field(default_factory=dict)
    """`EnvironmentRights` by name, with absolute paths."""

    def home_of(self, name: str) -> str | None:
        """The HOME of an environment, which is kept; None for environments without a name."""
        if self.homes is None or not name:
            return None
        plain = "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in name).strip(".")
        return str(Path(self.homes) / (plain or "-"))

    @classmethod
    def of_home(cls, home: Home) -> Walls:
        """The owner's decisions as they are on disk now."""
        settings = home.settings()
        return cls(
            required=settings.wall.missing == "refuse",
            closed=(str(home.path), str(home.configuration)),
            homes=str(home.worker_homes),
            rights={name: _absolute(rights, home) for name, rights in settings.environment.items()},
        )

    def encode(self) -> str:
        """As JSON, for ENV_WALLS."""
        return json.dumps(asdict(self))

    @classmethod
    def from_variables(cls, variables: Mapping[str, str]) -> Walls:
        """The decisions that a parent process passed on; the default if there are none."""
        given = variables.get(ENV_WALLS)
        if not given:
            return cls()
        said = json.loads(given)
        return cls(said["required"], tuple(said["closed"]), said["homes"], said["rights"])


def _absolute(rights: EnvironmentRights, home: Home) -> dict[str, Any]:
    def absolute(places: list[str]) -> list[str]:
        return [str(home.configuration / Path(place).expanduser()) for place in places]

    return {"trust": rights.trust, "reads": absolute(rights.reads), "writes": absolute(rights.writes)}
