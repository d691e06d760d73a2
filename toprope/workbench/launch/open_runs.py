"""The run manager of an owner's home, and what the owner's settings give to runs: a machine, variables, leave to go on.

Settings are read when they are needed, so keys travel nowhere.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from toprope.records.run.specification import Specification
from toprope.records.walls import Walls
from toprope.settings.owner import Home, OwnerSettings
from toprope.supervisor.capacity.reservations import Machine
from toprope.supervisor.launchers.local import LocalLauncher
from toprope.supervisor.runs.manager import RunManager
from toprope.workbench.endpoints import variables_for
from toprope.workbench.launch.reserve_budget import may_go_on

CONDUCTOR = "conductor"
"""The member of a sweep that starts runs and must know where the owner's files are."""


def open_runs(home: Home) -> RunManager:
    """Return the run manager of a home, under the owner's settings."""
    return RunManager(
        home.runs,
        LocalLauncher(contained=lambda: home.settings().containment, walls=lambda: Walls.of_home(home)),
        lambda: machine_of(home.settings()),
        lambda specification: variables_to_resume(home, specification),
    )


def machine_of(settings: OwnerSettings) -> Machine:
    """Return the part of this machine that runs may use: all of it, or as much as the owner allows."""
    everyone = settings.variables.get("*", {})
    visible = everyone.get("CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES"))
    floor = settings.machine.disk_floor_mb
    disk_floor = None if floor is None else int(floor * 1_000_000)
    return Machine.detect(settings.machine.threads, settings.machine.gpus, visible, disk_floor)


def variables_of(specification: Specification, home: Home) -> dict[str, dict[str, str]]:
    """Return the owner's variables by crew member; a sweep's conductor also learns the owner's folders."""
    found = variables_for(specification, home.settings(), home.preset_folders)
    if specification.run_kind.starts_runs:
        places = {"TOPROPE_HOME": str(home.path), "TOPROPE_CONFIG": str(home.configuration)}
        found[CONDUCTOR] = {**found.get(CONDUCTOR, {}), **places}
    return found


def variables_to_resume(home: Home, specification: Specification) -> Mapping[str, Mapping[str, str]]:
    """Return the owner's variables for a lost run that is about to go on by itself.

    Raises:
        TopropeError: The owner's limits leave it nothing, or a file of the owner cannot be read; the caller asks again
            the next time somebody looks at the run.
    """
    may_go_on(specification, home.limits(), home.runs)
    return variables_of(specification, home)
