"""The clients: same calls, typed errors, and nothing lost or doubled when connections break."""

from __future__ import annotations

import asyncio
import inspect
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.training_api_server import SECRET, Served, served, until
from toprope.errors import ComponentFailed, InvalidValue, NotPossibleNow
from toprope.records.journal.groups import Counts, Group, Outcome
from toprope.records.journal.journal import FileJournal
from toprope.training.api.clients.async_client import ApiClient
from toprope.training.api.clients.requests import Backoff
from toprope.training.api.clients.sync_client import SyncApiClient
from toprope.training.api.http.errors import Refused
from toprope.training.api.intake.validation import Limits
from toprope.training.component.peer_addresses import PeerAway


@pytest.fixture
def api(tmp_path: Path) -> Iterator[Served]:
    with served(tmp_path / "journal", limits=Limits(queue_groups=4)) as running:
        yield running


def a_group(mark: int, group_id: str | None = None) -> Group:
    return Group(
        tokens=[[mark, 2, 3]] * 2,
        masks=[[-100, 2, 3]] * 2,
        scores=[0.0, 1.0],
        inference_logprobs=[[1.0, -0.5, -0.25]] * 2,
        group_id=group_id,
        environment="words",
        outcomes=[Outcome(0.0), Outcome(1.0, {"exact": 1.0}, True)],
        versions=[[(4, 2)]] * 2,
    )


def test_both_clients_have_the_same_calls() -> None:
    def calls(kind: type) -> dict[str, list[str]]:
        return {
            name: list(inspect.signature(member).parameters)
            for name, member in vars(kind).items()
            if not name.startswith("_") and name not in ("wanted", "take_up")  # for the driver, for the trainer
        }

    assert calls(ApiClient) == calls(SyncApiClient)


def test_a_round_through_the_asynchronous_client(api: Served) -> None:
    async def work() -> None:
        async with ApiClient(api.url, SECRET) as client:
            assert [await client.post_group(a_group(mark, f"g{mark}")) for mark in (1, 2, 3)] == [1, 2, 3]
            assert await client.post_group(a_group(3, "g3")) == 3
            batch = await client.next_batch(0, 4, 1.0)
            assert batch.batch == [a_group(1, "g1"), a_group(2, "g2")]
            assert (batch.cursor, batch.sequence_numbers, batch.waiting) == (2, [1, 2], 1)
            assert (await client.next_batch(2, 4)).batch is None
            assert await client.wait_for_room(2) and not await client.wait_for_room(1, 0.01)
            await client.dropped([(1, "stale")])
            await client.commit(2)
            counts = await client.counts()
            assert (counts.accepted, counts.committed, counts.dropped, counts.duplicates) == (3, 1, {"stale": 1}, 1)

    asyncio.run(work())


def test_a_round_through_the_synchronous_client(api: Served) -> None:
    with SyncApiClient(api.url + "/", SECRET) as client:
        assert [client.post_group(a_group(mark, f"g{mark}")) for mark in (1, 2, 3)] == [1, 2, 3]
        batch = client.next_batch(0, 4, 1.0)
        assert batch.batch == [a_group(1, "g1"), a_group(2, "g2")] and batch.cursor == 2
        assert client.next_batch(0, 4) == batch
        assert client.next_batch(2, 4).batch is None
        assert client.wait_for_room(2, 0.0)
        client.dropped([(1, "stale")])
        client.commit(2)
        assert client.counts().committed == 1


def test_refusals_are_typed(api: Served) -> None:
    bad = Group(tokens=[[1]], masks=[[1]], scores=[])

    async def asynchronously() -> None:
        async with ApiClient(api.url, SECRET) as client:
            await client.post_group(bad)

    with pytest.raises(Refused, match="scores has 0 entries") as refused:
        asyncio.run(asynchronously())
    assert isinstance(refused.value, InvalidValue)
    assert (refused.value.kind, refused.value.status, refused.value.field) == ("length_mismatch", 422, "scores")
    with SyncApiClient(api.url, SECRET) as client, pytest.raises(Refused) as ahead:
        client.next_batch(9, 4)
    assert ahead.value.kind == "cursor_ahead"
    with SyncApiClient(api.url, "wrong") as client, pytest.raises(Refused) as unauthorized:
        client.counts()
    assert unauthorized.value.status == 401


