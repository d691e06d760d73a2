"""Tools for earlier configurations: fork, compare and undo them, and reproduce a run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from anyio import to_thread

from toprope.analysis.reports.report import gather
from toprope.analysis.reproduction import Reproduction, compare_runs_of_one, differing_inputs
from toprope.analysis.statistics.intervals import Proportion
from toprope.errors import Corrupt, InvalidValue, NotFound, NotPossibleNow
from toprope.records.run.folder import RunFolder, nearest_runs
from toprope.records.run.manifest import Manifest
from toprope.records.run.metrics import read_rows
from toprope.records.run.specification import Specification
from toprope.records.run.status import LIVE, Status
from toprope.settings.changes import Change
from toprope.settings.fields import KNOBS
from toprope.settings.presets import load_preset
from toprope.text_format import call, clip, cut, plural, value
from toprope.workbench.drafts import default_section
from toprope.workbench.history import Side, config_of_preset, difference
from toprope.workbench.launch.freeze import freeze_again
from toprope.workbench.launch.seeds import expand
from toprope_tools.answers import planning as planning_answers
from toprope_tools.answers import runs as runs_answers
from toprope_tools.answers.answer import Answer, fitting
from toprope_tools.openings import CALLER, Caller
from toprope_tools.planning.config import said_changes
from toprope_tools.planning.opening import describe, options_of
from toprope_tools.runs.sweeps import best_of_sweep
from toprope_tools.runs.training import start_frozen

if TYPE_CHECKING:
    from toprope_tools.workshop import Workshop

_DRAFT = re.compile(r"^(draft-[a-z0-9]+)(?:@(\d+))?$")
_SHOWN, _LONGEST = 40, 200


async def fork_config(workshop: Workshop, *, run_id: str, caller: Caller = CALLER) -> Answer:
    """Make a draft with a run's configuration and environment; of a seed group, those of its first run.

    Raises:
        NotFound: There is no such run, or its environment is gone.
        EnvironmentFailed: The environment does not load.
        InvalidValue: The environment has changed its knobs, or the locks forbid the configuration; no draft was made.
    """
    [first, *_] = await to_thread.run_sync(expand, workshop.home.runs, [run_id])
    run = await to_thread.run_sync(_specification, workshop, first)
    if run.ask is not None:
        raise InvalidValue(f"{run_id} only asked questions.", hint="Fork the run whose policy it asked.")
    if run.sweep is not None:
        run = await to_thread.run_sync(best_of_sweep, workshop.runs.folder(run_id), run)
    entry = await to_thread.run_sync(workshop.catalog.find, run.environment.name)
    locks = workshop.home.locks(run.preset)
    knobs = await to_thread.run_sync(_known_knobs, workshop, run)
    if knobs is None:
        section, run_environment = default_section(workshop.home, entry.name, locks), run.config.environment
        limit = float(locks.nearest("environment.load_timeout_s", run_environment.load_timeout_s))
        options = options_of(workshop, section, load_timeout_s=limit)
        tuned = {knob: locks.nearest(f"{KNOBS}.{knob}", setting) for knob, setting in run_environment.knobs.items()}
        try:
            described = await describe(workshop, entry, replace(options, knobs=tuned), examples=0, caller=caller)
        except InvalidValue:  # It has changed its knobs since.
            described = await describe(workshop, entry, options, examples=0, caller=caller)
        knobs = [knob.declaration() for knob in described.card.knobs]
    draft, moved, gone = await to_thread.run_sync(workshop.drafts.fork, run, entry.environment, knobs, locks)
    text = f"Made {draft.id} with the configuration of {run_id}: {entry.name}, preset {run.preset or 'unknown'}."
    if moved:
        text += f"\nThe owner's locks changed: {said_changes(moved)}."
    if gone:
        text += f"\nLeft out, because the environment does not have them any more: {', '.join(gone)}."
    edit, start = call("edit_config", draft_id=draft.id), call("start_training", draft_id=draft.id)
    text += f"\nNext: {edit} with changes, or {start}."
    data = planning_answers.Forked(
        draft_id=draft.id,
        run_id=run_id,
        environment=entry.name,
        revision=draft.revision,
        moved_by_locks=_diffs(moved),
        dropped=gone,
    )
    return Answer(text, data)


async def diff_config(workshop: Workshop, *, a: str, b: str | None = None) -> Answer:
    """Compare two configurations.

    Args:
        a: A draft (`draft-7f3k`), one of its revisions (`draft-7f3k@2`), a run, or `preset NAME`.
        b: The other; the preset of `a` if None.

    Raises:
        NotFound: One of them does not exist.
    """
    side_a, side_b = await to_thread.run_sync(_sides, workshop, a, b)
    changes = difference(side_a.config, side_b.config)
    lines = [f"{side_a.name} and {side_b.name}: {plural(len(changes), 'field differs', 'fields differ')}."]
    if not changes:
        lines = [f"{side_a.name} and {side_b.name} are equal in every field."]
    if side_a.environment and side_b.environment and side_a.environment != side_b.environment:
        lines.append(f"They train on different environments: {side_a.environment} and {side_b.environment}.")
    lines += [f"  {change.field}: {value(change.before)} | {value(change.after)}" for change in changes[:_SHOWN]]
    if len(changes) > _SHOWN:
        lines.append(f"  and {len(changes) - _SHOWN} more, in the structure.")
    return fitting(
        lambda limit: Answer(
            "\n".join(lines), planning_answers.ConfigDiff(a=side_a.name, b=side_b.name, fields=_diffs(changes, limit))
        )
    )


async def undo_edit(workshop: Workshop, *, draft_id: str, revision: int) -> Answer:
    """Go back to an earlier revision of a draft by a new edit.

    Args:
        revision: The revision to restore; 1 is the draft as it was made.

    Raises:
        NotFound: There is no such draft or revision.
        InvalidValue: The result has conflicts; nothing was changed.
    """

    def work() -> Answer:
        draft = workshop.drafts.get(draft_id)
        draft_after, changes, kept_changes = workshop.drafts.revert(
            draft_id, revision, workshop.home.locks(draft.preset)
        )
        if changes:
            text = f"{draft_id} has the values of revision {revision} again, as revision {draft_after.revision}: "
            text += f"{said_changes(changes)}."
        else:
            text = f"{draft_id} stays at revision {draft_after.revision}: "
            text += f"it already has the values of revision {revision}."
        if kept_changes:
            text += f"\nKept by the owner's locks: {said_changes(kept_changes)}."
        text += f"\nNext: {call('start_training', draft_id=draft_id)}"
        data = planning_answers.Undone(
            draft_id=draft_id,
            revision=draft_after.revision,
            back_to=revision,
            changed=_diffs(changes),
            kept_by_locks=_diffs(kept_changes),
        )
        return Answer(text, data)

    return await to_thread.run_sync(work)


async def reproduce_run(workshop: Workshop, *, run_id: str) -> Answer:
    """Start a run with the same specification; get_results compares the two.

    Raises:
        NotFound: There is no such run.
        LockedField, InvalidValue: The owner does not allow that configuration any more, or runs of its kind cannot be
            repeated.
        NotPossibleNow: The run has not ended, is being repeated already, or a limit forbids it; nothing was started.
    """

    def work() -> Answer:
        run = _specification(workshop, run_id)
        status = workshop.runs.status(run_id)
        if not status.ended:
            raise NotPossibleNow(
                f"{run_id} is {status.state}, so there are no results to compare with; nothing was started.",
                hint=call("check_status", run_ids=[run_id], wait_s=45),
            )
        if twin := _repeats(workshop, run_id):
            raise NotPossibleNow(
                f"{run_id} is being repeated already, as {twin}; nothing was started.",
                hint=call("check_status", run_ids=[twin], wait_s=45),
            )
        [repetition] = start_frozen(workshop, [freeze_again(run, workshop.home.locks(run.preset), workshop.home.runs)])
        exact = run.config.algorithm.deterministic
        promise = (
            "It is deterministic: every metric should be equal at every step."
            if exact
            else "It is not deterministic: expect held-out accuracy within noise. A fork of it with "
            "algorithm.deterministic=true gives runs that can be equal."
        )
        text = (
            f"Started {repetition.run_id}, which repeats {run_id}. {promise}\n"
            f"Next: {call('check_status', run_ids=[repetition.run_id], wait_s=45)}; when it has ended "
            f"{call('get_results', run_id=repetition.run_id)} says whether the results are equal, "
            "or which input differs."
        )
        return Answer(
            text,
            runs_answers.Reproducing(run_id=repetition.run_id, reproduces=run_id, deterministic=exact, state="queued"),
        )

    return await to_thread.run_sync(work)


def compared_with_original(workshop: Workshop, specification: Specification) -> Reproduction | None:
    """Compare a run with the one it repeats; None for other runs, or if the other is gone."""
    if specification.reproduces is None:
        return None
    try:
        original = workshop.runs.folder(specification.reproduces)
        folders = original, workshop.runs.folder(specification.run_id)
        manifests = [Manifest.read(folder) for folder in folders]
        inputs: dict[str, list[Any]] = {}
        if manifests[0] is not None and manifests[1] is not None:
            inputs = differing_inputs(manifests[0].inputs, manifests[1].inputs)
        measured = [_measured(folder) for folder in folders]
    except (NotFound, Corrupt):  # the other run is gone or damaged; this one still has results
        return None
    return compare_runs_of_one(
        original.run_id,
        read_rows(folders[0].metrics),
        read_rows(folders[1].metrics),
        deterministic=specification.config.algorithm.deterministic,
        inputs=inputs,
        heldout=(measured[0], measured[1]),
        measured="held-out accuracy" if specification.run_kind.trains else "accuracy on validation tasks",
    )


def _measured(folder: RunFolder) -> Proportion | None:
    specification = Specification.read(folder)
    report = gather(folder, specification, Status.read(folder))
    measured = report.evaluations.get(specification.run_kind.final_evaluation or "")
    return measured.sampled.proportion() if measured is not None and measured.sampled is not None else None


def _repeats(workshop: Workshop, run_id: str) -> str | None:
    """Return a live run that repeats this one."""
    for status in workshop.statuses():
        try:
            if status.state in LIVE and _specification(workshop, status.run_id).reproduces == run_id:
                return status.run_id
        except (NotFound, Corrupt):
            continue
    return None


def _specification(workshop: Workshop, run_id: str) -> Specification:
    return Specification.read(workshop.runs.folder(run_id))


def _known_knobs(workshop: Workshop, run: Specification) -> list[dict[str, Any]] | None:
    """Return the knobs of the environment from the run's draft, if it still exists and they fit."""
    if run.draft_id is None:
        return None
    try:
        draft = workshop.drafts.get(run.draft_id)
    except NotFound:
        return None
    names = {knob.get("name") for knob in draft.knobs}
    source = run.environment.model_copy(update={"split_rule": draft.environment.split_rule})
    fits = draft.environment == source and names == set(run.config.environment.knobs)
    return draft.knobs if fits else None


