"""A server stays reachable while strangers hold connections open, and gives up slow requests."""

import asyncio
import socket
from contextlib import asynccontextmanager, nullcontext

import pytest
import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol
from uvicorn.protocols.http.h11_impl import H11Protocol

from benchmarks.hostile.connections import API, besieged
from toprope.bounded_http import admit, bounded

HALF = b"POST / HTTP/1.1\r\nHost: a\r\nX-A: "
WHOLE = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
KNOWN = b"GET / HTTP/1.1\r\nHost: a\r\nAuthorization: yes\r\n\r\n"
BODY = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n123"


async def application(scope, receive, send):
    if dict(scope["headers"]).get(b"authorization"):
        admit(scope)
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


class Server(uvicorn.Server):
    def capture_signals(self):
        return nullcontext()


@asynccontextmanager
async def served(protocol=AutoHTTPProtocol, **options):
    listening = socket.create_server(("127.0.0.1", 0))
    http = bounded(protocol, **{"most": 50, "head_s": 0.3, "body_s": 0.3} | options)
    server = Server(uvicorn.Config(application, http=http, log_level="critical", lifespan="off", timeout_keep_alive=60))
    task = asyncio.create_task(server.serve(sockets=[listening]))
    while not server.started:
        await asyncio.sleep(0.005)
    try:
        yield listening.getsockname()[1]
    finally:
        server.should_exit = server.force_exit = True
        await task
        listening.close()


async def connect(port, data=b""):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    return reader, writer


async def all_of(reader):
    """Everything until the server closes the connection."""
    found = b""
    try:
        while part := await asyncio.wait_for(reader.read(4096), 10):
            found += part
    except ConnectionError:
        pass
    return found


@pytest.mark.parametrize("protocol", [AutoHTTPProtocol, H11Protocol])
@pytest.mark.parametrize("data", [b"", b"G", HALF, BODY, WHOLE])
def test_slow_requests_are_given_up(protocol, data):
    async def work():
        async with served(protocol) as port:
            reader, writer = await connect(port, data)
            if data == WHOLE:
                assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
                writer.write(b"G")
            found = await all_of(reader)
            writer.close()
            return found

    assert asyncio.run(work()).endswith(b"content-length: 0\r\n\r\n")


def test_strangers_make_room_before_clients_with_a_key():
    async def work():
        async with served(most=4, head_s=60.0) as port:
            friend, writer = await connect(port, KNOWN)
            assert (await friend.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
            crowd = [await connect(port, data) for data in (b"", HALF, b"G") * 4]
            await asyncio.sleep(0.2)
            writer.write(KNOWN)
            assert (await friend.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
            late, other = await connect(port, WHOLE)
            assert (await late.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
            for one in (writer, other, *(writer for _, writer in crowd)):
                one.close()

    asyncio.run(work())


@pytest.mark.parametrize("walls", [True, False])
def test_two_thousand_half_open_connections_leave_the_api_reachable(tmp_path, walls):
    found = besieged(API, tmp_path, "/info", seconds=3.0, walls=walls)
    assert (found["down"] == 0) == walls, found
