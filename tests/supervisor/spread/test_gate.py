"""Gates carry bytes between the loopback interfaces of nodes, and let in only members of the run."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from toprope.supervisor.spread.credentials import contexts, make_identity
from toprope.supervisor.spread.gate import Gate, Place

Tls = tuple[ssl.SSLContext, ssl.SSLContext] | None


@pytest.fixture(scope="module")
def tls() -> Tls:
    return contexts(make_identity())


def run_with_echo(work: Callable[[int], Awaitable[None]]) -> None:
    """Run `work` beside a server that sends what it got back in capitals, on a loopback port."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(100):
                writer.write(data.upper())
        finally:
            writer.close()

    async def main() -> None:
        server = await asyncio.start_server(echo, "127.0.0.1", 0)
        await work(server.sockets[0].getsockname()[1])
        server.close()

    asyncio.run(asyncio.wait_for(main(), 20))


def test_system_without_files_in_memory_leaves_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    server, client = contexts(make_identity())
    assert server.cert_store_stats() == client.cert_store_stats() and not list(tmp_path.iterdir())


async def ask(url: str, data: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    try:
        writer.write(data)
        return await reader.readexactly(len(data))
    finally:
        writer.close()


@pytest.mark.parametrize("trusted", [False, True])
def test_member_reaches_a_port_of_another_node(tls: Tls, trusted: bool) -> None:
    async def work(port: int) -> None:
        keys = None if trusted else tls
        there, here = Gate("there", "127.0.0.2", keys), Gate("here", "127.0.0.3", keys)
        announced = await there.announce(f"http://127.0.0.1:{port}")
        assert Place.parse(announced) is not None and "127.0.0.2" in announced
        assert await there.reach(announced) == f"http://127.0.0.1:{port}"  # on one node there is nothing between
        url = await here.reach(announced)
        assert url == await here.reach(announced) != f"http://127.0.0.1:{port}"
        assert await ask(url, b"some words") == b"SOME WORDS"
        there.close()
        here.close()

    run_with_echo(work)


@pytest.mark.parametrize("address", ["/policies/tiny", "checked", "", "http://10.0.0.1:80", "http://localhost"])
def test_addresses_of_other_kinds_stay(address: str) -> None:
    async def work() -> None:
        gate = Gate("here", "127.0.0.2", None)
        assert await gate.announce(address) == await gate.reach(address) == address

    asyncio.run(work())


def test_gate_refuses_who_does_not_belong_to_the_run(tls: Tls) -> None:
    stranger = contexts(make_identity())[1]
    nobody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    nobody.check_hostname, nobody.verify_mode = False, ssl.CERT_NONE

    async def work(port: int) -> None:
        there = Gate("there", "127.0.0.2", tls)
        place = Place.parse(await there.announce(f"http://127.0.0.1:{port}"))
        assert place is not None
        for context in (stranger, nobody, None):
            with pytest.raises((OSError, EOFError)):
                reader, writer = await asyncio.open_connection(place.host, place.gate, ssl=context)
                try:
                    writer.write(b"some words")
                    await reader.readexactly(1)
                finally:
                    writer.close()
        there.close()

    run_with_echo(work)


def test_member_calls_no_gate_of_a_stranger(tls: Tls) -> None:
    async def work(port: int) -> None:
        there, here = Gate("there", "127.0.0.2", contexts(make_identity())), Gate("here", "127.0.0.3", tls)
        url = await here.reach(await there.announce(f"http://127.0.0.1:{port}"))
        with pytest.raises((ConnectionError, EOFError)):
            await ask(url, b"the run's secret")
        there.close()
        here.close()

    run_with_echo(work)


def test_broken_connection_is_broken_for_the_caller() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]

    async def work() -> None:
        here = Gate("here", "127.0.0.3", None)
        url = await here.reach(str(Place("127.0.0.2", port, "there", 1)))
        with pytest.raises((ConnectionError, EOFError)):
            await ask(url, b"anybody?")
        here.close()

    asyncio.run(asyncio.wait_for(work(), 20))
