"""Tool that checks whether an environment is fit for training. Texts from the environment are untrusted."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anyio import to_thread

from toprope.records.walls import Walls
from toprope.settings.fields import KNOBS
from toprope.settings.sections.environment import curriculum_of, members_of, rewards_of
from toprope.text_format import call, clip, number, plural
from toprope.untrusted import marked
from toprope.workbench.catalog.check import FULL_S, QUICK_S, CheckReport, check
from toprope.workbench.catalog.kept_checks import KeptChecks, KeptFinding
from toprope.workbench.drafts import default_section
from toprope.workbench.launch.mixture_sources import hold_locks, own_source
from toprope_tools.answers.answer import Answer
from toprope_tools.answers.planning import CheckAnswer, CheckFinding
from toprope_tools.openings import CALLER, Caller
from toprope_tools.planning.fit import default_policy, lengths
from toprope_tools.planning.opening import opened, options_of

if TYPE_CHECKING:
    from toprope_tools.workshop import Workshop

_DRAFT = re.compile(r"draft-[a-z0-9]+")
_BEYOND_S = 8.0
"""Seconds beyond its time limit that a check may take to end its processes."""
_MOST_FINDINGS = 20
_WORDS = {
    "ok": "no problem found that speaks against training on it",
    "warning": "training on it is possible, but note the following",
    "critical": "do not train on it as it is",
}


async def check_environment(
    workshop: Workshop,
    *,
    name: str,
    knobs: dict[str, Any] | None = None,
    full: bool = False,
    seconds: float | None = None,
    caller: Caller = CALLER,
) -> Answer:
    """Try an environment in workers and report its faults.

    Args:
        name: Name of the environment, or id of a draft whose settings apply.
        knobs: The environment's own settings, in place of those of the draft or the defaults.
        full: Try more of everything, and measure memory.
        seconds: Time limit after loading and the first tasks; that of the quick or full check if None.
        caller: Who waits for it.

    Raises:
        NotFound: There is no such environment, draft or reward function.
        LockedField: The owner does not allow a knob, or the draft's environment any more.
        InvalidValue: A knob is missing or has an impossible value.
        EnvironmentFailed: It does not load.
        NotPossibleNow: It still loads, or is still being checked.
    """
    draft_id, other_members, locks = None, [], workshop.home.locks()
    own_knobs = dict(knobs or {})
    locks.require({f"{KNOBS}.{knob}": setting for knob, setting in own_knobs.items()})
    if _DRAFT.fullmatch(name):
        draft = await to_thread.run_sync(workshop.drafts.get, name)
        draft_id, section, policy = draft.id, draft.config.environment, draft.config.policy.model
        environment_fields = {key: field for key, field in draft.fields.items() if key.startswith("environment.")}
        locks.enforce(draft.config, environment_fields)
        hold_locks(draft.config, locks)
        folders = workshop.home.environment_folders(workshop.settings())
        source = await to_thread.run_sync(own_source, draft, folders, Walls.of_home(workshop.home))
        entry = await to_thread.run_sync(workshop.catalog.of_source, source)
        other_members = [f"{plan.label}, in environment.mixture" for plan in members_of(section)[1:]]
        section = section.model_copy(update={"knobs": {**section.knobs, **own_knobs}})
        if (curriculum := curriculum_of(section.curriculum)) is not None and curriculum.knob in own_knobs:
            section.curriculum = {}  # its level would replace the caller's
    else:
        entry = await to_thread.run_sync(workshop.catalog.find, name)
        section = default_section(workshop.home, entry.name, locks).model_copy(update={"knobs": own_knobs})
        policy = default_policy(workshop, entry.name)
    time_limit_s = seconds or (FULL_S if full else QUICK_S)
    max_turns = section.max_turns if draft_id else None
    judges = [f"judge {reward.name}, in environment.rewards" for reward in rewards_of(section.rewards) if reward.judge]
    options = options_of(workshop, section, call_timeout_s=min(20.0, section.call_timeout_s, 0.8 * time_limit_s))
    report = await opened(
        workshop,
        entry,
        lambda: check(entry, options, max_turns=max_turns, full=full, seconds=time_limit_s, judged=bool(judges)),
        asked={"check": [full, time_limit_s, max_turns], "section": section.model_dump(mode="json")},
        limit_s=3 * options.load_timeout_s + time_limit_s + _BEYOND_S,  # to start, to load, and for the first tasks
        caller=caller,
        beyond_s=_BEYOND_S,
        doing="Checking",
    )
    data = await to_thread.run_sync(_data, report, draft_id, policy, workshop.home.runs)
    text = _text(report, draft_id, other_members, judges, knobs, data)
    data.not_checked = [*data.not_checked, *other_members, *judges]
    kept_findings = [
        KeptFinding(rule=finding.rule, level=finding.level, what=finding.what) for finding in data.findings
    ]
    await to_thread.run_sync(
        lambda: KeptChecks(workshop.home.path).keep(report.name, report.worst, kept_findings, full=report.full)
    )
    return Answer(text, data)


def _text(
    report: CheckReport,
    draft_id: str | None,
    other_members: list[str],
    judges: list[str],
    knobs: dict[str, Any] | None,
    data: CheckAnswer,
) -> str:
    trial = report.seen
    form = "full check" if report.full else "quick check"
    repeatable = _repeatable(report)
    lines = [
        f"{report.name}: {report.worst}: {_WORDS[report.worst]} ({form}, {report.seconds:.1f} s: {len(trial.scores)} "
        f"answers to {plural(trial.tried, 'task')}"
        + (
            ", a second process agrees)."
            if repeatable
            else ", a second process disagrees)."
            if repeatable is False
            else ")."
        )
    ]
    for finding in report.findings[:_MOST_FINDINGS]:
        lines.append(f"{finding.level} {finding.rule}: {marked(finding.what, 400)}")
        if finding.level != "note":
            lines.append(f"  To do: {finding.next}.")
    if scores := _scores(report):
        how = f"{' without judges' if judges else ''}{', each scored alone' if trial.compared else ''}"
        lines.append(
            f"Share of the highest reward{how}: " + ", ".join(f"{kind} {share:.0%}" for kind, share in scores.items())
        )
    sizes = [f"{split} {size.known}{'' if size.exhausted else '+'}" for split, size in trial.splits.items()]
    if sizes and (prompts := data.prompt_characters):
        in_tokens = data.prompt_tokens
        lines.append(
            f"Distinct tasks: {', '.join(sizes)}. Prompts of {prompts['median']} characters, at most "
            f"{prompts['longest']}" + (f" ({in_tokens['longest']} tokens of {data.tokens_of})." if in_tokens else ".")
        )
    if trial.skipped:
        lines.append(f"Not checked for lack of time: {'; '.join(trial.skipped)}.")
    if other_members:
        members = marked("; ".join(other_members), 300)
        lines.append(f"Not tried: {members}. To try one with its defaults, check it by name.")
    if judges:
        asks = call("test_inference", draft_id=draft_id) if draft_id else "test_inference"
        lines.append(f"Not tried: {marked('; '.join(judges), 300)}. {asks} asks them.")
    lines.append(_next(report, draft_id, {"knobs": knobs} if knobs else {}))
    return "\n".join(lines)


def _next(report: CheckReport, draft_id: str | None, knob_argument: dict[str, Any]) -> str:
    if report.worst == "critical":
        arguments: dict[str, Any] = {"name": draft_id or report.name, **knob_argument}
        advice = report.seen.advice("correct it", "change its settings")
        return (
            f"Next: {advice}, then {call('check_environment', **arguments)}; or choose another with list_environments."
        )
    if draft_id:
        return f"Next: {call('test_inference', draft_id=draft_id)} or {call('start_training', draft_id=draft_id)}"
    return f"Next: {call('select_environment', name=report.name, **knob_argument)}"


def _data(report: CheckReport, draft_id: str | None, policy: str, runs: Path) -> CheckAnswer:
    trial = report.seen
    score_seconds = [score.seconds for score in trial.scores if score.kind != "solver"]
    tasks = [task for split in trial.splits.values() for task in split.tasks]
    references = [task.reference for task in tasks if task.reference is not None]
    in_tokens = lengths([[{"content": task.prompt}] for task in tasks], references, policy, runs)
    return CheckAnswer(
        environment=report.name,
        draft_id=draft_id,
        verdict=report.worst,
        full=report.full,
        findings=[
            CheckFinding.of(
                finding,
                what=clip(finding.what, 400),
                observed={
                    key: clip(figure, 100) if isinstance(figure, str) else figure
                    for key, figure in finding.observed.items()
                },
            )
            for finding in report.findings[:_MOST_FINDINGS]
        ],
        scores=_scores(report),
        tasks_tried=trial.tried,
        splits={name: {"known": size.known, "exhausted": size.exhausted} for name, size in trial.splits.items()},
        prompt_characters=_lengths(len(task.prompt) for task in tasks),
        answer_characters=_lengths(len(reference) for reference in references),
        tokens_of=in_tokens.policy,
        prompt_tokens=_lengths(in_tokens.prompts),
        answer_tokens=_lengths(in_tokens.answers),
        repeatable=_repeatable(report),
        start_seconds=round(trial.start_s + trial.load_s, 3),
        task_seconds=None if trial.tasks_s is None else float(f"{trial.tasks_s:.3g}"),
        score_seconds=float(f"{statistics.median(score_seconds):.3g}") if score_seconds else None,
        memory_mb=round(trial.memory_mb, 1) or None,
        not_checked=trial.skipped,
        seconds=round(report.seconds, 2),
    )


def _scores(report: CheckReport) -> dict[str, float]:
    """Return the mean reward by kind of answer, as a share of the highest, in the order of trial."""
    rewards: dict[str, list[float]] = {}
    for score in report.seen.scores:
        rewards.setdefault(score.kind, []).append(report.seen.share(score.reward))
    return {kind: float(number(statistics.fmean(shares))) for kind, shares in rewards.items()}


def _repeatable(report: CheckReport) -> bool | None:
    trials = report.seen.again
    return not any(trial.other_tasks or trial.other_scores for trial in trials) if trials else None


def _lengths(sizes: Iterable[int]) -> dict[str, int]:
    lengths = list(sizes)
    return {"median": round(statistics.median(lengths)), "longest": max(lengths)} if lengths else {}
