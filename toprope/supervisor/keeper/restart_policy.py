"""Decides what happens when a member ends or hangs before its work is done: restart it, or fail the run.

    ended or hung -> its processes are gone -> backoff -> started again, with addresses and open orders -> ready
                  -> it reported a failure, or failed too often -> the run fails with that reason

Peers learn at once that the member is away, and its new address when it serves again. A member is not restarted if it
failed by itself before it ever served, because nothing will have changed, nor if it reported why it fails, unless its
report says that a restart may help.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable, Coroutine
from typing import Any

from toprope.errors import Corrupt
from toprope.records.messages import Without
from toprope.records.run.checkpoints import newest_sound, no_sound_checkpoint, set_aside
from toprope.records.run.folder import RunFolder
from toprope.records.run.specification import Specification
from toprope.records.run.status import Failure
from toprope.settings.sections.launcher import RestartAllowance
from toprope.supervisor.keeper.component import Component
from toprope.supervisor.keeper.crew import Crew
from toprope.supervisor.keeper.report_handler import ReportHandler
from toprope.supervisor.keeper.status_writer import StatusWriter
from toprope.supervisor.programs import optional_members_of

_KILL_GUARD_AFTER_S = 5.0
"""A guard that has not ended a hung member after so long is killed itself."""
_HASH_BYTES = 256 << 20
"""The part of a checkpoint that is compared here; the trainer compares the rest."""


class RestartPolicy:
    """Decides on restarts and carries them out.

    Args:
        writer: Records restarts.
        crew: The processes.
        reports: The reports of the members.
        decided: Done as soon as the run's end is decided: nothing starts after that.
        fail: Ends the run as failed.
        launch: Starts a member and follows its reports.
        background: Runs a coroutine as a task.
    """

    def __init__(
        self,
        folder: RunFolder,
        specification: Specification,
        writer: StatusWriter,
        crew: Crew,
        reports: ReportHandler,
        *,
        decided: asyncio.Future[Any],
        fail: Callable[[Failure], object],
        launch: Callable[[str], None],
        background: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._folder, self._spec, self._section = folder, specification, specification.config.launcher
        self._writer, self._crew, self._reports = writer, crew, reports
        self._decided, self._fail, self._launch, self._background = decided, fail, launch, background
        self._allowances: dict[str, RestartAllowance] = {}
        self._hung: dict[Component, str] = {}
        self._loop = asyncio.get_running_loop()

    def kill_hung(self, component: Component, reason: str) -> None:
        """Kill a member that hangs. `handle_loss` follows from its end."""
        if component.exit is None and component not in self._hung:
            self._hung[component] = reason
            self._kill(component)

    def end_failed(self, component: Component) -> None:
        """Stop waiting for a member that reported its failure some time ago and has not exited."""
        if self._decided.done() or self._crew[component.name] is not component or component.exit is not None:
            return
        if self._may_restart(component):
            self._kill(component)
        else:
            self._give_up(component, self._describe_failure(component))

    def handle_loss(self, component: Component) -> None:
        """Restart a member that ended too early, or give it up."""
        if self._decided.done():
            return
        name, failure = component.name, self._describe_failure(component)
        allowance = self._allowances.setdefault(name, RestartAllowance(self._section))
        now = self._loop.time()
        before = allowance.used(now)
        wait_s = allowance.take(now) if self._may_restart(component) else None
        if wait_s is None:
            if before:
                times = "once" if before == 1 else f"{before} times"
                failure.reason += f" It had been started again {times} within {allowance.window_s:g} s."
            self._give_up(component, failure)
            return
        self._writer.count_restart(name)
        number, limit = allowance.used(now), allowance.limit
        self._writer.record_event(
            "restart",
            what=f"{name} is started again ({number} of {limit}): {failure.reason}",
            component=name,
            reason=failure.reason,
            restart=number,
            of=limit,
            wait_s=wait_s,
            excerpt=failure.excerpt[-5:],
        )
        self._crew.withdraw(name)
        self._reports.forget(name)
        self._writer.write_or_retry()
        self._hung.pop(component, None)
        self._background(self._restart(component, wait_s))

    async def _restart(self, component: Component, wait_s: float) -> None:
        name = component.name
        since = self._loop.time()
        # Processes that are left may hold a port, a file or memory of the device.
        await asyncio.wait(
            {self._decided, asyncio.ensure_future(component.gone.wait())}, return_when=asyncio.FIRST_COMPLETED
        )
        if name == "trainer" and not self._decided.done():
            try:
                await self._choose_checkpoint()
            except Corrupt as error:
                self._fail(Failure(component=name, reason=error.message, hint=error.hint))
        await self._crew.reap_after(component)
        seconds_left = since + wait_s - self._loop.time()
        if seconds_left > 0:
            await asyncio.wait({self._decided}, timeout=seconds_left)
        if self._decided.done():
            return
        self._launch(name)
        limit_s = self._section.start_timeout_s
        self._loop.call_later(limit_s, self._check_ready, self._crew[name], limit_s)

    async def _choose_checkpoint(self) -> None:
        """Have the trainer resume from the newest sound checkpoint, or else from the start.

        Raises:
            Corrupt: There are checkpoints, but none of them is sound.
        """
        checkpoint, damaged = await asyncio.to_thread(newest_sound, self._folder, hash_bytes=_HASH_BYTES)
        if checkpoint is None and damaged:
            raise no_sound_checkpoint(self._folder, damaged)
        for damage in damaged:
            self._writer.record_event("warning", what=f"{damage} It is kept as {set_aside(damage.path).name}.")
        self._crew.checkpoint = None if checkpoint is None else checkpoint.path
        self._writer.update(checkpoint=None if checkpoint is None else checkpoint.told(self._folder))

    def _check_ready(self, component: Component, limit_s: float) -> None:
        name = component.name
        if self._crew[name] is component and name not in self._reports.ready and not self._decided.done():
            self.kill_hung(component, f"{name} was started again and was not ready after {limit_s:g} s.")

    def _kill(self, component: Component) -> None:
        component.stop(0)
        self._loop.call_later(_KILL_GUARD_AFTER_S, component.kill_guard)

    def _may_restart(self, component: Component) -> bool:
        name, outcome, reported = component.name, component.exit, self._reports.failures.get(component.name)
        if self._section.restarts == 0:
            return False
        if reported is not None:
            return reported.again
        by_itself = outcome is not None and outcome.code is not None and component not in self._hung
        return self._reports.was_ready(name) or not by_itself

    def _give_up(self, component: Component, failure: Failure) -> None:
        """Fail the run, or go on without the member if the run can."""
        name = component.name
        if name in optional_members_of(self._spec):
            text = f"{name} failed, the run goes on without it: {failure.reason}"
            self._writer.record_event("warning", what=text)
            reason = f"{failure.reason} {failure.hint}".strip()
            if name in ("policy", "inference"):
                self._crew.send_until_settled("environment", Without(name, reason))
            return
        self._fail(failure)

    def _describe_failure(self, component: Component) -> Failure:
        """Describe a member's end: its own report, or how its process ended."""
        name, outcome, reported = component.name, component.exit, self._reports.failures.get(component.name)
        state = self._writer.state
        if reported is not None:
            reason, hint = reported.reason, reported.hint
        else:
            hint = f"read_logs(component={name!r}) shows what it printed."
            if component in self._hung:
                reason = self._hung[component]
            elif outcome is not None and outcome.code == 0:
                reason = f"{name} ended while the run was {state}, before its work was done."
            else:
                reason = f"{name} {outcome} while the run was {state}."
                if outcome is not None and outcome.signal == "SIGKILL":
                    hint = "Nobody here sent that signal: the system does when memory runs out. " + hint
        return Failure(
            component=name,
            reason=reason,
            hint=hint,
            exit_code=outcome.code if outcome else None,
            signal=outcome.signal if outcome else None,
            excerpt=self._crew.excerpt(name),
        )


def failure_of_keeper(error: BaseException) -> Failure:
    """Describe an error of the keeper's own code as the failure of its run."""
    lines = [line for text in traceback.format_exception(error) for line in text.splitlines()]
    return Failure(
        component="keeper",
        reason=f"The keeper failed: {type(error).__name__}: {getattr(error, 'message', error)}",
        excerpt=lines[-20:],
        hint=getattr(error, "hint", "")
        or "A bug of Toprope, a full disk or a damaged file; logs/keeper.log in the run folder has the traceback.",
    )
