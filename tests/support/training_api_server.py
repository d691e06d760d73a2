"""The trajectory API on a real socket in the test process, and raw requests to it."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from toprope.records.journal.file_journal import FileJournal
from toprope.training.api.__main__ import protocol
from toprope.training.api.http.app import create_app
from toprope.training.api.intake.version_matching import InferenceMatcher
from toprope.training.api.storage.group_commit import GroupCommit
from toprope.training.api.storage.store import TrajectoryStore
from toprope.training.component.http_server import serve

SECRET = "correct-horse"
REGISTRATION = {
    "wandb_group": "g", "wandb_project": "p", "batch_size": 16, "max_token_len": 64, "checkpoint_dir": "/c",
    "save_checkpoint_interval": 5, "starting_step": 0, "num_steps": 100,
}  # fmt: skip
ENVIRONMENT = {"max_token_length": 64, "desired_name": "words", "weight": 1.0, "group_size": 8}


def group(mark: int = 1, rows: int = 8, **fields: Any) -> dict[str, Any]:
    """A group whose rows all begin with `mark`."""
    return {
        "tokens": [[mark, 2, 3]] * rows,
        "masks": [[-100, 2, 3]] * rows,
        "scores": [float(n % 2) for n in range(rows)],
    } | fields


def marks(batch: dict[str, Any]) -> list[int] | None:
    """The marks of a batch's groups."""
    return None if batch["batch"] is None else [group["tokens"][0][0] for group in batch["batch"]]


def until(condition: Callable[[], Any], seconds: float = 30.0) -> Any:
    """Wait for a condition; fail if it does not become true in time."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "the condition did not become true in time"
        time.sleep(0.005)
    return value


@dataclass
class Served:
    """A running API. Its thread owns store and journal, so tests only read them."""

    url: str
    store: TrajectoryStore
    journal: FileJournal
    stop: Callable[[], None]

    @property
    def address(self) -> tuple[str, int]:
        parts = urlsplit(self.url)
        return parts.hostname or "", parts.port or 0

    def raw(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: dict[str, str] | None = None,
        secret: str | None = SECRET,
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of one request on a connection of its own."""
        connection = http.client.HTTPConnection(*self.address, timeout=30)
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        sent = ({"Authorization": f"Bearer {secret}"} if secret else {}) | (headers or {})
        try:
            connection.request(method, path, data, sent)
            answer = connection.getresponse()
            return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
        finally:
            connection.close()

    def call(self, method: str, path: str, body: Any = None, **options: Any) -> tuple[int, Any]:
        """Status and decoded answer of one request."""
        status, _, data = self.raw(method, path, body, **options)
        return status, json.loads(data)

    def get(self, path: str) -> Any:
        """The answer of a successful GET."""
        status, answer = self.call("GET", path)
        assert status == 200, answer
        return answer

    def post(self, path: str, body: Any) -> Any:
        """The answer of a successful POST."""
        status, answer = self.call("POST", path, body)
        assert status == 200, answer
        return answer

    def refusal(self, method: str, path: str, body: Any = None) -> tuple[int, str, str | None]:
        """Status, type and field of a refused request."""
        status, answer = self.call(method, path, body)
        assert status >= 400, answer
        return status, answer["error"]["type"], answer["error"]["field"]

    def open(self, method: str, path: str, body: bytes = b"") -> socket.socket:
        """Send a request and leave the answer to the caller."""
        raw = socket.create_connection(self.address, timeout=10)
        head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {SECRET}\r\n"
        raw.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        return raw


@contextmanager
def served(
    folder: Path, *, matcher: InferenceMatcher | None = None, segment_bytes: int | None = None, **options: Any
) -> Iterator[Served]:
    """Serve an API over the journal in `folder`; `options` are those of TrajectoryStore."""
    journal = FileJournal(folder, sync="group", **({} if segment_bytes is None else {"segment_bytes": segment_bytes}))
    store = TrajectoryStore(journal, **options)
    commit = GroupCommit(journal)
    ready, urls = threading.Event(), []
    loops: list[asyncio.AbstractEventLoop] = []
    ending: list[asyncio.Event] = []

    def started(url: str) -> None:
        urls.append(url)
        ready.set()

    async def main() -> None:
        ending.append(asyncio.Event())
        loops.append(asyncio.get_running_loop())
        app = create_app(store, SECRET, commit=commit, matcher=matcher)
        await serve(app, started, ending[0], http=protocol(), timeout_keep_alive=75)
        if matcher is not None:
            await matcher.close()

    def stop() -> None:
        if thread.is_alive():
            loops[0].call_soon_threadsafe(lambda: (store.changed.close(), ending[0].set()))
            thread.join(20)
            assert not thread.is_alive()

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    assert ready.wait(20)
    try:
        yield Served(urls[0], store, journal, stop)
    finally:
        stop()
        commit.close()
        journal.close()
