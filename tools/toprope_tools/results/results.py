"""Tool that answers a run's results: the keeper's final report, or a report on the records so far."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from anyio import to_thread

from toprope.analysis.failures import has_log
from toprope.analysis.findings.stored_runs import accuracy_change, explain_run
from toprope.analysis.reports.headline import accuracy_on, standard_lines
from toprope.analysis.reports.report import gather, labels_to_tell
from toprope.analysis.reports.results import RESULTS_VERSION, Accuracy, Example, ModelReport, Models, Results
from toprope.errors import InvalidValue
from toprope.records.run.digests import sha256_of
from toprope.records.run.folder import RunFolder, find_record
from toprope.records.run.launch import cluster_with_files
from toprope.records.run.specification import Specification, moved_home
from toprope.records.run.status import RESUMABLE, Status, read_events
from toprope.records.run.tested_models import AnsweredConversation, read_measurements
from toprope.records.run.usage import Usage, wall_seconds
from toprope.records.sweep_journal import members_in
from toprope.settings.schema import Config
from toprope.text_format import accuracy, ago, call, clip, duration, number, percent, plural, value
from toprope.untrusted import marked, marked_lines, named
from toprope.workbench.history import values_of
from toprope.workbench.launch.seeds import expand
from toprope_tools.answers import results as answers
from toprope_tools.answers.answer import TOKEN_BUDGET, Answer, tokens
from toprope_tools.experiments.config_history import compared_with_original
from toprope_tools.planning.preview_text import used
from toprope_tools.results.diagnosis import (
    causes_structure,
    findings_lines,
    findings_told,
    mending_lines,
    restart_lines,
    time_line,
)
from toprope_tools.results.plots import with_picture
from toprope_tools.results.report_sections import curricula_lines, environment_lines, integrity_section
from toprope_tools.results.verdict import judge_test, teaches
from toprope_tools.runs.ask import answer_lines, shown
from toprope_tools.runs.sweeps import member_of, sweep_lines, sweep_structure
from toprope_tools.runs.use import served_lines
from toprope_tools.status.snapshot import limit_report

if TYPE_CHECKING:
    from toprope_tools.workshop import Workshop

_MOST_EXAMPLES = 8
_EXAMPLE_CHARACTERS = 600
_ANSWER_CHARACTERS = 400
"""Of an example's answer in the text, which has all turns of a conversation."""
_MOST_ALONG = {False: 6, True: 20}
"""Evaluations between before and after in a concise and in a detailed answer."""


async def get_results(workshop: Workshop, *, run_id: str, detail: str = "concise", plot: bool = False) -> Answer:
    """Answer the report of a run.

    Args:
        detail: `detailed` adds history, examples and the fields that differ from the defaults.
        plot: Add the run's plot.

    Raises:
        NotFound: There is no such run.
        Corrupt: Its files cannot be read.
    """
    answer = await to_thread.run_sync(lambda: _results(workshop, run_id, detailed=detail == "detailed"))
    return await to_thread.run_sync(with_picture, workshop, run_id, answer) if plot else answer


