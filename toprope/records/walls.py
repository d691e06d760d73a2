"""The owner's decisions about the walls around environments, and their way to the processes that start workers."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from toprope.errors import TopropeError
from toprope.records.run.folder import read_json
from toprope.settings.locks import Locks
from toprope.settings.owner import EnvironmentRights, Home

ENV_WALLS = "TOPROPE_WALLS"
"""Carries `Walls` as JSON to keepers, to those of their components that start workers, and to data programs."""

RESERVED = ("standard-tasks",)
"""Names of Toprope's own workers; no environment of an agent may have one."""


_LIMITING = re.compile(r"CUDA_VISIBLE_DEVICES|\w+_OFFLINE|\w+_NUM_THREADS")
"""Variables that only limit; code that agents saved gets these of the owner's, too."""

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
    agents: tuple[str, ...] = ()
    """Folders of files that agents wrote. Agents choose the names in them, so such code has no rights by its name."""
    variables: tuple[str, ...] = ()
    """Names of the variables that the owner's settings have for environments; such code does not get them."""
    added: tuple[str, ...] = ()
    """Folders that the owner added by name: the code of a project there reads the project, see
    `toprope.sdk.wall.projects.project_root`."""

    def wrote_agent(self, file: str) -> bool:
        """True if an agent wrote a file."""
        real = Path(os.path.realpath(file))
        return any(real.is_relative_to(os.path.realpath(folder)) for folder in self.agents)

    def home_of(self, name: str, *, of_agent: bool = False) -> str | None:
        """The HOME of an environment, which is kept and no other has; None for environments without a name.

        Args:
            of_agent: An agent wrote its code.
        """
        if self.homes is None or not name:
            return None
        plain = "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in name).strip(".")
        if plain != name:  # otherwise `a/b` would share that of `a-b`
            plain += f"@{hashlib.sha256(name.encode(errors='surrogatepass')).hexdigest()[:16]}"
        return str(Path(self.homes) / (f"{plain}@agent" if of_agent else plain))

    @classmethod
    def of_home(cls, home: Home) -> Walls:
        """The owner's decisions as they are on disk now."""
        settings = home.settings()
        return cls(
            required=settings.wall.missing == "refuse",
            closed=(str(home.path), str(home.configuration)),
            homes=str(home.worker_homes),
            rights={name: _absolute(rights, home) for name, rights in settings.environment.items()},
            agents=(str(home.agent_environments),),
            variables=tuple(
                name for name in settings.variables.get("environment", {}) if not _LIMITING.fullmatch(name)
            ),
            added=_added_folders(home),
        )

    def encode(self) -> str:
        """As JSON, for ENV_WALLS."""
        return json.dumps(asdict(self))

    @classmethod
    def from_variables(cls, variables: Mapping[str, str]) -> Walls:
        """The decisions that a parent process passed on; the default if there are none."""
        encoded = variables.get(ENV_WALLS)
        if not encoded:
            return cls()
        data = json.loads(encoded)
        # a keeper of an earlier version names none of the last three
        more = {name: tuple(data.get(name, ())) for name in ("agents", "variables", "added")}
        return cls(data["required"], tuple(data["closed"]), data["homes"], data["rights"], **more)


def _added_folders(home: Home) -> tuple[str, ...]:
    """The folders, projects and checkouts that the owner added; none if the registry cannot be read."""
    try:
        entries = read_json(home.environments_file)["environments"].values()
        places = [str(entry.get("path") or entry["given"]) for entry in entries]
    except (TopropeError, AttributeError, KeyError, TypeError):
        return ()
    return tuple(os.path.normpath(place) for place in places if os.path.isabs(place) and os.path.isdir(place))


def _absolute(rights: EnvironmentRights, home: Home) -> dict[str, Any]:
    def absolute(places: list[str]) -> list[str]:
        return [str(home.configuration / Path(place).expanduser()) for place in places]

    return {"trust": rights.trust, "reads": absolute(rights.reads), "writes": absolute(rights.writes)}
