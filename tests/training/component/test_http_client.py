"""The client of a crew's servers keeps its connections, and says when one broke or no answer came."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest

from toprope.training.component.http_client import HttpConnections

_Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\nX-Life: one\r\nContent-Length: 2\r\n\r\nok"


def against(talk: _Talk, use: Callable[[str, HttpConnections], Awaitable[None]]) -> int:
    """Serves every connection by `talk` while `use` runs; returns the number of connections."""
    count = 0

    async def run() -> None:
        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal count
            count += 1
            with suppress(asyncio.IncompleteReadError, ConnectionError):
                await talk(reader, writer)
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

        server = await asyncio.start_server(accept, "127.0.0.1", 0)
        client = HttpConnections({"Authorization": "Bearer key"})
        try:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            await asyncio.wait_for(use(url, client), 10)
        finally:
            await client.close()
            server.close()
            while len(asyncio.all_tasks()) > 1:  # the connections' own
                await asyncio.sleep(0.01)

    asyncio.run(run())
    return count


async def read(reader: asyncio.StreamReader) -> bytes:
    """One request with its body."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = next((int(line[16:]) for line in head.split(b"\r\n") if line.startswith(b"content-length: ")), 0)
    return head + await reader.readexactly(length)


def test_requests_share_connections_and_carry_headers_and_body() -> None:
    seen: list[bytes] = []

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            seen.append(await read(reader))
            writer.write(OK)

    async def use(url: str, client: HttpConnections) -> None:
        for _ in range(3):
            answer = await client.request("POST", f"{url}/run", "/x?y=1", body=b"body", timeout_s=5)
            assert (answer.status, answer.headers["x-life"], answer.body) == (200, "one", b"ok")
        await asyncio.gather(*(client.request("GET", f"{url}/run", "/", timeout_s=5) for _ in range(2)))

    assert against(talk, use) == 2
    assert seen[0].startswith(b"POST /run/x?y=1 HTTP/1.1\r\n") and seen[0].endswith(b"\r\n\r\nbody")
    assert b"Authorization: Bearer key\r\n" in seen[0]
    assert seen[-1].startswith(b"GET /run/ HTTP/1.1\r\n") and b"content-length" not in seen[-1]


def test_answer_in_pieces_is_whole_and_a_closed_connection_is_not_used_again() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read(reader)
        for part in (b"HTTP/1.1 503 Busy\r\nConnection: close\r\nTransfer-Enc", b"oding: chunked\r\n\r\n2\r\nno\r\n"):
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0)
        writer.write(b"2\r\nw!\r\n0\r\n\r\n")

    async def use(url: str, client: HttpConnections) -> None:
        for _ in range(2):
            answer = await client.request("GET", url, "/", timeout_s=5)
            assert (answer.status, answer.body) == (503, b"now!")

    assert against(talk, use) == 2


@pytest.mark.parametrize(
    "sent", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf", b"\x16\x03\x01 not http\r\n"]
)
def test_a_broken_answer_is_an_error_that_may_be_repeated(sent: bytes) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read(reader)
        writer.write(sent)

    async def use(url: str, client: HttpConnections) -> None:
        with pytest.raises(ConnectionError):
            await client.request("GET", url, "/", timeout_s=5)

    assert against(talk, use) == 1


def test_a_late_answer_times_out_and_a_cancelled_request_closes_its_connection() -> None:
    begun = ended = 0

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal begun, ended
        await read(reader)
        begun += 1
        with suppress(ConnectionError):
            assert await reader.read() == b""
        ended += 1

    async def use(url: str, client: HttpConnections) -> None:
        with pytest.raises(TimeoutError):
            await client.request("GET", url, "/", timeout_s=0.05)
        asking = asyncio.create_task(client.request("GET", url, "/", timeout_s=5))
        while begun < 2:
            await asyncio.sleep(0.01)
        asking.cancel()
        while ended < 2:
            await asyncio.sleep(0.01)

    assert against(talk, use) == 2


def test_no_server_is_an_error_that_may_be_repeated() -> None:
    async def run() -> None:
        server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        server.close()
        await server.wait_closed()
        with pytest.raises(OSError):
            await HttpConnections().request("GET", url, "/", timeout_s=5)

    asyncio.run(run())


def test_interim_answers_are_passed_over_and_another_protocol_is_refused() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read(reader)
        writer.write(b"HTTP/1.1 103 Early Hints\r\nX-Life: none\r\n\r\n" + OK)
        await read(reader)
        writer.write(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n")
        await reader.read()

    async def use(url: str, client: HttpConnections) -> None:
        answer = await client.request("GET", url, "/a", timeout_s=5)
        assert (answer.status, answer.body, answer.headers["x-life"]) == (200, b"ok", "one")
        with pytest.raises(ConnectionError, match="does not speak HTTP"):
            await client.request("GET", url, "/b", timeout_s=5)

    assert against(talk, use) == 1
