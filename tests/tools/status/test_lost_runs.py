"""Waiting for a run that was lost: it has ended only if it does not resume by itself."""

import time

import anyio
from toprope_tools.status.status import check_status

from tests.support.tools_house import become, start_run


def check(shop, folder, until, act=None):
    """One call of check_status; `act` is done meanwhile."""

    async def work():
        async with anyio.create_task_group() as tasks:
            if act is not None:
                tasks.start_soon(anyio.to_thread.run_sync, act)
            return await check_status(shop, run_ids=[folder.run_id], wait_s=0.3 if act is None else 20, until=until)

    return anyio.run(work)


def test_lost_run_that_will_resume_has_not_ended(house):
    shop, _ = house
    folder = start_run(shop)
    become(folder, "lost", ended_at=time.time(), resume_at=time.time() + 60)
    answer = check(shop, folder, ["end", "all ended"])
    assert answer.data.met == [] and "Ended" not in answer.text
    assert answer.text.splitlines()[-1].startswith("Next: check_status(")

    def go_on():
        time.sleep(0.6)  # a look or two
        become(folder, "training", ended_at=None, resume_at=None)

    assert [met.condition for met in check(shop, folder, ["training"], go_on).data.met] == ["training"]
    become(folder, "lost", ended_at=time.time(), resume_at=None)
    assert "Ended: get_results(" in check(shop, folder, ["end"]).text
