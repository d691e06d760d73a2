"""The life of one run under its keeper, from the first process to the last.

`RunLifecycle.run` is the whole sequence: reserve the machine, start all members at once, wait for the decision how the
run ends, close the crew, write the results and the final status. Until the decision, reports move the run from state to
state (`report_handler`) and members that end or hang are restarted where that may help (`restart_policy`). The first
decision counts: an order to stop, one failure too many, or the last evaluation. The crew is gone before `run` returns.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
import traceback
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from toprope.analysis import failures
from toprope.analysis.findings.stored_runs import explain_run
from toprope.analysis.reports.report import gather
from toprope.atomic import write_json
from toprope.machine import is_shutting_down
from toprope.records.messages import Failed, Finished, Report
from toprope.records.run.digests import sha256_of
from toprope.records.run.folder import RunFolder
from toprope.records.run.full_disk import NO_ROOM
from toprope.records.run.specification import Specification
from toprope.records.run.status import Failure, State, Status
from toprope.supervisor import guard
from toprope.supervisor.capacity.reservations import Granted, Reservations, Waiting
from toprope.supervisor.heartbeat import beat, watch_parent
from toprope.supervisor.keeper.component import Component, Exit
from toprope.supervisor.keeper.crew import Crew
from toprope.supervisor.keeper.hang_detector import HangDetector
from toprope.supervisor.keeper.pause import PauseControl
from toprope.supervisor.keeper.preloading import Preloaded
from toprope.supervisor.keeper.report_handler import ReportHandler
from toprope.supervisor.keeper.restart_policy import RestartPolicy, failure_of_keeper
from toprope.supervisor.keeper.status_writer import StatusWriter
from toprope.supervisor.lock import RunLock
from toprope.supervisor.programs import PLOT, STARTS_RUNS, TRACKER, Programs, members_of
from toprope.supervisor.runs.auto_resume_policy import decide_auto_resume
from toprope.supervisor.runs.orders import StopOrder, take_orders
from toprope.supervisor.spread.nodes import Spread, is_taken_back
from toprope.supervisor.watchers.group import WatcherGroup, create_watchers
from toprope.supervisor.watchers.watcher import RunControl

_READ_ORDERS_EVERY_S, _CLAIM_EVERY_S, _WATCH_EVERY_S = 0.04, 0.25, 1.0
_EXIT_WITHIN_S = 1.0
"""Seconds that a member gets to exit after it reported a failure, or did not exit at the end of its work."""
_SIGNALLED_WITHIN_S = 0.5
_TAKEN_BACK_GRACE_S = 45.0
"""Slurm's signal comes a minute before it ends a job; a checkpoint that is cut off costs more than the wait."""
_PLOT_TIMEOUT_S = 120.0
_BLAME_ORDER = ("policy", "inference", "environment", "api", "trainer", "conductor")
"""The first of the members that are not ready is blamed: each member waits for those before it."""
_HANDLED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
_TAKEN_BACK = "The engine took the job's place back (its time limit, or a job with priority)."
_PARENT_ENDED = "The engine's process above the keeper ended."
_SHUT_DOWN = "The machine is shut down or restarted."


@dataclass(frozen=True)
class _Completed:
    """Every member has done its work."""


@dataclass(frozen=True)
class _FolderGone:
    """The run folder was deleted."""


_Ending = _Completed | _FolderGone | StopOrder | Failure