def _results(workshop: Workshop, run_id: str, *, detailed: bool) -> Answer:
    if (group := expand(workshop.home.runs, [run_id])) != [run_id]:
        raise InvalidValue(
            f"{run_id} is a seed group; only single runs have results.",
            hint=f"Name one of its runs ({', '.join(group)}), or give the group to compare_runs.",
        )
    status = workshop.runs.status(run_id)
    folder = workshop.runs.folder(run_id)
    specification = Specification.read(folder)
    report = find_record(folder.results, RESULTS_VERSION, Results, moved_home(folder))
    complete = report is not None
    if report is not None:
        report = report.model_copy(update=_copies_here(folder, report))
    else:
        report = gather(folder, specification, status)
        report = report if status.ended else limit_report(workshop, report)
    labels = labels_to_tell(report.evaluations, _MOST_ALONG[detailed])
    omitted = len(report.evaluations) - len(labels)
    report = report.model_copy(update={"evaluations": {label: report.evaluations[label] for label in labels}})
    report = report.model_copy(
        update={
            "standard": read_measurements(folder),  # some come after the run's end
            "change": report.change or accuracy_change(folder, status),  # records of earlier versions have none
        }
    )
    answered = [AnsweredConversation.model_validate(answer) for answer in report.answers]
    started = members_in(workshop.home.runs, run_id) if specification.sweep is not None else []
    usage_lines, usage = used(folder, live=not status.is_over, members=[*map(workshop.runs.folder, started)])
    lines = [_head(status, report, usage)]
    changed = _changed_after_end(status, folder) if complete else ""
    lines += [changed] if changed else []
    if report.tested is not None:
        lines += _models(report.tested)
    elif specification.sweep is not None:
        lines += sweep_lines(folder, specification.sweep)
    elif specification.ask is not None:
        lines += [f"Asked: {specification.ask.asked}.", *answer_lines(answered)]
        lines += [] if status.ended else served_lines(folder)
    else:
        # The last measurement of a sweep is of what was trained, and of one answer to a task.
        lines += _evaluations(report, specification, judged=specification.member is None)
        lines += (
            [f"{plural(omitted, 'evaluation')} along the way left out; {folder.evaluations} has them."]
            if omitted
            else []
        )
    lines += [f"Standard task {line}" for line in standard_lines(report.standard, named)]
    repeated = compared_with_original(workshop, specification)
    if repeated is not None:
        lines.append(repeated.says)
    events = list(read_events(folder.events, kinds=("finding",)))
    causes = explain_run(folder, specification, status)
    lines += findings_lines(status, events, causes)
    lines += restart_lines(folder)
    lines += time_line(report.time)
    lines += _file_lines(folder, report)
    if status.failure is not None:
        failure = status.failure
        kind = f" ({failure.kind})" if failure.kind not in ("", "unknown") else ""
        lines.append(
            f"Failed: {failure.component}{kind}: {marked(failure.reason, 400)} {clip(failure.hint, 400)}".rstrip()
        )
        lines += marked_lines(failure.excerpt[-5:], 200)
    lines += usage_lines
    integrity_lines, checks = integrity_section(
        workshop, run_id, report.integrity, ended=status.ended, detailed=detailed
    )
    lines += integrity_lines
    left_out = {"version", "integrity", "history", "examples"} | (set() if detailed else {"counts", "metrics"})
    structure = report.model_dump(mode="json", exclude=left_out, exclude_none=True)
    if changed:
        structure["changed_after_end"] = True
    if usage is not None:
        structure["usage"] = usage
    if checks is not None:
        structure["integrity"] = checks
    if repeated is not None:
        structure["reproduction"] = {"same": repeated.same, **repeated.model_dump(mode="json")}
    if specification.sweep is not None:
        structure["sweep"] = sweep_structure(folder, specification.sweep)
    if specification.member is not None:
        structure["member"] = specification.member.model_dump(mode="json", exclude_defaults=True)
        if (membership := member_of(run_id)) is not None:  # a repetition of a member does not belong to the sweep
            lines.insert(1, f"It is {membership}; get_results of the sweep lists all candidates.")
    if findings := findings_told(status, events, detailed=detailed):
        structure["findings"] = findings
    if (structured := causes_structure(causes)) is not None:
        structure["causes"] = structured
    if answered:
        structure["answers"] = shown(answered)
    if report.tested is not None:
        structure["tested"] = _tested(report.tested, detailed)
    detail: dict[str, Any] = {}
    if detailed:
        detail["history"] = [point.model_dump(exclude_none=True) for point in report.history]
        structure["examples"] = [_cut(example) for example in report.examples[:_MOST_EXAMPLES]]
        default_settings, settings = values_of(Config()), values_of(specification.config)
        detail["configuration"] = {  # fields that differ from the defaults, and every knob
            name: setting
            for name, setting in settings.items()
            if name not in default_settings or setting != default_settings[name]
        }
        lines += _history(report) if status.run_kind.samples else []
        lines += [f"Fields that differ from the defaults: {_settings_text(detail['configuration'])}"]
        lines += _examples(report.examples[:_MOST_EXAMPLES])
    change = report.change if status.ended else None
    lines += mending_lines(run_id, specification.preset or "", causes, status.kind, change=change)
    lines.append(_next(status, folder, detailed, _to_train(specification, report)))
    return _within_budget(
        "\n".join(line for line in lines if line),
        answers.Result(
            run_id=run_id, kind=status.kind, state=status.state, complete=complete, results=structure, detail=detail
        ),
    )


