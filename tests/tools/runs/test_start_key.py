"""Starting once: calls that are repeated with their key, at two servers at once, or that are cancelled."""

from __future__ import annotations

import threading
import time

import anyio
import pytest
from toprope_tools.planning.config import edit_config
from toprope_tools.planning.environments import select_environment
from toprope_tools.runs import training
from toprope_tools.runs.training import start_training, stop_training
from toprope_tools.status.status import check_status

from tests.support.tools_house import StandInLauncher, age_stamp, become, do, make_workshop, step
from toprope.errors import ComponentFailed, InvalidValue, NotPossibleNow
from toprope.records.index import idempotency_keys as start_keys
from toprope.records.index.database import StartRow
from toprope.records.run.specification import TrainPlan
from toprope.supervisor.lock import is_held
from toprope.workbench.launch.start import StartRequest


def draft_of(shop):
    return do(select_environment, shop, name="sort_letters").data.draft_id


def runs_of(shop):
    return [status.run_id for status in shop.statuses()]


def test_repeated_call_with_key_returns_its_run(house):
    shop, _ = house
    draft = draft_of(shop)
    first = do(start_training, shop, draft_id=draft, key="k-1").data.run_id
    again = do(start_training, shop, draft_id=draft, key="k-1")
    assert again.data.run_id == first and "no second run" in again.text and runs_of(shop) == [first]
    # Without the key the revision is refused, and the key of a call that was refused is free.
    with pytest.raises(NotPossibleNow, match=first):
        do(start_training, shop, draft_id=draft)
    with pytest.raises(NotPossibleNow, match=first):
        do(start_training, shop, draft_id=draft, key="k-2")
    assert start_keys.taken(shop.index, "k-2") is None
    other = do(start_training, shop, draft_id=draft, key="k-2", again=True).data.run_id
    assert other != first
    # Ended as well: what was asked for with that key has been done.
    do(stop_training, shop, run_id=first)
    assert do(start_training, shop, draft_id=draft, key="k-1").data.state == "stopped"


def test_start_tells_of_seeds_that_ran_at_this_revision(house, monkeypatch):
    shop, launcher = house
    draft = draft_of(shop)
    group = do(start_training, shop, draft_id=draft, seeds=2)
    assert "seeds_repeated" not in group.text
    again = do(start_training, shop, draft_id=draft, seeds=3, again=True, preview=True)
    first, second = group.data.run_ids
    assert f"2 seeds of this start ran at this revision before (0 as {first}, 1 as {second})" in again.text
    assert f'edit_config(draft_id="{draft}", changes={{"algorithm.seed": 3}}) takes seeds' in again.text
    alone = do(start_training, shop, draft_id=draft, again=True)
    assert f"(0 as {first})" in alone.text and alone.data.run_id in alone.text
    do(edit_config, shop, draft_id=draft, changes={"algorithm.seed": 3})
    assert "seeds_repeated" not in do(start_training, shop, draft_id=draft, seeds=3, preview=True).text
    # Runs that did not complete are no evidence, and those of other code another experiment.
    other = draft_of(shop)
    failed = do(start_training, shop, draft_id=other).data.run_id
    launcher.leave(failed)
    become(shop.runs.folder(failed), "failed", ended_at=time.time())
    complete = do(start_training, shop, draft_id=other)
    assert "seeds_repeated" not in complete.text
    launcher.leave(complete.data.run_id)
    become(shop.runs.folder(complete.data.run_id), "completed", ended_at=time.time())
    assert "seeds_repeated" in do(start_training, shop, draft_id=other, preview=True).text
    monkeypatch.setattr(training, "_changed_since_before", lambda *_: ["environment.py"])
    assert "seeds_repeated" not in do(start_training, shop, draft_id=other, preview=True).text


def test_lost_run_counts_as_live_until_it_resumes_and_does_not_resume_under_the_lock(house, monkeypatch):
    shop, launcher = house
    draft = draft_of(shop)
    first = do(start_training, shop, draft_id=draft).data.run_id
    launcher.leave(first)
    become(shop.runs.folder(first), "lost", ended_at=time.time(), resume_at=time.time() - 1)
    monkeypatch.setattr(shop.runs, "_resume_lost", lambda *_: pytest.fail("the ledger is locked"))
    request = StartRequest(shop.drafts.get(draft), TrainPlan(), again=False)
    with pytest.raises(NotPossibleNow, match=f"running already, as {first}"):
        shop.starter.start(request)
    become(shop.runs.folder(first), "lost", resume_at=None)
    assert shop.starter.start(request).specifications


