"""Opening environments for the tools: with the owner's limits, with progress, and beyond the call that asked.

An environment may take `environment.load_timeout_s` to load, which is longer than most clients wait for a call. So an
opening that outlasts its call goes on, and the next equal call gets its result.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from anyio import to_thread

from toprope.errors import EnvironmentFailed
from toprope.records.walls import Walls, allowed_network
from toprope.settings.sections.environment import EnvironmentSection, curriculum_of, rewards_of
from toprope.supervisor.environment_variables import worker_variables
from toprope.text_format import call
from toprope.workbench.catalog.catalog import Description, Entry
from toprope.workbench.catalog.describe import WorkerOptions
from toprope.workbench.catalog.opened import changed
from toprope_tools.clients import longest_wait_s
from toprope_tools.openings import Caller
from toprope_tools.workshop import Workshop

T = TypeVar("T")


def options_of(workshop: Workshop, section: EnvironmentSection, **more: Any) -> WorkerOptions:
    """Return how a worker opens an environment with the settings of a configuration's section.

    A worker knows no judges, whose parts are added beyond it, so weights of those are left out.
    """
    settings = workshop.settings()
    judges = {reward.name for reward in rewards_of(section.rewards) if reward.judge}
    options: dict[str, Any] = dict(
        knobs=section.knobs,
        reward_weights={name: weight for name, weight in section.reward_weights.items() if name not in judges},
        load_timeout_s=section.load_timeout_s,
        call_timeout_s=section.call_timeout_s,
        variables=worker_variables(settings.variables),
        tool_variables=settings.tool_variables,
        network=allowed_network(workshop.home.locks(), section.network),
        walls=Walls.of_home(workshop.home),
    )
    options |= more
    if (curriculum := curriculum_of(section.curriculum)) is not None:
        options["levels"] = tuple({**options["knobs"], curriculum.knob: level} for level in curriculum.levels)
        options["knobs"] = options["levels"][curriculum.measured]
    return WorkerOptions(**options)


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
        asked={
            "examples": examples,
            "knobs": dict(options.knobs),
            "levels": options.levels,
            "weights": dict(options.reward_weights),
        },
        # The start of the interpreter and the first tasks have the same limit as loading, and examples take calls.
        limit_s=3 * options.load_timeout_s + 4 * options.call_timeout_s,
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
    doing: str = "Loading",
) -> T:
    """Return what `make` finds out about an environment. See `Openings.result`.

    Args:
        asked: What distinguishes this request from others about the environment.
        beyond_s: Seconds that the call may take beyond the client's usual limit.
        doing: The work, for messages.
    """
    wait_s = limit_s
    if caller.client is not None:
        wait_s = min(limit_s, longest_wait_s(caller.client, workshop.settings().status.waits) + beyond_s)
    source = entry.environment.model_dump(mode="json")
    key = json.dumps([source, changed(entry.environment), dict(asked)], sort_keys=True, default=str)
    try:
        result = await workshop.openings.result(
            key, make, what=f"{doing} {entry.name}", limit_s=limit_s, wait_s=wait_s, caller=caller
        )
    except EnvironmentFailed:
        if asked.get("knobs"):  # which may be at fault
            raise
        await to_thread.run_sync(workshop.opened.forget, entry)
        raise
    await to_thread.run_sync(workshop.opened.add, entry)
    return result
