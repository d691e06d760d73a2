"""The run manager of an owner's home, and what the owner's settings give to runs: a machine, variables, leave to go on.

Settings are read when they are needed, so keys travel nowhere.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack, nullcontext

from toprope.records.run.specification import Specification
from toprope.records.run.status import RESUMABLE, Status
from toprope.records.walls import Walls
from toprope.settings.owner import Home, OwnerSettings
from toprope.supervisor.capacity.budget_ledger import ledger_lock, reserved
from toprope.supervisor.capacity.reservations import Machine
from toprope.supervisor.environment_variables import KEEPER
from toprope.supervisor.keeper.containment import ContainmentSetting
from toprope.supervisor.launchers.by_kind import LauncherByKind, engine_of
from toprope.supervisor.launchers.cluster import ClusterLauncher
from toprope.supervisor.launchers.local import LocalLauncher
from toprope.supervisor.launchers.standby import Standby
from toprope.supervisor.notices import tell_end
from toprope.supervisor.runs.manager import RunManager
from toprope.workbench.endpoints import variables_for
from toprope.workbench.launch.accepted_code import code_to_resume
from toprope.workbench.launch.budgets.reserve_budget import may_go_on, with_raised_caps
from toprope.workbench.launch.hold import hold_run, require_policies

CONDUCTOR = "conductor"
"""The member of a sweep that starts runs and must know where the owner's files are."""
_OF_SLURM = ("SLURM_CONF", "KRB5CCNAME")
"""Variables of this process by which the conductor reaches the same Slurm for the members."""


def open_runs(home: Home, standby: Standby | None = None) -> RunManager:
    """Return the run manager of a home, under the owner's settings.

    Args:
        standby: Has keepers that wait for runs on this machine.
    """

    def contained() -> ContainmentSetting:
        return home.settings().containment

    def walls() -> Walls:
        return Walls.of_home(home)

    cluster = ClusterLauncher(home.clusters, engine_of, contained, walls)
    return RunManager(
        home.runs,
        LauncherByKind(LocalLauncher(contained=contained, walls=walls, standby=standby), cluster),
        lambda: machine_of(home.settings()),
        lambda specification: variables_to_resume(home, specification),
        lambda folder: tell_end(folder, home),
    )


def machine_of(settings: OwnerSettings) -> Machine:
    """Return the part of this machine that runs may use: all of it, or as much as the owner allows."""
    everyone = settings.variables.get("*", {})
    visible = everyone.get("CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES"))
    floor = settings.machine.disk_floor_mb
    disk_floor = None if floor is None else int(floor * 1_000_000)
    return Machine.detect(settings.machine.threads, settings.machine.gpus, visible, disk_floor)


def variables_of(specification: Specification, home: Home) -> dict[str, dict[str, str]]:
    """Return the owner's variables by crew member; keeper and conductor also learn the owner's folders.

    Raises:
        LockedField: See `tool_variables`.
    """
    from toprope.workbench.launch.lent import tool_variables  # imports the catalog, which most callers do not need

    variables = variables_for(specification, home.settings(), home.preset_folders)
    if lent := tool_variables(specification, home):
        variables["environment"] = {**variables.get("environment", {}), **lent}
    places = {"TOPROPE_HOME": str(home.path), "TOPROPE_CONFIG": str(home.configuration)}
    variables[KEEPER] = places
    if specification.run_kind.starts_runs:
        engine = {name: os.environ[name] for name in _OF_SLURM if name in os.environ}
        variables[CONDUCTOR] = {**engine, **variables.get(CONDUCTOR, {}), **places}
    return variables


def variables_to_resume(home: Home, specification: Specification) -> Mapping[str, Mapping[str, str]]:
    """Return the owner's variables for a run that is about to go on.

    Raises:
        LockedField: The owner does not allow the run's configuration any more, or to serve a policy.
        TopropeError: The owner's limits leave it nothing, an interpreter is gone, or a file of the owner cannot be
            read; the caller asks again the next time somebody looks at the run.
    """
    # They import the catalog and more, which most callers do not need.
    from toprope.workbench.launch.lent import renewed
    from toprope.workbench.launch.requirements import require_interpreters

    hold_run(specification, home.locks(specification.preset), home.runs)
    renewed([specification], home)  # refuses what the owner has withdrawn
    require_interpreters(specification)
    if specification.ask is not None and specification.ask.serve_s is not None:
        require_policies(home.settings())
    may_go_on(specification, home.limits(), home.runs)
    return variables_of(specification, home)


def resume_run(home: Home, runs: RunManager, run_id: str, *, by_owner: bool = False) -> tuple[Status, Specification]:
    """Start the next attempt of an ended run, if the owner's present locks and limits allow it.

    Args:
        by_owner: See `code_to_resume`. If starts are confirmed, only the owner's resume takes raised limits.

    Returns:
        Its first status and its specification.

    Raises:
        LockedField: The owner does not allow the run's configuration any more.
        TopropeError: See `RunManager.resume`, `may_go_on` and `code_to_resume`.
    """
    with ExitStack() as reservation:
        # Starts elsewhere wait for this lock, so the keeper starts, or a job is submitted, after it.
        with ledger_lock(home.runs) if home.runs.is_dir() else nullcontext():
            status = runs.status(run_id, revive=False)
            folder = runs.folder(run_id)
            specification = frozen = Specification.read(folder)
            variables: Mapping[str, Mapping[str, str]] = {}
            if status.ended and status.state in RESUMABLE:  # otherwise the manager says what is wrong
                limits = home.limits()
                if by_owner or limits.confirm == "never":
                    specification = with_raised_caps(frozen, limits, runs.machine(), home.runs)
                variables = variables_to_resume(home, specification)
                code = code_to_resume(specification, home, by_owner=by_owner)
                specification = specification.model_copy(update={"code": code})
                reservation.enter_context(reserved(home.runs, [specification]))
                if specification != frozen:
                    specification.write(folder)
        return runs.resume(run_id, variables), specification
