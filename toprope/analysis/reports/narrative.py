"""Compose reports about runs as blocks of text, tables and figures. See `page` for the markup.

Intervals, findings, plateaus and comparisons are computed elsewhere. Texts of environments, models and agents are
shortened and labelled as theirs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from toprope.analysis.plots.style import GREY, SUCCESS
from toprope.analysis.reports.charts import Bar, Line, bars, lines
from toprope.analysis.reports.headline import HELDOUT, accuracy_on, headline
from toprope.analysis.reports.page import Block, Figure, Heading, Listed, Paragraph, Table
from toprope.analysis.reports.report import labels_to_tell
from toprope.analysis.reports.results import Results
from toprope.analysis.reports.sweep_section import sweep_blocks
from toprope.analysis.statistics.accuracy_change import change_by_intervals
from toprope.analysis.statistics.plateau import plateau
from toprope.records.experiments import Experiment
from toprope.records.run.manifest import Manifest
from toprope.records.run.specification import Specification
from toprope.records.run.status import Event, Finding, Status
from toprope.records.sweep_journal import Standing
from toprope.text_format import accuracy, clip, duration, moment, percent, plural, value

_CURVES: tuple[tuple[str, tuple[Line, ...], bool], ...] = (
    ("Reward and success", (Line("reward", "reward"), Line("success", "success")), True),
    (
        "Groups without signal, answers cut off",
        (Line("frac_reward_zero_std", "groups of equal reward"), Line("completions/clipped_ratio", "answers cut off")),
        True,
    ),
    ("Entropy", (Line("entropy", "entropy"),), False),
    ("Gradient norm", (Line("grad_norm", "gradient norm"),), False),
    ("Answer length, tokens", (Line("completions/mean_length", "mean"),), False),
    ("KL to the starting policy", (Line("kl", "KL"),), False),
)
_FINE_TUNING: tuple[tuple[str, tuple[Line, ...], bool], ...] = (
    ("Loss on demonstrations, nats per token", (Line("loss", "loss"),), False),
    ("Tokens of demonstrations ranked first", (Line("mean_token_accuracy", "token accuracy"),), True),
    ("Entropy", (Line("entropy", "entropy"),), False),
    ("Gradient norm", (Line("grad_norm", "gradient norm"),), False),
)
_EXAMPLES, _FINDINGS, _CHANGES, _RUNS, _DETAILED, _LEDGER = 8, 20, 40, 200, 12, 100
_ALONG = 12
"""Evaluations to show between before and after."""


@dataclass(frozen=True)
class RunRecords:
    """The records of one run that a report needs."""

    specification: Specification
    status: Status
    results: Results
    rows: Sequence[Mapping[str, Any]]
    events: Sequence[Event]
    manifest: Manifest | None = None
    sweep: Standing | None = None
    """The decisions of a sweep."""
    repeated: str = ""
    """The comparison with the run that it repeats; empty if it repeats none."""


def compose_run_report(run: RunRecords, experiments: Sequence[Experiment] = ()) -> list[Block]:
    """Compose the report of one run.

    Args:
        run: Records of the run.
        experiments: All experiments; those that name the run are shown.
    """
    blocks: list[Block] = [Heading(run.status.run_id, 1), Paragraph(_summary(run)), *_verdict(run)]
    if run.sweep is not None and run.specification.sweep is not None:
        blocks += sweep_blocks(run.sweep, run.specification.sweep, headline(run.status))
    blocks += _evaluations(run)
    blocks += _curves(run)
    blocks += _findings(run.events)
    blocks += _changes(run)
    blocks += _examples(run.results)
    run_experiments = [entry for entry in experiments if run.status.run_id in entry.runs]
    if run_experiments:
        blocks += [Heading("Experiments with this run"), _ledger_table(run_experiments)]
    blocks += _manifest(run)
    blocks += _places(run.results)
    return blocks


def compose_overview(
    runs: Sequence[RunRecords], experiments: Sequence[Experiment], goals: Mapping[str, str], total: int
) -> list[Block]:
    """Compose the report over all runs and experiments.

    Args:
        runs: Runs to show, newest first.
        experiments: All experiments, newest first.
        goals: Goals by environment.
        total: Number of runs, shown or not.
    """
    blocks: list[Block] = [Heading("Training runs and experiments", 1)]
    ended = sum(run.status.ended for run in runs)
    seconds = sum(run.results.seconds.training or 0.0 for run in runs)
    summary = f"{plural(total, 'run')}, {plural(len(experiments), 'experiment')}. "
    if runs:
        summary += f"Of the {len(runs)} runs below {ended} have ended; they trained for {duration(seconds)} in all."
    blocks.append(Paragraph(summary.strip()))
    if goals:
        blocks += [Heading("Goals"), Listed([f"{name}: {clip(goal, 400)}" for name, goal in goals.items()])]
    blocks += _ledger(experiments)
    train = [run for run in runs if run.specification.run_kind.trains]
    measured = [bar for run in train[:24] if (bar := _bar(run)) is not None]
    if picture := bars("Runs, newest first", measured):
        blocks += [Heading("Runs"), Figure(picture, "Held-out accuracy with 95 % intervals, before and after training")]
    elif runs:
        blocks.append(Heading("Runs"))
    if runs:
        blocks.append(_runs_table(runs[:_RUNS]))
    for run in train[:_DETAILED]:
        blocks += [Heading(run.status.run_id), Paragraph(_summary(run)), *_verdict(run)]
        blocks += _curves(run)[1:3]
        blocks += _findings(run.events, level=3)
    if len(train) > _DETAILED:
        blocks.append(Paragraph(f"The other {len(train) - _DETAILED} runs have reports of their own."))
    return blocks


def _summary(run: RunRecords) -> str:
    status, results = run.status, run.results
    text = f"{status.run_kind.title} of {results.environment} with the policy {clip(results.model, 80)}"
    text += f", started {moment(status.created_at)}. It {_STATES.get(status.state, f'is {status.state}')}"
    if status.ended_at is not None:
        text += f" after {duration(status.ended_at - status.created_at)}"
    text += "."
    if results.steps:
        text += f" {plural(results.steps, 'step')}"
        text += f", {plural(results.rollouts, 'rollout')}" if results.rollouts else ""
        if results.seconds.training is not None:
            text += f", {duration(results.seconds.training)} of training"
        text += "."
    if status.attempt > 1:
        text += f" This is attempt {status.attempt}."
    if status.failure is not None:
        text += f" {status.failure.component}: {clip(status.failure.reason, 300)}"
    return text


_STATES = {
    "completed": "completed",
    "stopped": "was stopped",
    "failed": "failed",
    "lost": "was lost",
}


def _verdict(run: RunRecords) -> list[Block]:
    results = run.results
    before, after = (results.evaluations.get(label) for label in ("before", "after"))
    blocks: list[Block] = []
    if before and after and before.sampled and after.sampled:
        subject = accuracy_on(after.split or HELDOUT)
        unseen = " that training never saw" if (after.split or HELDOUT) == HELDOUT else ""
        sentence = (
            f"{subject[:1].upper()}{subject[1:]} went from {accuracy(before.sampled)} to {accuracy(after.sampled)} on "
            f"{after.sampled.tasks} tasks{unseen}."
        )
        change = results.change or change_by_intervals(before.sampled.proportion(), after.sampled.proportion())
        manner = {"rose": "good", "fell": "bad", "none": "note"}[change.verdict]
        blocks.append(Paragraph(f"{sentence} {change.sentence()}", manner))
    elif run.status.state in ("failed", "lost"):
        blocks.append(Paragraph("The run ended early, so there is no accuracy after training.", "bad"))
    if run.repeated:
        blocks.append(Paragraph(run.repeated, "note"))
    return blocks


def _evaluations(run: RunRecords) -> list[Block]:
    rows, drawn = [], []
    for label in labels_to_tell(run.results.evaluations, _ALONG):
        evaluation = run.results.evaluations[label]
        for how, measured in (("sampled", evaluation.sampled), ("greedy", evaluation.greedy)):
            if measured is None:
                continue
            rows.append(
                [
                    f"{label}{evaluation.versions}, {how}",
                    evaluation.split,
                    str(measured.tasks),
                    percent(measured.accuracy),
                    f"{percent(measured.low)} to {percent(measured.high)}",
                    "" if measured.reward_mean is None else f"{measured.reward_mean:.3g}",
                    str(measured.errors),
                ]
            )
            if evaluation.split == "heldout":
                colour = SUCCESS if how == "sampled" else GREY
                drawn.append(Bar(f"{label}, {how}", measured.accuracy, measured.low, measured.high, colour=colour))
    if not rows:
        return []
    head = ["evaluation", "split", "tasks", "accuracy", "95 % interval", "reward", "errors"]
    blocks: list[Block] = [Heading("Evaluations"), Table(head, rows, numbers=(2, 3, 5, 6))]
    if picture := bars("Held-out accuracy", drawn):
        blocks.append(Figure(picture, "Held-out accuracy with 95 % intervals"))
    return blocks


def _curves(run: RunRecords) -> list[Block]:
    figures: list[Block] = []
    for title, wanted, shares in _FINE_TUNING if run.specification.run_kind.demonstrates else _CURVES:
        if picture := lines(title, run.rows, wanted, shares=shares):
            figures.append(Figure(picture, f"{title}, by optimizer step"))
    return [Heading("Training"), *figures] if figures else []


def _findings(events: Sequence[Event], level: int = 2) -> list[Block]:
    points = []
    for event in events:
        if event.kind == "finding":
            finding = Finding.model_validate(event.data)
            at = "" if finding.step is None else f" at step {finding.step}"
            text = f"{finding.level}{at}: {finding.rule}. {clip(finding.what, 300)} {clip(finding.next, 200)}"
            points.append(text.strip())
        elif event.kind in ("warning", "stall"):
            points.append(f"{event.kind}: {clip(str(event.data.get('what', '')), 300)}")
    if not points:
        return []
    more = len(points) - _FINDINGS
    listed = points[:_FINDINGS] + ([f"and {more} more, in events.jsonl"] if more > 0 else [])
    return [Heading("Findings", level), Listed(listed)]


def _changes(run: RunRecords) -> list[Block]:
    changes = run.specification.beside_preset
    rows = [[name, value(before), value(after)] for name, (before, after) in list(changes.items())[:_CHANGES]]
    knobs = run.specification.config.environment.knobs
    rows += [[f"environment.knobs.{name}", "", value(setting)] for name, setting in list(knobs.items())[:20]]
    if not rows:
        return []
    preset = run.specification.preset or "none"
    return [Heading("Configuration"), Table(["field", f"preset {preset}", "this run"], rows)]


def _examples(results: Results) -> list[Block]:
    if not results.examples:
        return []
    rows = []
    for example in results.examples[:_EXAMPLES]:
        rows.append(
            [
                clip(example.prompt, 200),
                _answer(example.before, example.before_success),
                _answer(example.after, example.after_success),
            ]
        )
    note = "Texts of the environment and the policy, on validation tasks; greedy answers with all their turns."
    return [Heading("Examples"), Paragraph(note), Table(["asked", "before", "after"], rows)]


def _answer(text: str | None, success: bool | None) -> str:
    if text is None:
        return ""
    return f"{clip(text, 600) or '(empty)'} ({'right' if success else 'wrong'})"


def _ledger(experiments: Sequence[Experiment]) -> list[Block]:
    if not experiments:
        return []
    blocks: list[Block] = [Heading("Experiments")]
    drawn = []
    for entry in experiments[:24]:
        figures = [figure for figure in entry.figures.values() if figure.accuracy is not None]
        if figures and entry.accuracy is not None:
            lows = [figure.low for figure in figures if figure.low is not None]
            highs = [figure.high for figure in figures if figure.high is not None]
            before = [figure.before for figure in figures if figure.before is not None]
            label = f"{entry.id}: {clip(entry.hypothesis, 34)}"
            start = sum(before) / len(before) if before else None
            drawn.append(Bar(label, entry.accuracy, min(lows, default=None), max(highs, default=None), before=start))
    if picture := bars("Experiments, newest first", drawn):
        blocks.append(Figure(picture, "Held-out accuracy of each experiment's runs, with their outermost intervals"))
    blocks.append(_ledger_table(experiments[:_LEDGER]))
    for name in dict.fromkeys(entry.environment for entry in experiments):
        verdict = plateau([entry for entry in experiments if entry.environment == name])
        if verdict is not None:
            blocks.append(Paragraph(verdict.says, "note" if verdict.stands else ""))
    return blocks


def _ledger_table(experiments: Sequence[Experiment]) -> Table:
    rows = []
    for entry in experiments:
        rows.append(
            [
                entry.id,
                moment(entry.at),
                entry.environment,
                clip(entry.hypothesis, 240),
                "" if entry.accuracy is None else percent(entry.accuracy),
                clip(entry.outcome, 240),
                entry.decision,
                ", ".join(entry.runs[:4]),
            ]
        )
    head = ["id", "noted", "environment", "hypothesis", "accuracy", "outcome", "decision", "runs"]
    return Table(head, rows, numbers=(4,), narrow=(0, 6))


def _runs_table(runs: Sequence[RunRecords]) -> Table:
    rows = []
    for run in runs:
        before, after = (run.results.evaluations.get(label) for label in ("before", "after"))
        measured = after.sampled if after is not None else None
        start = before.sampled if before is not None else None
        rows.append(
            [
                run.status.run_id,
                moment(run.status.created_at),
                run.results.environment,
                run.status.kind,
                run.status.state,
                str(run.results.steps or ""),
                "" if start is None else percent(start.accuracy),
                "" if measured is None else accuracy(measured),
            ]
        )
    head = ["run", "started", "environment", "kind", "state", "steps", "before", "after"]
    return Table(head, rows, numbers=(5, 6, 7), narrow=(0, 1, 4))


def _bar(run: RunRecords) -> Bar | None:
    before, after = (run.results.evaluations.get(label) for label in ("before", "after"))
    if after is None or after.sampled is None or (after.split or HELDOUT) != HELDOUT:
        return None  # the chart is of held-out tasks
    start = before.sampled.accuracy if before is not None and before.sampled is not None else None
    return Bar(run.status.run_id, after.sampled.accuracy, after.sampled.low, after.sampled.high, start)


def _manifest(run: RunRecords) -> list[Block]:
    manifest = run.manifest
    if manifest is None:
        return []
    code, hardware = manifest.code, manifest.hardware
    rows = [
        ["Toprope", f"{code.version}{f', commit {code.commit[:12]}' if code.commit else ''}"],
        ["uncommitted changes", "yes, see toprope.diff in the run folder" if code.changes_sha256 else "no"],
        ["configuration", f"sha256 {manifest.configuration.sha256[:16]}, seed {manifest.configuration.seed}"],
        ["locks", f"sha256 {manifest.configuration.locks_sha256[:16]}, {len(run.specification.locks)} locks"],
        [
            "environment",
            f"sha256 {(manifest.environment.sha256 or 'unknown')[:16]} {_pairs(manifest.environment.versions)}",
        ],
        ["policy", f"sha256 {(manifest.policy.sha256 or 'unknown')[:16]} ({manifest.policy.hashed or 'not loaded'})"],
        ["machine", f"{hardware.cpu}, {hardware.cores} cores, {hardware.memory_gb:g} GB, {hardware.system}"],
        ["GPUs", ", ".join(hardware.gpus) or "none"],
        ["Python", f"{manifest.python}; {_pairs(manifest.libraries)}"],
    ]
    if not code.commit:
        rows.pop(1)
    return [Heading("Inputs"), Table(["input", "value"], rows)]


def _places(results: Results) -> list[Block]:
    places = (("Checkpoint", results.checkpoint), ("Weights, for from_pretrained", results.weights))
    points = [f"{name}: {path}" for name, path in places if path is not None]
    return [Heading("Files"), Listed(points)] if points else []


def _pairs(values: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in list(values.items())[:16])
