"""The keeper measures a run's use and stops it at the owner's limits; the ledger adds up the folders."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from types import SimpleNamespace

import pytest

from tests.support import records
from tests.support.run_harness import ended, eventually
from toprope import atomic
from toprope.machine import gpu_names
from toprope.records.messages import Used
from toprope.records.run.folder import RunFolder
from toprope.records.run.specification import Specification
from toprope.records.run.status import Status, read_events
from toprope.records.run.usage import Usage, day_of
from toprope.settings.limits import Cap, FrozenLimits
from toprope.settings.owner import Home
from toprope.supervisor.capacity import budget_ledger
from toprope.supervisor.capacity.budget_ledger import ledger_lock, read_accounts, reserved
from toprope.supervisor.keeper import status_writer
from toprope.supervisor.keeper.status_writer import StatusWriter
from toprope.supervisor.watchers import budget
from toprope.supervisor.watchers.budget import BudgetWatcher
from toprope.supervisor.watchers.group import WatcherGroup
from toprope.supervisor.watchers.watcher import Watcher


def started(harness, caps=None, reserved=None, behaviours=None, **prices):
    runs = harness.runs(behaviours or {})
    specification = harness.specification()
    limits = FrozenLimits(source="the owner, in limits.yaml", caps=caps or {}, reserved=reserved or {}, **prices)
    folder = runs.start(specification.model_copy(update={"limits": limits}))
    harness.started.append(folder)
    return runs, folder


def test_run_is_stopped_with_checkpoint_at_cap(harness):
    caps = {"wall_hours": Cap(value=1.5 / 3600, limit="per_run.wall_hours", reason="A test.")}
    runs, folder = started(harness, caps, behaviours={"trainer": {"endless": True, "patient": True}})
    status = ended(runs, folder)
    assert status.state == "stopped"
    assert "per_run.wall_hours" in status.reason and "the owner, in limits.yaml" in status.reason
    assert "A test." in status.reason
    assert status.checkpoint is not None
    [finding] = [
        event.data
        for event in read_events(folder.events)
        if event.kind == "finding" and event.data["rule"] == "budget_spent"
    ]
    assert finding["level"] == "critical" and finding["observed"]["wall_hours"] >= 1.5 / 3600
    usage = Usage.read(folder)
    assert usage is not None
    assert 1.5 <= usage.wall_s < 30
    assert usage.cpu_s > 0 and usage.disk_bytes > 0 and usage.usd is None
    assert sum(day.wall_s for day in usage.days.values()) == pytest.approx(usage.wall_s)
    harness.check_nothing_left(folder)


def test_run_that_costs_nothing_goes_on_where_nothing_may_be_spent(harness):
    caps = {"cost_usd": Cap(value=0.0, limit="per_day.cost_usd", reason="")}
    runs, folder = started(harness, caps, cpu_hour_usd=0.0)
    status = ended(runs, folder)
    assert status.state == "completed", status.reason
    assert not [event for event in read_events(folder.events) if event.kind == "finding"]


def test_run_whose_next_call_does_not_fit_is_stopped_and_says_so(harness):
    caps = {"cost_usd": Cap(value=1.2, limit="per_run.cost_usd")}
    spends = {"trainer": {"steps": 9, "at": "step-2", "do": "spend", "times": 1}}
    runs, folder = started(harness, caps, behaviours=spends)
    status = ended(runs, folder)
    assert status.state == "stopped" and status.checkpoint is not None
    used = "1.04 are used, and the next call may cost 0.52"
    said = f"The limit per_run.cost_usd of 1.2 USD is reached after step 2 of 9 ({used}), set by the owner"
    assert status.reason.startswith(said), status.reason
    events = [event.data for event in read_events(folder.events) if event.kind == "finding"]
    [finding] = [one for one in events if one["rule"] == "budget_spent"]
    assert "used after step 2 of 9" in finding["what"] and finding["observed"] == {"cost_usd": 1.04}
    runs.resume(folder.run_id)
    assert ended(runs, folder).state == "completed"


BUSY = "import time\nend = time.process_time() + 1.0\nwhile time.process_time() < end: pass\n"


def test_cpu_time_of_ended_processes_is_priced(harness, tmp_path):
    runs = harness.runs({}, plot=[sys.executable, "-I", "-S", "-c", BUSY])
    limits = FrozenLimits(source="x", cpu_hour_usd=3600.0)
    folder = runs.start(harness.specification().model_copy(update={"limits": limits}))
    harness.started.append(folder)
    assert ended(runs, folder).state == "completed"
    usage = Usage.read(folder)
    assert usage is not None and usage.cpu_s >= 1.0
    assert usage.usd == pytest.approx(usage.cpu_s)


def test_use_of_members_on_other_nodes_counts_as_they_report_it(harness, tmp_path):
    folder = RunFolder.create(tmp_path / "runs", "run-1")
    status = SimpleNamespace(started_at=None)
    watcher = BudgetWatcher(
        SimpleNamespace(folder=folder, specification=harness.specification(), status=lambda: status)
    )
    watcher.on_report("environment-2", Used(cpu_s=50.0, memory_bytes=1 << 40))
    watcher.on_report("environment-2", Used(cpu_s=25.0, memory_bytes=1 << 41))
    watcher.on_report("environment-3", Used(cpu_s=5.0, memory_bytes=1 << 41))
    watcher.on_end()
    usage = Usage.read(folder)
    assert usage is not None and 80.0 <= usage.cpu_s < 120.0
    assert (1 << 42) <= usage.peak_memory_bytes < (1 << 42) + (1 << 40)


@pytest.mark.parametrize("others", [2.5e9, 1e9])
def test_disk_of_all_runs_together_is_held_to_its_limit(harness, tmp_path, monkeypatch, others):
    """Runs that started later may have taken the room that was left at the start."""
    for number in range(2):
        Usage(disk_bytes=int(others / 2)).write(RunFolder.create(tmp_path / "runs", f"other-{number}"))
    folder, stops, events = RunFolder.create(tmp_path / "runs", "run-1"), [], []
    cap = Cap(value=1.5, limit="disk_gb", together=2.0)
    limits = FrozenLimits(source="the owner", caps={"disk_gb": cap})
    status = SimpleNamespace(started_at=None, progress={})
    control = SimpleNamespace(
        folder=folder, specification=harness.specification().model_copy(update={"limits": limits}),
        status=lambda: status, stop=stops.append, record_event=lambda kind, **data: events.append(data),
    )  # fmt: skip
    watcher = BudgetWatcher(control)
    watcher.on_tick(time.monotonic())
    watcher.on_end()
    assert [stop.reason for stop in stops] == (
        ["The limit disk_gb of 2 GB on disk is reached, set by the owner."] if others > 2e9 else []
    )
    assert len(events) == len(stops)
    (tmp_path / "limits.yaml").write_text("disk_gb: 5")  # raised since: later runs may have started under it
    monkeypatch.setattr(budget, "home_of_keeper", lambda _: Home(tmp_path / "home", tmp_path))
    watcher, stops[:] = BudgetWatcher(control), []
    watcher.on_tick(time.monotonic())
    watcher.on_end()
    assert not stops


@pytest.mark.parametrize("limits", [None, FrozenLimits(source="x", caps={"wall_hours": Cap(value=1.0, limit="wall")})])
def test_damaged_usage_stops_a_run_with_limits_and_is_told_of_any(harness, tmp_path, limits):
    folder = RunFolder.create(tmp_path / "runs", "run-1")
    (folder.path / "usage.json").write_text("")
    stops, events = [], []
    control = SimpleNamespace(
        folder=folder, specification=harness.specification().model_copy(update={"limits": limits}),
        status=lambda: SimpleNamespace(started_at=None), stop=stops.append,
        record_event=lambda kind, **data: events.append((kind, data)),
    )  # fmt: skip
    watcher = BudgetWatcher(control)
    for second in range(3):
        watcher.on_tick(float(second))
    watcher.on_end()
    if limits is None:
        assert not stops and Usage.read(folder) is not None
        [(_, warning)] = events
        assert "usage.json is not valid JSON" in warning["what"] and "from zero" in warning["what"]
    else:
        assert not events and (folder.path / "usage.json").read_text() == ""
        assert ["usage.json is not valid JSON" in stop.reason for stop in stops] == [True]


def test_usage_and_states_reach_the_disk(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(atomic, "fsync", lambda path: synced.append(path.name.strip(".").partition(".")[0]))
    folder = RunFolder.create(tmp_path / "runs", "run-1")
    Usage().write(folder)
    assert synced == ["usage", "run-1"]
    monkeypatch.setattr(status_writer, "fsync", atomic.fsync)

    async def live():
        writer = StatusWriter(folder, records.status(state="queued"))
        synced.clear()
        writer.update(reason="waits")
        writer.write()
        assert not synced
        writer.enter("validating")
        assert Status.read(folder).state == "validating"
        while len(synced) < 2:
            await asyncio.sleep(0.01)
        writer.write_final()
        assert synced == 2 * ["events", "status"]

    asyncio.run(asyncio.wait_for(live(), 60))


def test_account_holds_reservation_then_usage(harness):
    runs, folder = started(harness, reserved={"cpu_hours": 5.0}, behaviours={"trainer": {"endless": True}})
    os.utime(folder.spec, (1.0, 1.0))  # as a copy of the home leaves it
    created_at = Specification.read(folder).created_at
    assert not read_accounts(runs.path, 1.0)[0].started_today
    [account] = read_accounts(runs.path, created_at)
    assert account.live and account.started_today
    assert account.held("cpu_hours") == pytest.approx(5.0, abs=0.1)
    runs.stop(folder.run_id)
    ended(runs, folder)
    usage = Usage.read(folder)
    assert usage is not None
    account = eventually(lambda: next((one for one in read_accounts(runs.path, usage.at) if not one.live), None))
    assert account.held("cpu_hours") == pytest.approx(usage.days[day_of(usage.at)].cpu_s / 3600)
    assert account.held("cpu_hours") < 0.1
    assert read_accounts(runs.path, leave_out=[folder.run_id]) == []


def test_specifications_of_earlier_days_are_not_read(harness, monkeypatch):
    runs, folder = started(harness)
    ended(runs, folder)
    eventually(lambda: not read_accounts(runs.path)[0].live)
    (folder.path / "usage.json").unlink()
    [account] = read_accounts(runs.path)
    assert account.started_today
    os.utime(folder.spec, (1.0, 1.0))
    monkeypatch.setattr(budget_ledger, "_read_frozen", lambda _: pytest.fail("it was read"))
    assert not read_accounts(runs.path)[0].started_today


def test_day_is_one_for_all_time_zones(monkeypatch):
    for zone in ("Etc/GMT+12", "Etc/GMT-14"):
        monkeypatch.setenv("TZ", zone)
        time.tzset()
        assert day_of(1_795_996_800.0) == "2026-11-30"
    monkeypatch.undo()
    time.tzset()


def test_gpu_names_come_from_the_driver(tmp_path):
    place = tmp_path / "0000:01:00.0"
    place.mkdir()
    (place / "information").write_text("Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 12\n")
    assert gpu_names(tmp_path) == ["NVIDIA H100 80GB HBM3"]
    assert gpu_names(tmp_path / "none") == []


def test_reserved_run_counts_once(harness):
    specification = harness.specification()
    limits = FrozenLimits(source="x", reserved={"cpu_hours": 2.0})
    specification = specification.model_copy(update={"limits": limits})
    runs = harness.runs({"trainer": {"endless": True}})
    with ledger_lock(runs.path):
        reservation = reserved(runs.path, [specification])
        reservation.__enter__()
    [account] = read_accounts(runs.path)
    assert account.live and account.held("cpu_hours") == 2.0 and account.started_today
    harness.started.append(runs.start(specification))
    [account] = read_accounts(runs.path)
    assert account.live and account.held("cpu_hours") == pytest.approx(2.0, abs=0.1)
    reservation.__exit__(None, None, None)
    assert len(read_accounts(runs.path)) == 1
    runs.stop(specification.run_id)
    ended(runs, harness.started[-1])
    left = runs.path / ".budget" / "killed.pencilled"
    left.write_text('{"cpu_hours": 9.0}')
    os.utime(left, (1.0, 1.0))
    assert [one.run_id for one in read_accounts(runs.path)] == [specification.run_id] and not left.exists()


class Failing(Watcher):
    def __init__(self, holds_limits, failures):
        self.holds_limits, self.left, self.looks = holds_limits, failures, 0

    def on_tick(self, now):
        self.looks += 1
        self.left -= 1
        if self.left >= 0:
            raise OSError("too many open files")


def test_failing_watcher_is_removed_unless_it_holds_limits():
    assert BudgetWatcher.holds_limits
    told = []
    once, always, budget = Failing(False, 1), Failing(False, 99), Failing(True, 30)
    watchers = WatcherGroup([once, always, budget], lambda kind, what: told.append(what))
    for second in range(40):
        watchers.on_tick(float(second))
    assert (once.looks, always.looks, budget.looks) == (40, 10, 40)
    assert [what.partition(":")[0] for what in told] == ["Failing failed and stays active"] * 3 + [
        "Failing failed again and again and is switched off"
    ]
