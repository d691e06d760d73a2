"""One run that cannot be read, refused starts and late orders: they reach no other run and no other attempt."""

from __future__ import annotations

import os
import time

import pytest

from tests.supervisor.runs.test_lost import left
from tests.support.run_harness import RunHarness, ended, until
from toprope import flock
from toprope.errors import ComponentFailed, NotPossibleNow
from toprope.records.run.folder import RunFolder
from toprope.records.run.launch import Launch
from toprope.records.run.specification import Specification
from toprope.records.run.status import Status, read_events
from toprope.records.run.usage import Usage
from toprope.settings.clusters import Clusters
from toprope.settings.limits import FrozenLimits
from toprope.supervisor.capacity.budget_ledger import ledger_lock, read_accounts, reserved
from toprope.supervisor.launchers.by_kind import LauncherByKind, engine_of
from toprope.supervisor.launchers.cluster import ClusterLauncher
from toprope.supervisor.lock import RunLock
from toprope.supervisor.runs.auto_resume_policy import is_due
from toprope.supervisor.runs.cleanup import settle_runs
from toprope.supervisor.runs.manager import RunManager
from toprope.supervisor.runs.orders import take_orders, write_end_order


def by_kind(harness: RunHarness, variables=None) -> RunManager:
    """Return a front end that asks the launcher of each run's kind."""
    plain = harness.runs()
    cluster = ClusterLauncher(lambda: None, lambda _: None)
    return RunManager(plain.path, LauncherByKind(plain.launcher, cluster), lambda: harness.machine, variables)


def forbid_lock(folder: RunFolder) -> None:
    """Have every opening of the lock fail, also by root."""
    folder.lock.unlink()
    folder.lock.symlink_to(folder.lock.name)


def test_damaged_launch_file_hides_no_run_and_proves_no_loss(harness):
    folder, other = left(harness), left(harness)
    folder.launch.write_text("{")
    runs = by_kind(harness)
    found = {status.run_id: status for status in runs.list()}
    assert found[folder.run_id].state == "training" and "launch.json is not valid JSON" in found[folder.run_id].reason
    assert found[other.run_id].state == "lost"
    with pytest.raises(NotPossibleNow, match="may still run"):
        runs.resume(folder.run_id)


def test_wrong_file_of_clusters_hides_no_run(harness):
    folder, other = left(harness), left(harness)
    Launch(
        kind="slurm", cluster="lab", attempt=1, name=f"{folder.run_id}.1", mirror="127.0.0.1:47999", submitted_at=0,
        deadline=0,
    ).write(folder)  # fmt: skip
    file = harness.path / "clusters.yaml"
    file.write_text("lab:\n  kind: slurmm\n")
    plain = harness.runs()
    cluster = ClusterLauncher(lambda: Clusters.read(file), engine_of)
    runs = RunManager(plain.path, LauncherByKind(plain.launcher, cluster), lambda: harness.machine)
    assert {status.run_id: status.state for status in runs.list()} == {folder.run_id: "training", other.run_id: "lost"}
    assert "clusters.yaml" in cluster.status(folder).told


@pytest.mark.parametrize("front_end", [by_kind, RunHarness.runs])
def test_lock_that_cannot_be_opened_hides_no_run_and_stops_no_start(harness, front_end):
    folder, other = left(harness), left(harness)
    forbid_lock(folder)
    runs = front_end(harness)
    found = {status.run_id: status for status in runs.list()}
    assert set(found) == {folder.run_id, other.run_id} and found[other.run_id].state == "lost"
    assert "symbolic links" in found[folder.run_id].reason
    accounts = {account.run_id: account for account in read_accounts(runs.path)}
    assert accounts[folder.run_id].live and not accounts[other.run_id].live


def test_run_that_cannot_be_weighed_counts_as_live_with_unknown_use(harness, monkeypatch):
    folder, other = left(harness), left(harness)
    read = Usage.read

    def refuses(one):
        if one == folder:
            raise PermissionError(13, "Permission denied")
        return read(one)

    monkeypatch.setattr(Usage, "read", refuses)
    accounts = {account.run_id: account for account in read_accounts(folder.path.parent)}
    assert accounts[folder.run_id].live and not accounts[folder.run_id].used_today
    assert not accounts[other.run_id].live


def test_lock_that_cannot_be_taken_keeps_no_other_lock(harness, monkeypatch):
    first, bad, last = left(harness), left(harness), left(harness)
    forbid_lock(bad)
    settled = settle_runs([first, bad, last], harness.runs().launcher)
    assert set(settled) == {first.run_id, last.run_id}

    def no_locks(descriptor, operation):
        raise OSError(37, "No locks available")

    with monkeypatch.context() as patch:
        patch.setattr(flock, "locked", no_locks)
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(OSError, match="No locks"):
            RunLock.acquire(first.lock)
        assert len(os.listdir("/proc/self/fd")) == before