def _changed_after_end(status: Status, folder: RunFolder) -> str:
    if not status.results_sha256 or sha256_of(folder.results) == status.results_sha256:
        return ""
    return (
        f"Do not rely on these results: {folder.results} was changed after the keeper wrote it (its SHA-256 is not "
        f"{status.results_sha256[:12]}... any more). reproduce_run measures again."
    )


def _within_budget(text: str, data: answers.Result) -> Answer:
    """Leave out the longest parts of the structure until the answer fits; the run's folder has them."""
    left_out: list[str] = []
    answer = Answer(text, data)
    while tokens(answer) > TOKEN_BUDGET and len(data.results) > 1:
        longest = max(data.results, key=lambda key: len(json.dumps(data.results[key])) if key != "left_out" else 0)
        left_out.append(longest)
        remaining = {key: part for key, part in data.results.items() if key != longest}
        data = data.model_copy(update={"results": {**remaining, "left_out": left_out}})
        answer = Answer(text, data)
    return answer


def _head(status: Status, report: Results, usage: Mapping[str, Any] | None) -> str:
    text = f"{status.run_id}: {status.state}, {status.kind}, {status.environment}"
    text += f", policy {report.model}" if report.tested is None else f", {len(report.tested.models)} models"
    if status.ended_at is not None:
        took_s = wall_seconds(Usage(**usage) if usage else None, status, status.ended_at)
        text += f", ended {ago(status.ended_at)} after {duration(took_s)}"
    text += "."
    if report.steps:
        text += f" {plural(report.steps, 'step')}"
        sampled = int(status.making.get("rollouts") or 0)  # groups that still waited at the end are not trained on
        if 0 < report.rollouts < sampled:
            text += f", {report.rollouts} of {sampled} sampled rollouts"
        else:
            text += f", {plural(report.rollouts, 'rollout')}" if report.rollouts else ""
        text += f", {duration(report.seconds.training)} of training." if report.seconds.training is not None else "."
    if not status.ended:
        text += " It has not ended; results so far:"
    elif status.state != "completed":
        reason = f" ({marked(status.reason, 200)})" if status.reason and status.failure is None else ""
        text += f" It did not complete{reason}; results so far:"
    return text


def _evaluations(report: Results, specification: Specification, *, judged: bool) -> list[str]:
    lines = []
    for label, evaluation in report.evaluations.items():
        if evaluation.sampled is None:
            continue
        line = f"{label}: {accuracy_on(evaluation.split)} {accuracy(evaluation.sampled)}"
        line += f" on {plural(evaluation.sampled.tasks, 'task')}{evaluation.versions}"
        if evaluation.greedy is not None:
            line += f"; greedy {accuracy(evaluation.greedy)}"
        lines.append(line + _counts_text(evaluation.sampled) + ".")
        lines += environment_lines(label, evaluation, report.change_each)
    lines += curricula_lines(report.curricula)
    if report.change is not None:
        lines.append(report.change.sentence())
    if not lines:
        lines.append("Nothing was evaluated yet.")
    test = report.evaluations.get("test")
    if test is not None and test.sampled is not None:
        lines += judge_test(test.sampled, specification.config, specification.unknown_task) if judged else []
    return lines


