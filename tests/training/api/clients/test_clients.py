"""The clients raise typed errors, and lose or duplicate nothing when connections break."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.training_api_server import SECRET, Served, served, until
from toprope.errors import ComponentFailed, InvalidValue, NotPossibleNow
from toprope.records.journal.file_journal import FileJournal
from toprope.records.journal.groups import Counts, Group, Outcome
from toprope.training.api.clients.async_client import ApiClient
from toprope.training.api.clients.requests import Backoff, MissingRows
from toprope.training.api.clients.sync_client import SyncApiClient
from toprope.training.api.http.errors import Refused
from toprope.training.api.http.group_endpoints import GroupEndpoints
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


def test_async_client_posts_waits_and_counts(api: Served) -> None:
    async def work() -> None:
        async with ApiClient(api.url, SECRET) as client:
            assert [await client.post_group(a_group(mark, f"g{mark}")) for mark in (1, 2, 3)] == [1, 2, 3]
            assert await client.post_group(a_group(3, "g3")) == 3
            assert await client.wait_for_room(4) and not await client.wait_for_room(3, 0.01)
            assert await client.missing_rows() == MissingRows(version=0, rows=0)
            counts = await client.counts()
            assert (counts.accepted, counts.waiting, counts.duplicates) == (3, 3, 1)

    asyncio.run(work())


def test_groups_that_come_during_a_post_share_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused one among them fails alone."""
    paths: list[str] = []
    post = GroupEndpoints.post_group, GroupEndpoints.post_groups

    async def one(self: GroupEndpoints, *arguments: Any) -> None:
        paths.append("one")
        await post[0](self, *arguments)

    async def several(self: GroupEndpoints, *arguments: Any) -> None:
        paths.append("several")
        await post[1](self, *arguments)

    monkeypatch.setattr(GroupEndpoints, "post_group", one)
    monkeypatch.setattr(GroupEndpoints, "post_groups", several)
    bad = Group(tokens=[[1]], masks=[[1]], scores=[])

    async def work(url: str) -> None:
        async with ApiClient(url, SECRET) as client:
            found = await asyncio.gather(*(client.post_group(a_group(mark, f"g{mark}")) for mark in range(9)))
            assert found == [1] + [9] * 8 and paths == ["one", "several"]
            groups = [a_group(10, "g10"), a_group(11, "g11"), bad, a_group(12, "g12")]
            ends = await asyncio.gather(*map(client.post_group, groups), return_exceptions=True)
            assert isinstance(ends[2], Refused) and ends[2].field == "scores"
            assert all(isinstance(end, int) for end in (*ends[:2], ends[3]))
            counts = await client.counts()
            assert (counts.accepted, counts.duplicates, sum(counts.refused.values())) == (12, 0, 2)
            large = [a_group(mark, f"l{mark}") for mark in range(3)]
            for one in large:
                one.prompt = "x" * 600_000
            del paths[:]
            await asyncio.gather(*map(client.post_group, large))
            assert paths == ["one"] * 3

    with served(tmp_path / "bundles") as running:
        asyncio.run(work(running.url))
        with SyncApiClient(running.url, SECRET) as client:  # more than is sent as a whole
            found = client.next_batch(0, 30).batch
            assert found is not None
            assert [(one.group_id, len(one.prompt or "")) for one in found[12:]] == [
                (f"l{n}", 600_000) for n in range(3)
            ]


def test_cancelled_post_keeps_no_other_waiting(api: Served) -> None:
    async def work() -> int:
        async with ApiClient(api.url, SECRET) as client:
            posts = [asyncio.create_task(client.post_group(a_group(mark, f"g{mark}"))) for mark in range(3)]
            await asyncio.sleep(0)
            posts[0].cancel()
            await asyncio.gather(*posts, return_exceptions=True)
            assert posts[0].cancelled() and not client._posts
            return max(posts[1].result(), posts[2].result())

    assert asyncio.run(work()) in (2, 3)  # the first may have arrived


