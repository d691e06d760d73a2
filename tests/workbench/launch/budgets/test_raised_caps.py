"""Caps at a resume: limits that the owner raised count, within what the day and the disk have left."""

from __future__ import annotations

import time

import pytest
from toprope_tools.planning.config import edit_config
from toprope_tools.runs.training import resume_training, start_training

from tests.support.tools_house import become, do, make_workshop
from toprope.errors import NotPossibleNow
from toprope.records.run.specification import EnvironmentSource, Specification
from toprope.records.run.usage import Spent, Usage, day_of
from toprope.settings.limits import Cap
from toprope.settings.presets import load_preset
from toprope.supervisor.capacity.budget_ledger import read_accounts
from toprope.supervisor.lock import RunLock
from toprope.workbench.launch.open_runs import resume_run

HOUR = 3600.0


@pytest.fixture
def house(tmp_path):
    shop, launcher = make_workshop(tmp_path)
    shop.home.ensure()
    shop.home.configuration.mkdir(parents=True, exist_ok=True)
    yield shop, launcher
    launcher.close()


def owner(shop, text):
    (shop.home.configuration / "limits.yaml").write_text(text)


def ended(house, limits, *, used, today=None, train_s=None):
    """Start a run under `limits`, end it, and have it use CPU-hours: `used` in all, and of them `today`."""
    shop, launcher = house
    owner(shop, limits)
    preset = load_preset("cpu-embedded", shop.home.preset_folders)
    source = EnvironmentSource(name="dice", file="/nowhere/dice.py", attribute="Dice")
    draft = shop.drafts.create(source, preset, [], shop.home.locks())[0].id
    do(edit_config, shop, draft_id=draft, changes={"budget.max_train_seconds": train_s})
    folder = shop.runs.folder(do(start_training, shop, draft_id=draft).data.run_id)
    become(folder, "stopped", ended_at=time.time())
    launcher.leave(folder.run_id)
    days = {day_of(time.time()): Spent(cpu_s=(used if today is None else today) * HOUR)}
    Usage(cpu_s=used * HOUR, days=days).write(folder)
    return folder


def resumed(house, folder, **options):
    do(resume_training, house[0], run_id=folder.run_id, **options)
    return Specification.read(folder).limits


def test_raised_cap_leaves_the_limit_of_the_day_whole(house):
    folder = ended(house, "per_run: {cpu_hours: 5}\nper_day: {cpu_hours: 10}", used=5)
    owner(house[0], "per_run: {cpu_hours: 15}\nper_day: {cpu_hours: 10}")
    limits = resumed(house, folder)
    assert limits.caps["cpu_hours"] == Cap(value=10, limit="per_day.cpu_hours")
    assert limits.reserved["cpu_hours"] == 10


def test_resume_starts_its_keeper_without_the_ledger_lock_and_with_a_reservation(house, monkeypatch):
    (shop, _), seen = house, []
    folder = ended(house, "per_run: {cpu_hours: 5}\nper_day: {cpu_hours: 10}", used=2)
    resume, runs = shop.runs.resume, folder.path.parent

    def watched(*given):
        if (taken := RunLock.acquire(runs / ".budget" / "lock", 0.0)) is not None:
            taken.release()
        seen.append(taken is not None)
        seen.append([account.held("cpu_hours") for account in read_accounts(runs) if account.live])
        with pytest.raises(NotPossibleNow, match=f"is starting {folder.run_id}"):
            resume_run(shop.home, shop.runs, folder.run_id)
        return resume(*given)

    monkeypatch.setattr(shop.runs, "resume", watched)
    limits = resumed(house, folder)
    assert seen == [True, [limits.reserved["cpu_hours"]]]


def test_use_of_today_counts_towards_the_day_of_an_unchanged_cap(house):
    folder = ended(house, "per_run: {cpu_hours: 9}\nper_day: {cpu_hours: 10}", used=4)
    owner(house[0], "per_run: {cpu_hours: 9}\nper_day: {cpu_hours: 8}")
    with pytest.raises(NotPossibleNow, match="4 are left today, and the run may still use 5"):
        resumed(house, folder)


