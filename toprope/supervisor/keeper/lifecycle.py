"""The course of one run, from the first process to the last: what its keeper does.

All members are started at once and learn each other's addresses as they come. What they report (`hearing`) moves the
run from state to state; a member that ends or hangs is started again where that may help (`restarts`). The first thing
that ends the run (an order, a death too many, the last evaluation) decides how, and everything after that only closes
the crew. Whatever happens here, the crew is gone before the course is over.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
import traceback
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from toprope.analysis.reports.report import gather
from toprope.atomic import write_json
from toprope.records.messages import Failed, Finished, Report
from toprope.records.run.folder import RunFolder
from toprope.records.run.full_disk import NO_ROOM
from toprope.records.run.specification import Specification
from toprope.records.run.status import Failure, State, Status
from toprope.supervisor import guard
from toprope.supervisor.capacity.reservations import Granted, Reservations, Waiting
from toprope.supervisor.keeper.component import Component, Exit
from toprope.supervisor.keeper.crew import Crew
from toprope.supervisor.keeper.hang_detector import HangDetector
from toprope.supervisor.keeper.pause import PauseControl
from toprope.supervisor.keeper.report_handler import ReportHandler
from toprope.supervisor.keeper.restart_policy import RestartPolicy
from toprope.supervisor.keeper.status_writer import StatusWriter
from toprope.supervisor.lock import RunLock
from toprope.supervisor.programs import PLOT, STARTS_RUNS, Programs, members_of
from toprope.supervisor.runs.orders import StopOrder, take_orders
from toprope.supervisor.watchers.group import create_watchers
from toprope.supervisor.watchers.watcher import RunControl, WatcherGroup

__all__ = ["RunLifecycle", "failure_of_keeper"]

_LOOK_FOR_ORDERS_S = 0.04
_LOOK_FOR_ROOM_S = 0.25
_WATCH_EVERY_S = 1.0
_AFTER_CONFESSION_S = 1.0
"""A member that said why it fails has so long to exit before the run goes on without its exit code."""
_PLOT_TIMEOUT_S = 120.0
_BLAME = ("policy", "inference", "environment", "api", "trainer", "conductor")
"""Who is named first when several are not ready: each waits for those before it."""
_HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True)
class _Completed:
    pass


@dataclass(frozen=True)
class _FolderGone:
    pass


_Ending = _Completed | _FolderGone | StopOrder | Failure


class RunLifecycle:
    """One run under its keeper.

    Args:
        folder: The run folder, whose lock is `lock`.
        lock: Passed on to the guards.
        programs: argv in place of the real programs; tests have light ones.
        surroundings: The environment to select the members' variables from; this process's when None.
    """

    def __init__(
        self,
        folder: RunFolder,
        lock: RunLock,
        *,
        programs: Programs | None = None,
        surroundings: Mapping[str, str] | None = None,
    ) -> None:
        self._folder = folder
        self._spec = Specification.read(folder)
        self._life = StatusWriter(folder, Status.read(folder))
        self._reservations = Reservations(folder.path.parent)
        status = self._life.status
        resumes = folder.path / status.checkpoint["path"] if status.checkpoint and status.attempt > 1 else None
        self._crew = Crew(
            folder,
            self._spec,
            lock,
            attempt=status.attempt,
            programs=programs,
            surroundings=os.environ if surroundings is None else surroundings,
            checkpoint=resumes,
        )
        self._pausing = PauseControl(self._life, self._crew)
        self._hearing = ReportHandler(self._spec, self._life, self._crew, resumes=resumes is not None)
        self._hastened: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._decision: asyncio.Future[_Ending] = asyncio.get_running_loop().create_future()
        self._start_limit: asyncio.TimerHandle | None = None
        self._pulse = HangDetector(self._silence_allowed)
        self._restarts = RestartPolicy(
            folder,
            self._spec,
            self._life,
            self._crew,
            self._hearing,
            decided=self._decision,
            fail=self._decide,
            launch=self._launch,
            background=self._background,
        )
        self._watchers = self._watch_with()

    def _watch_with(self) -> WatcherGroup:
        life = self._life
        pausing, stop = self._pausing, self._stop
        hands = RunControl(
            self._folder,
            self._spec,
            lambda: life.status,
            life.event,
            life.update,
            stop,
            pausing.pause,
            pausing.proceed,
        )
        return WatcherGroup(create_watchers(hands), life.event)

    async def run(self) -> None:
        """Lives the run from `queued` to its end.

        Raises:
            OSError: Not even the final status could be written. The crew is gone or ends with this process.
        """
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._callback_failed)
        if not STARTS_RUNS & set(members_of(self._spec)):  # else keepers of runs that a member starts would come here
            guard.become_subreaper()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop, StopOrder(reason=f"the keeper got {number.name}"))
        loop.add_signal_handler(signal.SIGHUP, lambda: None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED)
        grace = self._spec.config.launcher.stop_grace_s
        try:
            ending = await self._until_decided()
            match ending:
                case Failure():
                    self._life.to("failed", ending.reason, failure=ending)
                case StopOrder():
                    self._life.to("stopping", ending.reason)
                    grace = grace if ending.grace_s is None else ending.grace_s
                case _FolderGone():
                    grace = 0.0
            await self._crew.close(grace, patient_with=self._patient_with())
            match ending:
                case StopOrder():
                    self._end("stopped", ending.reason)
                case _Completed():
                    self._pausing.release()
                    await self._conclude()
                    self._end("completed")
                case Failure():
                    self._end("failed")
        except Exception as error:
            traceback.print_exc()
            await self._crash(error, grace)
        finally:
            self._reservations.leave(self._spec.run_id)

    async def _until_decided(self) -> _Ending:
        self._look_for_orders()
        self._background(self._read_orders())
        self._background(self._watch())
        await self._reserve()
        if not self._closing:
            self._life.to("validating", started_at=time.time())
            timeout = self._spec.config.launcher.start_timeout_s
            self._start_limit = asyncio.get_running_loop().call_later(timeout, self._not_ready, timeout)
        for name in members_of(self._spec):
            if self._closing:
                break
            self._launch(name)
        return await self._decision

    async def _reserve(self) -> None:
        """Waits until the run has what it needs of the machine, or is to end before."""
        answer = None if self._closing else self._reservations.claim(self._spec, anew=True)
        while not self._closing:
            if isinstance(answer, Granted):
                self._crew.gpus = answer.gpus
                return
            if isinstance(answer, Waiting) and answer.reason != self._life.status.reason:
                self._life.update(reason=answer.reason)
            await asyncio.wait({self._decision}, timeout=_LOOK_FOR_ROOM_S)
            answer = self._reservations.claim(self._spec)

    async def _watch(self) -> None:
        while not self._closing:
            now = asyncio.get_running_loop().time()
            for name, seconds in self._pulse.silent(self._hearing.ready, now).items():
                limit = self._silence_allowed(name)
                reason = (
                    f"{name} gave no sign of life for {seconds:.0f} s (at most {limit:g} are allowed) and was ended."
                )
                self._restarts.hung(self._crew[name], reason)
            self._watchers.looked(now)
            await asyncio.sleep(_WATCH_EVERY_S)

    def _silence_allowed(self, name: str) -> float:
        launcher = self._spec.config.launcher
        return launcher.trainer_hang_timeout_s if name == "trainer" else launcher.hang_timeout_s

    # Starting and listening

    def _launch(self, name: str) -> None:
        self._life.member(name, "starting", pid=None)
        self._background(self._follow(self._crew.launch(name)))

    async def _follow(self, component: Component) -> None:
        self._life.member(component.name, "starting", pid=await component.started())
        async for report in component:
            self._heard(component, report)
        self._gone(component)

    def _background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._background_ended)

    def _background_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            traceback.print_exception(error)
            self._decide(failure_of_keeper(error))

    def _callback_failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        loop.default_exception_handler(context)
        if (error := context.get("exception")) is not None:
            self._decide(failure_of_keeper(error))

    def _decide(self, ending: _Ending) -> bool:
        """The first decision counts. Whether it was this one."""
        if self._closing:
            return False
        self._decision.set_result(ending)
        if self._start_limit is not None:
            self._start_limit.cancel()
        return True

    @property
    def _closing(self) -> bool:
        return self._decision.done()

    def _heard(self, component: Component, report: Report) -> None:
        loop = asyncio.get_running_loop()
        self._pulse.heard(component.name, report, loop.time())
        self._hearing.take(component, report, closing=self._closing)
        self._watchers.heard(component.name, report)
        if isinstance(report, Failed):
            loop.call_later(_AFTER_CONFESSION_S, self._restarts.confessed, component)
        if self._closing:
            return
        if isinstance(report, Finished) and component.name == "trainer":
            loop.call_later(self._spec.config.launcher.stop_grace_s, self._hasten, component)
        if self._start_limit is not None and self._hearing.all_ready:
            self._start_limit.cancel()
        self._pausing.enforce()
        self._complete_if_done()

    def _complete_if_done(self) -> None:
        # How the trainer exits counts as well: one that fails in its last breath did not complete.
        if self._hearing.done and (not self._spec.run_kind.trains or self._crew["trainer"].exit is not None):
            self._decide(_Completed())

    # Endings

    def _gone(self, component: Component) -> None:
        name, how, hearing = component.name, component.exit, self._hearing
        assert how is not None
        self._pulse.forget(name)
        hearing.ended(name)
        may_end = (
            (name == "policy" and name in hearing.ready)
            or (name == "trainer" and name in hearing.finished)
            or (name == "environment" and "after" in hearing.evaluated)
            or (name == "conductor" and name in hearing.finished)
        )
        # One that had said its work was done, and was ended on its way out, is finished none the less.
        done = name in hearing.finished or (name == "policy" and name in hearing.ready)
        if name in self._hastened or (how.code == 0 and may_end) or (self._closing and done):
            state = "finished"
        else:
            state = "stopped" if self._closing else "exited"
        self._life.member(name, state, pid=component.pid, exit_code=how.code)
        if state == "exited":
            self._restarts.lost(component)
        self._complete_if_done()

    def _hasten(self, component: Component) -> None:
        """Ends a member that is done and does not exit; that is no failure."""
        if component.exit is None and not self._closing:
            self._hastened.add(component.name)
            self._life.event("warning", what=f"{component.name} had finished and did not exit; it was ended")
            component.stop(_AFTER_CONFESSION_S)

    def _not_ready(self, timeout_s: float) -> None:
        missing = [name for name in _BLAME if name in self._crew and name not in self._hearing.ready]
        if not missing or self._closing:
            return
        self._decide(
            Failure(
                component=missing[0],
                reason=f"Not ready after {timeout_s:g} s: {', '.join(missing)}.",
                hint="launcher.start_timeout_s sets the time; read_logs shows what each of them is doing.",
                excerpt=self._crew.excerpt(missing[0]),
            )
        )

    async def _crash(self, error: Exception, grace_s: float) -> None:
        """The keeper's own code failed: say so, end the crew, and let nothing of that stop the other."""
        failure = failure_of_keeper(error)
        self._decide(failure)
        try:
            if self._folder.path.is_dir() and not self._life.status.ended:
                self._life.to("failed", failure.reason, failure=failure)
        finally:
            await self._crew.close(grace_s, patient_with=self._patient_with())
        if self._folder.path.is_dir():
            self._end("failed")

    def _patient_with(self) -> set[str]:
        return self._hearing.finished | ({"trainer"} if self._hearing.unsaved else set())

    def _end(self, state: State, reason: str = "") -> None:
        """The last write: the crew is gone."""
        self._watchers.ended()
        self._folder.tidy()
        now = time.time()
        if not self._life.status.ended:
            self._life.to(state, reason)
        self._life.event("end", state=self._life.state, seconds=round(now - self._life.status.created_at, 3))
        # Whoever sees this finds the whole story in the events.
        self._life.update(ended_at=now)
        self._life.write_at_last()

    async def _conclude(self) -> None:
        if self._spec.run_kind.has_plot:
            how = await self._crew.run_to_end(PLOT, str(self._folder.path), timeout_s=_PLOT_TIMEOUT_S)
            if how != Exit(code=0):
                excerpt = self._crew.excerpt(PLOT, 5)
                self._life.event("warning", what=f"the plot could not be drawn: its program {how}", excerpt=excerpt)
        self._watchers.ended()
        status = self._life.status.model_copy(update={"state": "completed", "ended_at": time.time()})
        results = gather(self._folder, self._spec, status).model_dump(mode="json")
        try:
            write_json(self._folder.results, results)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            what = "There was no room on the disk for results.json; get_results makes the same of the other files."
            self._life.event("warning", what=what)

    # Orders

    async def _read_orders(self) -> None:
        while True:
            self._look_for_orders()
            await asyncio.sleep(_LOOK_FOR_ORDERS_S)

    def _look_for_orders(self) -> None:
        orders = take_orders(self._folder)
        if orders.folder_gone:
            self._decide(_FolderGone())
        for complaint in orders.complaints:
            self._life.event("warning", what=complaint)
        for order in orders.stops:
            self._stop(order)

    def _stop(self, order: StopOrder) -> None:
        if not self._decide(order) and order.grace_s is not None:
            self._crew.hurry(order.grace_s)


def failure_of_keeper(error: BaseException) -> Failure:
    """What a status says when the keeper's own code raised `error`."""
    lines = [line for text in traceback.format_exception(error) for line in text.splitlines()]
    return Failure(
        component="keeper",
        reason=f"The keeper failed: {type(error).__name__}: {error}",
        excerpt=lines[-20:],
        hint="A bug of Toprope, a full disk or a damaged file; logs/keeper.log in the run folder has the traceback.",
    )
