"""Endpoints of the trajectory API over a real socket: shapes, limits, secrets, waiting."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.training_api_server import ENVIRONMENT, REGISTRATION, SECRET, Served, group, marks, served, until
from toprope.training.api.intake.validation import Limits


@pytest.fixture
def api(tmp_path: Path) -> Iterator[Served]:
    with served(tmp_path / "journal", limits=Limits(body_bytes=50_000, decoded_bytes=80_000)) as running:
        yield running


def test_atropos_endpoints_answer_in_their_shapes(api: Served) -> None:
    assert api.get("/") == {"message": "AtroposLib API"}
    assert api.get("/wandb_info") == {"group": None, "project": None}
    assert api.get("/info") == {"batch_size": -1, "max_token_len": -1}
    assert api.get("/status") == {"current_step": 0, "queue_size": 0}
    assert isinstance(api.post("/register", REGISTRATION | {"starting_step": 7})["uuid"], int)
    assert api.get("/wandb_info") == {"group": "g", "project": "p"}
    assert api.get("/info") == {"batch_size": 16, "max_token_len": 64}
    assert api.post("/register-env", ENVIRONMENT) == {"status": "wait for trainer to start"}
    assert api.get("/batch") == {"batch": None}
    success = {
        "status": "success", "wandb_name": "words_0", "checkpoint_dir": "/c", "starting_step": 7,
        "checkpoint_interval": 5, "num_steps": 100,
    }  # fmt: skip
    assert api.post("/register-env", ENVIRONMENT) == success | {"env_id": 0}
    assert api.post("/register-env", ENVIRONMENT)["wandb_name"] == "words_1"
    assert api.post("/scored_data", group(1, env_id=0))["status"] == "received"
    answer = api.post("/scored_data_list", [group(2, env_id=0), group(3, env_id=1)])
    assert (answer["status"], answer["groups_processed"]) == ("received", 2)
    assert api.get("/status") == {"current_step": 7, "queue_size": 3}
    status, answer = api.call("GET", "/status-env", {"env_id": 0})
    assert (status, answer) == (
        200,
        {
            "current_step": 7, "queue_size": 3, "unallocated_fraction": 1.0, "self_queue_size": 2, "max_group_size": 8,
            "env_weight": 0.5,
        },
    )  # fmt: skip
    assert api.get("/latest_example")["tokens"][0] == [3, 2, 3]
    assert api.get("/latest_example")["advantages"] is None
    assert len(api.get("/batch")["batch"]) == 2
    assert api.get("/status") == {"current_step": 8, "queue_size": 1}
    assert api.post("/disconnect-env", {"env_id": 0}) == {"status": "success"}


def test_latest_example_is_empty_before_first_group(api: Served) -> None:
    example = api.get("/latest_example")
    assert example["tokens"] == example["scores"] == [] and "inference_logprobs" in example


def test_reset_data_needs_post(api: Served) -> None:
    api.post("/register", REGISTRATION)
    api.post("/scored_data", group())
    status, headers, body = api.raw("GET", "/reset_data")
    assert (status, headers["allow"]) == (405, "POST")
    assert "POST /reset_data" in json.loads(body)["error"]["message"]
    assert api.get("/status")["queue_size"] == 1
    assert api.raw("POST", "/reset_data")[2] == b"Reset successful"
    assert api.get("/status")["queue_size"] == 0 and api.get("/info")["batch_size"] == -1
    assert api.get("/counts")["dropped"] == {"reset": 1}


def test_reset_data_is_refused_while_a_trainer_reads_by_cursor(api: Served) -> None:
    for mark in range(1, 4):
        api.post("/scored_data", group(mark))
    assert marks(api.get("/batch?cursor=0&sequences=16")) == [1, 2]
    status, _, body = api.raw("POST", "/reset_data")
    assert status == 409 and "reads with a cursor" in json.loads(body)["error"]["message"]
    assert api.get("/status")["queue_size"] == 1
    assert api.post("/commit", {"cursor": 2})["cursor"] == 2


def test_trainer_reads_by_cursor_commits_and_reports_drops(api: Served) -> None:
    for mark in range(1, 6):
        assert api.post("/scored_data", group(mark))["waiting"] == mark
    first = api.get("/batch?cursor=0&sequences=16")
    assert marks(first) == [1, 2]
    assert (first["cursor"], first["sequence_numbers"], first["waiting"]) == (2, [1, 2], 3)
    assert api.get("/batch?cursor=0&sequences=16") == first, "the same cursor gives the same groups"
    second = api.get("/batch?cursor=2&sequences=16")
    assert marks(second) == [3, 4]
    assert api.get("/batch?cursor=4&sequences=16") == {"batch": None, "cursor": 4, "sequence_numbers": [], "waiting": 1}
    dropped = {"items": [{"sequence_number": 3, "reason": "stale"}]}
    assert api.post("/dropped", dropped)["dropped"] == 1
    assert api.post("/dropped", dropped)["dropped"] == 0
    assert api.post("/commit", {"cursor": 2}) == {"status": "success", "committed": 2, "cursor": 2}
    assert api.get("/counts") == {
        "accepted": 5, "waiting": 1, "delivered": 1, "committed": 2, "dropped": {"stale": 1}, "refused": {},
        "duplicates": 0, "equal_score": 0, "unmatched": 0,
    }  # fmt: skip
    assert api.refusal("GET", "/batch?cursor=1&sequences=16") == (409, "cursor_committed", "cursor")
    assert api.refusal("GET", "/batch?cursor=5&sequences=16") == (409, "cursor_ahead", "cursor")
    assert api.refusal("GET", "/batch?sequences=16") == (409, "cursor_needed", "cursor")
    assert api.refusal("POST", "/commit", {"cursor": 9}) == (409, "cursor_ahead", "cursor")
    for items, kind in (([5, "stale"], "not_delivered"), ([4, "Not a name!"], "bad_reason")):
        body = {"items": [{"sequence_number": items[0], "reason": items[1]}]}
        assert api.refusal("POST", "/dropped", body)[1:] == (kind, "items")


@pytest.mark.parametrize(
    "query", ["cursor=x", "cursor=-1", "sequences=0", "sequences=1.5", "wait_s=-1", "wait_s=nan", "wait_s=inf"]
)
def test_batch_parameters_are_checked(api: Served, query: str) -> None:
    status, kind, field = api.refusal("GET", f"/batch?{query}")
    assert (status, kind, field) == (400, "bad_parameter", query.partition("=")[0])


def in_background(work: Any) -> tuple[threading.Thread, list[Any]]:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    return thread, results


def waiters(api: Served) -> int:
    return len(api.store.changed)


def test_batch_request_is_answered_once_enough_rows_wait(api: Served) -> None:
    thread, results = in_background(lambda: api.get("/batch?cursor=0&sequences=16&wait_s=30"))
    until(lambda: waiters(api) == 1)
    api.post("/scored_data", group(1))
    assert waiters(api) == 1, "one group is not enough to wake the waiter"
    api.post("/scored_data", group(2))
    thread.join(10)
    assert marks(results[0]) == [1, 2]


def test_batch_wait_ends_without_a_batch(api: Served) -> None:
    assert api.get("/batch?cursor=0&sequences=16&wait_s=0.05")["batch"] is None
    assert waiters(api) == 0


def test_room_request_is_answered_after_a_delivery(api: Served) -> None:
    for mark in range(4):
        api.post("/scored_data", group(mark))
    assert api.get("/room?below=5") == {"room": True, "waiting": 4}
    assert api.get("/room?below=4&wait_s=0.05") == {"room": False, "waiting": 4}
    thread, results = in_background(lambda: api.get("/room?below=4&wait_s=30"))
    until(lambda: waiters(api) == 1)
    api.get("/batch?cursor=0&sequences=16")
    thread.join(10)
    assert results == [{"room": True, "waiting": 2}]
    assert api.refusal("GET", "/room") == (400, "bad_parameter", "below")


def test_full_queue_has_room_while_the_trainer_waits_for_more_rows(api: Served) -> None:
    for mark in range(4):
        api.post("/scored_data", group(mark, rows=1))
    room, found = in_background(lambda: api.get("/room?below=4&wait_s=30"))
    until(lambda: waiters(api) == 1)
    batch, delivered = in_background(lambda: api.get("/batch?cursor=0&sequences=6&wait_s=30"))
    room.join(10)
    assert found == [{"room": True, "waiting": 4}]
    for mark in (4, 5):
        api.post("/scored_data", group(mark, rows=1))
    batch.join(10)
    assert marks(delivered[0]) == list(range(6))
    for mark in range(4):
        api.post("/scored_data", group(mark, rows=1))
    assert api.get("/room?below=4") == {"room": False, "waiting": 4}, "nobody waits"


def test_waiting_requests_are_answered_at_shutdown(api: Served) -> None:
    thread, results = in_background(lambda: api.get("/batch?cursor=0&sequences=16&wait_s=60"))
    until(lambda: waiters(api) == 1)
    api.stop()
    thread.join(10)
    assert results[0]["batch"] is None


def test_secret_is_accepted_as_bearer_token_or_path_prefix(api: Served) -> None:
    assert api.raw("GET", "/", secret=None)[0] == 200
    for secret in (None, "wrong", SECRET + "x", ""):
        status, headers, _ = api.raw("GET", "/counts", secret=secret)
        assert (status, headers["www-authenticate"]) == (401, "Bearer")
    assert api.raw("GET", "/wrong/counts", secret=None)[0] == 401
    assert api.raw("POST", f"/{SECRET}/scored_data", group(), secret=None)[0] == 200
    assert json.loads(api.raw("GET", f"/{SECRET}/status", secret=None)[2])["queue_size"] == 1
    assert api.raw("GET", f"/{SECRET}/", secret=None)[0] == 200
    assert api.raw("GET", "/counts", secret=None, headers={"Authorization": f"bearer {SECRET}"})[0] == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [("localhost:80", 200), ("127.0.0.1", 200), ("[::1]:9", 200), ("evil.example:80", 421), ("127.0.0.1.evil", 421)],
)
def test_only_loopback_host_names_are_accepted(api: Served, host: str, status: int) -> None:
    assert api.raw("GET", "/", headers={"Host": host})[0] == status


def test_unknown_endpoints_and_methods_give_typed_errors(api: Served) -> None:
    assert api.refusal("GET", "/nothing")[:2] == (404, "not_found")
    assert api.refusal("GET", "/scored_data")[:2] == (405, "method_not_allowed")


def test_gzip_bodies_are_read_and_limited_after_decompression(api: Served) -> None:
    header = {"Content-Encoding": "gzip"}
    packed = gzip.compress(json.dumps(group(4)).encode())
    assert api.raw("POST", "/scored_data", packed, headers=header)[0] == 200
    cases = [
        (packed[:-4], "bad_gzip"), (packed + b"x", "bad_gzip"), (b"plain", "bad_gzip"),
        (gzip.compress(b" " * 80_001), "too_large"),
    ]  # fmt: skip
    for body, kind in cases:
        status, _, answer = api.raw("POST", "/scored_data", body, headers=header)
        assert (status, json.loads(answer)["error"]["type"]) == (413 if kind == "too_large" else 400, kind)
    status, _, answer = api.raw("POST", "/scored_data", packed, headers={"Content-Encoding": "br"})
    assert (status, json.loads(answer)["error"]["type"]) == (415, "unknown_encoding")
    assert api.get("/status")["queue_size"] == 1


def test_large_body_is_refused_with_and_without_length(api: Served) -> None:
    assert api.refusal("POST", "/scored_data", b" " * 50_001)[:2] == (413, "too_large")
    with api.open("GET", "/") as raw:
        head = f"POST /scored_data HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {SECRET}\r\n"
        raw.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
        answer = b""
        for _ in range(6):
            raw.sendall(b"2710\r\n" + b" " * 10_000 + b"\r\n")
        while b"too_large" not in answer:
            part = raw.recv(65_536)
            assert part, answer
            answer += part
    assert b" 413 " in answer


def test_bodies_are_delivered_unchanged_without_unknown_fields(api: Served) -> None:
    body = json.dumps(group(1), indent=1).encode()
    api.post("/scored_data", body)
    api.post("/scored_data", group(2, rows=8, mystery={"deep": [1]}))
    answer = api.raw("GET", "/batch?cursor=0&sequences=16")[2]
    assert answer.startswith(b'{"batch":[' + body + b',{"tokens":')
    assert marks(json.loads(answer)) == [1, 2] and b"mystery" not in answer


def test_list_stores_valid_groups_and_reports_invalid_ones(api: Served) -> None:
    answer = api.post("/scored_data_list", [group(1), group(2, scores=[1.0]), group(3), {"tokens": "x"}])
    assert (answer["groups_processed"], answer["sequence_numbers"], answer["waiting"]) == (2, [1, 2], 2)
    assert [(item["index"], item["type"], item["field"]) for item in answer["refused"]] == [
        (1, "length_mismatch", "scores"),
        (3, "invalid_type", "tokens"),
    ]
    assert api.refusal("POST", "/scored_data_list", [group(2, scores=[1.0])])[1] == "length_mismatch"
    assert api.refusal("POST", "/scored_data_list", {"no": "list"})[:2] == (400, "malformed_json")
    assert api.post("/scored_data_list", [])["groups_processed"] == 0
    assert api.post("/scored_data_list", [group(5, group_id="k"), group(5, group_id="k")])["sequence_numbers"] == [3, 3]
    assert api.get("/counts")["refused"] == {"length_mismatch": 2, "invalid_type": 1, "malformed_json": 1}


def test_metrics_show_the_account(api: Served) -> None:
    for mark in range(3):
        api.post("/scored_data", group(mark, environment='odd"name', scores=[1.0] * 8))
    api.refusal("POST", "/scored_data", b"{")
    api.get("/batch?cursor=0&sequences=16")
    api.post("/dropped", {"items": [{"sequence_number": 1, "reason": "stale"}]})
    status, headers, body = api.raw("GET", "/metrics")
    assert status == 200 and headers["content-type"].startswith("text/plain")
    lines = body.decode().splitlines()
    for line in (
        "toprope_api_waiting_groups 1",
        "toprope_api_waiting_rows 8",
        "toprope_api_delivered_groups 1",
        "toprope_api_accepted_total 3",
        "toprope_api_equal_score_total 3",
        'toprope_api_dropped_total{reason="stale"} 1',
        'toprope_api_refused_total{reason="malformed_json"} 1',
        'toprope_api_environment_waiting_rows{environment="odd\\"name"} 8',
    ):
        assert line in lines
    waiting = next(line for line in lines if line.startswith("toprope_api_oldest_waiting_seconds "))
    assert 0 <= float(waiting.split()[1]) < 60