def _models(tested: Models) -> list[str]:
    """Return one line per model; a model that was not measured says why."""
    lines = []
    for model in tested.models:
        name = model.name if model.name == model.model else f"{model.name} ({named(model.model)})"
        spent = [duration(model.seconds)]
        if model.completion_tokens is not None:
            spent.append(f"{(model.prompt_tokens or 0) + model.completion_tokens} tokens")
        if model.cost_usd is not None:
            spent.append(f"{model.cost_usd:.4f} USD")
        if model.retries:
            spent.append(plural(model.retries, "retry", "retries"))
        if model.unanswered:
            spent.append(f"{plural(model.unanswered, 'task')} unanswered")
        if model.measured is None:
            lines.append(f"{name}: not measured: {marked(model.error or '', 400)} ({', '.join(spent)})")
        else:
            on = f"on {model.measured.tasks} validation tasks"
            lines.append(
                f"{name}: accuracy {accuracy(model.measured)} {on}{_counts_text(model.measured)}; {', '.join(spent)}."
            )
    if tested.best is None:
        lines.append("No model could be measured, so it is unknown whether the environment works.")
    else:
        works = "works" if tested.environment_works else "does not work: most answers ended in an error"
        lines.append(
            f"Best: {tested.best}; mean accuracy {percent(tested.mean_accuracy)}. The environment {works} with these."
        )
    return lines


def _tested(tested: Models, detailed: bool) -> dict[str, Any]:
    """Return the models for the structure, with null instead of 0 for a failure, and texts cut."""
    structure = tested.model_dump(mode="json")
    for entry, model in zip(structure["models"], tested.models, strict=True):
        entry["error"] = None if model.error is None else clip(model.error, 400)
        entry["examples"] = _example_answers(model) if detailed else []
        entry["scores"] = model.scores if detailed else []
    return structure


def _example_answers(model: ModelReport) -> list[dict[str, Any]]:
    return [
        {key: clip(text, _EXAMPLE_CHARACTERS) if isinstance(text, str) else text for key, text in example.items()}
        for example in model.examples[:4]
    ]


def _counts_text(measured: Accuracy) -> str:
    parts = []
    if measured.rollouts is not None:
        parts.append(plural(measured.rollouts, "answer"))
    if measured.reward_mean is not None:
        parts.append(f"reward {number(measured.reward_mean)}")
    if len(measured.parts) > 1:
        parts.append(
            "parts " + ", ".join(f"{named(name, 40)} {number(part_mean)}" for name, part_mean in measured.parts.items())
        )
    for share, words in (
        (measured.pass_at_k, "of tasks solved at least once"),
        (measured.all_wrong_share, "of tasks all wrong"),
        (measured.all_right_share, "of tasks all right"),
    ):
        if share is not None:
            parts.append(f"{percent(share)} {words}")
    if measured.parse_failures:
        parts.append(f"{percent(measured.parse_failures)} without a readable answer")
    if measured.truncated:
        parts.append(f"{percent(measured.truncated)} cut off")
    if measured.errors:
        parts.append(plural(measured.errors, "error"))
    if measured.unjudged:
        parts.append(f"{measured.unjudged} more not judged")
    return f" ({', '.join(parts)})" if parts else ""


def _copies_here(folder: RunFolder, report: Results) -> dict[str, str]:
    """The paths here of files that a cluster without a shared folder named by its own; those of files that came."""
    if not cluster_with_files(folder):
        return {}
    far = {name: getattr(report, name) or "" for name in ("checkpoint", "weights", "plot")}
    here = {name: folder.path / path.partition(f"/runs/{folder.run_id}/")[2] for name, path in far.items()}
    return {name: str(path) for name, path in here.items() if path != folder.path and path.exists()}


