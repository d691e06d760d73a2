"""Groups fetched ahead: positions of checkpoints, and the account of groups after a crash."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from tests.support.trainer_stand_ins import PreparedGroups, group, rollout_group, small_config
from tests.support.training_api_server import SECRET, served, until
from toprope.records.journal.groups import Batch
from toprope.records.messages import Skipping
from toprope.training.api.clients.sync_client import SyncApiClient
from toprope.training.trainer import batch_source
from toprope.training.trainer.batch_source import BatchSource, EndOfTraining
from toprope.training.trainer.step.prefetch import PrefetchingSource


def test_account_stays_exact_when_groups_fetched_ahead_are_lost(tmp_path: Path) -> None:
    """Two steps are trained, a third is fetched, the first is in a checkpoint; then the trainer is gone."""
    config = small_config(rollout__groups_per_step=2, algorithm__drop_zero_signal=False, rollout__queue_groups=8)
    with served(tmp_path / "journal") as api, SyncApiClient(api.url, SECRET) as other:
        for number in range(1, 11):
            other.post_group(group(number, version=0))

        def source(cursor: int) -> tuple[PrefetchingSource, SyncApiClient]:
            client = SyncApiClient(api.url, SECRET)
            return PrefetchingSource(BatchSource(client, config, lambda: False, cursor), lambda: False), client

        def account() -> tuple[int, int, int]:
            counts = other.counts()
            assert counts.balanced() and counts.accepted == 10
            return counts.waiting, counts.delivered, counts.committed

        trainer, client = source(0)
        first = [one.group_id for one in trainer.next(0).groups]
        until(lambda: account() == (6, 4, 0))
        second = [one.group_id for one in trainer.next(1).groups]
        assert trainer.cursor == 4 and first + second == ["g-1", "g-2", "g-3", "g-4"]
        until(lambda: account() == (4, 6, 0))
        other.commit(2)
        assert account() == (4, 4, 2)
        client.close()
        resumed, client = source(other.take_up(2))
        again = [[one.group_id for one in resumed.next(version).groups] for version in (1, 2, 3)]
        assert again == [["g-3", "g-4"], ["g-5", "g-6"], ["g-7", "g-8"]]
        other.commit(resumed.cursor)
        until(lambda: account() == (0, 2, 8))
        client.close()


def test_next_batch_is_fetched_during_the_step_for_its_version() -> None:
    asked = threading.Event()

    class Api(PreparedGroups):
        versions: list[int] = []

        def next_batch(self, cursor: int, sequences: int, wait_s: float) -> Batch:
            self.versions.append(self.policy_version)
            if len(self.versions) > 1:
                asked.set()
            return super().next_batch(cursor, sequences, wait_s)

    api = Api(rollout_group([1.0, 0.0, 0.0, 0.0], version=5, task=str(number)) for number in range(6))
    source = PrefetchingSource(BatchSource(api, small_config(), lambda: False), lambda: False)
    batch = source.next(5)
    assert asked.wait(10), "nothing was asked for during the step"
    assert source.cursor == batch.cursor == 2 and source.rollouts == 8
    later = source.next(6)
    assert later.version == 6 and later.metrics["staleness/max"] == 1
    assert source.cursor == 4 and api.versions[:2] == [5, 6]


def test_no_batch_is_fetched_after_the_last_step() -> None:
    api = PreparedGroups(rollout_group([1.0, 0.0, 0.0, 0.0], task=str(number)) for number in range(6))
    source = PrefetchingSource(BatchSource(api, small_config(), lambda: False), lambda: False, lambda: False)
    source.next(0)
    assert source._ahead is None and api.sent == 2


@pytest.mark.parametrize("error", [EndOfTraining, RuntimeError])
def test_errors_reach_the_thread_that_trains(error: type[Exception]) -> None:
    class Api(PreparedGroups):
        def next_batch(self, cursor: int, sequences: int, wait_s: float) -> Any:
            raise error("away")

    source = PrefetchingSource(BatchSource(Api([]), small_config(), lambda: False), lambda: False)
    with pytest.raises(error):
        source.next(0)


def test_groups_left_out_are_told_only_while_a_step_waits_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_source, "_TELL_S", -1.0)
    told: list[Skipping] = []
    looked, go = threading.Event(), threading.Event()

    class Api(PreparedGroups):
        calls = 0

        def next_batch(self, cursor: int, sequences: int, wait_s: float) -> Batch:
            self.calls += 1
            if self.calls == 4:  # the second step has left one group out, while the first is trained
                looked.set()
                assert go.wait(10)
            return super().next_batch(cursor, 4, wait_s)

    flat, useful = [0.0] * 4, [1.0, 0.0, 0.0, 0.0]
    kinds = [flat, useful, flat, flat, useful]
    groups = Api(iter([rollout_group(rewards, task=str(n)) for n, rewards in enumerate(kinds)]))
    config = small_config(rollout__groups_per_step=1)
    source = PrefetchingSource(BatchSource(groups, config, lambda: False, tell=told.append), lambda: False)
    source.next(0)
    assert told == [Skipping({"zero_signal": 1}, 0, 1)]
    assert looked.wait(10) and len(told) == 1
    threading.Timer(0.1, go.set).start()
    source.next(1)
    assert told[1:] == [Skipping({"zero_signal": 2}, 0, 1)]
