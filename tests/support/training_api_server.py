"""The trajectory API on a real socket within the test process, and raw requests to it."""

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

from toprope.records.journal.journal import FileJournal
from toprope.training.api.__main__ import protocol
from toprope.training.api.http.app import create_app
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
    """A group whose rows all hold `mark`."""
    return {
        "tokens": [[mark, 2, 3]] * rows,
        "masks": [[-100, 2, 3]] * rows,
        "scores": [float(n % 2) for n in range(rows)],
    } | fields


def marks(batch: dict[str, Any]) -> list[int] | None:
    """The marks of a batch's groups."""
    return None if batch["batch"] is None else [group["tokens"][0][0] for group in batch["batch"]]


def until(condition: Callable[[], Any], seconds: float = 10.0) -> Any:
    """Waits for a condition; fails when it does not come true in time."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.005)
    return value


@dataclass
class Served:
    """A running API: the store is shared with the server's thread, so tests only look at it."""

    url: str
    store: TrajectoryStore
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
        """One request on a connection of its own: status, headers, body."""
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
        """One request: status and decoded answer."""
        status, _, data = self.raw(method, path, body, **options)
        return status, json.loads(data)

    def get(self, path: str) -> Any:
        """The answer of a GET that succeeds."""
        status, answer = self.call("GET", path)
        assert status == 200, answer
        return answer

    def post(self, path: str, body: Any) -> Any:
        """The answer of a POST that succeeds."""
        status, answer = self.call("POST", path, body)
        assert status == 200, answer
        return answer

    def refusal(self, method: str, path: str, body: Any = None) -> tuple[int, str, str | None]:
        """Status, type and field of a request that is refused."""
        status, answer = self.call(method, path, body)
        assert status >= 400, answer
        return status, answer["error"]["type"], answer["error"]["field"]

    def open(self, method: str, path: str, body: bytes = b"") -> socket.socket:
        """Sends a request and leaves the answer to the caller."""
        raw = socket.create_connection(self.address, timeout=10)
        head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {SECRET}\r\n"
        raw.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        return raw


@contextmanager
def served(folder: Path, **options: Any) -> Iterator[Served]:
    """An API over the journal in `folder`; `options` are TrajectoryStore's."""
    matcher = options.pop("matcher", None)
    journal = FileJournal(folder, sync="group")
    store = TrajectoryStore(journal, **options)
    commit = GroupCommit(journal)
    ready, loops = threading.Event(), []
    ending: list[asyncio.Event] = []

    async def main() -> None:
        ending.append(asyncio.Event())
        loops.append(asyncio.get_running_loop())

        def started(url: str) -> None:
            loops.append(url)
            ready.set()

        app = create_app(store, SECRET, commit=commit, matcher=matcher)
        await serve(app, started, ending[0], http=protocol(), timeout_keep_alive=75)

    def stop() -> None:
        if thread.is_alive():
            loops[0].call_soon_threadsafe(lambda: (store.changed.close(), ending[0].set()))
            thread.join(20)
            assert not thread.is_alive()

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    assert ready.wait(20)
    try:
        yield Served(loops[1], store, stop)
    finally:
        stop()
        commit.close()
        if matcher is not None:
            matcher.close()
        journal.close()
