"""Tools that read and edit drafts."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from anyio import to_thread

from toprope.errors import InvalidValue, NotPossibleNow
from toprope.records.run.specification import EnvironmentSource
from toprope.records.walls import Walls
from toprope.settings.changes import Change, apply_changes
from toprope.settings.fields import KNOBS, Field, get_value
from toprope.settings.locks import Locks
from toprope.settings.schema import SECTIONS, Config
from toprope.settings.sections.environment import MemberPlan, members_of
from toprope.text_format import ago, call, cut, value
from toprope.workbench.drafts import Draft
from toprope.workbench.endpoints import resolve_helpers
from toprope.workbench.launch.lineage import policy_named
from toprope.workbench.launch.mixture_sources import blend, own_source
from toprope_tools.answers import planning as answers
from toprope_tools.answers.answer import Answer, fitting
from toprope_tools.openings import CALLER, Caller
from toprope_tools.planning.fit import no_tasks_lines, remember
from toprope_tools.planning.opening import describe, options_of

if TYPE_CHECKING:
    from toprope_tools.workshop import Workshop

_HISTORY, _SHORT_HISTORY = 10, 2
"""Edits in an answer, and in an answer whose values must be short."""
_SHORT_VALUES = 200
"""Longest value of such an answer, in characters."""
_SOURCES = frozenset(f"environment.{name}" for name in ("mixture", "model_roles", "opponent", "rewards"))
_OPENED = frozenset(f"environment.{name}" for name in ("curriculum", "reward_weights", "reward_weights_end", "rewards"))
"""Fields that only an opened environment can check, beside knobs."""


async def get_config(workshop: Workshop, *, draft_id: str, section: str | None = None) -> Answer:
    """Answer a draft's fields with value, type, bounds and lock, its edits, and its conflicts.

    Args:
        section: Answer only this section, with descriptions.

    Raises:
        NotFound: There is no such draft.
        InvalidValue: There is no such section, or the owner's locks cannot be read.
    """
    if section is not None and section not in SECTIONS:
        raise InvalidValue(f"There is no section {section!r}.", hint=f"Sections: {', '.join(SECTIONS)}.")
    draft = await to_thread.run_sync(workshop.drafts.get, draft_id)
    history = await to_thread.run_sync(workshop.drafts.history, draft_id)
    locks = workshop.home.locks(draft.preset)
    fields = [
        field
        for name, field in draft.fields.items()
        if section in (None, name.partition(".")[0])
    ]  # fmt: skip
    conflicts = draft.config.conflicts()
    head = (
        f"{draft.id}: {draft.environment.name}, preset {draft.preset}, revision {draft.revision}, "
        f"edited {ago(draft.updated_at)}."
    )
    if origin := await to_thread.run_sync(workshop.drafts.forked_from, draft.id):
        head += f" It began with the configuration of {origin}."
    field_lines = _by_section(draft, fields, locks) if section is None else _in_full(draft, fields, locks)

    def answer(limit: int) -> Answer:
        edits = history[-_HISTORY if limit > _SHORT_VALUES else -_SHORT_HISTORY :]
        lines = [head, *field_lines]
        if edits:
            lines.append(f"Edits ({len(history)}); undo_edit goes back to a revision:")
            lines += [f"  revision {edit.revision}: {said_changes(edit.changes)}" for edit in edits]
        lines += [f"Conflict: {conflict}" for conflict in conflicts]
        if section is None:
            lines.append(
                f"Descriptions: {call('get_config', draft_id=draft.id, section='rollout')} and other sections."
            )
        lines.append(f"Next: {call('edit_config', draft_id=draft.id)} with changes, or {_start(draft)}.")
        data = answers.ConfigAnswer(
            draft_id=draft.id,
            environment=draft.environment.name,
            preset=draft.preset,
            revision=draft.revision,
            values={field.name: cut(get_value(draft.config, field), limit) for field in fields},
            conflicts=conflicts,
        )
        return Answer("\n".join(lines), data)

    return fitting(answer)


async def edit_config(
    workshop: Workshop, *, draft_id: str, changes: Mapping[str, Any], caller: Caller = CALLER
) -> Answer:
    """Change fields of a draft, all or none.

    Args:
        draft_id: Id of the draft.
        changes: Values by field.
        caller: Who waits for the environment, which a worker opens with its new knobs, weights and rewards.

    Raises:
        NotFound: There is no such draft, field, environment or reward function.
        LockedField, InvalidValue: A value is not allowed; nothing was changed.
        EnvironmentFailed: The environment does not load with these values; nothing was changed.
        NotPossibleNow: It still loads; nothing was changed.
    """
    if not changes:
        raise InvalidValue(
            "changes is empty.",
            hint='Give fields and values: {"optimizer.learning_rate": 1e-4}. get_config names them.',
        )
    former = await to_thread.run_sync(workshop.drafts.get, draft_id)
    locks = workshop.home.locks(former.preset)
    if isinstance(model := changes.get("policy.model"), str):
        changes = {**changes, "policy.model": await to_thread.run_sync(policy_named, model, workshop.home.runs)}
    config, planned = apply_changes(former.config, changes, former.knobs, locks)
    warnings = await _require_opening(workshop, former, config, planned, caller)
    draft, changed = await to_thread.run_sync(workshop.drafts.edit, draft_id, changes, locks)
    workshop.expect_run(draft.config)
    if changed:
        text = f"{draft.id} is now at revision {draft.revision}: {said_changes(changed)}."
    else:
        text = f"{draft.id} stays at revision {draft.revision}: it already had these values."
    for conflict in draft.config.conflicts():
        text += f"\nConflict, so it would not start yet: {conflict}"
    text += "".join(f"\n{line}" for line in warnings)
    text += f"\nNext: {call('test_inference', draft_id=draft.id)} or {_start(draft)}."

    def answer(limit: int) -> Answer:
        data = answers.EditAnswer(draft_id=draft.id, revision=draft.revision, changed=_changes(changed, limit))
        return Answer(text, data)

    return fitting(answer)


async def _require_opening(
    workshop: Workshop, former: Draft, config: Config, changed: Sequence[Change], caller: Caller
) -> list[str]:
    """Find the environments and helpers of an edited configuration, and open the environments that the edit concerns.

    Returns:
        A warning of each opened environment that has no tasks.

    Raises: See `edit_config`.
    """
    names, section = {change.field for change in changed}, config.environment
    opens = bool(names & _OPENED) or any(name.startswith(f"{KNOBS}.") for name in names)
    if not opens and not names & _SOURCES:
        return []
    edited, folders = replace(former, config=config), workshop.home.environment_folders(workshop.settings())
    walls = Walls.of_home(workshop.home)
    members, known = members_of(section), members_of(former.config.environment)[1:]
    sources: list[EnvironmentSource] = []
    if names & _SOURCES:
        settings, file = workshop.settings(), workshop.home.settings_file
        await to_thread.run_sync(resolve_helpers, section, settings, workshop.home.preset_folders, file)
        sources = (await to_thread.run_sync(blend, edited, workshop.catalog.find, folders, walls)).mixture
    plans = [(member, source) for member, source in zip(members[1:], sources, strict=False) if member not in known]
    if opens:
        plans.insert(0, (members[0], await to_thread.run_sync(own_source, edited, folders, walls)))
    # Side by side: the caller waits for the slowest alone, and one that still loads hides no mistake of another.
    opened = await asyncio.gather(*(_open(workshop, *plan, caller) for plan in plans), return_exceptions=True)
    failures = [result for result in opened if isinstance(result, BaseException)]
    for failure in sorted(failures, key=lambda failure: isinstance(failure, NotPossibleNow)):
        raise failure
    return [line for lines in opened if not isinstance(lines, BaseException) for line in lines]


async def _open(workshop: Workshop, plan: MemberPlan, source: EnvironmentSource, caller: Caller) -> list[str]:
    section = plan.section
    entry = await to_thread.run_sync(workshop.catalog.of_source, source)
    weights = {**section.reward_weights_end, **section.reward_weights}
    options = options_of(workshop, section.model_copy(update={"reward_weights": weights}))
    described = await describe(workshop, entry, options, examples=0, caller=caller)
    remember(workshop, entry.name, section.knobs, described)
    return no_tasks_lines(described)


async def open_drafts(workshop: Workshop) -> str:
    """Return one line that names the drafts, for a call that named none."""
    drafts = await to_thread.run_sync(workshop.drafts.recent, 10)
    if not drafts:
        return "There are no drafts yet; select_environment makes one."
    return "Drafts: " + "; ".join(
        f"{draft.id} ({draft.environment.name}, revision {draft.revision}, {ago(draft.updated_at)})" for draft in drafts
    )


def said_changes(changes: list[Change]) -> str:
    """Format changes as short text: `rollout.group_size 8 -> 16; policy.lora false -> true`."""
    return "; ".join(f"{change.field} {value(change.before)} -> {value(change.after)}" for change in changes)


def _start(draft: Draft) -> str:
    return call("start_training", draft_id=draft.id)


def _by_section(draft: Draft, fields: list[Field], locks: Locks) -> list[str]:
    """Return one line of values per section, then the locked fields."""
    lines = []
    for section in SECTIONS:
        section_fields = [field for field in fields if field.name.partition(".")[0] == section]
        values = [f"{field.name.partition('.')[2]}={value(get_value(draft.config, field))}" for field in section_fields]
        lines.append(f"{section}: {', '.join(values)}")
    locked = [f"{field.name} ({lock.says})" for field in fields if (lock := locks.get(field.name))]
    if locked:
        lines.append(f"Locked by the owner: {'; '.join(locked)}.")
    return lines


def _in_full(draft: Draft, fields: list[Field], locks: Locks) -> list[str]:
    lines = []
    for field in fields:
        bounds = f", {field.bounds}" if field.bounds else ""
        line = (
            f"{field.name} = {value(get_value(draft.config, field))} ({field.type_text}{bounds}): {field.description}"
        )
        if lock := locks.get(field.name):
            line += f" LOCKED by the owner, {lock.says}: {lock.reason}"
        lines.append(line.strip())
    return lines


def _changes(changes: list[Change], limit: int) -> list[answers.FieldChange]:
    return [
        answers.FieldChange(field=change.field, before=cut(change.before, limit), after=cut(change.after, limit))
        for change in changes
    ]
