"""An outpost on a node that is not the keeper's: the end of the keeper, the connection and the guard there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from tests.support.run_harness import eventually
from toprope.records.messages import Keys, Peers, Used, decode_order, decode_report, encode_line
from toprope.supervisor.spread.credentials import make_identity
from toprope.supervisor.spread.outpost import GPUS, Request

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="outposts need Linux")

MEMBER = """
import os, signal, subprocess, sys, time
print(os.environ.get("CUDA_VISIBLE_DEVICES"), flush=True)
if "deaf" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", sys.argv[1]], start_new_session=True)
while "deaf" in sys.argv or (line := sys.stdin.readline()):
    print(line if "deaf" not in sys.argv else time.sleep(600), flush=True)
"""


class Outpost:
    """An outpost that a test keeps; its member prints the orders that it gets and leaves a process behind."""

    def __init__(
        self, folder: Path, *words: str, lease_s: float = 60.0, gpus: list[int] | None = None, seen: str | None = "3"
    ) -> None:
        self.token, self.log = f"token-{uuid.uuid4().hex}", folder / "member.log"
        request = Request(
            member="environment-2", argv=[sys.executable, "-c", MEMBER, self.token, *words],
            variables={"CUDA_VISIBLE_DEVICES": "7"}, keys={"SECRET": "hush"}, log=str(self.log), folder=str(folder),
            grace_s=0.2, lock=None, inherits=[], node="far", address="127.0.0.2", is_far=True,
            is_contained=False, identity=make_identity(), gpus=gpus,
        )  # fmt: skip
        self.path = folder / "request.json"
        self.path.write_bytes(msgspec.json.encode(request))
        start = (
            f"from toprope.supervisor.spread import outpost; outpost.LEASE_S, outpost._MEASURE_EVERY_S = {lease_s}, 0.1"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", f"{start}; raise SystemExit(outpost.main())", str(self.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={name: value for name, value in os.environ.items() if name != GPUS} | ({GPUS: seen} if seen else {}),
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self.input, self.output = self.process.stdin, self.process.stdout
        self.started = self.read(lambda told: told.get("type") == "guard_started")

    def say(self, line: bytes) -> None:
        self.input.write(line)
        self.input.flush()

    def read(self, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        while line := self.output.readline():
            if wanted(told := json.loads(line)):
                return told
        raise AssertionError("the outpost ended")

    def processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                if self.token in process.cmdline():
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.input.close()
        self.output.close()
        for process in self.processes():
            with suppress(psutil.Error):
                process.kill()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Outpost]]:
    made: list[Outpost] = []

    def start(*words: str, **options: Any) -> Outpost:
        made.append(Outpost(tmp_path, *words, **options))
        return made[-1]

    yield start
    for outpost in made:
        outpost.close()


def test_far_member_gets_keys_and_orders_and_its_use_is_reported(start: Callable[..., Outpost]) -> None:
    outpost = start()
    assert not outpost.path.exists()
    outpost.say(encode_line(Peers({"api": "toprope://127.0.0.3:9/other/5", "policy": "/policies/tiny"})))
    gpus, keys, peers = eventually(lambda: len(lines := outpost.log.read_bytes().split()) > 2 and lines)
    assert gpus == b"3"  # of its own node, not of the keeper's
    assert decode_order(keys) == Keys({"SECRET": "hush"})
    reached = decode_order(peers)
    assert isinstance(reached, Peers)
    assert reached.addresses["policy"] == "/policies/tiny"
    assert reached.addresses["api"].startswith("http://127.0.0.1:")
    used = decode_report(json.dumps(outpost.read(lambda told: told.get("type") == "used")).encode())
    assert isinstance(used, Used) and used.cpu_s > 0 and used.memory_bytes > 1 << 20
    guard = psutil.Process(outpost.started["pid"]).parent()
    assert guard is not None and guard.ppid() != outpost.process.pid  # engines kill what is below the outpost


@pytest.mark.parametrize(
    ("gpus", "seen", "named"),
    [([1, 2], "3,4,5", "4,5"), ([], "3,4", ""), ([1], None, "1"), ([0, 1], "3", "3"), (None, None, "None")],
)
def test_member_sees_its_share_of_the_gpus_that_the_engine_names(
    start: Callable[..., Outpost], gpus: list[int] | None, seen: str | None, named: str
) -> None:
    outpost = start(gpus=gpus, seen=seen)
    assert eventually(outpost.log.read_bytes).split(b"\n")[0].decode() == named


def test_stop_ends_a_far_member_within_its_grace(start: Callable[..., Outpost]) -> None:
    outpost = start("deaf")
    eventually(lambda: len(outpost.processes()) >= 3)  # guard, member and what it left
    outpost.say(b"stop 0.1\n")
    assert outpost.read(lambda told: told.get("type") == "guard_exited")["signal"] == "SIGKILL"
    assert outpost.process.wait(20) == 0
    assert not outpost.processes()


@pytest.mark.parametrize("end", ["keeper", "outpost", "lease"])
def test_far_member_ends_if_keeper_or_outpost_goes_or_the_keeper_is_silent(
    start: Callable[..., Outpost], end: str
) -> None:
    outpost = start("deaf", lease_s=0.5 if end == "lease" else 60.0)
    eventually(lambda: len(outpost.processes()) >= 3)
    if end == "keeper":
        outpost.input.close()
    elif end == "outpost":
        outpost.process.kill()
    eventually(lambda: not outpost.processes())
    assert outpost.process.wait(20) == (-9 if end == "outpost" else 0)


def test_outpost_survives_signals_to_its_job_and_reports_a_killed_guard(start: Callable[..., Outpost]) -> None:
    outpost = start()
    outpost.process.terminate()
    outpost.say(encode_line(Peers({})))
    eventually(lambda: b"peers" in outpost.log.read_bytes())
    guard = psutil.Process(outpost.started["pid"]).parent()
    assert guard is not None
    guard.kill()
    assert outpost.process.wait(20) == 0  # without a report of the member's end: nobody saw it
    assert b"guard_exited" not in outpost.output.read()
    eventually(lambda: not _runs(outpost.started["pid"]))


def _runs(pid: int) -> bool:
    """False also for a process that ended and that its new parent has not collected yet."""
    with suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    return False