class RunLifecycle:
    """One run under its keeper. Create it in a running event loop, then await `run`.

    Args:
        folder: The run folder, whose lock is `lock`.
        lock: The guards hold copies of it.
        programs: argv in place of the real programs; tests pass light ones.
        parent: The process of an engine that gave the run its place, and with whose end the run ends; None: the run
            reserves its place on this machine.
        spread: The nodes that members run on; None if all run beside the keeper.
        preloaded: See `PreloadingSpawner`.
    """

    def __init__(
        self,
        folder: RunFolder,
        lock: RunLock,
        *,
        programs: Programs | None = None,
        parent: int | None = None,
        spread: Spread | None = None,
        preloaded: Preloaded | None = None,
    ) -> None:
        self._folder, self._parent = folder, parent
        self._spec = Specification.read(folder)
        self._writer = StatusWriter(folder, Status.read(folder))
        self._reservations = Reservations(folder.path.parent)
        self._grace_s = self._spec.config.launcher.stop_grace_s
        status = self._writer.status
        checkpoint = folder.path / status.checkpoint["path"] if status.checkpoint and status.attempt > 1 else None
        self._crew = Crew(
            folder,
            self._spec,
            lock,
            attempt=status.attempt,
            programs=programs,
            surroundings=os.environ,
            checkpoint=checkpoint,
            spread=spread,
            preloaded=preloaded,
        )
        self._pause = PauseControl(self._writer, self._crew)
        self._reports = ReportHandler(self._spec, self._writer, self._crew, resumes=checkpoint is not None)
        self._decision: asyncio.Future[_Ending] = asyncio.get_running_loop().create_future()
        self._late_stop: StopOrder | None = None
        """An order to stop the run while it ends as lost."""
        self._start_timer: asyncio.TimerHandle | None = None
        self._ended_when_done: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._hangs = HangDetector(self._silence_limit_s)
        self._restarts = RestartPolicy(
            folder, self._spec, self._writer, self._crew, self._reports,
            decided=self._decision, fail=self._decide, launch=self._launch, background=self._run_in_background,
        )  # fmt: skip
        writer, pause = self._writer, self._pause
        control = RunControl(
            folder, self._spec, lambda: writer.status,
            writer.record_event, writer.update, self._stop, pause.pause, pause.proceed,
        )  # fmt: skip
        self._watchers = WatcherGroup(create_watchers(control), writer.record_event)

    # The sequence

    async def run(self) -> None:
        """Take the run from `queued` to its end.

        Raises:
            OSError: Not even the final status could be written. The crew is gone, or ends with this process.
        """
        self._handle_signals()
        try:
            self._read_orders()
            self._run_in_background(self._read_orders_often())
            self._run_in_background(self._watch())
            self._run_in_background(beat(self._folder))
            await self._reserve_machine()
            self._start_members()
            ending = await self._decision
            self._enter_ending_state(ending)
            state = "completed" if isinstance(ending, _Completed) else self._writer.state
            patient = self._members_that_end_themselves()
            await self._crew.close(self._grace_s, patient_with=patient, state=state)
            await self._write_end(self._late_stop or ending)
        except Exception as error:
            traceback.print_exc()
            await self._end_after_crash(error)
        finally:
            self._reservations.release(self._spec.run_id)

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._handle_callback_error)
        if not STARTS_RUNS & set(members_of(self._spec)):
            guard.become_subreaper()  # else it would adopt the keepers that a member starts
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop_by, number)
        loop.add_signal_handler(signal.SIGHUP, lambda: None)
        if self._parent is not None:
            order = StopOrder(max(self._grace_s, _TAKEN_BACK_GRACE_S), _TAKEN_BACK, lost=True)
            loop.add_signal_handler(signal.SIGUSR1, self._stop, order)
            watch_parent(self._parent, lambda: self._stop(StopOrder(reason=_PARENT_ENDED, lost=True)))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED_SIGNALS)

    def _stop_by(self, number: signal.Signals) -> None:
        # Nobody wants the run to stop in these two cases.
        lost = _SHUT_DOWN if is_shutting_down() else _TAKEN_BACK if is_taken_back(os.environ) else ""
        sender = "" if self._parent is None else ", as a job that is cancelled"
        self._stop(StopOrder(reason=lost or f"the keeper got {number.name}{sender}", lost=bool(lost)))

    async def _reserve_machine(self) -> None:
        """Wait until the machine has room for the run, or until its end is decided. An engine has reserved it already
        for the keeper that it started."""
        if self._parent is not None:
            return
        answer = None if self._closing else self._reservations.claim(self._spec, anew=True)
        while not self._closing:
            if isinstance(answer, Granted):
                self._crew.gpus = answer.gpus
                return
            if isinstance(answer, Waiting) and answer.reason != self._writer.status.reason:
                self._crew.drop_preloaded()  # the machine has no room
                self._writer.update(reason=answer.reason)
            await asyncio.wait({self._decision}, timeout=_CLAIM_EVERY_S)
            answer = self._reservations.claim(self._spec)

    def _start_members(self) -> None:
        if self._closing:
            return
        self._writer.enter("validating", started_at=time.time())
        timeout_s = self._spec.config.launcher.start_timeout_s
        self._start_timer = asyncio.get_running_loop().call_later(timeout_s, self._fail_unready, timeout_s)
        for name in members_of(self._spec):
            self._launch(name)

    def _enter_ending_state(self, ending: _Ending) -> None:
        match ending:
            case Failure():
                self._writer.enter("failed", ending.reason, failure=ending)
            case StopOrder():
                if ending.lost:  # `stopping` would mean that somebody wants the run to stop
                    self._writer.update(reason=ending.reason)
                else:
                    self._writer.enter("stopping", ending.reason)
                self._grace_s = self._grace_s if ending.grace_s is None else ending.grace_s
            case _FolderGone():
                self._grace_s = 0.0

    def _members_that_end_themselves(self) -> set[str]:
        return self._reports.finished | ({"trainer"} if self._reports.has_unsaved_step else set())

    async def _write_end(self, ending: _Ending) -> None:
        match ending:
            case StopOrder(lost=True):
                decision = decide_auto_resume(self._folder, self._writer.status)
                self._writer.update(resume_at=decision.resume_at, resumed_lost=decision.count)
                self._write_final_status("lost", f"{ending.reason} {decision.explanation}".rstrip())
            case StopOrder():
                self._write_final_status("stopped", ending.reason)
            case _Completed():
                self._pause.leave_pause()
                await self._write_results()
                self._write_final_status("completed")
            case Failure():
                self._write_final_status("failed")

    async def _write_results(self) -> None:
        if self._spec.run_kind.has_plot:
            outcome = await self._crew.run_to_end(PLOT, str(self._folder.path), timeout_s=_PLOT_TIMEOUT_S)
            if outcome != Exit(code=0):
                excerpt = self._crew.excerpt(PLOT, 5)
                self._writer.record_event(
                    "warning", what=f"the plot could not be drawn: its program {outcome}", excerpt=excerpt
                )
        self._watchers.on_end()
        status = self._writer.status.model_copy(update={"state": "completed", "ended_at": time.time()})
        results = gather(self._folder, self._spec, status).model_dump(mode="json")
        try:
            write_json(self._folder.results, results)
            self._writer.update(results_sha256=sha256_of(self._folder.results))
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            text = "The disk had no room for results.json; get_results derives the same from the other files."
            self._writer.record_event("warning", what=text)

    def _write_final_status(self, state: State, reason: str = "") -> None:
        self._watchers.on_end()
        self._folder.tidy()
        self._reservations.release(self._spec.run_id)  # nobody does it for a keeper that is killed after the end
        now = time.time()
        if not self._writer.status.ended:
            self._writer.enter(state, reason)
        seconds = round(now - self._writer.status.created_at, 3)
        self._writer.record_event("end", state=self._writer.state, seconds=seconds)
        # `ended_at` comes last: a reader who sees it finds every event.
        self._writer.update(ended_at=now)
        self._writer.write_final()
        with suppress(Exception):  # readers explain it themselves
            explain_run(self._folder, self._spec, self._writer.status)

    async def _end_after_crash(self, error: Exception) -> None:
        """Record a failure of the keeper's own code and end the crew, even if one of the two fails."""
        failure = failure_of_keeper(error)
        self._decide(failure)
        try:
            if self._folder.path.is_dir() and not self._writer.status.ended:
                self._writer.enter("failed", failure.reason, failure=failure)
        finally:
            await self._crew.close(self._grace_s, patient_with=self._members_that_end_themselves())
        if self._folder.path.is_dir():
            self._write_final_status("failed")

    # The decision how the run ends

    @property
    def _closing(self) -> bool:
        return self._decision.done()

    def _decide(self, ending: _Ending) -> bool:
        """Decide how the run ends. The first decision counts; False if there was one already."""
        if self._closing:
            return False
        self._decision.set_result(ending)
        if self._start_timer is not None:
            self._start_timer.cancel()
        return True

    def _decide_if_completed(self) -> None:
        # The trainer's exit counts as well: a trainer that fails on its way out has not completed.
        if self._reports.work_done and (not self._spec.run_kind.trains or self._crew["trainer"].exit is not None):
            self._decide(_Completed())

    def _fail_unready(self, timeout_s: float) -> None:
        missing = [name for name in _BLAME_ORDER if name in self._crew and name not in self._reports.ready]
        if not missing or self._closing:
            return
        self._decide(
            Failure(
                component=missing[0],
                reason=f"Not ready after {timeout_s:g} s: {', '.join(missing)}.",
                hint="launcher.start_timeout_s sets the limit; read_logs shows what each of them is doing.",
                excerpt=self._crew.excerpt(missing[0]),
            )
        )

    def _stop(self, order: StopOrder) -> None:
        if not self._decide(order) and order.grace_s is not None:
            self._crew.hurry(order.grace_s)

    # Members: start, reports, end

    def _launch(self, name: str) -> None:
        self._writer.set_member(name, "starting", pid=None)
        component = self._crew.launch(name)
        self._writer.set_member(name, "starting", pid=None, node=component.node)
        self._run_in_background(self._follow(component))

    async def _follow(self, component: Component) -> None:
        self._writer.set_member(component.name, "starting", pid=await component.wait_started())
        async for report in component:
            self._handle_report(component, report)
        self._handle_exit(component)

    def _handle_report(self, component: Component, report: Report) -> None:
        loop = asyncio.get_running_loop()
        self._hangs.record(component.name, report, loop.time())
        self._reports.handle(component, report, closing=self._closing)
        self._watchers.on_report(component.name, report)
        if isinstance(report, Failed):
            loop.call_later(_EXIT_WITHIN_S, self._restarts.end_failed, component)
        if self._closing:
            return
        if isinstance(report, Finished) and component.name == "trainer":
            loop.call_later(self._spec.config.launcher.stop_grace_s, self._end_finished, component)
        if self._start_timer is not None and self._reports.all_ready:
            self._start_timer.cancel()
            self._start_timer = None
            failures.prepare()  # a death is then on disk sooner
        self._pause.apply()
        self._decide_if_completed()

    def _handle_exit(self, component: Component) -> None:
        name, outcome, reports = component.name, component.exit, self._reports
        assert outcome is not None
        self._hangs.forget(name)
        reports.close_member(name)
        samples_no_more = name in self._crew.drivers[1:] and "trainer" in reports.finished
        may_end = (
            (name == "policy" and name in reports.ready)
            or (name == "trainer" and name in reports.finished)
            or (name == "environment" and "after" in reports.evaluated)
            or samples_no_more
            or (name == "conductor" and name in reports.finished)
            or (name == TRACKER and self._closing)
        )
        # A member that reported the end of its work has finished, even if it was ended on its way out.
        done = name in reports.finished or (name == "policy" and name in reports.ready) or samples_no_more
        if name in self._ended_when_done or (outcome.code == 0 and may_end) or (self._closing and done):
            state = "finished"
        else:
            state = "stopped" if self._closing else "exited"
        self._writer.set_member(name, state, pid=component.pid, exit_code=outcome.code)
        if state == "exited":
            # scancel signals all processes of a job, and members may end before the keeper reads its own signal.
            if self._parent is None:
                self._restarts.handle_loss(component)
            else:
                asyncio.get_running_loop().call_later(_SIGNALLED_WITHIN_S, self._restarts.handle_loss, component)
        self._decide_if_completed()

    def _end_finished(self, component: Component) -> None:
        """End a member that has finished and does not exit. This is no failure."""
        if component.exit is None and not self._closing:
            self._ended_when_done.add(component.name)
            self._writer.record_event("warning", what=f"{component.name} had finished and did not exit; it was ended")
            component.stop(_EXIT_WITHIN_S)

    # Watchers, orders and background tasks

    async def _watch(self) -> None:
        while not self._closing:
            now = asyncio.get_running_loop().time()
            for name, seconds in self._hangs.find_silent(self._reports.ready, now).items():
                limit = f"at most {self._silence_limit_s(name):g} are allowed"
                reason = f"{name} gave no sign of life for {seconds:.0f} s ({limit}) and was ended."
                self._restarts.kill_hung(self._crew[name], reason)
            for component in self._crew.cut_off(anew=self._hangs.suspended):
                reason = f"Nothing came of {component.name} or its node {component.node} any more."
                self._restarts.kill_hung(component, reason)
            self._watchers.on_tick(now)
            await asyncio.sleep(_WATCH_EVERY_S)

    def _silence_limit_s(self, name: str) -> float:
        launcher = self._spec.config.launcher
        return launcher.trainer_hang_timeout_s if name == "trainer" else launcher.hang_timeout_s

    async def _read_orders_often(self) -> None:
        while True:
            self._read_orders()
            await asyncio.sleep(_READ_ORDERS_EVERY_S)

    def _read_orders(self) -> None:
        orders = take_orders(self._folder, self._writer.status.attempt)
        if orders.folder_gone:
            self._decide(_FolderGone())
        for complaint in orders.complaints:
            self._writer.warn_once(complaint)
        for order in orders.stops:
            self._stop(order)
            decided = self._decision.result()
            if isinstance(decided, StopOrder) and decided.lost and not (order.lost or self._late_stop):
                self._late_stop = order  # a lost run would resume
                self._writer.enter("stopping", order.reason)

    def _run_in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._handle_task_end)

    def _handle_task_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            traceback.print_exception(error)
            self._decide(failure_of_keeper(error))

    def _handle_callback_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        loop.default_exception_handler(context)
        if (error := context.get("exception")) is not None:
            self._decide(failure_of_keeper(error))
