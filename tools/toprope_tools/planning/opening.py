"""Opening environments for the tools: with the owner's limits, with progress, and beyond the call that asked.

An environment may take `environment.load_timeout_s` to load, which is longer than most clients wait for a call. So an
opening that outlasts its call goes on, and the next equal call gets its result.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from anyio import to_thread

from toprope.errors import EnvironmentFailed, InvalidValue, NotFound, NotPossibleNow
from toprope.records.walls import Walls, allowed_network
from toprope.settings.environment import EnvironmentSection
from toprope.settings.locks import Locks
from toprope.settings.presets import load_preset
from toprope.supervisor.environment_variables import worker_variables
from toprope.text_format import call
from toprope.workbench.catalog.catalog import Description, Entry
from toprope.workbench.catalog.describe import WorkerOptions
from toprope_tools.clients import UNKNOWN, Client, longest_wait_s

if TYPE_CHECKING:
    from toprope_tools.workshop import Workshop

T = TypeVar("T")

_TOLD_EVERY_S = 5.0
_KEPT_S = 600.0
"""Seconds that a result waits for the call that asks again."""


@dataclass(frozen=True)
class Caller:
    """A caller that waits for an environment.

    Attributes:
        client: It decides how long the call may take; None for a caller without a limit, such as the command line.
        progress: Called with the seconds so far, their limit and a sentence.
    """

    client: Client | None = UNKNOWN
    progress: Callable[[float, float | None, str | None], Awaitable[Any]] | None = None


CALLER = Caller()


@dataclass
class _Opening:
    task: asyncio.Task[Any]
    began: float
    waiting: int = 0


@dataclass
class Openings:
    """Openings in progress, and results that no call has fetched yet."""

    _known: dict[str, _Opening] = field(default_factory=dict)

    async def result(
        self, key: str, make: Callable[[], Awaitable[T]], *, what: str, limit_s: float, wait_s: float, caller: Caller
    ) -> T:
        """Return what `make` returns, or its error.

        Args:
            key: Calls with the same key share one opening.
            make: Opens the environment. It is cancelled after `limit_s`, or if its only caller gives up.
            what: The opening in words, for messages.
            wait_s: The longest that this call waits.

        Raises:
            NotPossibleNow: It goes on; the same call waits further.
            EnvironmentFailed: It took longer than `limit_s`.
        """
        self._forget_old()
        opening = self._known.get(key)
        if opening is None or opening.task.get_loop() is not asyncio.get_running_loop():
            task = asyncio.get_running_loop().create_task(_limited(make, what, limit_s))
            opening = self._known[key] = _Opening(task, time.monotonic())
        until = time.monotonic() + wait_s
        opening.waiting += 1
        try:
            while not opening.task.done() and time.monotonic() < until:
                left = until - time.monotonic()
                await asyncio.wait([opening.task], timeout=min(_TOLD_EVERY_S, left))
                if caller.progress is not None and not opening.task.done():
                    seconds = time.monotonic() - opening.began
                    await caller.progress(seconds, limit_s, f"{what}, {seconds:.0f} of at most {limit_s:.0f} s")
        except asyncio.CancelledError:
            if opening.waiting == 1:
                self._known.pop(key, None)
                opening.task.cancel()
                await asyncio.wait([opening.task])
            raise
        finally:
            opening.waiting -= 1
        if not opening.task.done():
            seconds = time.monotonic() - opening.began
            raise NotPossibleNow(
                f"{what} goes on: {seconds:.0f} of at most {limit_s:.0f} s have passed.",
                hint="Repeat the same call to keep waiting.",
            )
        self._known.pop(key, None)
        result: T = opening.task.result()
        return result

    def _forget_old(self) -> None:
        for key, one in list(self._known.items()):
            if one.task.done() and time.monotonic() - one.began > _KEPT_S:
                if not one.task.cancelled():
                    one.task.exception()  # retrieved, so that asyncio does not report it
                del self._known[key]


async def _limited(make: Callable[[], Awaitable[T]], what: str, limit_s: float) -> T:
    try:
        return await asyncio.wait_for(_awaited(make), limit_s)
    except TimeoutError:
        raise EnvironmentFailed(
            f"{what} did not end within {limit_s:.0f} s.",
            hint="Look for downloads or slow tasks in the environment's code; environment.load_timeout_s is the limit.",
        ) from None


async def _awaited(make: Callable[[], Awaitable[T]]) -> T:
    return await make()


def options_of(workshop: Workshop, section: EnvironmentSection, **more: Any) -> WorkerOptions:
    """Return how a worker opens an environment with the settings of a configuration's section."""
    given: dict[str, Any] = dict(
        knobs=section.knobs,
        reward_weights=section.reward_weights,
        load_timeout_s=section.load_timeout_s,
        call_timeout_s=section.call_timeout_s,
        variables=worker_variables(workshop.settings().variables),
        network=allowed_network(workshop.home.locks(), section.network),
        walls=Walls.of_home(workshop.home),
    )
    return WorkerOptions(**{**given, **more})