def _sides(workshop: Workshop, a: str, b: str | None) -> tuple[Side, Side]:
    side_a = _side(workshop, a, "", {})
    if b is None:
        if not side_a.preset:
            raise NotFound(
                f"The preset of {side_a.name} is not known.", hint="Give b: a draft, a run or 'preset NAME'."
            )
        b = f"preset {side_a.preset}"
    side_b = _side(workshop, b, side_a.environment, _defaults(workshop, a))
    if not side_a.environment:
        side_a = _side(workshop, a, side_b.environment, _defaults(workshop, b))
    return side_a, side_b


def _defaults(workshop: Workshop, name: str) -> dict[str, Any]:
    """Return the defaults of the environment's knobs, from the named draft or from the draft of the named run."""
    try:
        match = _DRAFT.match(name.strip())
        draft_id = match[1] if match else _specification(workshop, name.strip()).draft_id
        draft = workshop.drafts.get(draft_id or "")
    except NotFound:
        return {}
    return {knob["name"]: knob.get("default") for knob in draft.knobs}


def _side(workshop: Workshop, name: str, environment: str, defaults: Mapping[str, Any]) -> Side:
    """Return one side; a preset names no environment, so it takes the defaults of the other side's knobs."""
    name = name.strip()
    if match := _DRAFT.match(name):
        draft = workshop.drafts.get(match[1])
        config = draft.config if match[2] is None else workshop.drafts.at(draft.id, int(match[2]))
        return Side(name, draft.environment.name, draft.preset, config)
    if re.match("preset[ :=]", name):
        preset_name = name.removeprefix("preset").lstrip(" :=")
        preset = load_preset(preset_name, workshop.home.preset_folders)
        config = config_of_preset(preset, environment)
        config.environment.knobs = {**defaults, **config.environment.knobs}
        return Side(f"preset {preset_name}", environment, preset_name, config)
    try:
        run = _specification(workshop, name)
    except NotFound:
        near = nearest_runs(workshop.home.runs, name)
        raise NotFound(
            f"There is no draft, run or preset {clip(name, 80)!r}.",
            hint=f"Did you mean {' or '.join(near)}?"
            if near
            else 'Write "draft-7f3k", "draft-7f3k@2", a run\'s id as list_runs gives it, or "preset cpu-embedded".',
        ) from None
    return Side(name, run.environment.name, run.preset, run.config)


def _diffs(changes: list[Change], limit: int = _LONGEST) -> list[planning_answers.FieldDiff]:
    return [
        planning_answers.FieldDiff(field=change.field, a=cut(change.before, limit), b=cut(change.after, limit))
        for change in changes
    ]
