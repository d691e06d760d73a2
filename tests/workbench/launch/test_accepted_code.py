"""The code of environments that runs execute is what was there when they were started, or resumed by the owner."""

from __future__ import annotations

import time

import anyio
import pytest
import yaml
from toprope_tools.runs.training import resume_training, start_training
from toprope_tools.workshop import Workshop

from tests.support.tools_house import StandInLauncher, become, do, make_workshop
from toprope.errors import InvalidValue, NotPossibleNow
from toprope.records.run.folder import RunFolder
from toprope.records.run.specification import Specification, SweepMember
from toprope.settings.presets import load_preset
from toprope.training.driver.program import environment_plans
from toprope.training.rollouts.environment_host import EnvironmentHost
from toprope.workbench.approvals import Approvals
from toprope.workbench.catalog.catalog import Catalog
from toprope.workbench.launch.accepted_code import accepted_code
from toprope.workbench.launch.open_runs import resume_run
from toprope.workbench.launch.start import RunStarter

CODE = """
import beside_it
from toprope.sdk import Environment, Task

class Few(Environment):
    name = "few"

    def tasks(self):
        yield from (Task(f"Say {number}.", reference=str(number)) for number in range(64))

    def score(self):
        return float(self.said == self.task.reference)
"""


@pytest.fixture
def house(tmp_path):
    shop, launcher = make_workshop(tmp_path)
    (shop.home.configuration / "environments").mkdir(parents=True)
    yield shop, launcher
    launcher.close()


def written(shop: Workshop, beside: str = "") -> None:
    place = shop.home.configuration / "environments"
    (place / "few.py").write_text(CODE)
    (place / "beside_it.py").write_text(beside)


def started(shop: Workshop) -> RunFolder:
    written(shop)
    source = Catalog.of_home(shop.home.ensure()).find("few").environment
    preset = load_preset("cpu-embedded", shop.home.preset_folders)
    draft = shop.drafts.create(source, preset, [], shop.home.locks())[0].id
    try:
        return shop.runs.folder(do(start_training, shop, draft_id=draft).data.run_id)
    except NotPossibleNow:
        [asked] = Approvals(shop.home).pending()
        Approvals(shop.home).approve(asked.hash)
        return shop.runs.folder(do(start_training, shop, draft_id=draft).data.run_id)


def stopped(folder: RunFolder, launcher: StandInLauncher) -> None:
    become(folder, "stopped", ended_at=time.time())
    launcher.leave(folder.run_id)


def open_worker(folder: RunFolder) -> None:
    """Start a worker as the run's driver does."""

    async def work() -> None:
        run = Specification.read(folder)
        [(plan, source)] = environment_plans(run)
        host = await EnvironmentHost.start(run, plan, source, lambda report: None)
        await host.close()

    anyio.run(work)


@pytest.mark.parametrize("rules", ["", "confirm: always"])
def test_replaced_code_does_not_run_until_the_owner_resumes(house, rules):
    shop, launcher = house
    (shop.home.configuration / "limits.yaml").write_text(rules)
    folder = started(shop)
    open_worker(folder)
    written(shop, "replaced = True")
    with pytest.raises(InvalidValue, match=r"other code .*beside_it\.py changed") as refused:
        open_worker(folder)
    assert f"toprope resume {folder.run_id}" in refused.value.hint
    stopped(folder, launcher)
    if rules:
        with pytest.raises(NotPossibleNow, match=r"changed after its start was confirmed: .*beside_it\.py"):
            do(resume_training, shop, run_id=folder.run_id)
    assert do(resume_training, shop, run_id=folder.run_id, by_owner=True).data.attempt == 2
    open_worker(folder)
    stopped(folder, launcher)
    assert do(resume_training, shop, run_id=folder.run_id).data.attempt == 3
    open_worker(folder)


def test_lost_run_does_not_go_on_with_other_code(house):
    shop, launcher = house
    folder = started(shop)
    launcher.leave(folder.run_id)
    become(folder, "lost", ended_at=time.time(), resume_at=time.time() - 1)
    written(shop, "replaced = True")
    shop.runs._variables = lambda run: {}
    assert shop.runs.status(folder.run_id).attempt == 2
    with pytest.raises(InvalidValue, match="other code"):
        open_worker(folder)


def test_members_of_a_sweep_execute_what_it_was_started_with(house):
    shop, launcher = house
    sweep = started(shop)
    written(shop, "replaced = True")
    first = Specification.read(sweep)
    of_sweep = SweepMember(sweep=sweep.run_id, candidate="a", epoch=0)
    member = first.model_copy(update={"run_id": "member-a", "member": of_sweep, "code": None})
    RunStarter(shop.home, shop.runs).start_frozen([member])
    folder = shop.runs.folder("member-a")
    assert Specification.read(folder).code == first.code
    stopped(folder, launcher)
    resume_run(shop.home, shop.runs, "member-a")  # as the conductor does
    assert Specification.read(folder).code == first.code
    with pytest.raises(InvalidValue, match="other code"):
        open_worker(folder)


def test_agents_that_may_save_environments_change_what_waits(house):
    shop, _ = house
    shop.home.settings_file.write_text(yaml.safe_dump({"saves": "allow"}))
    folder = started(shop)
    written(shop, "replaced = True")
    open_worker(folder)
    (shop.home.configuration / "limits.yaml").write_text("confirm: always")
    assert accepted_code(Specification.read(folder), shop.home)