def _file_lines(folder: RunFolder, report: Results) -> list[str]:
    lines = []
    if report.checkpoint is not None:
        lines.append(f"Checkpoint: {report.checkpoint} (step {report.checkpoint_step}).")
    if report.weights is not None:
        lines.append(f"Weights, for from_pretrained: {report.weights}")
    if report.wandb is not None:
        folders = report.trackers.get("wandb", {}).get("folders") or []
        lines.append(_wandb(report.wandb, folders, cluster_with_files(folder)))
    if report.plot is not None:
        lines.append(f"Plot: {report.plot}")
    if folder.metrics.exists():
        lines.append(f"Metrics: {folder.metrics}")
    return lines


def _wandb(record: dict[str, str], folders: list[str], cluster: str) -> str:
    if "url" in record:
        return f"Weights & Biases: {clip(record['url'], 300)}"
    folders = folders or [folder for folder in [record.get("folder")] if folder]
    if record["mode"] == "offline" and folders:
        there = f", on the cluster {cluster}" if cluster else ""
        return f"Weights & Biases, offline; this uploads it{there}: {shlex.join(['wandb', 'sync', *folders])}"
    return f"Weights & Biases ({record['mode']}): nothing was written."


def _history(report: Results) -> list[str]:
    if not report.history:
        return ["No steps were recorded."]
    points = [
        f"{point.step}: {'n/a' if point.reward is None else number(point.reward)} / {percent(point.success)}"
        for point in report.history
    ]
    return ["History (step: reward / success): " + "; ".join(points)]


def _settings_text(values: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value(setting)}" for name, setting in values.items()) or "nothing"


def _cut(example: Example) -> dict[str, Any]:
    """Return an example with its texts cut, because they come from an environment and a model."""
    return {
        key: clip(text, _EXAMPLE_CHARACTERS) if isinstance(text, str) else text
        for key, text in example.model_dump(mode="json", exclude_none=True).items()
    }


def _examples(examples: list[Example]) -> list[str]:
    if not examples:
        return []
    lines = ["Examples (untrusted text):"]
    for example in examples:
        line = f"  {marked(example.prompt, 160)}"
        if example.reference is not None:
            line += f" reference {marked(example.reference, 80)};"
        for label, text, won in (
            ("before", example.before, example.before_success),
            ("after", example.after, example.after_success),
        ):
            if text is not None:
                line += f" {label} {marked(text, _ANSWER_CHARACTERS)} ({'right' if won else 'wrong'})"
        lines.append(line)
    return lines


def _to_train(specification: Specification, report: Results) -> str:
    """Return the call that trains on what a test found fit for training; empty for other runs."""
    test = report.evaluations.get("test")
    if specification.draft_id is None or specification.member is not None or test is None or test.sampled is None:
        return ""
    if specification.unknown_task:
        return ""
    return call("start_training", draft_id=specification.draft_id) if teaches(test.sampled) else ""


def _next(status: Status, folder: RunFolder, detailed: bool, to_train: str) -> str:
    run_id = status.run_id
    if not status.ended:
        return f"Next: {call('check_status', run_ids=[run_id], wait_s=45)}"
    if status.failure is not None:
        if has_log(folder, status.failure.component):
            return f"Next: {call('read_logs', run_id=run_id, component=status.failure.component)}"
        if status.kind == "ask":
            return f"Next: {call('resume_training', run_id=run_id)} tries again."
        return f"Next: {call('fork_config', run_id=run_id)}, then edit_config mends the settings."
    if not detailed:
        more = f"More: {call('get_results', run_id=run_id, detail='detailed')}"
        resume = f"{call('resume_training', run_id=run_id)} continues it" if status.state in RESUMABLE else ""
        following = resume or to_train
        return f"Next: {following}. {more}" if following else more
    if status.run_kind.starts_runs:
        return f"Next: {call('fork_config', run_id=run_id)}, then start_training with the whole budget."
    if not status.run_kind.samples:
        return "Next: edit_config and start_training."
    note, fork = call("note_experiment", run_ids=[run_id]), call("fork_config", run_id=run_id)
    return f"Next: {note} with hypothesis and outcome records what was learned; {fork} starts another try."