def test_key_belongs_to_one_draft(house):
    shop, _ = house
    first = do(start_training, shop, draft_id=draft_of(shop), key="k-1").data.run_id
    with pytest.raises(InvalidValue, match=first):
        do(start_training, shop, draft_id=draft_of(shop), key="k-1")
    assert runs_of(shop) == [first]


def test_key_without_run_starts_one(house, monkeypatch):
    shop, launcher = house
    draft = draft_of(shop)
    start_keys.take(shop.index, "k-1", draft, "run-that-never-was", lambda _: False)
    with shop.index.writing() as db:
        db.execute("UPDATE start_keys SET at = at - 60")
    run_id = do(start_training, shop, draft_id=draft, key="k-1").data.run_id
    assert runs_of(shop) == [run_id] and start_keys.taken(shop.index, "k-1").run_id == run_id

    def fails(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(launcher, "submit", fails)
    with pytest.raises(NotPossibleNow):
        do(start_training, shop, draft_id=draft, key="k-3", again=True)
    assert start_keys.taken(shop.index, "k-3") is None and runs_of(shop) == [run_id]


def test_two_servers_asked_at_once_start_one_run(tmp_path):
    """The slower one answers while the other's keeper is still coming up."""

    class Slow(StandInLauncher):
        def submit(self, folder, variables, lock=None):
            time.sleep(0.3)
            super().submit(folder, variables, lock)

    shops = [make_workshop(tmp_path)[0] for _ in range(2)]
    launchers = []
    for shop in shops:
        launchers.append(Slow())
        shop.runs.launcher = launchers[-1]
    draft = draft_of(shops[0])
    found, barrier = [], threading.Barrier(2)

    def ask(shop):
        barrier.wait()
        found.append(do(start_training, shop, draft_id=draft, key="same").data.run_id)

    threads = [threading.Thread(target=ask, args=(shop,)) for shop in shops]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2 and len(set(found)) == 1 and runs_of(shops[0]) == found[:1]
    assert sum(len(launcher.held) for launcher in launchers) == 1
    for launcher in launchers:
        launcher.close()


def test_cancelled_start_is_whole_or_absent(house):
    """Whatever the moment: never a run without its keeper, nor a key without its run."""
    shop, _ = house
    shop.home.ensure()
    draft = draft_of(shop)

    async def cancelled(after):
        with anyio.move_on_after(after):
            await start_training(shop, draft_id=draft, key=f"k-{after}", again=True)

    for after in (0.0, 0.001, 0.005, 0.02, 0.1):
        anyio.run(cancelled, after)
        taken = start_keys.taken(shop.index, f"k-{after}")
        if taken is not None:
            assert is_held(shop.runs.folder(taken.run_id).lock)
    assert all(is_held(shop.runs.folder(run_id).lock) for run_id in runs_of(shop))
    assert not [path for path in shop.home.runs.iterdir() if path.name.startswith(".making")]


def test_cancelled_stop_continues(house):
    shop, _ = house
    run_id = do(start_training, shop, draft_id=draft_of(shop)).data.run_id
    ordered = []
    shop.runs.launcher.stop = lambda folder, grace_s: ordered.append(folder.run_id)

    async def cancelled():
        with anyio.move_on_after(0.3):
            await stop_training(shop, run_id=run_id)

    anyio.run(cancelled)
    assert ordered == [run_id] and shop.runs.status(run_id).state == "queued"


def test_start_note_from_the_future_blocks_nothing(house):
    shop, _ = house
    draft = draft_of(shop)
    shop.index.record_start(StartRow("run-of-tomorrow", draft, 1, "train", time.time() + 86_400), None)
    assert do(start_training, shop, draft_id=draft).data.run_id


def test_failed_keeper_keeps_key_of_its_run(house, monkeypatch):
    shop, launcher = house

    def fails(*_):
        raise ComponentFailed("no keeper")

    monkeypatch.setattr(launcher, "submit", fails)
    draft = draft_of(shop)
    with pytest.raises(ComponentFailed):
        do(start_training, shop, draft_id=draft, key="k-1")
    assert do(start_training, shop, draft_id=draft, key="k-1").data.state == "failed"


def test_clock_set_back_withholds_no_numbers(house):
    shop, _ = house
    run_id = do(start_training, shop, draft_id=draft_of(shop)).data.run_id
    step(shop.runs.folder(run_id), 1)
    assert do(check_status, shop, run_ids=[run_id]).data.runs[0].fresh
    step(shop.runs.folder(run_id), 2)
    assert not do(check_status, shop, run_ids=[run_id]).data.runs[0].fresh
    age_stamp(shop, run_id, -86_400)
    told = do(check_status, shop, run_ids=[run_id]).data.runs[0]
    assert told.fresh and told.numbers["step"] == 2