def test_a_limit_raised_above_that_of_the_day_does_not_keep_a_run_from_going_on(house):
    folder = ended(house, "per_run: {cpu_hours: 5}\nper_day: {cpu_hours: 20}", used=2)
    owner(house[0], "per_run: {cpu_hours: 50}\nper_day: {cpu_hours: 20}")
    assert resumed(house, folder).caps["cpu_hours"].value == 20


def test_a_raised_limit_that_the_day_has_no_room_for_leaves_the_former_cap(house):
    folder = ended(house, "per_run: {cpu_hours: 5}\nper_day: {cpu_hours: 20}", used=2, today=0)
    owner(house[0], "per_run: {cpu_hours: 50}\nper_day: {cpu_hours: 2}")
    with pytest.raises(NotPossibleNow, match="2 are left today, and the run may still use 3"):
        resumed(house, folder)
    assert Specification.read(folder).limits.caps["cpu_hours"].value == 5


def test_a_run_that_used_up_a_day_goes_on_with_what_another_leaves(house):
    folder = ended(house, "per_day: {cpu_hours: 10}", used=10)
    with pytest.raises(NotPossibleNow, match="10 of the 10 CPU-hours that per_day.cpu_hours"):
        resumed(house, folder)
    Usage(cpu_s=10 * HOUR).write(folder)  # on another day
    assert resumed(house, folder).caps["cpu_hours"].value == 20


def test_a_run_that_may_use_the_rest_of_a_day_takes_less_of_another(house):
    folder = ended(house, "per_day: {cpu_hours: 10}", used=2, today=0)
    owner(house[0], "per_day: {cpu_hours: 5}")
    assert resumed(house, folder).caps["cpu_hours"] == Cap(value=7, limit="per_day.cpu_hours")


def test_a_run_with_a_budget_of_time_does_not_reserve_the_rest_of_the_day(house):
    folder = ended(house, "per_day: {cpu_hours: 900}", used=1, train_s=60.0)
    bound = Specification.read(folder).limits.reserved["cpu_hours"]
    limits = resumed(house, folder)
    assert limits.reserved["cpu_hours"] == limits.caps["cpu_hours"].value == pytest.approx(1 + bound)


def test_a_limit_that_the_owner_removed_counts_as_raised(house):
    folder = ended(house, "per_run: {cpu_hours: 5, wall_hours: 1}", used=5)
    owner(house[0], "per_run: {wall_hours: 1}")
    assert set(resumed(house, folder).caps) == {"wall_hours"}


def test_a_raised_cap_on_disk_leaves_that_of_all_runs_whole(house):
    folder = ended(house, "per_run: {disk_gb: 1}\ndisk_gb: 3", used=0)
    owner(house[0], "per_run: {disk_gb: 9}\ndisk_gb: 3")
    assert resumed(house, folder).caps["disk_gb"] == Cap(value=3, limit="disk_gb", together=3)


def test_agents_do_not_raise_the_cap_that_a_person_confirmed(house):
    confirm = "\nconfirm: {above: {steps: 1000000}}"
    folder = ended(house, "per_run: {cpu_hours: 5}" + confirm, used=5)
    owner(house[0], "per_run: {cpu_hours: 15}" + confirm)
    with pytest.raises(NotPossibleNow, match="5 of the 5 CPU-hours") as refused:
        resumed(house, folder)
    assert f"toprope resume {folder.run_id}" in refused.value.hint
    assert resumed(house, folder, by_owner=True).caps["cpu_hours"].value == 15


def test_a_run_that_costs_nothing_goes_on(house):
    confirm = "\nconfirm: {above: {steps: 1000000}}"
    text = "per_day: {cost_usd: 5}\nprices: {cpu_hour_usd: 0}" + confirm
    folder = ended(house, text, used=1, train_s=60.0)
    assert resumed(house, folder).caps["cost_usd"].value == 0


def test_a_cap_stays_while_the_machine_shows_no_gpu(house):
    folder = ended(house, "per_day: {gpu_hours: 8}", used=0)
    frozen = Specification.read(folder)
    caps = {"gpu_hours": Cap(value=3, limit="per_day.gpu_hours")}  # as on a machine with a GPU
    limits = frozen.limits.model_copy(update={"caps": caps, "reserved": {"gpu_hours": 3.0}})
    frozen.model_copy(update={"limits": limits}).write(folder)
    limits = resumed(house, folder)
    assert limits.caps == caps and limits.reserved == {"gpu_hours": 3.0}
