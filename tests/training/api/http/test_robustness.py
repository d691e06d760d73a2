"""Faults of Atropos's run-api that this API must not have."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.training_api_server import ENVIRONMENT, REGISTRATION, Served, group, marks, served, until
from toprope.errors import Corrupt
from toprope.records.journal.file_journal import FileJournal
from toprope.records.journal.groups import Batch, Group
from toprope.records.journal.marks import GroupNote
from toprope.training.api.clients.requests import BATCH
from toprope.training.api.intake.validation import Limits
from toprope.training.api.queue.fair_scheduler import FairScheduler
from toprope.training.api.queue.group_queue import GroupQueue
from toprope.training.api.storage.store import TrajectoryStore


@pytest.fixture
def api(tmp_path: Path) -> Iterator[Served]:
    with served(tmp_path / "journal", alive_s=0.3) as running:
        yield running


def test_batches_are_fifo_and_step_counts_delivered_batches(api: Served) -> None:
    api.post("/register", REGISTRATION)
    for mark in range(1, 9):
        api.post("/scored_data", group(mark))
    assert api.get("/status")["current_step"] == 0, "nothing was delivered yet"
    for step, expected in enumerate(([1, 2], [3, 4], [5, 6]), 1):
        assert marks(api.get("/batch")) == expected
        assert api.get("/status")["current_step"] == step


def test_disconnect_while_waiting_loses_no_group(api: Served) -> None:
    api.post("/register", REGISTRATION)
    raw = api.open("GET", "/batch?wait_s=30")
    until(lambda: len(api.store.changed))
    raw.close()
    until(lambda: not len(api.store.changed))
    for mark in (1, 2):
        api.post("/scored_data", group(mark))
    assert marks(api.get("/batch")) == [1, 2]


def big(mark: int) -> dict[str, object]:
    """A group of 3 MB."""
    row = [mark, *[2] * 400_000]
    return {"tokens": [row], "masks": [[-100, *row[1:]]], "scores": [1.0]}


def test_disconnect_within_the_answer_loses_no_group(api: Served) -> None:
    api.post("/register", REGISTRATION | {"batch_size": 2, "max_token_len": 1_000_000})
    for mark in (1, 2, 3, 4):
        api.post("/scored_data", big(mark))
    raw = api.open("GET", "/batch")
    assert raw.recv(1000).startswith(b"HTTP/1.1 200")
    raw.close()
    until(lambda: api.store.queue.waiting == 4)
    assert api.get("/status") == {"current_step": 0, "queue_size": 4}
    assert marks(api.get("/batch")) == [1, 2]
    assert marks(api.get("/batch")) == [3, 4]


def test_batch_stays_delivered_if_client_closes_after_reading(api: Served) -> None:
    api.post("/register", REGISTRATION)
    for mark in range(4):
        api.post("/scored_data", group(mark))
    for expected in ([0, 1], [2, 3]):
        assert marks(api.get("/batch")) == expected
    assert api.get("/counts")["waiting"] == 0


def test_repeated_post_with_key_is_one_group(api: Served) -> None:
    answer = api.post("/scored_data", group(1, group_id="once"))
    assert api.post("/scored_data", group(1, group_id="once")) == answer
    assert api.get("/counts") | {"accepted": 1, "duplicates": 1} == api.get("/counts")


def test_repeated_post_without_key_is_one_group_if_unanswered(api: Served) -> None:
    body = json.dumps(group(1)).encode()
    raw = api.open("POST", "/scored_data", body)
    until(lambda: api.store.queue.waiting == 1)
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    raw.close()  # reset: the client was killed before it read the answer
    until(lambda: len(api.store.duplicates))
    assert api.post("/scored_data", body)["sequence_number"] == 1
    assert api.get("/counts")["duplicates"] == 1
    # Posted once more, the body is another group: its environment has the answer.
    assert api.post("/scored_data", body)["sequence_number"] == 2
    assert api.post("/scored_data", body)["sequence_number"] == 3


def test_equal_body_after_ten_minutes_is_another_group(tmp_path: Path) -> None:
    clock = [0.0]
    store = TrajectoryStore(FileJournal(tmp_path), now=lambda: clock[0])
    body = json.dumps(group(1)).encode()
    post = store.validate(body)
    store.mark_unanswered([store.accept(post)], [post])
    clock[0] = 601.0
    assert store.post(body) == 2


BAD_GROUPS = [
    ("length_mismatch", "masks[1]", group() | {"masks": [[-100, 2, 3], [-100, 2], *[[-100, 2, 3]] * 6]}),
    ("length_mismatch", "masks", group() | {"masks": [[-100, 2, 3]]}),
    ("length_mismatch", "scores", group(scores=[1.0])),
    ("length_mismatch", "inference_logprobs[0]", group(inference_logprobs=[[0.0]] * 8)),
    ("length_mismatch", "advantages[0]", group(advantages=[[0.0]] * 8)),
    ("length_mismatch", "ref_logprobs", group(ref_logprobs=[])),
    ("length_mismatch", "versions", group(versions=[])),
    ("length_mismatch", "outcomes", group(outcomes=[{"reward": 1.0}])),
    ("missing_outcomes", "rollouts", group(rollouts=[0] * 8)),
    ("bad_rollout", "rollouts[1]", group(rollouts=[0, 2, *[1] * 6], outcomes=[{"reward": 1.0}, {"reward": 0.0}])),
    ("bad_version", "versions[0]", group(versions=[[[0, 4]]] * 8)),
    ("bad_version", "versions[0]", group(versions=[[[-1, 2]]] * 8)),
    ("bad_mask", "masks[0][1]", group() | {"masks": [[-100, 9, 3]] * 8}),
    ("empty_group", "tokens", group(rows=0)),
    ("empty_row", "tokens[0]", {"tokens": [[]], "masks": [[]], "scores": [1.0]}),
    ("row_too_long", "tokens[0]", {"tokens": [[1] * 65], "masks": [[1] * 65], "scores": [1.0]}),
    ("out_of_range", "tokens[0][0]", group(mark=100)),
    ("out_of_range", "tokens[0][0]", group(mark=-1)),
    ("out_of_range", "tokens[0][0]", group(mark=10**30)),
    ("invalid_type", "tokens[0][0]", group() | {"tokens": [[1.5, 2, 3]] * 8}),
    ("invalid_type", "scores[0]", group(scores=[None] * 8)),
    ("invalid_type", None, {"tokens": [[1]], "masks": [[1]]}),
    ("unknown_environment", "env_id", group(env_id=5)),
    ("unknown_environment", "env_id", group(env_id=-1)),
    ("group_exceeds_batch", "tokens", group(rows=17, env_id=0)),
    ("bad_name", "environment", group(environment="#0")),
    ("bad_name", "group_id", group(group_id="")),
    ("too_deep", "messages", group(messages=json.loads("[" * 40 + "]" * 40))),
]


def test_invalid_group_is_refused_and_harms_no_other(tmp_path: Path) -> None:
    with served(tmp_path / "journal", vocabulary=100) as api:
        api.post("/register", REGISTRATION)
        api.get("/batch")
        api.post("/register-env", ENVIRONMENT)
        for kind, field, body in BAD_GROUPS:
            assert api.refusal("POST", "/scored_data", body) == (422, kind, field)
        broken = [
            b'{"tokens":[[1]],"masks":[[1]],"scores":[NaN]}',
            b'{"tokens":[[1]],"masks":[[1]],"scores":[-Infinity]}',
            b'{"tokens":[[1]],"masks":[[1]],"scores":[1],"messages":["\xff"]}',
            b'{"tokens":[[1]],"masks":[[1]],"scores":[1],"messages":' + b"[" * 9000 + b"]" * 9000 + b"}",
            b'{"tokens":[[1]]',
            b"",
        ]
        for body in broken:
            status, kind, _ = api.refusal("POST", "/scored_data", body)
            refused = {(400, "malformed_json"), (400, "too_deep")}
            if sys.version_info >= (3, 12):  # its json reads deep lists
                refused.add((422, "too_deep"))
            assert (status, kind) in refused
        huge = b'{"tokens":[[1]],"masks":[[1]],"scores":[1],"inference_logprobs":[[1e999]]}'
        assert api.refusal("POST", "/scored_data", huge) == (422, "out_of_range", "inference_logprobs[0][0]")
        for mark in (1, 2):
            api.post("/scored_data", group(mark))
        assert marks(api.get("/batch")) == [1, 2]
        counts = api.get("/counts")
        assert counts["accepted"] == 2
        assert sum(counts["refused"].values()) == len(BAD_GROUPS) + len(broken) + 1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("weight", -1.0), ("weight", 0.0), ("weight", 1e9), ("group_size", 0), ("max_token_length", 0),
        ("min_batch_allocation", 1.5), ("min_batch_allocation", -0.1), ("desired_name", ""),
    ],
)  # fmt: skip
def test_registration_out_of_range_is_refused(api: Served, field: str, value: float | str) -> None:
    api.post("/register", REGISTRATION)
    api.get("/batch")
    api.post("/register-env", ENVIRONMENT)
    assert api.refusal("POST", "/register-env", ENVIRONMENT | {field: value}) == (422, "invalid_value", field)
    status, answer = api.call("GET", "/status-env", {"env_id": 0})
    assert (status, answer["env_weight"]) == (200, 1.0)
    assert api.refusal("GET", "/status-env?env_id=3")[1] == "unknown_environment"


def test_second_registration_replaces_the_first(api: Served) -> None:
    api.post("/register", REGISTRATION)
    for mark in range(1, 5):
        api.post("/scored_data", group(mark))
    assert marks(api.get("/batch")) == [1, 2]
    api.post("/register", REGISTRATION | {"batch_size": 8, "starting_step": 40})
    assert api.get("/info")["batch_size"] == 8
    assert api.get("/status")["current_step"] == 40
    assert marks(api.get("/batch")) == [3]
    assert api.get("/status")["current_step"] == 41


def test_registration_that_cannot_fill_batches_is_refused(api: Served) -> None:
    api.post("/register", REGISTRATION | {"batch_size": 12})
    api.get("/batch")
    for size in (8, 24):
        assert api.refusal("POST", "/register-env", ENVIRONMENT | {"group_size": size}) == (
            422,
            "impossible_batch",
            "group_size",
        )
    api.post("/register-env", ENVIRONMENT | {"group_size": 4})
    api.post("/register-env", ENVIRONMENT | {"group_size": 8})  # 8 + 4
    assert api.refusal("POST", "/register", REGISTRATION | {"batch_size": 10})[1:] == ("impossible_batch", "batch_size")
    api.post("/register-env", ENVIRONMENT | {"group_size": 4, "min_batch_allocation": 0.7})
    assert api.refusal("POST", "/register-env", ENVIRONMENT | {"group_size": 4, "min_batch_allocation": 0.4}) == (
        422,
        "overallocated",
        "min_batch_allocation",
    )


def test_dead_environment_with_allocation_blocks_no_batch(api: Served) -> None:
    api.post("/register", REGISTRATION)
    api.get("/batch")
    api.post("/register-env", ENVIRONMENT | {"min_batch_allocation": 0.5})
    for mark in (1, 2):
        api.post("/scored_data", group(mark))
    assert api.get("/batch")["batch"] is None, "the batch waits for its share while it may be alive"
    began = time.monotonic()
    assert marks(api.get("/batch?wait_s=20")) == [1, 2]
    assert time.monotonic() - began < 10


def test_posts_before_registration_are_stored(api: Served) -> None:
    assert api.post("/scored_data", group(1))["status"] == "received"
    assert api.post("/register-env", ENVIRONMENT) == {"status": "wait for trainer to start"}
    assert api.refusal("GET", "/batch") == (409, "not_registered", None)
    api.post("/scored_data_list", [group(2)])
    api.post("/register", REGISTRATION)
    assert marks(api.get("/batch")) == [1, 2]


def test_restart_keeps_groups_and_environment_ids(tmp_path: Path) -> None:
    with served(tmp_path / "journal") as api:
        api.post("/register", REGISTRATION | {"starting_step": 3})
        api.get("/batch")
        api.post("/register-env", ENVIRONMENT)
        for mark in range(1, 6):
            api.post("/scored_data", group(mark, env_id=0, group_id=f"k{mark}"))
        assert marks(api.get("/batch?cursor=0")) == [1, 2]
    with served(tmp_path / "journal") as api:
        assert api.get("/status") == {"current_step": 4, "queue_size": 3}
        assert api.get("/info")["batch_size"] == 16
        assert api.post("/scored_data", group(5, env_id=0, group_id="k5"))["sequence_number"] == 5
        assert api.post("/scored_data", group(6, env_id=0))["sequence_number"] == 6
        assert api.call("GET", "/status-env", {"env_id": 0})[1]["self_queue_size"] == 4
        assert marks(api.get("/batch?cursor=0")) == [1, 2], "the trainer died with its last answer"
        assert marks(api.get("/batch?cursor=2")) == [3, 4]
        assert api.refusal("GET", "/batch")[1] == "cursor_needed"


def test_full_queue_refuses_with_retry_after(tmp_path: Path) -> None:
    with served(tmp_path / "journal", limits=Limits(queue_groups=3)) as api:
        api.post("/scored_data", group(1, group_id="k"))
        api.post("/scored_data_list", [group(2), group(3)])
        for path, body in (("/scored_data", group(4)), ("/scored_data_list", [group(4)])):
            status, headers, answer = api.raw("POST", path, body)
            assert (status, headers["retry-after"]) == (503, "1")
            assert json.loads(answer)["error"]["type"] == "queue_full"
        assert api.post("/scored_data", group(1, group_id="k"))["sequence_number"] == 1, "a known group needs no room"
        assert api.refusal("POST", "/scored_data_list", [group(5)] * 4)[:2] == (413, "too_large")
        api.get("/batch?cursor=0&sequences=16")
        api.post("/scored_data", group(4))
    size = len(json.dumps(group()))
    with served(tmp_path / "bytes", limits=Limits(queue_bytes=2 * size)) as api:
        assert [api.raw("POST", "/scored_data", group())[0] for _ in range(3)] == [200, 200, 503]


def test_server_listens_on_loopback_only(api: Served) -> None:
    port = f"{api.address[1]:04X}"
    listening = [
        line.split()[1]
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/{os.getpid()}/net/{table}").read_text().splitlines()[1:]
        if line.split()[3] == "0A" and line.split()[1].endswith(f":{port}")
    ]
    assert listening == [f"0100007F:{port}"]


def test_policy_versions_are_stored_and_delivered(api: Served, tmp_path: Path) -> None:
    api.post("/scored_data", group(1, versions=[[[3, 1], [4, 1]]] * 8, inference_logprobs=[[1.0, -0.5, -0.25]] * 8))
    journal = FileJournal(tmp_path / "journal")
    assert next(journal.iterate()).note.oldest_version == 3
    journal.close()
    batch: Batch = BATCH.decode(api.raw("GET", "/batch?cursor=0&sequences=8")[2])
    (received,) = batch.batch or []
    assert isinstance(received, Group) and received.oldest_version() == 3
    assert received.inference_logprobs == [[1.0, -0.5, -0.25]] * 8


def test_batch_cost_does_not_grow_with_queue_length() -> None:
    queue = GroupQueue(FairScheduler())
    queue.scheduler.lane("b").minimum = 0.25
    for number in range(1, 50_001):
        queue.accept(number, GroupNote(rows=8, lane="ab"[number % 2]), 100_000)
    began = time.process_time()
    while (plan := queue.plan(128, 0.0)) is not None:
        queue.deliver(plan)
    assert queue.waiting < 16
    assert time.process_time() - began < 5, "3125 batches; run-api takes 39 s without, minutes with an allocation"


def test_unreadable_group_is_counted_and_skipped(tmp_path: Path) -> None:
    journal = FileJournal(tmp_path)
    store = TrajectoryStore(journal)
    for mark in range(1, 5):
        store.post(json.dumps(group(mark)).encode())
    journal.close()
    path = tmp_path / "00000001.journal"
    data = bytearray(path.read_bytes())
    data[data.index(b'"tokens": [[2') + 3] ^= 1
    path.write_bytes(data)
    store = TrajectoryStore(FileJournal(tmp_path))
    formed = store.next_batch(0, 16)
    assert formed is not None and [group.seq for group in formed.plan.groups] == [1, 3]
    assert store.queue.counts().dropped == {"unreadable": 1} and store.queue.counts().balanced()


def test_contradictory_journal_is_refused_and_unchanged(tmp_path: Path) -> None:
    journal = FileJournal(tmp_path)
    store = TrajectoryStore(journal)
    for mark in range(1, 5):
        store.post(json.dumps(group(mark)).encode())
    store.next_batch(0, 16)
    journal.close()
    path = tmp_path / "00000001.journal"
    data = bytearray(path.read_bytes())
    data[30] ^= 0xFF  # the head of group 1, which was delivered
    path.write_bytes(data)
    with pytest.raises(Corrupt, match="cannot be recovered"):
        TrajectoryStore(FileJournal(tmp_path))
    assert path.read_bytes() == data