def default_section(workshop: Workshop, environment: str, locks: Locks) -> EnvironmentSection:
    """Return the section that a draft from the owner's preset would have, without knobs; the schema's if it is gone."""
    section = EnvironmentSection(name=environment)
    try:
        preset = load_preset(workshop.settings().preset, workshop.home.preset_folders)
        section = preset.config(environment).environment
    except (InvalidValue, NotFound):  # Describing an environment needs no preset; select_environment tells.
        pass
    limit = locks.nearest("environment.load_timeout_s", section.load_timeout_s)
    return section.model_copy(update={"load_timeout_s": float(limit), "knobs": {}, "reward_weights": {}})


async def describe(
    workshop: Workshop, entry: Entry, options: WorkerOptions, *, examples: int, caller: Caller
) -> Description:
    """Describe an environment, waiting as long as the caller's client allows.

    Raises:
        NotPossibleNow: It still loads; the same call waits further.
        EnvironmentFailed, InvalidValue: See `Catalog.describe`.
    """
    if entry.status == "needs install" and workshop.settings().installs == "allow":
        raise EnvironmentFailed(
            f"{entry.name} is not installed.", hint=f"Install it: {call('add_environment', what=entry.ecosystem)}"
        )
    return await opened(
        workshop,
        entry,
        lambda: workshop.catalog.describe(entry, options, examples=examples),
        asked={"examples": examples, "knobs": dict(options.knobs)},
        # The start of the interpreter has the same limit as loading, and examples take calls.
        limit_s=2 * options.load_timeout_s + 2 * options.call_timeout_s,
        caller=caller,
    )


async def opened(
    workshop: Workshop,
    entry: Entry,
    make: Callable[[], Awaitable[T]],
    *,
    asked: Mapping[str, Any],
    limit_s: float,
    caller: Caller,
    beyond_s: float = 0.0,
) -> T:
    """Return what `make` finds out about an environment. See `Openings.result`.

    Args:
        asked: What distinguishes this request from others about the environment.
        beyond_s: Seconds that the call may take beyond the client's usual limit.
    """
    wait_s = limit_s
    if caller.client is not None:
        wait_s = min(limit_s, longest_wait_s(caller.client, workshop.settings().status.waits) + beyond_s)
    source = entry.environment.model_dump(mode="json")
    key = json.dumps([source, _changed(source.get("file")), dict(asked)], sort_keys=True, default=str)
    result = await workshop.openings.result(
        key, make, what=f"Loading {entry.name}", limit_s=limit_s, wait_s=wait_s, caller=caller
    )
    await to_thread.run_sync(workshop.opened.add, entry)
    return result


def _changed(file: Any) -> int:
    """Return when a file was changed; 0 without a file."""
    try:
        return os.stat(file).st_mtime_ns if file else 0
    except OSError:
        return 0