def test_a_post_to_a_full_queue_waits_for_room(api: Served) -> None:
    async def work() -> list[int]:
        async with ApiClient(api.url, SECRET) as client:
            for mark in range(4):
                await client.post_group(a_group(mark))
            posting = asyncio.create_task(client.post_group(a_group(4)))
            while api.store.queue.counts().refused.get("queue_full", 0) < 1:
                await asyncio.sleep(0.005)
            assert not posting.done()
            cursor = (await client.next_batch(0, 4)).cursor
            waiting = await posting
            return [cursor, waiting]

    assert asyncio.run(work()) == [2, 3]


def message(connection: socket.socket) -> bytes:
    """One HTTP message with its body; empty when the peer has gone."""
    data = b""
    while part := connection.recv(1 << 20):
        data += part
        head, _, body = data.partition(b"\r\n\r\n")
        lengths = [
            line.partition(b":")[2] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")
        ]
        if b"\r\n\r\n" in data and len(body) >= sum(map(int, lengths)):
            break
    return data


@contextmanager
def breaking(target: tuple[str, int], breaks: Callable[[int], str]) -> Iterator[str]:
    """A way to `target` on which the nth connection (from 0) is treated as `breaks` says: `pass` it on, `drop` it
    unheard, or pass the request on and drop the `answer`."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(0.05)
    ending = threading.Event()

    def handle(client: socket.socket, how: str) -> None:
        with client, socket.create_connection(target, timeout=20) as server:
            if how == "drop":
                return
            server.sendall(message(client))
            answer = message(server)
            if how == "pass":
                client.sendall(answer)

    def accept() -> None:
        number = 0
        while not ending.is_set():
            try:
                client, _ = listener.accept()
            except TimeoutError:
                continue
            handle(client, breaks(number))
            number += 1

    thread = threading.Thread(target=accept)
    thread.start()
    try:
        yield "http://{}:{}".format(*listener.getsockname())
    finally:
        ending.set()
        thread.join()
        listener.close()


@pytest.mark.parametrize("how", ["drop", "answer"])
def test_broken_connections_lose_and_double_nothing(api: Served, how: str) -> None:
    def breaks(number: int) -> str:
        return how if number % 3 else "pass"

    async def posts(url: str) -> list[int]:
        async with ApiClient(url, SECRET) as client:
            return [await client.post_group(a_group(mark)) for mark in (1, 2)]

    with breaking(api.address, breaks) as url:
        assert asyncio.run(posts(url)) == [1, 2]
        with SyncApiClient(url, SECRET) as client:
            assert client.post_group(a_group(3)) == 3
            first = client.next_batch(0, 4)
            assert [group.tokens[0][0] for group in first.batch or []] == [1, 2]
            client.dropped([(1, "stale")])
            client.commit(2)
            counts = client.counts()
    assert (counts.accepted, counts.waiting, counts.committed, counts.dropped) == (3, 1, 1, {"stale": 1})
    assert (counts.duplicates > 0) == (how == "answer")


def test_clients_go_on_when_the_api_comes_back(tmp_path: Path) -> None:
    with served(tmp_path / "journal") as first:
        client = SyncApiClient(first.url, SECRET, patience_s=0.2)
        client.post_group(a_group(1, "k"))
        first.stop()
        with pytest.raises(ComponentFailed, match="cannot be reached"):
            client.counts()
    with served(tmp_path / "journal") as second:
        client = SyncApiClient(second.url, SECRET)
        assert client.post_group(a_group(1, "k")) == 1
        assert client.counts().accepted == 1
        client.close()


def test_an_api_that_is_not_there_is_an_error_in_good_time() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    url = "http://{}:{}".format(*listener.getsockname())
    listener.close()

    async def work() -> None:
        async with ApiClient(url, SECRET, patience_s=0.1) as client:
            await client.counts()

    with pytest.raises(ComponentFailed, match="cannot be reached"):
        asyncio.run(work())


def test_patience_ends_for_an_api_that_cannot_store_and_never_for_a_full_queue() -> None:
    away = Backoff(30.0, away_s=60.0)
    assert away.after_error(OSError(), 0.0) == 0.0 and away.after_error(OSError(), 1.0) > 0
    # One that is being started again is waited for, and then the patience begins anew.
    assert 0 < away.after_absence(29.0) <= away.after_absence(80.0) <= 0.25
    assert away.after_error(OSError(), 85.0) == 0.0
    assert away.after_absence(90.0) > 0
    with pytest.raises(PeerAway, match="did not come back within 60 s"):
        away.after_absence(151.0)
    with pytest.raises(PeerAway, match="http://x cannot be reached"):
        [away.after_error(OSError(), now, "http://x") for now in (200.0, 231.0)]
    backoff = Backoff(30.0)
    storage = Refused("storage", "disk full", status=503)
    assert backoff.after_refusal(storage, 0.0) == 0.5
    with pytest.raises(NotPossibleNow, match="disk full"):
        backoff.after_refusal(storage, 31.0)
    assert backoff.after_refusal(Refused("queue_full", "", status=503), 1e9) == 0.25
    assert backoff.after_refusal(Refused("bad_mask", ""), 0.0) is None


def test_an_answer_that_is_none_of_ours_is_told() -> None:
    refusal = Refused.parse(502, b"<html>bad gateway</html>")
    assert (refusal.kind, refusal.status) == ("unexpected_answer", 502) and "bad gateway" in refusal.message
    again = Refused.parse(422, Refused("bad_mask", "A mask.", field="masks[0]").body())
    assert (again.kind, again.message, again.field) == ("bad_mask", "A mask.", "masks[0]")


def test_a_disk_that_is_full_is_a_moment_not_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: FileJournal, *rest: object) -> int:
        raise NotPossibleNow("The journal cannot be written: No space left on device.")

    with served(tmp_path / "journal") as api:
        monkeypatch.setattr(FileJournal, "append", full)
        body = json.dumps({"tokens": [[1]], "masks": [[1]], "scores": [1.0], "group_id": "k"}).encode()
        status, headers, answer = api.raw("POST", "/scored_data", body)
        assert (status, headers["retry-after"], json.loads(answer)["error"]["type"]) == (503, "5", "storage")
        monkeypatch.undo()
        assert api.post("/scored_data", body)["sequence_number"] == 1
        until(lambda: api.store.queue.counts().accepted == 1)


def test_clients_go_on_at_the_address_that_the_api_comes_back_at(tmp_path: Path) -> None:
    """What a member knows of its peers changes: away, then elsewhere."""
    where: list[str | None] = [None]

    async def posts(first: str, second: str) -> tuple[int, Counts]:
        async with ApiClient(lambda: where[0], SECRET, patience_s=5.0) as client:
            posting = asyncio.create_task(client.post_group(a_group(0)))
            await asyncio.sleep(0.05)
            assert not posting.done()
            where[0] = first
            waiting = await posting
            where[0] = second
            return waiting, await client.counts()

    with served(tmp_path / "first") as first, served(tmp_path / "second") as second:
        waiting, counts = asyncio.run(posts(first.url, second.url))
        assert waiting == 1 and counts.accepted == 0
        with SyncApiClient(lambda: where[0], SECRET) as client:
            assert client.counts().accepted == 0
            where[0] = first.url
            assert client.counts().accepted == 1
