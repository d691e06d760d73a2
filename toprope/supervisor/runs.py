"""Runs, as a front end sees them: start, stop, resume, look, wait. Any number of front ends may do so at once.

Nothing is remembered here: folders tell all there is to know. A front end never signals a process and never trusts a
process id; whether a run lives it asks the run's lock, and whoever finds a run without its keeper settles it.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

import anyio

from toprope.errors import Corrupt, NotFound, NotPossibleNow, TopropeError
from toprope.records.folder import RUN_ID, RunFolder
from toprope.records.specification import Specification
from toprope.records.status import RESUMABLE, Event, Failure, Status, read_events
from toprope.supervisor.launchers import Launcher
from toprope.supervisor.lock import RunLock, held
from toprope.supervisor.reservations import Machine, Reservations
from toprope.supervisor.seen import SeenStatuses
from toprope.supervisor.settle import end_unkept, prepare_attempt, settle

__all__ = ["Runs", "Until"]

Until = Callable[[Status, Sequence[Event]], bool]
"""Whether a wait is over, given the status and the events since the number that the wait began at."""

_LOOK_EVERY_S = 0.05
_LOOK_AT_LOCK_EVERY_S = 1.0


class Runs:
    """The runs of one folder.

    Args:
        path: The folder that holds a folder per run; made when the first run is started.
        launcher: What brings keepers to life.
        machine: What runs may have of this machine together, asked whenever one is started; by default all of it.
    """

    def __init__(self, path: Path, launcher: Launcher, machine: Callable[[], Machine] = Machine.detect) -> None:
        self.path = path
        self._launcher, self._machine = launcher, machine
        self._seen = SeenStatuses()

    def folder(self, run_id: str) -> RunFolder:
        """The folder of a run.

        Raises:
            NotFound: There is no such run.
        """
        return RunFolder.open(self.path, run_id)

    def start(
        self, specification: Specification, variables: Mapping[str, Mapping[str, str]] | None = None
    ) -> RunFolder:
        """Makes the run's folder and its keeper; when this returns, the run goes on whatever happens to the caller.

        Args:
            specification: Frozen; its run_id names the folder.
            variables: Environment variables by component, EVERYONE for all, from the owner's settings.

        Raises:
            NotPossibleNow: There is another run of that id. The same specification again is answered with its folder.
            ComponentFailed: The keeper did not come up; the run is there and failed.
        """
        try:
            folder = RunFolder.create(self.path, specification.run_id)
        except FileExistsError:
            folder = self.folder(specification.run_id)
            if Specification.read(folder) == specification:
                return folder
            raise NotPossibleNow(
                f"There is another run {specification.run_id!r}.", hint="A run's id is used once; leave it to us."
            ) from None
        lock = RunLock.acquire(folder.lock)
        if lock is None:
            raise NotPossibleNow(f"{folder.path} is being used by another process.", hint="Try again.")
        try:
            specification.write(folder)
            Reservations(self.path).announce(self._machine())
            now = time.time()
            Status(
                run_id=specification.run_id,
                kind=specification.kind,
                environment=specification.environment.name,
                state="queued",
                created_at=specification.created_at,
                since=now,
                updated_at=now,
            ).write(folder)
            self._launcher.submit(folder, variables or {}, lock)
        except TopropeError as error:
            end_unkept(folder, "failed", failure=Failure(component="keeper", reason=error.message, hint=error.hint))
            raise
        except OSError as error:  # no room for the first files, no process for the keeper
            shutil.rmtree(folder.path, ignore_errors=True)
            raise _not_written(folder, error) from None
        finally:
            lock.release()
        return folder

    def resume(self, run_id: str, variables: Mapping[str, Mapping[str, str]] | None = None) -> Status:
        """Gives a run that was stopped, failed or lost its next attempt: same folder, same specification, from its
        newest checkpoint, or from the start where it has none. Returns when the run has its keeper.

        Args:
            run_id: The run.
            variables: Environment variables by component, as for `start`.

        Returns:
            The status that the keeper began with: `attempt`, and `checkpoint`, None where it starts from nothing.

        Raises:
            NotFound, Corrupt: There is no such run, or its status, specification or checkpoint cannot be read.
            NotPossibleNow: It lives, is still ending, or has completed; nothing was changed.
            ComponentFailed: The keeper did not come up; the run is failed.
        """
        folder = self.folder(run_id)
        lock = RunLock.acquire(folder.lock)
        if lock is None:
            raise _lives(Status.read(folder))
        try:
            former = settle(folder)
            if former.state not in RESUMABLE:
                raise NotPossibleNow(
                    f"{run_id} has {former.state}: nothing is left to do, and nothing was changed.",
                    hint="start_training starts a new run from a draft. To train on from this run's weights, set the "
                    f"draft's policy.model to the folder model/ of its checkpoint below {folder.checkpoints}.",
                )
            Reservations(self.path).announce(self._machine())
            status = prepare_attempt(folder, former)
            try:
                self._launcher.submit(folder, variables or {}, lock)
            except TopropeError as error:
                end_unkept(folder, "failed", failure=Failure(component="keeper", reason=error.message, hint=error.hint))
                raise
            return status
        except OSError as error:
            raise _not_written(folder, error) from None
        finally:
            lock.release()

    def stop(self, run_id: str, grace_s: float | None = None) -> Status:
        """Orders a run to stop and answers at once: the keeper notices within 50 ms. A run that has ended is left as it
        is; a second order can only shorten the grace.

        Args:
            run_id: The run.
            grace_s: Seconds for a last checkpoint and an orderly end; launcher.stop_grace_s when None.

        Returns:
            The status as it was: `ended` says that there was nothing to stop.

        Raises:
            NotFound, Corrupt: There is no such run, or its status cannot be read.
        """
        folder, status = self.folder(run_id), self.status(run_id)
        if not status.ended or status.ended_at is None:
            self._launcher.stop(folder, grace_s)
        return status

    def status(self, run_id: str) -> Status:
        """The status of a run, `lost` if its keeper and crew are gone without having said how it ended.

        Raises:
            NotFound, Corrupt: There is no such run, or its status cannot be read.
        """
        return self._status(self.folder(run_id))

    def _status(self, folder: RunFolder) -> Status:
        status = self._seen.read(folder)
        if (status.ended and status.ended_at is not None) or held(folder.lock):
            return status
        lock = RunLock.acquire(folder.lock)
        if lock is None:
            return Status.read(folder)
        try:
            return settle(folder)
        finally:
            lock.release()

    def list(self) -> list[Status]:
        """The status of every run, newest first.

        A run whose status cannot be read is listed as lost, with the reason, and left as it is. A folder without one is
        passed over while it is being made, that is while somebody holds its lock.
        """
        found = []
        try:
            with os.scandir(self.path) as entries:
                names = [entry.name for entry in entries if RUN_ID.fullmatch(entry.name) and entry.is_dir()]
        except FileNotFoundError:
            return []
        self._seen.keep_only(set(names))
        for name in names:
            known = self._seen.known(name, f"{self.path}/{name}/status.json")
            if known is not None and known.ended and known.ended_at is not None:
                found.append(known)
                continue
            folder = RunFolder(self.path / name)
            try:
                found.append(self._status(folder))
            except (Corrupt, NotFound, OSError) as error:
                if folder.path.is_dir() and not held(folder.lock):
                    found.append(_unreadable(folder, error))
        return sorted(found, key=lambda status: status.created_at, reverse=True)

    def events(self, run_id: str, after: int = 0) -> Sequence[Event]:
        """What happened to a run after event number `after`, oldest first.

        Raises:
            NotFound: There is no such run.
        """
        return list(read_events(self.folder(run_id).events, after))

    async def wait(
        self,
        run_id: str,
        until: Until,
        timeout_s: float,
        *,
        after: int = 0,
        changed: Callable[[Status], Awaitable[None]] | None = None,
    ) -> tuple[Status, Sequence[Event]]:
        """Waits until a run's status and events satisfy `until`, or the time is over.

        Args:
            run_id: The run.
            until: Asked at once and at every change of the status or the events.
            timeout_s: Seconds; the answer then is what there is.
            after: Events after this number are handed to `until` and returned.
            changed: Awaited at every change, the first look included: for progress notifications.

        Raises:
            NotFound, Corrupt: There is no such run, or its status cannot be read.
        """
        folder = self.folder(run_id)
        limit = anyio.current_time() + timeout_s
        seen, lock_seen = None, anyio.current_time()
        status, events = self._status(folder), self.events(run_id, after)
        while True:
            now = _stamp(folder)
            if now != seen:
                seen = now
                status, events = self._status(folder), self.events(run_id, after)
                if changed is not None:
                    await changed(status)
                if until(status, events):
                    return status, events
            left = limit - anyio.current_time()
            if left <= 0:
                return status, events
            await anyio.sleep(min(_LOOK_EVERY_S, left))
            if anyio.current_time() - lock_seen > _LOOK_AT_LOCK_EVERY_S:
                lock_seen = anyio.current_time()
                # Settles a run whose keeper is gone, which changes the files that we look at.
                self._status(folder)


def _not_written(folder: RunFolder, error: OSError) -> NotPossibleNow:
    return NotPossibleNow(
        f"The run {folder.run_id!r} could not be written below {folder.path.parent}: {error.strerror or error}.",
        hint="Nothing was started. `toprope doctor` shows the room on the disk, `toprope prune` removes old runs.",
    )


def _lives(status: Status) -> NotPossibleNow:
    if status.ended:
        return NotPossibleNow(
            f"{status.run_id} is {status.state}, but its processes are still ending; it was not resumed.",
            hint="Call again in a few seconds.",
        )
    return NotPossibleNow(
        f"{status.run_id} is {status.state} under its keeper (attempt {status.attempt}): there is nothing to resume.",
        hint=f'check_status(run_ids=["{status.run_id}"], wait_s=45) follows it; stop_training stops it.',
    )


def _stamp(folder: RunFolder) -> tuple[tuple[int, int, int], ...]:
    """What changes when status or events change; status.json is replaced, so its inode does."""
    found = []
    for path in (folder.status, folder.events):
        try:
            stat = path.stat()
        except FileNotFoundError:
            found.append((0, 0, 0))
        else:
            found.append((stat.st_ino, stat.st_mtime_ns, stat.st_size))
    return tuple(found)


def _unreadable(folder: RunFolder, error: Exception) -> Status:
    at = folder.path.stat().st_mtime
    return Status(
        run_id=folder.run_id,
        kind="",
        environment="",
        state="lost",
        reason=f"Its status cannot be read: {error}",
        created_at=at,
        since=at,
        updated_at=at,
        ended_at=at,
    )
