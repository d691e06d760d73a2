"""Before a run trains: whether the environment's reward tells one answer from another at all.

An environment whose reward never varies costs a night and teaches nothing. So a training run tries a few answers to its
first tasks, the right one first, and goes on at the first two that earn different rewards: of a sound environment that
is two calls. Where all of them earn the same, and a right one was among them, the run is refused. Whoever knows better
says why in `environment.unchecked_reason`, which is frozen with the run.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from msgspec.structs import asdict

from toprope.errors import ComponentFailed
from toprope.sdk.checks.observed import Finding, SplitSeen
from toprope.sdk.checks.probing import Trial, tasks_of
from toprope.sdk.checks.scoring import never_varies
from toprope.sdk.errors import WorkerDied, WorkerFailure, WorkerTimeout
from toprope.training.rollouts.environment_worker import EnvironmentWorker

if TYPE_CHECKING:
    from toprope.training.rollouts.environment_host import Hosted

__all__ = ["require_teaching"]

_TASKS = 4
_SECONDS = 20.0
"""How long a suspicious environment is tried; what it has shown by then is judged."""


async def require_teaching(host: Hosted) -> None:
    """Passes where some answer earns more than another, or where nobody can tell.

    Raises:
        ComponentFailed: Nothing can be learned from this environment's reward, and nobody said why to go on.
        WorkerFailure: The environment's worker ended too often.
    """
    found = await _tried(host)
    if found is None:
        return
    section = host.plan.section
    name = "The environment" if host.alone else f"The environment {host.label}"
    if not found.refuses:
        print(f"{name}: {found.what}", file=sys.stderr, flush=True)
        return
    if section.unchecked_reason:
        print(
            f"{name}: {found.what} It is trained on all the same: {section.unchecked_reason}",
            file=sys.stderr,
            flush=True,
        )
        return
    raise ComponentFailed(
        f"{name} cannot teach anything: {found.what}",
        hint=f"check_environment shows more; {found.next}. To train on it all the same, edit_config sets "
        "environment.unchecked_reason to why, which is kept with the run.",
    )


async def _tried(host: Hosted) -> Finding | None:
    """`never_varies` where it holds."""
    link, timeout = await host.worker.link(), host.plan.section.call_timeout_s
    page = await link.tasks("train", 0, _TASKS, timeout=host.plan.section.load_timeout_s)
    ended: list[WorkerFailure] = []

    async def another() -> EnvironmentWorker:
        """The worker in whose place another one is wanted ended over an answer."""
        died = trial.seen.ended[-1]
        failure = WorkerTimeout(died.said) if died.hung else WorkerDied(died.said)
        try:
            await host.worker.lost(last[0], failure)
        except WorkerFailure as end:
            ended.append(end)
            raise
        last[0] = await host.worker.link()
        return last[0]

    last = [link]
    trial = Trial(another, call_timeout_s=timeout, until=time.monotonic() + _SECONDS)
    trial.link, seen = link, trial.seen
    card = host.card
    seen.max_reward, seen.min_reward = card.max_reward, card.min_reward
    seen.max_turns, seen.own_loop, seen.guessed = card.max_turns, card.own_loop, card.guessed_reference
    seen.splits["train"] = SplitSeen(tasks_of([asdict(task) for task in page.tasks]), page.known, page.exhausted)
    varies = await trial.varies(_TASKS)
    if ended:
        raise ended[0]
    if trial.link is None or not trial.link.alive:  # the last answer cost a worker: the run needs one
        await another()
    return None if varies else never_varies(seen)
