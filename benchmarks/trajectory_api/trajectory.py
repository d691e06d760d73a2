"""Real servers and a plain load for the trajectory API's benchmark: ours, `run-api`, and a bare ASGI application.

Bodies are made once and sent unchanged over kept connections, so that the server alone is measured. Processor time is
the server process's own, user and system, as the kernel counts it (in hundredths of a second: many requests per
figure).
"""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from toprope.records.messages import ENV_COMPONENT, ENV_FOLDER, ENV_REPORT_FD, ENV_SECRET, Ready, decode_report
from toprope.records.run.folder import RunFolder
from toprope.records.run.specification import EnvironmentSource, Specification
from toprope.settings.schema import Config

__all__ = ["ROWS", "SECRET", "Client", "Server", "bare", "bodies", "ours", "run_api", "run_folder"]

ROWS, TOKENS = 8, 512
SECRET = "benchmark-secret"
_START_S = 60.0


def bodies(count: int, seed: int = 0) -> list[bytes]:
    """Return groups of 8 x 512 tokens as an Atropos environment posts them: tokens, masks, scores,
    log-probabilities."""
    source = random.Random(seed)
    made = []
    for _ in range(count):
        tokens = [[source.randrange(32_000) for _ in range(TOKENS)] for _ in range(ROWS)]
        masks = [[-100] * 64 + row[64:] for row in tokens]
        logprobs = [[1.0] * 64 + [-source.random() * 5 for _ in range(TOKENS - 64)] for _ in tokens]
        scores = [float(source.random() < 0.5) for _ in tokens]
        group = {"tokens": tokens, "masks": masks, "scores": scores, "inference_logprobs": logprobs}
        made.append(json.dumps(group).encode())
    return made


class Client:
    """One kept connection, with requests that are ready to be sent."""

    def __init__(self, address: tuple[str, int], secret: str = SECRET) -> None:
        self._address = address
        self._head = f"Host: 127.0.0.1\r\nAuthorization: Bearer {secret}\r\n"
        self._socket: socket.socket | None = None
        self._into = bytearray(1 << 22)

    def request(self, method: str, path: str, body: bytes = b"") -> bytes:
        """Return a whole request as bytes."""
        head = f"{method} {path} HTTP/1.1\r\n{self._head}"
        if body:
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        return f"{head}\r\n".encode() + body

    def send(self, request: bytes) -> tuple[int, bytes]:
        """Send it and return status and body."""
        if self._socket is None:
            self._socket = socket.create_connection(self._address, timeout=120)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.sendall(request)
        view, have = memoryview(self._into), 0
        while True:
            got = self._socket.recv_into(view[have:])
            if not got:
                raise ConnectionError("the server closed the connection")
            have += got
            end = self._into.find(b"\r\n\r\n", 0, min(have, 65_536))
            if end >= 0:
                break
        head = bytes(view[:end]).lower()
        start = end + 4
        length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
        if start + length > len(self._into):
            raise ValueError(f"an answer of {length} bytes is larger than was expected")
        while have < start + length:
            got = self._socket.recv_into(view[have:])
            if not got:
                raise ConnectionError("the server closed the connection")
            have += got
        return int(head[9:12]), bytes(view[start : start + length])

    def json(self, method: str, path: str, body: Any = None) -> Any:
        """Return the answer of a request that succeeds."""
        data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        status, answer = self.send(self.request(method, path, data))
        if status != 200:
            raise RuntimeError(f"{method} {path} was answered {status}: {answer[:300]!r}")
        return json.loads(answer)

    def close(self) -> None:
        """Close the connection."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


class Server:
    """A running server process."""

    def __init__(self, process: subprocess.Popen[bytes], address: tuple[str, int]) -> None:
        self.process, self.address = process, address
        self._psutil = psutil.Process(process.pid)

    def cpu(self) -> float:
        """Return the processor seconds that it has used, user and system."""
        times = self._psutil.cpu_times()
        return times.user + times.system

    def rss(self) -> int:
        """Return its resident bytes."""
        return self._psutil.memory_info().rss

    def client(self) -> Client:
        """Open a new connection."""
        return Client(self.address)

    def kill(self) -> None:
        """Send SIGKILL and wait for its end."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(30)


def run_folder(root: Path, **settings: Any) -> RunFolder:
    """Create a run folder whose trainer takes batches of 16 groups; `settings` are fields with `__` for the dot."""
    folder = RunFolder.create(root, "bench")
    config = Config()
    config.rollout.group_size, config.rollout.groups_per_step, config.policy.max_context = ROWS, 16, TOKENS
    for name, value in settings.items():
        section, _, field = name.partition("__")
        setattr(getattr(config, section), field, value)
    Specification(
        run_id="bench", kind="train", created_at=0.0, toprope_version="0", policy_cache=str(root),
        environment=EnvironmentSource(name="bench"), config=config,
    ).write(folder)  # fmt: skip
    return folder


@contextmanager
def ours(folder: RunFolder) -> Iterator[Server]:
    """Start our API on the journal of a run folder."""
    readable, writable = os.pipe()
    variables = {
        ENV_FOLDER: str(folder.path), ENV_COMPONENT: "api", ENV_SECRET: SECRET, ENV_REPORT_FD: str(writable),
    }  # fmt: skip
    command = [sys.executable, "-P", "-m", "toprope.training.api"]
    with _process(command, env=os.environ | variables, stdin=subprocess.PIPE, pass_fds=[writable]) as process:
        os.close(writable)
        try:
            address = _ready(readable)
            yield Server(process, address)
        finally:
            os.close(readable)


def _ready(descriptor: int) -> tuple[str, int]:
    """Return the address that a member of a crew reports."""
    pending = b""
    while chunk := os.read(descriptor, 65_536):
        *lines, pending = (pending + chunk).split(b"\n")
        for line in lines:
            report = decode_report(line)
            if isinstance(report, Ready):
                parts = urlsplit(report.address)
                return parts.hostname or "", parts.port or 0
    raise RuntimeError("the API ended before it was ready")


@contextmanager
def run_api(program: Path) -> Iterator[Server]:
    """Start Atropos's server, from a virtual environment of its own."""
    with _on_port(lambda port: [str(program), "--host", "127.0.0.1", "--port", str(port)]) as server:
        yield server


@contextmanager
def bare(folder: Path) -> Iterator[Server]:
    """Start the lower bound: an ASGI application that appends the body to a file, or sends 16 stored bodies."""
    command = [sys.executable, "-P", "-m", "benchmarks.trajectory_api.bare_api", str(folder)]
    with _on_port(lambda port: [*command, str(port)]) as server:
        yield server


@contextmanager
def _on_port(command: Callable[[int], list[str]]) -> Iterator[Server]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with _process(command(port)) as process:
        deadline = time.monotonic() + _START_S
        while not _answers(port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{command(port)[0]} did not start")
            time.sleep(0.02)
        yield Server(process, ("127.0.0.1", port))


def _answers(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


@contextmanager
def _process(command: list[str], **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log, **options)
        try:
            yield process
        except BaseException:
            log.seek(0)
            sys.stderr.write(log.read()[-4000:].decode("utf-8", "replace"))
            raise
        finally:
            process.kill()
            process.wait()
            if process.stdin is not None:
                process.stdin.close()
