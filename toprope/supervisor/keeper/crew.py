"""The processes of one run, and how they are ended: in order, in bounded time, completely.

What the members say is not understood here; `course` does that.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import sys
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from pathlib import Path

from toprope.records.messages import ENV_LIFE, ENV_LISTENER_FD, Evaluate, Order, Peers, Stop, Without
from toprope.records.run.folder import RunFolder
from toprope.records.run.specification import Specification
from toprope.supervisor import guard
from toprope.supervisor.environment_variables import component_variables, decode_owner_variables, secret_values
from toprope.supervisor.keeper.component import Component, Exit, reap_orphans
from toprope.supervisor.lock import RunLock
from toprope.supervisor.programs import STARTS_RUNS, Programs, command_of
from toprope.supervisor.runs.orphan_reaper import reap_marked

__all__ = ["Crew"]

_SECOND_GRACE_S = 0.5
"""What inference and api get at least when those that are closed before them used the grace up."""
_NOTHING_TO_SAVE_S = 2.0
"""The most that a member gets to end in order, unless there is something to save."""
_BACKLOG = 1024
_CLOSED_FIRST = ("environment", "trainer", "policy", "conductor")


class Crew:
    """The components that were started for a run.

    Args:
        folder: The run folder.
        specification: Its specification.
        lock: The run's lock; the guards hold copies.
        attempt: Which life of the run this is.
        programs: argv in place of the real programs.
        surroundings: The environment to select the members' variables from.
        checkpoint: What this attempt goes on from.
    """

    def __init__(
        self,
        folder: RunFolder,
        specification: Specification,
        lock: RunLock,
        *,
        attempt: int,
        programs: Programs | None,
        surroundings: Mapping[str, str],
        checkpoint: Path | None = None,
    ) -> None:
        self._folder, self._spec, self._lock, self._attempt = folder, specification, lock, attempt
        self._programs, self._surroundings = programs, surroundings
        self.checkpoint = checkpoint
        """What members that are started from now on go on from."""
        self.gpus: tuple[str, ...] | None = None
        """Ids of the GPUs that members started from now on see; None: as the keeper does."""
        self._owners = decode_owner_variables(surroundings)
        self._secret = secrets.token_urlsafe(32)
        self._components: dict[str, Component] = {}
        self._addresses: dict[str, str] = {}
        self._lasting: dict[str, dict[str, Order]] = {}
        self._lives: Counter[str] = Counter()
        self._deadline = float("inf")
        self._hurry = asyncio.Event()
        self._listener: socket.socket | None = None

    def __contains__(self, name: str) -> bool:
        return name in self._components

    def __getitem__(self, name: str) -> Component:
        return self._components[name]

    def launch(self, name: str, *arguments: str) -> Component:
        """Starts one component and tells it the addresses known so far."""
        self._folder.make_temporary()
        kept = self._kept_open() if name == "api" else None
        component = Component(
            name,
            [*command_of(name, self._programs), *arguments],
            variables={ENV_LIFE: str(self._lives[name])}
            | ({} if kept is None else {ENV_LISTENER_FD: str(kept.fileno())})
            | component_variables(
                name,
                folder=self._folder.path,
                specification=self._spec,
                attempt=self._attempt,
                secret=self._secret,
                owners=self._owners,
                surroundings=self._surroundings,
                gpus=None if name in STARTS_RUNS else self.gpus,  # what it starts sees what it reserves itself
                checkpoint=self.checkpoint,
            ),
            log=self._folder.log(name),
            grace_s=self._spec.config.launcher.stop_grace_s,
            lock=self._lock,
            folder=self._folder.path,
            inherits=[] if kept is None else [kept.fileno()],
            lets_go=name in STARTS_RUNS,
        )
        self._components[name] = component
        self._lives[name] += 1
        if self._addresses:
            component.send(Peers(dict(self._addresses)))
        for order in self._lasting.get(name, {}).values():
            component.send(order)
        return component

    def _kept_open(self) -> socket.socket:
        """The socket on which the API listens in all its lives: outside environments know one address, and whoever
        calls while it is started again waits in line instead of being refused."""
        if self._listener is None:
            # Named by its protocol, or asyncio leaves Nagle's algorithm on, which costs 44 ms an answer.
            self._listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
            self._listener.bind(("127.0.0.1", 0))
            self._listener.listen(_BACKLOG)
        return self._listener

    def announce(self, name: str, address: str) -> None:
        """Tells everybody where `name` is."""
        self._addresses[name] = address
        for component in self._components.values():
            component.send(Peers(dict(self._addresses)))

    def withdraw(self, name: str) -> None:
        """Tells everybody that `name` is away."""
        if self._addresses.pop(name, None) is not None:
            for component in self._components.values():
                component.send(Peers(dict(self._addresses)))

    def send(self, name: str, order: Order) -> None:
        """Hands an order to one member, if there is such a member."""
        if name in self._components:
            self._components[name].send(order)

    def order(self, name: str, order: Order) -> None:
        """Hands over an order that holds until it is settled: a member that is started later, or again, gets it too."""
        kept = self._lasting.setdefault(name, {})
        if kept.get(_key(order)) != order:
            kept[_key(order)] = order
            self.send(name, order)

    def settle(self, name: str, order: Order) -> bool:
        """An order was carried out or taken back; whether it was open."""
        return self._lasting.get(name, {}).pop(_key(order), None) is not None

    def excerpt(self, name: str, lines: int = 20) -> list[str]:
        """What a component printed last, without the run's secret and the owner's keys."""
        hidden = secret_values(self._surroundings, *self._owners.values())
        return self._components[name].excerpt(lines, [self._secret, *hidden])

    async def run_to_end(self, name: str, *arguments: str, timeout_s: float) -> Exit:
        """Starts a program that ends by itself and waits for it; killed after `timeout_s`, or when hurried."""
        component = self.launch(name, *arguments)
        self._deadline = asyncio.get_running_loop().time() + timeout_s
        await self._all_gone([component])
        return component.exit or Exit()

    def hurry(self, grace_s: float) -> None:
        """What is being closed has `grace_s` seconds from now, if it had more."""
        self._deadline = min(self._deadline, asyncio.get_running_loop().time() + max(grace_s, 0.0))
        self._hurry.set()

    async def close(self, grace_s: float, *, patient_with: Set[str] = frozenset()) -> None:
        """Ends all: environment and trainer, then inference and api. Takes `grace_s` and half a second at most, as
        long as SIGKILL ends what it is sent to.

        Args:
            grace_s: Seconds to end in order. Members that have nothing to save get two of them at most, all together,
                and those that are closed last half a second at least.
            patient_with: Members that end by themselves: a trainer that has something to save, whoever has finished.
                They are not signalled within the grace.
        """
        loop = asyncio.get_running_loop()
        self._deadline = loop.time() + max(grace_s, 0.0)
        soon = loop.time() + min(grace_s, _NOTHING_TO_SAVE_S)
        await self._sweep_unguarded()
        running = [component for component in self._components.values() if not component.gone.is_set()]
        first = [component for component in running if component.name in _CLOSED_FIRST]
        for component in first:
            if component.name == "trainer":
                component.send(Stop(grace_s))
            if component.name not in patient_with:
                component.stop(min(grace_s, _NOTHING_TO_SAVE_S))
        await self._all_gone(first)
        rest = [component for component in running if component not in first]
        self._deadline = max(self._deadline, loop.time() + min(grace_s, _SECOND_GRACE_S))
        for component in rest:
            component.stop(max(soon - loop.time(), min(grace_s, _SECOND_GRACE_S)))
        await self._all_gone(rest)
        await self._sweep_unguarded()
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    async def sweep_after(self, component: Component) -> None:
        """Ends what a component left whose guard was killed, or that nothing held."""
        if component.name in STARTS_RUNS:
            await self._sweep_marked()
        elif component.exit == Exit():
            await reap_orphans(list(self._components.values()))

    async def _sweep_marked(self) -> None:
        """Ends what carries the mark of this run. Keepers that a member started do not: they outlive it."""
        await asyncio.to_thread(reap_marked, {str(self._folder.path.resolve()): self._attempt})

    async def _sweep_unguarded(self) -> None:
        if STARTS_RUNS & self._components.keys():
            if all(component.gone.is_set() for component in self._components.values()):
                await self._sweep_marked()
            return
        if any(component.exit == Exit() for component in self._components.values()):
            await reap_orphans(list(self._components.values()))

    async def _all_gone(self, components: Sequence[Component]) -> None:
        """Waits for their ends; at the deadline, which `hurry` may bring nearer, they are killed."""
        if not components:
            return
        loop = asyncio.get_running_loop()
        gone = asyncio.gather(*(component.gone.wait() for component in components))
        while not gone.done() and (left := self._deadline - loop.time()) > 0:
            self._hurry.clear()
            hurry = loop.create_task(self._hurry.wait())
            await asyncio.wait({gone, hurry}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            hurry.cancel()
        if not gone.done():
            for component in components:
                component.stop(0)
            await asyncio.wait({gone}, timeout=guard.SWEEP_LIMIT_S + 5)
        if not gone.done():
            print("a guard does not answer and is killed", file=sys.stderr, flush=True)
            for component in components:
                component.kill_guard()
            await gone
            await reap_orphans(list(self._components.values()))


def _key(order: Order) -> str:
    """What an order is about: a later one about the same takes its place."""
    about = order.label if isinstance(order, Evaluate) else order.component if isinstance(order, Without) else ""
    return f"{type(order).__name__} {about}"
