"""From a draft to a run with its keeper, the same way for everybody: tools, front ends, and sweeps that start members.

A specification is frozen with the owner's locks, held against the owner's limits, and started with the owner's
variables. All of these are read from the home when they are needed, so keys travel nowhere.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Literal

from toprope.errors import InvalidValue, NotFound
from toprope.records.run.specification import AskPlan, Specification, SweepPlan, TestPlan
from toprope.settings.locks import Locks
from toprope.settings.owner import Home, OwnerSettings
from toprope.settings.presets import load_preset
from toprope.supervisor.capacity.budget_ledger import ledger_lock, reserved
from toprope.supervisor.capacity.reservations import Machine
from toprope.supervisor.launchers.local import LocalLauncher
from toprope.supervisor.runs.manager import RunManager
from toprope.workbench.catalog.catalog import Catalog
from toprope.workbench.drafts import Draft
from toprope.workbench.endpoints import resolve_teacher, variables_for
from toprope.workbench.history import beside_preset
from toprope.workbench.interpreters.registry import Registry
from toprope.workbench.launch.custom_trainers import trainer_of
from toprope.workbench.launch.freeze import freeze
from toprope.workbench.launch.lineage import base_of, with_dataset
from toprope.workbench.launch.mixture_sources import Ingredients, blend
from toprope.workbench.launch.requirements import require_interpreters, require_wandb
from toprope.workbench.launch.reserve_budget import may_go_on, reserve

__all__ = ["CONDUCTOR", "Kind", "frozen", "machine_of", "runs_of", "start", "to_go_on", "variables_of"]

Kind = Literal["train", "test", "ask", "sweep"]

CONDUCTOR = "conductor"
"""The member of a sweep that starts runs, and needs to know where the owner's files are."""


def machine_of(settings: OwnerSettings) -> Machine:
    """What runs may have of this machine: the owner's limits, else what there is."""
    everyone = settings.variables.get("*", {})
    visible = everyone.get("CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES"))
    floor = settings.machine.disk_floor_mb
    disk_floor = None if floor is None else int(floor * 1_000_000)
    return Machine.detect(settings.machine.threads, settings.machine.gpus, visible, disk_floor)


def variables_of(specification: Specification, home: Home) -> dict[str, dict[str, str]]:
    """The owner's variables for a run's crew; for a sweep's conductor also where the owner's folders are."""
    found = variables_for(specification, home.settings(), home.preset_folders)
    if specification.run_kind.starts_runs:
        places = {"TOPROPE_HOME": str(home.path), "TOPROPE_CONFIG": str(home.configuration)}
        found[CONDUCTOR] = {**found.get(CONDUCTOR, {}), **places}
    return found


def to_go_on(home: Home, specification: Specification) -> Mapping[str, Mapping[str, str]]:
    """The owner's variables for a lost run that is to go on by itself, if the owner's limits leave it anything.

    Raises:
        TopropeError: They do not, or a file of the owner cannot be read; the next look asks again.
    """
    may_go_on(specification, home.limits(), home.runs)
    return variables_of(specification, home)


def runs_of(home: Home) -> RunManager:
    """The runs of a home, as a front end with the owner's settings sees them."""
    return RunManager(
        home.runs,
        LocalLauncher(contained=lambda: home.settings().containment),
        lambda: machine_of(home.settings()),
        lambda specification: to_go_on(home, specification),
    )


def frozen(
    home: Home,
    drafts: Sequence[Draft],
    kind: Kind,
    *,
    name: str | None = None,
    test: TestPlan | None = None,
    ask: AskPlan | None = None,
    sweep: SweepPlan | None = None,
    locks: Locks | None = None,
    base: tuple[str, str] | None = None,
) -> list[Specification]:
    """The specifications of runs that start together, one a draft, under the owner's locks as they are now.

    Args:
        home: The owner's.
        drafts: Alike but for what the caller varies.
        kind: What is asked for; `train` becomes `sft` where the algorithm is that.
        name: Begins the runs' ids.
        test: The plan of a test.
        ask: The plan of an asking.
        sweep: The plan of a sweep.
        locks: The owner's; read anew when None.
        base: The run that the policy begins as, and the folder of its weights, where it is not `policy.model`'s.

    Raises:
        NotFound, LockedField, InvalidValue: A draft cannot run.
        NotPossibleNow: Its policy is a run's that has none yet.
    """
    first, locks = drafts[0].config, locks or home.locks()
    made: Literal["train", "sft", "test", "ask", "sweep"] = kind
    teacher = None
    if kind == "train" and first.algorithm.name == "sft":
        made = "sft"
        if not first.sft.dataset:
            teacher = resolve_teacher(first.sft.teacher, home.settings(), home.preset_folders, home.settings_file)
    trainer = None
    if kind in ("train", "sweep"):
        trainer = trainer_of(first, home.trainer_folders(home.settings()), home.settings_file)
    found = [
        freeze(
            one,
            locks,
            kind=made,
            policy_cache=str(home.policies),
            name=name,
            test=test,
            ask=ask,
            sweep=sweep,
            teacher=teacher,
            trainer=trainer,
            base=base or (None if kind == "sweep" else base_of(one.config.policy.model, home.runs)),
            ingredients=_ingredients(home, one),
        )
        for one in drafts
    ]
    if made == "sft":
        found = [with_dataset(one, home.datasets) for one in found]
    for one in found:
        require_interpreters(one)
    if kind in ("train", "sweep"):
        require_wandb(found[0].config, home.settings(), home.settings_file)
    return found


def _ingredients(home: Home, draft: Draft) -> Ingredients | None:
    """What a draft's mixture and reward functions are made of; None where it has neither."""
    section = draft.config.environment
    if not (section.mixture or section.rewards):
        return None
    settings = home.settings()
    catalog = Catalog(
        home.environment_folders(settings),
        datasets=home.dataset_folders(settings),
        tools=home.lent_tools(settings),
        registry=Registry(home.environments_file),
    )
    return blend(draft, catalog.find, home.environment_folders(settings))


def start(home: Home, runs: RunManager, specification: Specification) -> None:
    """Gives a frozen run its keeper, with the owner's variables; one without limits gets those that hold now.

    Raises: see `Runs.start`, and `workbench.budgets.reserve`.
    """
    if specification.limits is None:
        with ExitStack() as pencil:
            with ledger_lock(runs.path):
                limits, machine = home.limits(), machine_of(home.settings())
                [specification] = reserve([specification], limits, machine, runs.path)
                pencil.enter_context(reserved(runs.path, [specification]))
            start(home, runs, specification)
        return
    specification = _beside_preset(home, specification)
    runs.start(specification, variables_of(specification, home))


def _beside_preset(home: Home, specification: Specification) -> Specification:
    """The specification with what is not as its preset has it now, for the run's manifest."""
    if specification.beside_preset or not specification.preset:
        return specification
    try:
        preset = load_preset(specification.preset, home.preset_folders)
    except (NotFound, InvalidValue):
        return specification
    beside = beside_preset(specification.config, preset, specification.environment.name)
    return specification.model_copy(update={"beside_preset": beside})
