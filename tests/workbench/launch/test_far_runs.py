"""Limits of runs on a cluster: its GPUs count, not those of this machine, and nodes add drivers."""

from __future__ import annotations

import pytest

from toprope.errors import LockedField
from toprope.records.run.specification import EnvironmentSource, Specification
from toprope.settings.locks import Lock, Locks
from toprope.settings.schema import Config
from toprope.supervisor.capacity.reservations import Machine
from toprope.workbench.launch.budgets import reserve_budget
from toprope.workbench.launch.budgets.reserve_budget import demand, gpu_of
from toprope.workbench.launch.mixture_sources import hold_locks


def far(kind: str = "slurm", nodes: int = 8) -> Config:
    config = Config()
    config.launcher.kind, config.launcher.nodes = kind, nodes  # type: ignore[assignment]
    config.launcher.resources = {"trainer": {"gpus": 8}}
    return config


def specification(config: Config, kind: str = "train") -> Specification:
    source = EnvironmentSource(name="mine", file="/nowhere.py", attribute="Mine")
    return Specification(
        run_id="run-a", kind=kind, created_at=0.0, toprope_version="0", environment=source, config=config,
        policy_cache="/nowhere",
    )  # fmt: skip


@pytest.mark.parametrize("gpus", [(), ("0",)])
def test_gpus_of_the_cluster_are_counted(gpus: tuple[str, ...]) -> None:
    here = Machine(threads=2, gpus=gpus)
    asked = demand(specification(far()), here)
    assert asked.gpus == 64 and asked.gpu == "" == gpu_of(specification(far()), here)
    local = demand(specification(far("local", 1)), here)
    assert local.gpus == 1 and (local.gpu is None) == (not gpus)


def test_processors_are_those_of_the_job_or_of_each_process_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reserve_budget, "processor_count", lambda: 2)
    config = far(nodes=4)
    config.launcher.threads = 16
    machine = Machine(threads=2)
    assert demand(specification(config), machine).processors == 4 * (16 + 16 + 1)
    assert demand(specification(config, "sweep"), machine).processors == 2, "its conductor runs here"
    monkeypatch.setattr(reserve_budget, "processor_count", lambda: 64)
    local = far("local", 1)
    local.launcher.drivers = 3
    local.environment.mixture = [{"name": "other"}]
    assert demand(specification(local), machine).processors == 2 + 1 + 3 * 2


def test_nodes_do_not_pass_the_lock_on_drivers() -> None:
    locks = Locks({"launcher.drivers": Lock("launcher.drivers", "memory", max=8)})
    hold_locks(far(nodes=9), locks)
    with pytest.raises(LockedField, match="memory"):
        hold_locks(far(nodes=10), locks)
    assert far("local", 1024).launcher.driver_count == 1
