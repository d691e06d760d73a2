"""Request bodies arrive unchanged however they are sent, and the connection stays usable."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.training_api_server import SECRET, Served, group, served, until
from toprope.training.api.intake.validation import Limits

HEAD = f"Host: localhost\r\nAuthorization: Bearer {SECRET}\r\n"


@pytest.fixture
def api(tmp_path: Path) -> Iterator[Served]:
    with served(tmp_path / "journal", limits=Limits(body_bytes=400_000)) as running:
        yield running


def body(mark: int, tokens: int = 20_000) -> bytes:
    """A group of about 300 KB."""
    row = [mark, *[12_345] * tokens]
    return json.dumps(group(1) | {"tokens": [row], "masks": [row], "scores": [1.0]}).encode()


def request(data: bytes, path: str = "/scored_data", more: str = "") -> bytes:
    return f"POST {path} HTTP/1.1\r\n{HEAD}Content-Length: {len(data)}\r\n{more}\r\n".encode() + data


def answer(raw: socket.socket) -> tuple[int, dict[str, object]]:
    """One answer, read to its end."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += raw.recv(65_536) or pytest.fail(f"closed after {data!r}")
    head, _, rest = data.partition(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
    while len(rest) < length:
        rest += raw.recv(65_536)
    return int(head[9:12]), json.loads(rest)


def connect(api: Served) -> socket.socket:
    raw = socket.create_connection(api.address, timeout=10)
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return raw


@pytest.mark.parametrize("pieces", [1, 2, 7, 40])
def test_body_arrives_whole_when_sent_in_pieces(api: Served, pieces: int) -> None:
    with connect(api) as raw:
        for number in range(1, 4):  # on one connection
            sent = request(body(number))
            step = len(sent) // pieces + 1
            for at in range(0, len(sent), step):
                raw.sendall(sent[at : at + step])
            status, read = answer(raw)
            assert (status, read["sequence_number"]) == (200, number)
        raw.sendall(f"GET /counts HTTP/1.1\r\n{HEAD}\r\n".encode())
        assert answer(raw)[1]["accepted"] == 3
    for number in range(1, 4):
        assert api.journal.read(number) == body(number)


def test_head_may_arrive_in_pieces_before_the_body(api: Served) -> None:
    data = body(1)
    head, _, _ = request(data).partition(data)
    with connect(api) as raw:
        for at in range(0, len(head), 9):
            raw.sendall(head[at : at + 9])
        raw.sendall(data)
        assert answer(raw)[0] == 200


def test_expect_100_continue_is_answered(api: Served) -> None:
    data = body(1)
    head, _, _ = request(data, more="Expect: 100-continue\r\n").partition(data)
    with connect(api) as raw:
        raw.sendall(head)
        assert raw.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        raw.sendall(data)
        assert answer(raw)[0] == 200


def test_connection_survives_a_refused_body(api: Served) -> None:
    large = b" " * 400_001
    with connect(api) as raw:
        raw.sendall(request(large))
        assert answer(raw)[0] == 413
        raw.sendall(request(body(1)))
        assert answer(raw)[0] == 200


def test_pipelined_requests_are_answered_in_order(api: Served) -> None:
    with connect(api) as raw:
        small = json.dumps(group(1)).encode()
        raw.sendall(request(small) + request(small) + f"GET /status HTTP/1.1\r\n{HEAD}\r\n".encode() + request(body(2)))
        waiting = b""
        while waiting.count(b'"waiting"') < 3:
            waiting += raw.recv(65_536) or pytest.fail(f"closed after {waiting!r}")
        numbers = [int(part.split(b",")[0]) for part in waiting.split(b'"sequence_number":')[1:]]
    assert numbers == [1, 2, 3]


def test_client_that_leaves_within_its_body_stores_nothing(api: Served) -> None:
    raw = connect(api)
    raw.sendall(request(body(1))[:150_000])
    raw.close()
    with connect(api) as other:
        other.sendall(request(body(2)))
        assert answer(other)[1]["sequence_number"] == 1
    until(lambda: api.get("/counts")["accepted"] == 1)


def test_chunked_body_is_accepted(api: Served) -> None:
    data = body(1)
    with connect(api) as raw:
        raw.sendall(f"POST /scored_data HTTP/1.1\r\n{HEAD}Transfer-Encoding: chunked\r\n\r\n".encode())
        for at in range(0, len(data), 50_000):
            part = data[at : at + 50_000]
            raw.sendall(b"%x\r\n%s\r\n" % (len(part), part))
        raw.sendall(b"0\r\n\r\n")
        assert answer(raw)[0] == 200
    assert api.journal.read(1) == data
