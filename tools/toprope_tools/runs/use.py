"""Tools that use what a run trained: its score on standard tasks, and its answers to other programs."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import anyio
from anyio import to_thread

from toprope.errors import InvalidValue, NotFound, NotPossibleNow, shown
from toprope.records.run.checkpoints import split_step
from toprope.records.run.folder import RunFolder
from toprope.records.run.manifest import pinned
from toprope.records.run.specification import AskPlan, Specification, StandardTasks
from toprope.records.run.status import Status
from toprope.records.run.tested_models import Served, read_measurements, read_served, served_key
from toprope.records.walls import allowed_network
from toprope.sdk.adapters.inspect_ai import PACKAGE
from toprope.settings.locks import Locks
from toprope.text_format import call, moment, plural
from toprope.workbench.interpreters.engines import engine_python
from toprope.workbench.interpreters.known import known_interpreters
from toprope.workbench.interpreters.registry import Registry
from toprope.workbench.launch.freeze import freeze_question
from toprope.workbench.launch.hold import require_policies
from toprope_tools.answers import runs as answers
from toprope_tools.answers.answer import Answer
from toprope_tools.runs.ask import checkpoint_to_use, policy_at

if TYPE_CHECKING:
    from toprope_tools.workshop import Workshop

_MOST_TASKS = 20
_IN_A_PACKAGE = re.compile(r"\w+/\w+")
_WAIT_S, _LOOK_S = 42.0, 0.25
"""Clients drop a call at about 60 s."""


async def evaluate_policy(
    workshop: Workshop,
    *,
    run_id: str,
    tasks: Sequence[str],
    limit: int | None = None,
    python: str | None = None,
    engine: str | None = None,
    agent: bool = True,
) -> Answer:
    """Start runs that measure standard tasks of Inspect: with a checkpoint, and with the policy that its run began with
    unless that was measured on them before.

    Args:
        run_id: An ended run with a checkpoint, or `RUN@STEP`.
        tasks: As `inspect eval` takes them: `inspect_evals/gsm8k`, or, not from agents, `/path/file.py@task`.
        limit: Samples of each task; all if None.
        python: An interpreter that has Inspect; one of the owner's if None.
        engine: As `inference.engine`; the run's if None.
        agent: An agent asks, so that only tasks of installed packages are run.

    Raises:
        InvalidValue: No tasks, too many, or names that agents may not give; or the engine was not added.
        NotFound: No interpreter has Inspect, or there is no such run.
        NotPossibleNow: The run is live or has no checkpoint, or a limit forbids the start.
    """
    if not 1 <= len(tasks) <= _MOST_TASKS:
        raise InvalidValue(f"{plural(len(tasks), 'task')} given.", hint=f"From 1 to {_MOST_TASKS} at a time.")
    for name in tasks if agent else ():
        if not _IN_A_PACKAGE.fullmatch(name):
            raise InvalidValue(
                f"{shown(name)} is not a task of an installed package. Nothing was started.",
                hint="Names have the form inspect_evals/gsm8k. Files are for the owner: toprope eval.",
            )

    def start() -> list[Specification]:
        run, checkpoint, policy_words = checkpoint_to_use(workshop, run_id)
        folder, locks = workshop.runs.folder(run.run_id), workshop.home.locks(run.preset)
        first_policy = pinned(run.config.policy, folder)
        sides = (
            (checkpoint.step, policy_at(run, checkpoint), policy_words),
            (None, first_policy, f"the policy that {run.run_id} began with"),
        )
        interpreter, network = python or _find_inspect(workshop), allowed_network(locks)
        sampler = None if engine is None else (engine, engine_python(workshop.home, engine))
        frozen = []
        for step, policy, words in sides:
            standard = StandardTasks(
                names=list(tasks), limit=limit, python=interpreter, network=network, run=run.run_id, step=step
            )
            plan = _plan(locks, run, words, standard)
            frozen.append(freeze_question(run, policy, locks, plan, sampler))
        conditions = (limit, plan.temperature, plan.max_new_tokens, frozen[-1].config.inference.engine)
        for measurement in read_measurements(folder):
            same_tasks = measurement.names == list(tasks) and measurement.conditions == conditions
            if measurement.step is None and same_tasks and not any(score.failed for score in measurement.scores):
                del frozen[1:]
        return workshop.starter.start_frozen(frozen).specifications

    started = await to_thread.run_sync(start)
    ids, run = [specification.run_id for specification in started], split_step(run_id)[0]
    words = " and ".join(
        f"{specification.run_id} ({specification.ask.asked})" for specification in started if specification.ask
    )
    text = f"Started {words}: {', '.join(tasks)}, {plural(limit, 'sample') + ' each' if limit else 'all samples'}.\n"
    if len(ids) == 1:
        text += "The policy before training was measured on these tasks already.\n"
    text += (
        f"Next: {call('check_status', run_ids=ids, wait_s=45, until='end')}, then {call('get_results', run_id=run)} "
        "has the scores."
    )
    return Answer(text, answers.Evaluating(run_id=run, run_ids=ids, tasks=list(tasks), limit=limit))


async def serve_policy(workshop: Workshop, *, run_id: str, minutes: float) -> Answer:
    """Start a run that serves a checkpoint to programs on this machine, and wait until it answers.

    Args:
        run_id: An ended run with a checkpoint, or `RUN@STEP`.
        minutes: The time after which it ends by itself.

    Raises:
        LockedField: The owner does not allow it.
        NotPossibleNow, NotFound: See `evaluate_policy`.
    """

    def start() -> Specification:
        require_policies(workshop.settings())
        run, checkpoint, policy_words = checkpoint_to_use(workshop, run_id)
        if run.config.launcher.kind != "local":
            raise NotPossibleNow(
                f"{run.run_id} is of the cluster {run.config.launcher.kind}, whose nodes programs here cannot reach.",
                hint="ask_checkpoint asks its policy there; export_policy writes it to a folder.",
            )
        locks = workshop.home.locks(run.preset)
        plan = _plan(locks, run, policy_words, None, minutes * 60)
        specification = freeze_question(run, policy_at(run, checkpoint), locks, plan)
        return workshop.starter.start_frozen([specification]).specifications[0]

    served = (await to_thread.run_sync(start)).run_id
    folder = workshop.runs.folder(served)

    def look() -> tuple[Served | None, Status]:
        return read_served(folder), workshop.runs.status(served)

    endpoint, status = await to_thread.run_sync(look)
    with anyio.move_on_after(_WAIT_S):
        while endpoint is None and not status.ended:
            await anyio.sleep(_LOOK_S)
            endpoint, status = await to_thread.run_sync(look)
    lines = await to_thread.run_sync(served_lines, folder) or [f"{served} is {status.state} and does not serve yet."]
    lines.append(f"Next: {call('stop_training', run_id=served)} ends it; get_results has this again.")
    return Answer(
        "\n".join(lines),
        answers.Serving(
            run_id=served,
            state=status.state,
            url=endpoint.url if endpoint else None,
            until=endpoint.until if endpoint else None,
            key_file=str(served_key(folder)) if endpoint else None,
        ),
    )


def served_lines(folder: RunFolder) -> list[str]:
    """Say where a live run serves its policy; nothing before and after."""
    endpoint = read_served(folder)
    if endpoint is None:
        return []
    return [
        f"{folder.run_id} serves its policy at {endpoint.url} (OpenAI's dialect, any model name) until "
        f"{moment(endpoint.until)}. The key is in {served_key(folder)}; give programs the file, not its content."
    ]


def _plan(
    locks: Locks, run: Specification, policy_words: str, standard: StandardTasks | None, serve_s: float | None = None
) -> AskPlan:
    return AskPlan(
        standard=standard,
        serve_s=serve_s,
        temperature=float(locks.nearest("rollout.temperature", 0.0)),
        max_new_tokens=locks.nearest("rollout.max_new_tokens", run.config.rollout.max_new_tokens),
        asked=policy_words,
    )


def _find_inspect(workshop: Workshop) -> str:
    """Return the first of the owner's interpreters that has Inspect.

    Raises:
        NotFound: None has it.
    """
    for interpreter in known_interpreters(Registry(workshop.home.environments_file).read()):
        if not interpreter.problem and (interpreter.site_packages / PACKAGE).is_dir():
            return interpreter.python or sys.executable
    raise NotFound(
        "No interpreter here has Inspect, so standard tasks cannot be run. Nothing was started.",
        hint="The owner makes one: toprope env add inspect-evals.",
    )
