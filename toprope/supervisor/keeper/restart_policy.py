"""What becomes of a member that ends or hangs before its work is done: it is started again in its place, or its end is
the end of the run.

    ended or hung -> nothing of it is left -> waited -> started again, told addresses and open orders -> ready
                  -> it said why it cannot go on, or did so too often -> the run fails with its reason

Peers hear at once that it is away, and where it is when it serves again. A member that fails by itself before it ever
served is not tried again, because nothing will have changed; nor is one that said why it fails, unless it says that
trying again may help.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from toprope.errors import Corrupt
from toprope.records.messages import Without
from toprope.records.run.checkpoints import newest_sound, nothing_sound, set_aside
from toprope.records.run.folder import RunFolder
from toprope.records.run.specification import Specification
from toprope.records.run.status import Failure
from toprope.settings.launcher import RestartAllowance
from toprope.supervisor.keeper.component import Component
from toprope.supervisor.keeper.crew import Crew
from toprope.supervisor.keeper.report_handler import ReportHandler
from toprope.supervisor.keeper.status_writer import StatusWriter
from toprope.supervisor.programs import optional_members_of

__all__ = ["RestartPolicy"]

_STUBBORN_S = 5.0
"""After so long a guard that was to end a hung member is killed itself."""
_HASH_BYTES = 256 << 20
"""Of a checkpoint that is to be gone on from so much is compared here; the trainer compares the rest."""


class RestartPolicy:
    """Decides and carries out.

    Args:
        folder: The run folder.
        specification: The run's.
        life: Where restarts are told.
        crew: The processes.
        hearing: What the members said.
        decided: Done once the run's end is decided: nothing is started after that.
        fail: Decides it as failed.
        launch: Starts a member and listens to it.
        background: Runs a coroutine beside.
    """

    def __init__(
        self,
        folder: RunFolder,
        specification: Specification,
        life: StatusWriter,
        crew: Crew,
        hearing: ReportHandler,
        *,
        decided: asyncio.Future[Any],
        fail: Callable[[Failure], object],
        launch: Callable[[str], None],
        background: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._folder, self._spec, self._section = folder, specification, specification.config.launcher
        self._life, self._crew, self._hearing = life, crew, hearing
        self._decided, self._fail, self._launch, self._background = decided, fail, launch, background
        self._allowances: dict[str, RestartAllowance] = {}
        self._hung: dict[Component, str] = {}
        self._loop = asyncio.get_running_loop()

    def hung(self, component: Component, reason: str) -> None:
        """A member does not answer any more: it is killed, and what `lost` does follows from that."""
        if component.exit is None and component not in self._hung:
            self._hung[component] = reason
            self._kill(component)

    def confessed(self, component: Component) -> None:
        """A member said some time ago why it fails, and may still be there: it is not waited for any longer."""
        if self._decided.done() or self._crew[component.name] is not component or component.exit is not None:
            return
        if self._may_again(component):
            self._kill(component)
        else:
            self._give_up(component, self._failure(component))

    def lost(self, component: Component) -> None:
        """A member ended that should not have."""
        if self._decided.done():
            return
        name, failure = component.name, self._failure(component)
        allowance = self._allowances.setdefault(name, RestartAllowance(self._section))
        now = self._loop.time()
        before = allowance.used(now)
        wait_s = allowance.take(now) if self._may_again(component) else None
        if wait_s is None:
            if before:
                again = "once" if before == 1 else f"{before} times"
                failure.reason += f" It had been started again {again} within {allowance.window_s:g} s."
            self._give_up(component, failure)
            return
        self._life.restarted(name)
        number, limit = allowance.used(now), allowance.limit
        self._life.event(
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
        self._hearing.forget(name)
        self._life.write_if_possible()
        self._hung.pop(component, None)
        self._background(self._again(component, wait_s))

    async def _again(self, component: Component, wait_s: float) -> None:
        name = component.name
        since = self._loop.time()
        # What is left of it may hold a port, a file, the device's memory.
        await asyncio.wait(
            {self._decided, asyncio.ensure_future(component.gone.wait())}, return_when=asyncio.FIRST_COMPLETED
        )
        if name == "trainer" and not self._decided.done():
            try:
                await self._go_back()
            except Corrupt as error:
                failure = Failure(component=name, reason=error.message, hint=error.hint)
                self._fail(failure)
        await self._crew.sweep_after(component)
        left = since + wait_s - self._loop.time()
        if left > 0:
            await asyncio.wait({self._decided}, timeout=left)
        if self._decided.done():
            return
        self._launch(name)
        again = self._crew[name]
        limit_s = self._section.start_timeout_s
        self._loop.call_later(limit_s, self._not_ready, again, limit_s)

    async def _go_back(self) -> None:
        """Has the trainer go on from the newest checkpoint that is sound; from the start where there is none.

        Raises:
            Corrupt: There are checkpoints, and none is sound.
        """
        found, damaged = await asyncio.to_thread(newest_sound, self._folder, hash_bytes=_HASH_BYTES)
        if found is None and damaged:
            raise nothing_sound(self._folder, damaged)
        for damage in damaged:
            self._life.event("warning", what=f"{damage} It is kept as {set_aside(damage.path).name}.")
        self._crew.checkpoint = None if found is None else found.path
        self._life.update(checkpoint=None if found is None else found.told(self._folder))

    def _not_ready(self, component: Component, limit_s: float) -> None:
        name = component.name
        if self._crew[name] is component and name not in self._hearing.ready and not self._decided.done():
            self.hung(component, f"{name} was started again and was not ready after {limit_s:g} s.")

    def _kill(self, component: Component) -> None:
        component.stop(0)
        self._loop.call_later(_STUBBORN_S, component.kill_guard)

    def _may_again(self, component: Component) -> bool:
        name, how, said = component.name, component.exit, self._hearing.confessed.get(component.name)
        if self._section.restarts == 0:
            return False
        if said is not None:
            return said.again
        by_itself = how is not None and how.code is not None and component not in self._hung
        return self._hearing.was_ready(name) or not by_itself

    def _give_up(self, component: Component, failure: Failure) -> None:
        name = component.name
        if name in optional_members_of(self._spec):
            what = f"{name} failed, the run goes on without: {failure.reason}"
            self._life.event("warning", what=what)
            self._crew.order("environment", Without(name, f"{failure.reason} {failure.hint}".strip()))
            return
        self._fail(failure)

    def _failure(self, component: Component) -> Failure:
        """How a member's end is told."""
        name, how, said = component.name, component.exit, self._hearing.confessed.get(component.name)
        state = self._life.state
        if said is not None:
            reason, hint = said.reason, said.hint
        else:
            hint = f"read_logs(component={name!r}) has what it printed."
            if component in self._hung:
                reason = self._hung[component]
            elif how is not None and how.code == 0:
                reason = f"{name} ended while the run was {state} without having done its part."
            else:
                reason = f"{name} {how} while the run was {state}."
                if how is not None and how.signal == "SIGKILL":
                    hint = "Nobody here sent that signal: the system does when memory runs out. " + hint
        return Failure(
            component=name,
            reason=reason,
            hint=hint,
            exit_code=how.code if how else None,
            signal=how.signal if how else None,
            excerpt=self._crew.excerpt(name),
        )