def test_refused_start_of_an_automatic_resume_is_tried_again_later(harness):
    folder = left(harness)
    plain = harness.runs()

    class Refuses:
        status, stop = plain.launcher.status, plain.launcher.stop

        def submit(self, *_):
            raise ComponentFailed("The queue is full.")

    runs = RunManager(plain.path, Refuses(), lambda: harness.machine, lambda _: {})
    first = runs.status(folder.run_id)
    assert first.state == "lost" and "The queue is full." in first.reason and first.resumed_lost == 1
    assert 5 < first.resume_at - time.time() < 11 and not is_due(first)
    for count in (2, 3):
        first.model_copy(update={"resume_at": 1.0}).write(folder)
        first = runs.status(folder.run_id)
        assert first.resumed_lost == count
    assert first.state == "lost" and first.resume_at is None and "3 times" in first.reason
    with pytest.raises(ComponentFailed):
        runs.resume(folder.run_id)
    assert Status.read(folder).state == "failed", "somebody asked for that resume, and was told"


def test_run_whose_status_a_power_cut_blanked_resumes(harness):
    folder = left(harness)
    folder.status.write_bytes(bytes(500))
    status = harness.runs().status(folder.run_id)
    assert status.state == "lost" and "was training" in status.reason and is_due(status)
    assert Status.read(folder) == status


def test_order_to_end_an_attempt_leaves_the_next_one_alone(harness):
    folder = left(harness, attempt=2)
    write_end_order(folder, 1, "Slurm knows no job of it.")
    assert not list(folder.orders.iterdir())
    write_end_order(folder, 2, "Slurm knows no job of it.")
    (folder.orders / "end-1.json").write_bytes((folder.orders / "end-2.json").read_bytes())
    assert take_orders(folder, 3).stops == [] and not list(folder.orders.iterdir())
    write_end_order(folder, 2, "Slurm knows no job of it.")
    assert [order.lost for order in take_orders(folder, 2).stops] == [True]


STALE = """
import errno, os, runpy, sys
real, looks = os.listdir, []
def listdir(path="."):
    if str(path).endswith("orders"):
        looks.append(path)
        if 3 < len(looks) < 7:
            raise OSError(errno.ESTALE, "Stale file handle")
    return real(path)
os.listdir, sys.argv = listdir, sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_orders_that_cannot_be_read_for_a_moment_end_no_run(harness):
    runs = harness.runs({"trainer": {"endless": True}})
    runs.launcher.command[2:2] = ["-c", STALE]
    folder = runs.start(harness.specification())
    harness.started.append(folder)
    until(runs, folder, "training")
    runs.stop(folder.run_id)
    assert ended(runs, folder).state == "stopped"
    warnings = [event.data["what"] for event in read_events(folder.events, kinds=("warning",))]
    assert len([text for text in warnings if "Stale file handle" in text]) == 1


def test_start_whose_log_cannot_be_opened_leaves_no_descriptor(harness):
    folder, runs = left(harness, state="queued"), harness.runs()
    folder.log("keeper").mkdir()
    before = len(os.listdir("/dev/fd"))
    for _ in range(2):
        with pytest.raises(IsADirectoryError):
            runs.launcher.submit(folder, {})
    assert len(os.listdir("/dev/fd")) == before


def limited(harness, **amounts: float) -> Specification:
    limits = FrozenLimits(source="x", reserved=amounts)
    return harness.specification().model_copy(update={"limits": limits})


def test_reservation_lasts_as_long_as_it_is_held(harness):
    one, runs = limited(harness, cpu_hours=2.0), harness.path / "runs"
    with ledger_lock(runs):
        reservation = reserved(runs, [one])
        reservation.__enter__()
    [file] = (runs / ".budget").glob("*.pencilled")
    os.utime(file, (1.0, 1.0))
    assert [account.held("cpu_hours") for account in read_accounts(runs)] == [2.0]
    reservation.__exit__(None, None, None)
    assert read_accounts(runs) == [] and not file.exists()


def test_automatic_resume_checks_and_reserves_its_budget_under_the_ledger_lock(harness):
    folder = left(harness, limited(harness, cpu_hours=2.0))
    plain, seen = harness.runs({"trainer": {"endless": True}}), []
    ledger = plain.path / ".budget" / "lock"

    def check(_):
        seen.append(RunLock.acquire(ledger, 0.0))
        return {}

    class Watches:
        status, stop = plain.launcher.status, plain.launcher.stop

        def submit(self, *given):
            if (taken := RunLock.acquire(ledger, 0.0)) is not None:
                taken.release()
            seen.append(taken is not None)
            seen.append([account.held("cpu_hours") for account in read_accounts(plain.path)])
            raise ComponentFailed("That is all.")

    runs = RunManager(plain.path, Watches(), lambda: harness.machine, check)
    runs.status(folder.run_id)
    assert seen == [None, True, [2.0]]
    with ledger_lock(plain.path):  # a start looks at a lost run
        Status.read(folder).model_copy(update={"resume_at": 1.0}).write(folder)
        assert runs.status(folder.run_id).resumed_lost == 2
    assert not list((plain.path / ".budget").glob("*.pencilled"))
