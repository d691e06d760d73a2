"""Runs, as a front end sees them: start, stop, resume, look, wait. Any number of front ends may do so at once.

Nothing is remembered here: folders tell all there is to know. A front end never signals a process and never trusts a
process id; whether a run lives it asks the run's lock, and whoever finds a run without its keeper settles it.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import anyio

from toprope.errors import Corrupt, NotFound, NotPossibleNow, TopropeError
from toprope.records.run.folder import RUN_ID, RunFolder
from toprope.records.run.specification import Specification
from toprope.records.run.status import RESUMABLE, Event, Failure, Status
from toprope.supervisor.capacity.reservations import Machine, Reservations
from toprope.supervisor.environment_variables import OwnerVariables
from toprope.supervisor.heartbeat import describe_silence
from toprope.supervisor.launchers import Launcher
from toprope.supervisor.lock import RunLock, is_held
from toprope.supervisor.runs.auto_resume_policy import is_due, stop_requested
from toprope.supervisor.runs.cleanup import cancel_auto_resume, prepare_attempt, settle_run, write_end
from toprope.supervisor.runs.errors import cannot_write, still_running, unreadable_status
from toprope.supervisor.runs.orphan_reaper import reap_marked
from toprope.supervisor.runs.status_cache import EventCache, StatusCache

__all__ = ["RunManager", "Until"]

Until = Callable[[Status, Sequence[Event]], bool]
"""Whether a wait is over, given the status and the events since the number that the wait began at."""

_LOOK_EVERY_S = 0.05
_LOOK_AT_LOCK_EVERY_S = 1.0
_MAKING = ".making-"
_MADE_WITHIN_S = 10.0


class RunManager:
    """The runs of one folder.

    Args:
        path: The folder that holds a folder per run; made when the first run is started.
        launcher: What brings keepers to life.
        machine: What runs may have of this machine together, asked whenever one is started; by default all of it.
        variables: The owner's variables for a run. With them, lost runs that are to go on by themselves do so when
            somebody looks; without, they are only marked.
    """

    def __init__(
        self,
        path: Path,
        launcher: Launcher,
        machine: Callable[[], Machine] = Machine.detect,
        variables: Callable[[Specification], OwnerVariables] | None = None,
    ) -> None:
        self.path = path
        self._launcher, self.machine, self._variables = launcher, machine, variables
        self._seen, self._seen_events = StatusCache(), EventCache()
        self._reviving = threading.Lock()

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
        folder = RunFolder(self.path / specification.run_id)
        making = RunFolder(self.path / f"{_MAKING}{uuid.uuid4().hex[:8]}" / specification.run_id)
        lock, ours = None, False
        try:
            lock = self._make(making, specification)
            # The run appears whole, with its lock held: nobody ever sees, or has to clear away, half of one.
            making.path.rename(folder.path)
            ours = True
            making.path.parent.rmdir()
            Reservations(self.path).announce(self.machine())
            self._launcher.submit(folder, variables or {}, lock)
        except TopropeError as error:
            if ours:
                write_end(folder, "failed", failure=Failure(component="keeper", reason=error.message, hint=error.hint))
            raise
        except OSError as error:  # no room for the first files, no process for the keeper
            if ours:
                shutil.rmtree(folder.path, ignore_errors=True)
            elif folder.path.is_dir():
                return self._same(specification)
            raise cannot_write(folder, error) from None
        finally:
            if lock is not None:
                lock.release()
            shutil.rmtree(making.path.parent, ignore_errors=True)
        return folder

    def _make(self, folder: RunFolder, specification: Specification) -> RunLock:
        """Writes a run's first files and returns its lock.

        Raises:
            NotPossibleNow: The folder of runs cannot be made.
            OSError: There is such a run, or the files cannot be written.
        """
        if (self.path / specification.run_id).exists():
            raise FileExistsError
        with suppress(OSError):  # the next line says it better
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        RunFolder.create(folder.path.parent, folder.run_id)
        lock = RunLock.acquire(folder.lock)
        assert lock is not None
        try:
            specification.write(folder)
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
        except BaseException:
            lock.release()
            raise
        return lock

    def _same(self, specification: Specification) -> RunFolder:
        """The folder of the run of that id.

        Raises:
            NotPossibleNow: It is another run.
        """
        folder = self.folder(specification.run_id)
        if Specification.read(folder) == specification:
            return folder
        raise NotPossibleNow(
            f"There is another run {specification.run_id!r}.", hint="A run's id is used once; leave it to us."
        )

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
        return self._resume(self.folder(run_id), variables)

    def _resume(
        self, folder: RunFolder, variables: Mapping[str, Mapping[str, str]] | None, *, by_itself: bool = False
    ) -> Status:
        """See `resume`. By itself: only where that is still due once the lock is held."""
        run_id, lock = folder.run_id, RunLock.acquire(folder.lock)
        if lock is None:
            raise still_running(Status.read(folder))
        try:
            former = settle_run(folder)
            if by_itself and not is_due(former):
                return former
            if by_itself and stop_requested(folder, former):
                return cancel_auto_resume(folder, former)
            if former.state not in RESUMABLE:
                raise NotPossibleNow(
                    f"{run_id} has {former.state}: nothing is left to do, and nothing was changed.",
                    hint="start_training starts a new run from a draft. To train on from this run's weights, set the "
                    f"draft's policy.model to the folder model/ of its checkpoint below {folder.checkpoints}.",
                )
            Reservations(self.path).announce(self.machine())
            status = prepare_attempt(folder, former, by_itself=by_itself)
            try:
                self._launcher.submit(folder, variables or {}, lock)
            except TopropeError as error:
                write_end(folder, "failed", failure=Failure(component="keeper", reason=error.message, hint=error.hint))
                raise
            return status
        except OSError as error:
            raise cannot_write(folder, error) from None
        finally:
            lock.release()

    def stop(self, run_id: str, grace_s: float | None = None) -> Status:
        """Orders a run to stop and answers at once: the keeper notices within 50 ms. A run that has ended is left as it
        is, but one that was lost does not go on by itself any more; a second order can only shorten the grace.

        Args:
            run_id: The run.
            grace_s: Seconds for a last checkpoint and an orderly end; launcher.stop_grace_s when None.

        Returns:
            The status as it was: `ended` says that there was nothing to stop.

        Raises:
            NotFound, Corrupt: There is no such run, or its status cannot be read.
        """
        folder = self.folder(run_id)
        status = self._looked(folder)
        if not _over(status):
            self._launcher.stop(folder, grace_s)
        elif status.resume_at is not None:
            # Where somebody resumes it right now, the order is for the keeper that comes.
            self._launcher.stop(folder, grace_s)
            return self._kept_back(folder)
        return status

    def status(self, run_id: str, *, revive: bool = True) -> Status:
        """The status of a run, `lost` if its keeper and crew are gone without having said how it ended.

        Args:
            run_id: Which.
            revive: Let a lost run go on if it is to do so by itself and the owner's variables are at hand; the status
                then is that of its new attempt.

        Raises:
            NotFound, Corrupt: There is no such run, or its status cannot be read.
        """
        folder = self.folder(run_id)
        return self._status(folder) if revive else self._looked(folder)

    def _status(self, folder: RunFolder) -> Status:
        status = self._looked(folder)
        return self._revived(folder, status) if self._variables is not None and is_due(status) else status

    def _looked(self, folder: RunFolder) -> Status:
        return self._told(folder, self._seen.read(folder))

    def _told(self, folder: RunFolder, status: Status) -> Status:
        if _over(status):
            return status
        if is_held(folder.lock):
            said = describe_silence(folder, status)
            return status.model_copy(update={"reason": said}) if said else status
        return self._settled([folder]).get(folder.run_id) or Status.read(folder)

    def _settled(self, folders: Iterable[RunFolder]) -> dict[str, Status]:
        """Finishes runs that nobody keeps; those that somebody else holds meanwhile are left out."""
        locks = {folder: lock for folder in folders if (lock := RunLock.acquire(folder.lock, 0.05))}
        try:
            last = {folder: Status.read(folder) for folder in locks}
            marks = {str(folder.path.resolve()): one.attempt for folder, one in last.items() if not _over(one)}
            swept = reap_marked(marks)
            return {folder.run_id: settle_run(folder, swept[str(folder.path.resolve())]) for folder in locks}
        finally:
            for lock in locks.values():
                lock.release()

    def _revived(self, folder: RunFolder, lost: Status) -> Status:
        """A lost run's next attempt. Where there can be none, the run stays lost and its status says why."""
        assert self._variables is not None
        try:
            specification = Specification.read(folder)
            variables = self._variables(specification)
        except TopropeError:
            return lost  # the owner's settings cannot be read now: the next one who looks may be luckier
        try:
            return self._resume(folder, variables, by_itself=True)
        except NotPossibleNow:
            return Status.read(folder)  # somebody else was faster
        except (TopropeError, OSError) as error:
            return self._kept_back(folder, f"It could not go on by itself: {error}")

    def _kept_back(self, folder: RunFolder, why: str = "") -> Status:
        lock = RunLock.acquire(folder.lock)
        if lock is None:
            return Status.read(folder)
        try:
            return cancel_auto_resume(folder, Status.read(folder), why)
        finally:
            lock.release()

    def list(self) -> list[Status]:
        """The status of every run, newest first.

        A run whose status cannot be read is listed as lost, with the reason, and left as it is. A folder without one is
        passed over while it is being made, that is while somebody holds its lock.
        """
        try:
            with os.scandir(self.path) as entries:
                found_there = [(entry.name, entry.is_dir()) for entry in entries]
        except FileNotFoundError:
            return []
        over = self._seen.over(self.path)
        found, unkept = list(over.values()), []
        names = [name for name, is_folder in found_there if is_folder and (name in over or RUN_ID.fullmatch(name))]
        self._clear_unmade(name for name, _ in found_there if name.startswith((_MAKING, "..")))
        self._seen.keep_only(set(names))
        for name in names:
            if name in over:
                continue
            folder = RunFolder(self.path / name)
            try:
                status = self._seen.read(folder)
                if _over(status) or is_held(folder.lock):
                    found.append(self._told(folder, status))
                else:
                    unkept.append(folder)
            except (Corrupt, NotFound, OSError) as error:
                if folder.path.is_dir() and not is_held(folder.lock):
                    found.append(unreadable_status(folder, error))
        found += self._settled_or_read(unkept)
        due = [RunFolder(self.path / status.run_id) for status in found if is_due(status)]
        if due and self._variables is not None and self._reviving.acquire(blocking=False):
            # This answer waits for no keeper to come up. Not a daemon: a command ends when they are there.
            threading.Thread(target=self._revive, args=(due,), name="revive").start()
        return sorted(found, key=lambda status: (status.created_at, status.run_id), reverse=True)

    def _settled_or_read(self, folders: Sequence[RunFolder]) -> list[Status]:
        try:
            settled = self._settled(folders)
        except (Corrupt, NotFound, OSError):  # one of them is broken: each by itself
            settled = {}
        found = []
        for folder in folders:
            try:
                found.append(settled.get(folder.run_id) or self._looked(folder))
            except (Corrupt, NotFound, OSError) as error:
                if folder.path.is_dir() and not is_held(folder.lock):
                    found.append(unreadable_status(folder, error))
        return found

    def _revive(self, folders: Sequence[RunFolder]) -> None:
        try:
            for folder in folders:
                with suppress(TopropeError, OSError):  # what stands against it is in its status, or its folder is gone
                    self._status(folder)
        finally:
            self._reviving.release()

    def _clear_unmade(self, names: Iterable[str]) -> None:
        """Removes what killed front ends left: runs that never appeared, files that were half written."""
        for name in names:
            path = self.path / name
            with suppress(OSError):
                young = abs(time.time() - path.stat().st_mtime) < _MADE_WITHIN_S
                if young:
                    continue
                if not path.is_dir():
                    path.unlink()
                elif not any(is_held(below / "keeper.lock") for below in path.iterdir()):
                    shutil.rmtree(path, ignore_errors=True)

    def events(self, run_id: str, after: int = 0) -> Sequence[Event]:
        """What happened to a run after event number `after`, oldest first.

        Raises:
            NotFound: There is no such run.
        """
        return self._seen_events.read(self.folder(run_id), after)

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


def _over(status: Status) -> bool:
    """Whether nothing more comes of this attempt: it has ended, and so have its processes."""
    return status.ended and status.ended_at is not None


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