def test_cancelled_post_of_a_bundle_fails_nothing_else(api: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> list[Any]:
        async with ApiClient(api.url, SECRET) as client:
            posts: list[asyncio.Task[int]] = []
            send = client._send

            async def answered(request: Any) -> Any:
                answer = await send(request)
                if request.path == "/scored_data_list":
                    posts[2].cancel()
                    await asyncio.sleep(0)
                    await asyncio.sleep(0)
                return answer

            monkeypatch.setattr(client, "_send", answered)
            posts += [asyncio.create_task(client.post_group(a_group(mark, f"g{mark}"))) for mark in range(4)]
            found = await asyncio.gather(*posts, return_exceptions=True)
            assert posts[2].cancelled() and not client._posts
            return found

    found = asyncio.run(work())
    assert [found[0], found[1], found[3]] == [1, 4, 4]


def test_sync_client_reads_commits_and_reports_drops(api: Served) -> None:
    with SyncApiClient(api.url + "/", SECRET) as client:
        assert [client.post_group(a_group(mark, f"g{mark}")) for mark in (1, 2, 3)] == [1, 2, 3]
        batch = client.next_batch(0, 4, 1.0)
        assert batch.batch == [a_group(1, "g1"), a_group(2, "g2")]
        assert (batch.cursor, batch.sequence_numbers, batch.waiting) == (2, [1, 2], 1)
        assert client.next_batch(0, 4) == batch
        assert client.next_batch(2, 4).batch is None
        client.dropped([(1, "stale")])
        client.commit(2)
        counts = client.counts()
        assert (counts.accepted, counts.committed, counts.dropped) == (3, 1, {"stale": 1})
        assert client.take_up(0) == 2


def test_refusals_are_raised_as_typed_errors(api: Served) -> None:
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


def test_post_waits_while_queue_is_full(api: Served) -> None:
    async def work() -> int:
        async with ApiClient(api.url, SECRET) as client:
            for mark in range(4):
                await client.post_group(a_group(mark))
            posting = asyncio.create_task(client.post_group(a_group(4)))
            await asyncio.to_thread(until, lambda: api.store.queue.counts().refused.get("queue_full", 0))
            assert not posting.done()
            assert len(api.get("/batch?cursor=0&sequences=4")["batch"]) == 2
            return await posting

    assert asyncio.run(work()) == 3


def message(connection: socket.socket) -> bytes:
    """One HTTP message with its body; empty if the peer has left."""
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
    """A proxy to `target` that asks `breaks` about the nth connection (from 0).

    It forwards the connection (`pass`), drops it (`drop`), or forwards the request and drops the `answer`.
    """
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
def test_broken_connections_neither_lose_nor_duplicate_groups(api: Served, how: str) -> None:
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


def test_clients_continue_when_api_returns(tmp_path: Path) -> None:
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


def test_unreachable_api_is_an_error_after_patience() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    url = "http://{}:{}".format(*listener.getsockname())
    listener.close()

    async def work() -> None:
        async with ApiClient(url, SECRET, patience_s=0.1) as client:
            await client.counts()

    with pytest.raises(ComponentFailed, match="cannot be reached"):
        asyncio.run(work())


def test_backoff_patience_by_kind_of_failure() -> None:
    away = Backoff(30.0, away_s=60.0)
    assert away.after_error(OSError(), 0.0) == 0.0 and away.after_error(OSError(), 1.0) > 0
    # The patience begins anew after an absence.
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
    # A run is paused meanwhile, however long the owner takes to make room.
    assert backoff.after_refusal(Refused("disk_full", "", status=503), 1e9) == 0.5
    with pytest.raises(Refused, match="permanent"):
        backoff.after_refusal(Refused("bad_mask", "permanent"), 0.0)


def test_unexpected_answer_is_reported() -> None:
    refusal = Refused.parse(502, b"<html>bad gateway</html>")
    assert (refusal.kind, refusal.status) == ("unexpected_answer", 502) and "bad gateway" in refusal.message
    again = Refused.parse(422, Refused("bad_mask", "A mask.", field="masks[0]").body())
    assert (again.kind, again.message, again.field) == ("bad_mask", "A mask.", "masks[0]")


def test_post_succeeds_after_disk_was_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_clients_follow_the_api_to_a_new_address(tmp_path: Path) -> None:
    where: list[str | None] = [None]
    lookups: list[str | None] = []

    def resolve() -> str | None:
        lookups.append(where[0])
        return where[0]

    async def posts(first: str, second: str) -> tuple[int, Counts]:
        async with ApiClient(resolve, SECRET, patience_s=5.0) as client:
            posting = asyncio.create_task(client.post_group(a_group(0)))
            await asyncio.to_thread(until, lambda: len(lookups) > 2)
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
