"""Orders as processes of their own: whoever asks waits for a while, and asks again for what takes longer.

An order's folder holds `order.json`, `progress.json`, `job.log`, and in the end `outcome.json` or `failure.json`. The
process holds a lock there for life, so whoever can take it knows that the process is gone. It outlives whoever started
it; started again in the same folder it goes on with the state that it left.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock
from pydantic import ValidationError

from toprope.atomic import write_json
from toprope.errors import ComponentFailed, Corrupt, NotFound, TopropeError
from toprope.records.run.folder import LEFT, misfits, read_json
from toprope.sdk.worker.client import worker_environment
from toprope.trajectories.jobs.orders import Order, Outcome

__all__ = ["Job", "Standing", "hold"]

_START_S = 30.0
_EVERY_S = 0.05
_HOLD_S = 5.0
_WORDS = 1500


@dataclass(frozen=True)
class Standing:
    """How a job stands: `outcome` where it succeeded, `failure` where not, neither while it goes on."""

    alive: bool
    outcome: Outcome | None = None
    failure: TopropeError | None = None
    doing: str = ""
    read: int = 0
    kept: int = 0

    @property
    def ended(self) -> bool:
        return self.outcome is not None or self.failure is not None


class Job:
    """One order and its folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def of(cls, place: Path, order: Order) -> Job:
        """The folder for an order below `place`, the same for the same order."""
        digest = hashlib.sha256(order.model_dump_json().encode()).hexdigest()[:16]
        return cls(place / digest)

    @property
    def id(self) -> str:
        return self.folder.name

    def begin(self, order: Order, keys: Mapping[str, str] | None = None) -> None:
        """Starts the process, unless it runs. What an ended one left behind as its result is forgotten; the state of
        one that did not come to an end is taken up.

        Args:
            order: What is asked.
            keys: Variables for the process beside the usual ones: keys of teachers.

        Raises:
            ComponentFailed: It does not start.
        """
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with FileLock(str(self.folder / "begin.lock")):  # two servers that are asked the same start it once
            while self.ended() and self.alive():  # it is on its way out
                time.sleep(_EVERY_S)
            if not self.alive():
                self._launch(order, keys)

    def _launch(self, order: Order, keys: Mapping[str, str] | None) -> None:
        if (self.folder / "outcome.json").exists():
            (self.folder / "state.jsonl").unlink(missing_ok=True)
        # Without its number it counts as about to begin, not as ended.
        for name in ("outcome.json", "failure.json", "progress.json", "told", "pid.json"):
            (self.folder / name).unlink(missing_ok=True)
        write_json(self.folder / "order.json", order.model_dump(mode="json"))
        with (self.folder / "job.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "toprope.trajectories", str(self.folder)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=worker_environment(keys),
                start_new_session=True,
            )
        # Somebody has to wait for it, or it stays as a zombie for as long as we live.
        threading.Thread(target=process.wait, name=f"data-{self.id}", daemon=True).start()
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            if self.alive() or self.standing().ended:
                return
            if process.returncode is not None:
                break
            time.sleep(_EVERY_S)
        if not self.standing().ended and not self.alive():
            raise ComponentFailed(f"The program for data did not start: {self._last_words()}", hint="Try again.")

    def alive(self) -> bool:
        """Whether its process is there."""
        try:
            descriptor = os.open(self.folder / "job.lock", os.O_RDWR)
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: those who look do not see each other
            return False
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)

    def standing(self) -> Standing:
        """How it stands now.

        Raises:
            Corrupt: Its files are not what we wrote.
        """
        alive = self.alive()  # looked at first: one that ends meanwhile has left its result by then
        if (found := self._result(alive)) is not None:
            return found
        # Whoever wrote its number held the lock; if nobody does after that was seen, it has ended.
        if (self.folder / "pid.json").exists() and not self.alive():
            if (found := self._result(False)) is not None:
                return found
            ended = f"The program for data was ended: {self._last_words()}"
            return Standing(False, failure=ComponentFailed(ended, hint="The same call goes on."))
        told = self._read("progress.json") or {}
        return Standing(
            alive, doing=str(told.get("doing", "")), read=int(told.get("read", 0)), kept=int(told.get("kept", 0))
        )

    def _result(self, alive: bool) -> Standing | None:
        """How it stands where it has left word of its end."""
        if (outcome := self._read("outcome.json")) is not None:
            try:
                return Standing(alive, Outcome.model_validate(outcome))
            except ValidationError as error:
                raise Corrupt(f"{self.folder}/outcome.json: {misfits(error)}.", hint=LEFT) from None
        if (failure := self._read("failure.json")) is not None:
            return Standing(alive, failure=_error(failure))
        return None

    def wait(self, seconds: float) -> Standing:
        """Waits for its end, so long at most."""
        deadline = time.monotonic() + seconds
        while not (now := self.standing()).ended and time.monotonic() < deadline:
            time.sleep(_EVERY_S)
        return now

    def ended(self) -> bool:
        """Whether it came to an end, good or bad, and left word of it."""
        return any((self.folder / name).exists() for name in ("outcome.json", "failure.json"))

    def told(self) -> bool:
        """Whether somebody was told its result."""
        return (self.folder / "told").exists()

    def tell(self) -> None:
        """Notes that somebody was."""
        (self.folder / "told").touch(mode=0o600)

    def stop(self) -> bool:
        """Ends the process and what it started; whether it ran. A build's state stays."""
        told = self._read("pid.json")
        if not self.alive() or not isinstance(told, dict):
            return False
        os.killpg(int(told["pid"]), signal.SIGTERM)
        return True

    def _read(self, name: str) -> Any:
        try:
            return read_json(self.folder / name)
        except NotFound:
            return None

    def _last_words(self) -> str:
        try:
            said = (self.folder / "job.log").read_bytes()[-_WORDS:].decode(errors="replace").strip()
        except OSError:
            return "it said nothing"
        return said.splitlines()[-1] if said else "it said nothing"


def hold(folder: Path) -> int | None:
    """Takes a job's lock for life; None where another process has it."""
    descriptor = os.open(folder / "job.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + _HOLD_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:  # another process, or somebody who looks at this very moment
            if time.monotonic() > deadline:
                os.close(descriptor)
                return None
            time.sleep(0.01)
    write_json(folder / "pid.json", {"pid": os.getpid()})
    return descriptor


def _error(told: Any) -> TopropeError:
    """The failure as the error that it was."""
    import toprope.errors as known

    kind = getattr(known, str(told.get("kind", "")), ComponentFailed) if isinstance(told, dict) else ComponentFailed
    if not (isinstance(kind, type) and issubclass(kind, TopropeError)):
        kind = ComponentFailed
    return kind(str(told.get("message", "")), hint=str(told.get("hint", "")))
