"""The interface of engines: programs that run jobs on the nodes of a cluster, and how their answers are remembered.

An engine is asked in a thread of its own, for all of its jobs at once. A look at a run takes the newest answer and
never waits for an engine that has stopped answering: no answer means that nothing is known.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from toprope.errors import ComponentFailed, TopropeError
from toprope.settings.sections.launcher import LauncherSection

_ASK_EVERY_S = 2.0
_FIRST_ANSWER_S = 3.0
"""The longest wait of a caller, who has no answer yet or an old one."""
_OLD_S = 30.0
"""An answer of this age is as good as none."""
NEVER_PLACED = "failed to start within"
"""Ray's words for a job that it gave up because it had no room for it for 900 s."""


Phase = Literal["waiting", "running", "ending", "ended"]
"""`ending`: the engine clears up after the job; its processes may be there or not."""


class Unreachable(TopropeError):
    """The engine gave no answer, so nothing is known about its jobs."""


class Refused(ComponentFailed):
    """The engine accepted no job, for the reason in its own words."""


class NotReached(Refused):
    """The engine could not be asked, so it has no job; it may accept one as soon as it answers."""


class QueueFull(Refused):
    """The engine accepts no job until another one of this user has ended."""


@dataclass(frozen=True)
class JobRequest:
    """One job: a keeper."""

    name: str
    """Unique for an attempt of a run; an engine that has a job of this name gets no second one."""
    command: Sequence[str]
    """argv, without secrets: every user of the cluster may read it."""
    folder: Path
    """Working directory, on shared storage."""
    log: Path
    launcher: LauncherSection


@dataclass(frozen=True)
class Job:
    """The present state of one job, as the engine tells it."""

    handle: str
    phase: Phase
    word: str
    """The engine's own word for it, such as NODE_FAIL."""
    told: str = ""
    """Reason and expected end of its wait, or of its end."""
    holds_nodes: bool = False
    """It ended for its run, but its engine keeps other nodes for it until it is cancelled."""


class Engine(Protocol):
    """One cluster's engine. Every call ends within bounded time."""

    title: str
    """Its name for people."""

    def submit(self, request: JobRequest) -> None:
        """Submit a job, unless the engine has one of its name.

        Raises:
            Refused: The engine does not accept it; NotReached if it could not even be asked if it has the job.
            Unreachable: The engine gave no answer; it may have the job.
        """

    def jobs(self) -> Mapping[str, Job]:
        """Return the engine's jobs of this user by name, those that ended lately included.

        Raises:
            Unreachable: The engine gave no answer.
        """

    def cancel(self, name: str, *, running: bool = False) -> None:
        """Cancel the job of this name if it still waits; one that runs only if `running`.

        Raises:
            Unreachable: The engine gave no answer.
        """

    def describe(self, request: JobRequest) -> str:
        """Say in one line what the engine would be asked for."""


class EngineView:
    """The newest answer of an engine. Safe to use from any number of threads."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._jobs: Mapping[str, Job] = {}
        self._why = f"{engine.title} has not answered yet."
        self._answered_at, self._asked_at = float("-inf"), float("-inf")
        self._failed = False
        self._wanted: set[str] = set()
        self._lock = threading.Lock()
        self._answered = threading.Condition(self._lock)
        self._asking = False

    def job(self, name: str) -> Job | None:
        """Return a job by name; None if the engine knows no such job. Waits a few seconds at most, and not at all for
        an engine that did not answer the last time.

        Raises:
            Unreachable: The engine did not answer lately.
        """
        with self._lock:
            self._wanted.add(name)
            now = time.monotonic()
            if not self._asking and now - self._asked_at > _ASK_EVERY_S:
                self._asking, self._asked_at = True, now
                threading.Thread(target=self._ask, name=f"ask {self.engine.title}", daemon=True).start()
            if now - self._answered_at > _OLD_S and not self._failed:
                self._answered.wait_for(lambda: not self._asking, _FIRST_ANSWER_S)
            if time.monotonic() - self._answered_at > _OLD_S or self._failed:
                raise Unreachable(self._why)
            return self._jobs.get(name)

    def forget(self) -> None:
        """Ask anew at the next look, because a job was submitted or cancelled."""
        with self._lock:
            self._asked_at = self._answered_at = float("-inf")

    def _ask(self) -> None:
        jobs: Mapping[str, Job] | None = None
        why = f"{self.engine.title} cannot be asked now."
        try:
            jobs = self.engine.jobs()
            for name in self._wanted & jobs.keys():  # never a job that nobody asked about: it may be another server's
                if jobs[name].holds_nodes:
                    self.engine.cancel(name, running=True)
        except TopropeError as error:
            why = str(error)
        finally:
            with self._lock:
                self._asking, self._failed = False, jobs is None
                if jobs is not None:
                    self._jobs, self._answered_at = jobs, time.monotonic()
                else:
                    self._why = why
                self._answered.notify_all()
