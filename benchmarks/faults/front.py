"""Front ends that may be killed at any moment, as processes of their own.

    python -P -m benchmarks.faults.front HOME           a front end; see `serve`
    python -P -m benchmarks.faults.front keeper HOME RUN_FOLDER ...    a keeper of theirs

A front end does what a server does with runs and the index, without the protocol: it looks at all runs ten times a
second, which also resumes lost ones, and carries out one order a line. Its keepers start stand-ins for the members if
HOME/programs/<run_id>.json names some, and real ones otherwise.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from toprope.errors import Corrupt, TopropeError
from toprope.records.index.database import Index, StartRow
from toprope.records.index.stamps import read_stamps
from toprope.records.run.specification import Specification
from toprope.supervisor.capacity.reservations import Machine
from toprope.supervisor.launchers.local import LocalLauncher
from toprope.supervisor.runs.manager import RunManager

__all__ = ["Front", "Fronts", "runs_at"]

_LOOK_EVERY_S = 0.1


def runs_at(home: Path, *, revives: bool = False) -> RunManager:
    """Return the runs of a home as its front ends see them."""
    command = [sys.executable, "-P", "-m", "benchmarks.faults.front", "keeper", str(home)]
    variables = (lambda _: {}) if revives else None
    return RunManager(home / "runs", LocalLauncher(command), lambda: Machine(threads=64), variables)


def serve(home: Path) -> None:
    """Read orders as JSON lines, answer each with one line, and look at the runs meanwhile. Return at end of input."""
    runs, index, pending, looked = runs_at(home, revives=True), Index(home / "index.db"), b"", 0.0
    while True:
        if time.monotonic() - looked >= _LOOK_EVERY_S:
            looked = time.monotonic()
            _carry_out(runs, index, {"do": "list"})
        if not select.select([0], [], [], _LOOK_EVERY_S / 2)[0]:
            continue
        data = os.read(0, 1 << 16)
        if not data:
            return
        *lines, pending = (pending + data).split(b"\n")
        for line in lines:
            print(json.dumps(_carry_out(runs, index, json.loads(line))), flush=True)


def _carry_out(runs: RunManager, index: Index, order: dict[str, Any]) -> dict[str, Any]:
    try:
        match order["do"]:
            case "list":
                for status in runs.list()[:3]:
                    read_stamps(index, [status.run_id])
                return {"ok": True}
            case "start":
                specification = Specification.model_validate(order["specification"])
                start = StartRow(specification.run_id, "draft-2222", 1, specification.kind, specification.created_at)
                if start.run_id not in {row.run_id for row in index.starts("draft-2222")}:
                    index.record_start(start, None)
                runs.start(specification)
                return {"ok": True}
            case "stop":
                return {"ok": True, "state": runs.stop(order["run_id"], order.get("grace_s")).state}
            case "resume":
                return {"ok": True, "attempt": runs.resume(order["run_id"]).attempt}
    except Corrupt as error:
        print(f"corrupt: {error}", file=sys.stderr, flush=True)
        return {"ok": False, "error": str(error), "corrupt": True}
    except TopropeError as error:
        return {"ok": False, "error": str(error), "corrupt": False}
    raise ValueError(order)


class Front:
    """One front end, from its owner's side."""

    def __init__(self, home: Path) -> None:
        self.complaints = home / "complaints.log"
        with self.complaints.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "benchmarks.faults.front", str(home)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        self._said = b""

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def order(self, **order: Any) -> None:
        """Send an order without waiting for its answer."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(order).encode() + b"\n")
            self.process.stdin.flush()
        except (BrokenPipeError, ValueError):
            pass

    def answer(self, limit_s: float = 60.0) -> dict[str, Any] | None:
        """Return the next answer; None if the front end is gone or does not answer in time."""
        assert self.process.stdout is not None
        limit, descriptor = time.monotonic() + limit_s, self.process.stdout.fileno()
        while b"\n" not in self._said:
            left = limit - time.monotonic()
            if left <= 0 or not select.select([descriptor], [], [], left)[0]:
                return None
            data = os.read(descriptor, 1 << 16)
            if not data:
                return None
            self._said += data
        line, _, self._said = self._said.partition(b"\n")
        return json.loads(line)

    def kill(self, tree: bool = False) -> int:
        """Send SIGKILL to it, or to it and its process tree; return the number of processes."""
        victims = [psutil.Process(self.process.pid)] if self.alive else []
        if tree and victims:
            victims += victims[0].children(recursive=True)
        killed = 0
        for victim in victims:
            try:
                victim.kill()
                killed += 1
            except psutil.NoSuchProcess:
                continue
        return killed

    def close(self) -> None:
        """End it and close its pipes."""
        if self.alive:
            self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            try:
                if pipe is not None:
                    pipe.close()
            except OSError:
                continue


class Fronts:
    """Two front ends at any time: one that was killed is replaced."""

    def __init__(self, home: Path, count: int = 2) -> None:
        self._home, self._fronts = home, [Front(home) for _ in range(count)]

    def one(self, number: int) -> Front:
        """Return the front end of that number, modulo their count; it was alive a moment ago."""
        place = number % len(self._fronts)
        if not self._fronts[place].alive:
            self._fronts[place].close()
            self._fronts[place] = Front(self._home)
        return self._fronts[place]

    def all(self) -> list[Front]:
        return [self.one(place) for place in range(len(self._fronts))]

    def ask(self, number: int, **order: Any) -> dict[str, Any]:
        """Send an order, and repeat it at the next front end until it is answered: the front end may be killed
        meanwhile.

        Raises:
            TimeoutError: No front end answers.
        """
        for turn in range(10):
            front = self.one(number + turn)
            front.order(**order)
            answer = front.answer()
            if answer is not None:
                return answer
            if front.alive:  # it does not answer; end it, so that it cannot answer later
                front.close()
        raise TimeoutError(f"no front end answered to {order['do']}")

    def close(self) -> None:
        for front in self._fronts:
            front.close()


def _keeper(home: Path, arguments: list[str]) -> int:
    from toprope.supervisor.keeper.program import main

    table = home / "programs" / f"{Path(arguments[0]).name}.json"
    return main(arguments, programs=json.loads(table.read_text()) if table.exists() else None)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.argv[1] == "keeper":
        sys.exit(_keeper(Path(sys.argv[2]), sys.argv[3:]))
    serve(Path(sys.argv[1]))
