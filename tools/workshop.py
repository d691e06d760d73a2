"""What the tools of one server work on, opened once: the owner's home, the catalog, drafts, runs and the index.

It is handed to each tool; there is no other state. Opening it makes nothing on disk and reads nothing but the owner's
settings, which name folders with environments.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field

from toprope.errors import Corrupt, InvalidValue, NotFound
from toprope.records.index import Index
from toprope.records.specification import Specification
from toprope.records.status import Status
from toprope.settings.owner import Home, OwnerSettings
from toprope.settings.presets import load_preset
from toprope.supervisor.launchers.local import LocalLauncher
from toprope.supervisor.ledger import pencilled_in, the_books
from toprope.supervisor.reservations import Machine
from toprope.supervisor.runs import Runs
from toprope.workbench.budgets import may_go_on, reserve
from toprope.workbench.catalog import Catalog
from toprope.workbench.drafts import Drafts
from toprope.workbench.endpoints import variables_for
from toprope.workbench.history import beside_preset

__all__ = ["Workshop", "machine_of"]

_LONGEST_STOP_S = 40.0
_SWEEP_S = 8.0
"""Seconds beyond the grace until a crew that ignores every request is gone."""


def machine_of(settings: OwnerSettings) -> Machine:
    """What runs may have of this machine: the owner's limits, else what there is."""
    everyone = settings.variables.get("*", {})
    visible = everyone.get("CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES"))
    floor = settings.machine.disk_floor_mb
    disk_floor = None if floor is None else int(floor * 1_000_000)
    return Machine.detect(settings.machine.threads, settings.machine.gpus, visible, disk_floor)


def _to_go_on(home: Home, specification: Specification) -> Mapping[str, Mapping[str, str]]:
    """The owner's variables for a lost run that is to go on by itself, if the owner's limits leave it anything.

    Raises:
        TopropeError: They do not, or a file of the owner cannot be read; the next look asks again.
    """
    may_go_on(specification, home.limits(), home.runs)
    return variables_for(specification, home.settings(), home.preset_folders)


@dataclass(frozen=True)
class Workshop:
    """The container. See the module."""

    home: Home
    catalog: Catalog
    drafts: Drafts
    runs: Runs
    index: Index
    _lengths: dict[str, float | None] = field(default_factory=dict, repr=False)
    """Longest training by run: frozen with the run, so it is read once."""

    @classmethod
    def open(cls, home: Home | None = None) -> Workshop:
        """The workshop of a home; the owner's own by default.

        Raises:
            InvalidValue: The owner's settings cannot be read.
        """
        home = home or Home.locate()
        index, settings = Index(home.index), home.settings()
        return cls(
            home=home,
            catalog=Catalog(
                home.environment_folders(settings),
                datasets=home.dataset_folders(settings),
                tools=home.lent_tools(settings),
            ),
            drafts=Drafts(index),
            runs=Runs(
                home.runs,
                LocalLauncher(contained=lambda: home.settings().containment),
                lambda: machine_of(home.settings()),
                lambda specification: _to_go_on(home, specification),
            ),
            index=index,
        )

    def settings(self) -> OwnerSettings:
        """The owner's settings as they are now."""
        return self.home.settings()

    def start(self, specification: Specification) -> None:
        """Gives a frozen run its keeper, with the owner's variables; one without limits gets those that hold now.

        Raises: see `Runs.start`, and `workbench.budgets.reserve`.
        """
        if specification.limits is None:
            with ExitStack() as pencil:
                with the_books(self.runs.path):
                    limits, machine = self.home.limits(), machine_of(self.settings())
                    [specification] = reserve([specification], limits, machine, self.runs.path)
                    pencil.enter_context(pencilled_in(self.runs.path, [specification]))
                self.start(specification)
            return
        specification = self._beside_preset(specification)
        self.runs.start(specification, variables_for(specification, self.settings(), self.home.preset_folders))

    def _beside_preset(self, specification: Specification) -> Specification:
        """The specification with what is not as its preset has it now, for the run's manifest."""
        if specification.beside_preset or not specification.preset:
            return specification
        try:
            preset = load_preset(specification.preset, self.home.preset_folders)
        except (NotFound, InvalidValue):
            return specification
        beside = beside_preset(specification.config, preset, specification.environment.name)
        return specification.model_copy(update={"beside_preset": beside})

    def resume(self, run_id: str) -> tuple[Status, Specification]:
        """Gives a run that has ended its next attempt, with the owner's variables as they are now.

        Returns:
            The status it begins with, and what it is. Raises: see `Runs.resume`.
        """
        specification = Specification.read(self.runs.folder(run_id))
        variables = variables_for(specification, self.settings(), self.home.preset_folders)
        return self.runs.resume(run_id, variables), specification

    async def stop(self, run_id: str) -> Status:
        """Orders a run to stop and waits until it has ended, or 40 s.

        Raises:
            NotFound, Corrupt: There is no such run, or its status cannot be read.
        """
        self.runs.stop(run_id)
        try:
            grace = Specification.read(self.runs.folder(run_id)).config.launcher.stop_grace_s
        except (NotFound, Corrupt, ValueError):
            grace = _LONGEST_STOP_S
        limit = min(grace + _SWEEP_S, _LONGEST_STOP_S)
        status, _ = await self.runs.wait(run_id, lambda now, _: now.ended and now.ended_at is not None, limit)
        return status

    def statuses(self) -> list[Status]:
        """Every run, newest first."""
        return self.runs.list()

    def longest_s(self, run_id: str) -> float | None:
        """Seconds that training may take at most by the run's own budget, None where it has no such limit."""
        if run_id not in self._lengths:
            try:
                self._lengths[run_id] = Specification.read(self.runs.folder(run_id)).config.budget.max_train_seconds
            except (NotFound, Corrupt, ValueError):
                return None
        return self._lengths[run_id]
