"""The wire between a cluster and its server: what arrives, what a cut or a rewrite does, and what is refused."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from tests.support import records
from tests.support.run_harness import RunHarness
from toprope.atomic import write_json
from toprope.errors import NotPossibleNow
from toprope.records.run.checkpoints import checkpoint_of, seal
from toprope.records.run.folder import RunFolder
from toprope.records.run.launch import Launch, kept_there, wanted
from toprope.records.run.status import EventLog, Status, read_events
from toprope.settings.clusters import Mirror
from toprope.supervisor.lock import RunLock
from toprope.supervisor.mirror import receiver, sender
from toprope.supervisor.mirror.receiver import Receiver, listen
from toprope.supervisor.mirror.sender import Sender
from toprope.supervisor.mirror.wire import CHUNK, Prefix, Refused, Wire, bearer, run_key, tls

KEEPER = "keeper one"


class Sides:
    """A run on both sides: `here` at the server, `there` on the cluster."""

    def __init__(self, path: Path, harness: RunHarness, *, trusted: bool = False, **limits: int) -> None:
        self.trusted, specification = trusted, harness.specification()
        self.key = run_key("k" * 32, specification.run_id, 1)
        self.mirror = Mirror(host="127.0.0.1", home=str(path), key_file="none", **limits)
        self.here = RunFolder.create(path / "here", specification.run_id)
        self.there = RunFolder.create(path / "there", specification.run_id)
        specification.write(self.here)
        Launch(
            kind="slurm", cluster="lab", attempt=1, name=f"{specification.run_id}.1", mirror="127.0.0.1:1",
            submitted_at=0, deadline=0,
        ).write(self.here)  # fmt: skip
        self.status = records.status(specification.run_id)
        for folder in (self.here, self.there):
            self.status.write(folder)
        self.there.lock.touch()
        self.port, self.wires = 0, list[Wire]()
        self.serve()
        self.sender = self.begin()

    def serve(self) -> None:
        """Start the receiver, on the former port if there was one."""
        self.loop, self.lock = asyncio.new_event_loop(), RunLock.acquire(self.here.lock)
        assert self.lock is not None
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()

        async def start() -> Any:
            serving = Receiver(self.here, self.lock, self.key, self.mirror)  # type: ignore[arg-type]
            return await listen(serving.app(), self.mirror, self.port, self.key, trusted=self.trusted)

        self.runner = asyncio.run_coroutine_threadsafe(start(), self.loop).result(20)
        self.port = self.runner.addresses[0][1]

    def end(self) -> None:
        """End the receiver as its loss does."""
        asyncio.run_coroutine_threadsafe(self.runner.cleanup(), self.loop).result(20)
        asyncio.run_coroutine_threadsafe(self.loop.shutdown_default_executor(), self.loop).result(20)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()
        assert self.lock is not None
        self.lock.release()

    def wire(self, keeper: str = KEEPER) -> Wire:
        self.wires.append(Wire(f"127.0.0.1:{self.port}", self.key, trusted=self.trusted, keeper=keeper))
        return self.wires[-1]

    def begin(self) -> Sender:
        wire = self.wire()
        wire.ask("POST", "/begin", json={"job": f"{self.here.run_id}.1"})
        return Sender(self.there, wire, 1)

    def close(self) -> None:
        """End both sides."""
        for wire in self.wires:
            wire._client.close()
        self.end()

    def put(self, path: str, data: bytes = b"x", **query: Any) -> int:
        return self.wire()._client.put("/file", params={"path": path, **query}, content=data).status_code


@pytest.fixture
def sides(tmp_path: Path, harness: RunHarness) -> Iterator[Sides]:
    made = Sides(tmp_path, harness)
    yield made
    made.close()


def same(sides: Sides) -> None:
    """Fail unless every mirrored file is the same on both sides."""
    for place in ("", "evaluations", "journal", "logs"):
        here, there = (
            {path.name: path.read_bytes() for path in (folder.path / place).iterdir() if path.is_file()}
            for folder in (sides.here, sides.there)
        )
        for owned in ("spec.json", "launch.json", "keeper.lock", "kept.json", "wanted.json", "mirror.log"):
            here.pop(owned, None)
            there.pop(owned, None)
        assert here == there, place


def write_some(folder: RunFolder, number: int) -> None:
    EventLog(folder).append("warning", what=f"number {number}")
    with folder.metrics.open("ab") as file:
        file.write(b'{"step": %d}\n' % number)
    with (folder.journal / "00000001.journal").open("ab") as file:
        file.write(os.urandom(3000))
    write_json(folder.evaluation(f"step-{number}"), {"label": number})
    folder.log("trainer").write_text(f"line {number}\n" * number)


def test_far_run_is_the_same_here_while_it_grows(sides: Sides) -> None:
    for number in range(1, 4):
        write_some(sides.there, number)
        sides.sender._look(last=False)
        same(sides)
    (sides.there.journal / "00000001.journal").rename(sides.there.journal / "00000001.journal.zst")
    with sides.there.metrics.open("ab") as file:
        file.write(b'{"step": 4')  # a row that is being written
    sides.sender._look(last=False)
    assert sides.here.metrics.read_bytes().endswith(b'{"step": 3}\n')
    assert [path.name for path in sides.here.journal.iterdir()] == ["00000001.journal.zst"]


@pytest.mark.parametrize("cut", [0, 17, 3000, 3001])
def test_cut_transfer_goes_on_where_it_was_cut(sides: Sides, cut: int) -> None:
    """The server died after so many bytes of each file; both sides begin again."""
    write_some(sides.there, 1)
    write_some(sides.there, 2)
    sides.sender._look(last=False)
    for path in (sides.here.events, sides.here.metrics, sides.here.journal / "00000001.journal"):
        os.truncate(path, min(cut, path.stat().st_size))
    if cut == 17:  # only the receiver died, and the connection with it
        sides.close()
        sides.serve()
        sides.sender._wire = sides.wire()
    else:
        sides.sender = sides.begin()
    write_some(sides.there, 3)
    sides.sender._look(last=False)
    same(sides)
    assert [event.seq for event in read_events(sides.here.events)] == [1, 2, 3]


def test_body_that_is_cut_leaves_nothing(sides: Sides) -> None:
    write_some(sides.there, 1)
    sides.sender._look(last=False)
    size = sides.here.events.stat().st_size
    head = f"PUT /file?path=events.jsonl&at={size}&head={'0' * 64} HTTP/1.1\r\nHost: h\r\nX-Keeper: {KEEPER}\r\n"
    head += f"Authorization: {bearer(sides.key)}\r\nContent-Length: 100\r\n\r\nhalf of it"
    with socket.create_connection(("127.0.0.1", sides.port), timeout=20) as plain:
        with tls(sides.key)[1].wrap_socket(plain) as encrypted:
            encrypted.sendall(head.encode())
    write_some(sides.there, 2)
    sides.sender._look(last=False)
    same(sides)


def test_rewound_or_rewritten_file_is_found(sides: Sides) -> None:
    for number in range(1, 4):
        write_some(sides.there, number)
    sides.sender._look(last=False)
    os.truncate(sides.there.metrics, 12)  # rewound
    sides.there.events.write_bytes(sides.there.events.read_bytes().replace(b"number", b"NUMBER") + b'{"more": 1}\n')
    sides.sender._look(last=False)
    same(sides)
    sides.there.metrics.write_bytes(b'{"step": 9}\n{"step": 10}\n')
    sides.sender = sides.begin()  # and by a job that knows nothing of what was sent
    sides.sender._look(last=False)
    same(sides)


def test_order_goes_to_the_cluster_once(sides: Sides) -> None:
    write_json(sides.here.orders / "stop-1234abcd.json", {"order": "stop"})
    (sides.here.orders / "note.json").write_text("{}")  # no order that a keeper knows
    sides.sender._look(last=False)
    [order] = sides.there.orders.glob("*.json")
    assert order.name == "stop-1234abcd.json"
    order.unlink()
    sides.sender._look(last=False)
    assert not list(sides.there.orders.glob("*.json")) and not (sides.here.orders / order.name).exists()


def test_cluster_cannot_write_what_the_server_owns(sides: Sides) -> None:
    """The last one is a checkpoint that nobody asked for."""
    paths = [
        *("spec.json", "launch.json", "keeper.lock", "kept.json", "wanted.json", ".variables-1.json", "crew", "logs"),
        *("orders/stop-1.json", "crew/claim-1", "../other", "/etc/passwd", "logs/../../x", "logs/mirror.log"),
        *("journal/.x", "a\nb", "a/b", "", "checkpoints/step-000001/state.json", "evaluations/a/b"),
        *("Spec.json", "KEEPER.LOCK", "logs/Mirror.log", "Orders"),  # the same files, on some systems
        *("checkpoints/.step-000001/../../spec.json", "checkpoints/.step-000001/state.json"),
    ]
    before = {one: one.read_bytes() for one in sides.here.path.parent.parent.rglob("*") if one.is_file()}
    client, empty = sides.wire()._client, {"at": 0, "head": Prefix().head}
    queries: list[dict[str, Any]] = [{"whole": 1}, {**empty}, {"anew": 1, **empty}]
    for path in paths:
        for query in queries:
            assert client.put("/file", params={"path": path, **query}, content=b"x").status_code == 400, path
    assert {one: one.read_bytes() for one in sides.here.path.parent.parent.rglob("*") if one.is_file()} == before


def test_link_in_the_copy_is_not_followed(sides: Sides, tmp_path: Path) -> None:
    (tmp_path / "outside").write_text("mine")
    sides.here.metrics.symlink_to(tmp_path / "outside")
    assert sides.put("metrics.jsonl", anew=1, at=0, head=Prefix().head) == 507
    assert (tmp_path / "outside").read_text() == "mine"


def test_false_account_of_the_folder_touches_only_the_copy(sides: Sides) -> None:
    write_some(sides.there, 1)
    sides.sender._look(last=False)
    write_json(sides.here.orders / "stop-1.json", {"order": "stop"})
    (sides.here.log("mirror")).write_text("mine")
    outside = sides.here.path.parent / "other.json"
    outside.write_text("{}")
    told: dict[str, Any] = {"names": [], "complete": ["../x", "step-000001/x", ""], "beat": 1}
    told |= {"kept": {"step-000001/../x": 1, "..": 2}}
    told |= {"taken": ["../spec.json", "../../other.json", "/etc/x.json"], "last": False}
    answer = sides.wire().ask("POST", "/pass", json=told).json()
    assert answer["wanted"] == [] and list(answer["orders"]) == ["stop-1.json"] and not answer["over"]
    kept = {"spec.json", "launch.json", "keeper.lock", "status.json", "logs/mirror.log", "orders/stop-1.json"}
    names = {path.relative_to(sides.here.path).as_posix() for path in sides.here.path.rglob("*") if path.is_file()}
    assert names - {"crew/claim-1"} == kept and outside.exists()
    wire = sides.wire()
    wrongs: list[Any] = [{}, {**told, "names": None}, {**told, "kept": []}, {**told, "beat": "x"}, []]
    for wrong in wrongs:
        assert wire._client.post("/pass", json=wrong).status_code == 400
    for text in (json.dumps(told | {"beat": float("inf")}), "[" * 100_000):
        assert wire._client.post("/pass", content=text).status_code == 400
    assert wire._client.get("/file", params={"path": "input/7", "at": 0}).status_code == 400
    sides.sender = sides.begin()
    sides.sender._look(last=False)
    same(sides)


def test_status_of_another_run_is_refused(sides: Sides) -> None:
    outside = {"checkpoint": {"step": 1, "path": "checkpoints/step-000001/../x"}}
    for change in ({"run_id": "run-other"}, {"attempt": 2}, {"kind": "test"}, outside):
        text = sides.status.model_copy(update=change).model_dump_json().encode()
        assert sides.put("status.json", text, whole=1) == 400, change
    assert sides.put("status.json", b"{}", whole=1) == 400
    size = sides.here.status.stat().st_size
    for at, query in ((size, {}), (0, {"anew": 1})):  # in parts, readers would see half of it
        head = Prefix.of(sides.here.status, at).head
        assert sides.put("status.json", sides.status.model_dump_json().encode(), at=at, head=head, **query) == 400
    assert Status.read(sides.here) == sides.status


def test_sizes_are_bounded(tmp_path: Path, harness: RunHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    sides = Sides(tmp_path, harness, most_mb=1)
    try:
        write_some(sides.there, 1)
        sides.there.log("trainer").write_bytes(b"x" * 1_500_000)
        sides.sender._look(last=False)
        assert not sides.here.log("trainer").exists() or sides.here.log("trainer").stat().st_size < 1_000_000
        assert sides.here.metrics.read_bytes() == sides.there.metrics.read_bytes()  # everything else arrives
        assert sides.put("big.json", b"x" * (17 << 20), whole=1) == 413
        sent, ask = list[str](), sides.sender._wire.ask

        def counted(method: str, path: str, **named: Any) -> httpx.Response:
            sent.append(named.get("params", {}).get("path"))
            return ask(method, path, **named)

        monkeypatch.setattr(sides.sender._wire, "ask", counted)
        with sides.there.log("trainer").open("ab") as file:
            file.write(b"more")
        sides.sender._look(last=False)
        assert sent == [None]  # a file without room is not sent again and again
        monkeypatch.setattr(sender, "_ROOM_S", 0.0)
        sides.sender._look(last=False)
        assert "logs/trainer.log" in sent
    finally:
        sides.close()


def test_status_without_room_is_sent_again(sides: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = sides.status.model_copy(update={"state": "stopped", "ended_at": 2.0})
    ended.write(sides.there)
    with monkeypatch.context() as full, pytest.raises(OSError, match="No space left"):
        full.setattr(receiver, "replacing", lambda path: (_ for _ in ()).throw(OSError(errno.ENOSPC, "")))
        sides.sender._look(last=True)
    assert not sides.sender.arrived and Status.read(sides.here).ended_at is None
    sides.sender._look(last=True)
    assert sides.sender.arrived and Status.read(sides.here) == ended


def test_line_longer_than_a_chunk_arrives(sides: Sides) -> None:
    with sides.there.events.open("ab") as file:
        file.write(b'{"what": "%s"}\n' % (b"x" * CHUNK))
    write_some(sides.there, 1)
    sides.sender._look(last=False)
    same(sides)


def test_bodies_are_bounded_in_number(tmp_path: Path, harness: RunHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiver, "_MOST_BODIES", 1)
    sides = Sides(tmp_path, harness)
    monkeypatch.setattr(receiver, "_BODY_S", 0.2)
    head = f"PUT /file?path=x&whole=1 HTTP/1.1\r\nHost: h\r\nX-Keeper: {KEEPER}\r\nAuthorization: "
    head += f"{bearer(sides.key)}\r\nContent-Length: 100\r\n\r\nhalf of it"
    context, begun = tls(sides.key)[1], time.monotonic()
    plain = [socket.create_connection(("127.0.0.1", sides.port), timeout=20) for _ in range(2)]
    stuck = [context.wrap_socket(one) for one in plain]
    try:
        for one in stuck:
            one.sendall(head.encode())
        assert all(b" 408 " in one.recv(100) for one in stuck)
        assert time.monotonic() - begun >= 0.4  # one waited for the other
        sides.sender._look(last=False)
    finally:
        for one in stuck:
            one.close()
        sides.close()


def test_trusted_network_needs_the_key_in_clear(tmp_path: Path, harness: RunHarness) -> None:
    sides = Sides(tmp_path, harness, trusted=True)
    try:
        write_some(sides.there, 1)
        sides.sender._look(last=False)
        same(sides)
        assert httpx.post(f"http://127.0.0.1:{sides.port}/begin", json={}).status_code == 401
    finally:
        sides.close()


def test_strangers_and_former_jobs_are_refused(sides: Sides) -> None:
    other = run_key("k" * 32, sides.here.run_id, 2)
    with pytest.raises(httpx.HTTPError):  # TLS with another run's certificate
        Wire(f"127.0.0.1:{sides.port}", other, trusted=False).ask("POST", "/pass")
    with pytest.raises(httpx.HTTPError):
        httpx.post(f"https://127.0.0.1:{sides.port}/pass", verify=False)
    with pytest.raises(httpx.HTTPError):
        httpx.post(f"http://127.0.0.1:{sides.port}/pass")
    wire = sides.wire()
    wire._client.headers["Authorization"] = bearer(other)
    with pytest.raises(httpx.HTTPError):  # the port may be another run's for a while
        wire.ask("POST", "/pass")
    for keeper in ("keeper two", "", "front end"):
        with pytest.raises(Refused):
            sides.wire(keeper).ask("PUT", "/file", params={"path": "metrics.jsonl", "whole": 1}, content=b"")
    with pytest.raises(Refused, match="claimed"):
        sides.wire("keeper two").ask("POST", "/begin", json={"job": f"{sides.here.run_id}.1"})
    with pytest.raises(Refused, match="is over"):
        sides.wire("keeper two").ask("POST", "/begin", json={"job": f"{sides.here.run_id}.2"})
    sides.sender._look(last=False)  # the run's own job goes on


def make_checkpoint(folder: RunFolder, step: int) -> Path:
    path = folder.checkpoints / f"step-{step:06d}"
    (path / "model").mkdir(parents=True)
    write_json(path / "state.json", {"version": 2, "step": step, "cursor": 7})
    (path / "model" / "weights.safetensors").write_bytes(os.urandom(CHUNK + 1000))
    seal(path)
    return path


def test_checkpoint_comes_when_it_is_asked_for_and_the_newest_at_the_end(sides: Sides) -> None:
    paths = [make_checkpoint(sides.there, step) for step in (10, 20)]
    sides.sender._look(last=False)
    assert not list(sides.here.checkpoints.iterdir())
    with pytest.raises(NotPossibleNow, match="Step 10 of .* is on its cluster"):
        checkpoint_of(sides.here, 10)
    for _ in range(3):
        sides.sender._look(last=False)
    assert checkpoint_of(sides.here, 10).step == 10 and not wanted(sides.here)
    ended = sides.status.model_copy(update={"state": "stopped", "ended_at": 2.0})
    ended.write(sides.there)
    for _ in range(4):
        sides.sender._look(last=True)
    assert sides.sender.arrived and checkpoint_of(sides.here).step == 20
    for path in paths:
        for file in path.rglob("*"):
            if file.is_file():
                copy = sides.here.checkpoints / file.relative_to(sides.there.checkpoints)
                assert copy.read_bytes() == file.read_bytes()


def hollow(folder: RunFolder, step: int) -> Path:
    path = folder.checkpoints / f"step-{step:06d}"
    path.mkdir()
    return path


def test_finished_checkpoint_is_measured_once(sides: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = list[Path]()

    def measure(path: Path) -> int:
        measured.append(path)
        return 7

    monkeypatch.setattr(sender, "folder_bytes", measure)
    monkeypatch.setattr(Path, "rglob", lambda path, pattern: pytest.fail(f"{path} was walked"))
    first = hollow(sides.there, 10)
    for _ in range(3):
        sides.sender._look(last=False)
    second = hollow(sides.there, 20)
    sides.sender._look(last=False)
    shutil.rmtree(first)
    sides.sender._look(last=False)
    assert measured == [first, second] and kept_there(sides.here) == {"step-000020": 7}


def test_checkpoint_that_nobody_wants_any_more_stops_nothing(sides: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender, "_AGAIN_S", 0.01)
    make_checkpoint(sides.there, 10)
    make_checkpoint(sides.there, 20)
    sides.status.model_copy(update={"state": "stopped", "ended_at": 2.0}).write(sides.there)
    sides.sender._wanted = ["step-000010"]  # the answer that took it back was lost
    sides.sender.start()
    assert sides.sender.finish(20) and checkpoint_of(sides.here).step == 20


def test_checkpoint_of_a_newer_version_stops_nothing(sides: Sides) -> None:
    path = make_checkpoint(sides.there, 10)
    write_json(path / "manifest.json", {"version": 99})
    sides.status.model_copy(update={"state": "stopped", "ended_at": 2.0}).write(sides.there)
    for _ in range(4):
        sides.sender._look(last=True)
    assert sides.sender.arrived and not list(sides.here.checkpoints.glob("step-*"))


def test_damaged_checkpoint_takes_no_place(sides: Sides) -> None:
    path = make_checkpoint(sides.there, 10)
    (path / "model" / "weights.safetensors").write_bytes(b"other")
    sides.status.model_copy(update={"state": "stopped", "ended_at": 2.0}).write(sides.there)
    for _ in range(4):
        sides.sender._look(last=True)
    assert sides.sender.arrived and not list(sides.here.checkpoints.glob("step-*"))
