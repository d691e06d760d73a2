"""Tools for the ledger of experiments: note one, and hand all of them over to another agent."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from anyio import to_thread

from toprope.analysis.reports.handoff import LIVE, Standing, handoff
from toprope.analysis.reports.headline import measured_share
from toprope.analysis.statistics.plateau import plateau
from toprope.analysis.statistics.run_samples import measured_tasks
from toprope.errors import Corrupt, InvalidValue, NotFound
from toprope.records.experiments import Decision, Experiment, Figures, Ledger
from toprope.records.run.specification import Specification
from toprope.records.run.status import Status
from toprope.text_format import call, clip, percent
from toprope.workbench.launch.seeds import expand
from toprope_tools.answers import results as answers
from toprope_tools.answers.answer import Answer
from toprope_tools.planning.config import said_changes
from toprope_tools.status.snapshot import told_numbers

if TYPE_CHECKING:
    from toprope_tools.workshop import Workshop

_MOST_RUNS = 32
_HANDOFF_RUNS = 400


def ledger_of(workshop: Workshop) -> Ledger:
    """Return the ledger of a workshop's home."""
    return Ledger(workshop.home.ledger)


async def note_experiment(
    workshop: Workshop,
    *,
    experiment_id: str | None = None,
    hypothesis: str | None = None,
    run_ids: list[str] | None = None,
    draft_id: str | None = None,
    outcome: str | None = None,
    decision: Decision | None = None,
    question: str | None = None,
    goal: str | None = None,
) -> Answer:
    """Add an experiment to the ledger, or amend one, together with the figures of its runs.

    Args:
        experiment_id: The experiment to amend; None adds one.
        hypothesis: The change to try and why it should help.
        run_ids: Its runs or seed groups; amending adds them.
        draft_id: The draft of the experiment.
        outcome: The result.
        decision: The consequence of the result.
        question: A question that remains open.
        goal: The goal for this environment; replaces the former one.

    Raises:
        NotFound: There is no such experiment, run or draft.
        InvalidValue: A new experiment lacks a hypothesis, or a run or draft; nothing was written.
    """

    def work() -> Answer:
        ledger = ledger_of(workshop)
        runs = expand(workshop.home.runs, run_ids or [])
        environments = [Specification.read(workshop.runs.folder(run_id)).environment.name for run_id in runs]
        if draft_id is not None:
            environments.append(workshop.drafts.get(draft_id).environment.name)
        if experiment_id is not None:
            entry = ledger.get(experiment_id)
            environments.append(entry.environment)
        elif hypothesis is None or not hypothesis.strip() or not environments:
            raise InvalidValue(
                "A new experiment needs a hypothesis, and run_ids or a draft_id.",
                hint="Give experiment_id to amend one; get_handoff lists them.",
            )
        else:
            now = time.time()
            entry = Experiment(id=ledger.new_id(), at=now, updated_at=now, environment=environments[0], hypothesis="")
        if len(set(environments)) > 1:
            raise InvalidValue(
                f"An experiment concerns one environment; these are {', '.join(sorted(set(environments)))}.",
                hint="Note one experiment for each.",
            )
        figures = figures_of(workshop, _all_runs(entry, runs))
        workshop.home.ensure()
        texts = {"hypothesis": hypothesis, "outcome": outcome, "decision": decision, "question": question}
        amended: dict[str, Any] = {key: text.strip() for key, text in texts.items() if text is not None}
        with ledger.amending():
            if experiment_id is not None:
                entry = ledger.get(experiment_id)  # another session may have amended it while the figures were read
            amended["runs"] = _all_runs(entry, runs)
            amended["drafts"] = list(dict.fromkeys([*entry.drafts, *([] if draft_id is None else [draft_id])]))
            entry = ledger.put(entry.model_copy(update={**amended, "figures": entry.figures | figures}))
        if goal is not None:
            ledger.set_goal(entry.environment, goal.strip())
        return _noted(ledger, entry, new=experiment_id is None)

    return await to_thread.run_sync(work)


def _all_runs(entry: Experiment, added: list[str]) -> list[str]:
    """Return the runs of an experiment with those that are added.

    Raises:
        InvalidValue: They are too many.
    """
    run_ids = list(dict.fromkeys([*entry.runs, *added]))
    if len(run_ids) > _MOST_RUNS:
        raise InvalidValue(f"{len(run_ids)} runs are too many for one experiment.", hint=f"At most {_MOST_RUNS}.")
    return run_ids


async def get_handoff(workshop: Workshop) -> Answer:
    """Answer the text that lets an agent without context continue."""

    return await to_thread.run_sync(handoff_of, workshop)


def handoff_of(workshop: Workshop) -> Answer:
    """Answer the handoff. See `get_handoff`."""
    runs = workshop.statuses()[:_HANDOFF_RUNS]
    ledger = ledger_of(workshop)
    experiments = [refreshed(workshop, entry) for entry in ledger.entries(limit=200)]
    drafts = []
    for draft in workshop.drafts.recent(6):
        history = workshop.drafts.history(draft.id)
        last_edit = f"; last edit: {clip(said_changes(history[-1].changes), 160)}" if history else ""
        drafts.append(f"{draft.id}: {draft.environment.name}, revision {draft.revision}{last_edit}")
    locked = [lock.field for lock in workshop.home.locks()]
    text = handoff(Standing(_limit_numbers(workshop, runs), experiments, ledger.goals(), drafts, locked))
    data = answers.Handoff(
        live_runs=[run.run_id for run in runs if not run.ended][:20],
        experiments=len(experiments),
        environments=list(dict.fromkeys(entry.environment for entry in experiments))[:20],
    )
    return Answer(text, data)


def _limit_numbers(workshop: Workshop, runs: list[Status]) -> list[Status]:
    """Return the runs with the numbers that may be shown now, under the limit of check_status."""
    shown_ids = {run.run_id for run in [run for run in runs if not run.ended][:LIVE]}
    statuses = []
    for run in runs:
        try:
            numbers = told_numbers(workshop, run.run_id)[0] if run.run_id in shown_ids else run.progress
        except NotFound:  # removed in the meantime
            continue
        statuses.append(run.model_copy(update={"progress": numbers}))
    return statuses


def refreshed(workshop: Workshop, entry: Experiment) -> Experiment:
    """Return the entry with the present figures of its runs, without storing them."""
    if all(figure.accuracy is not None for figure in entry.figures.values()) and len(entry.figures) == len(entry.runs):
        return entry
    return entry.model_copy(update={"figures": entry.figures | figures_of(workshop, entry.runs)})


def figures_of(workshop: Workshop, runs: list[str]) -> dict[str, Figures]:
    """Return the figures of runs by run id, without runs that are gone or unreadable."""
    figures = {}
    for run_id in runs:
        try:
            folder, status = workshop.runs.folder(run_id), workshop.runs.status(run_id)
            figures[run_id] = _figures(Specification.read(folder), status)
        except (NotFound, Corrupt):
            continue
    return figures


def _figures(specification: Specification, status: Status) -> Figures:
    summary_after = status.evaluations.get("after") or {}  # the validation accuracy of a test is another figure
    summary_before = status.evaluations.get("before") or {}
    figures = Figures(
        state=status.state,
        before=summary_before.get("accuracy"),
        steps=int(status.progress.get("step") or 0),
        seed=specification.config.algorithm.seed,
        configuration=_digest(specification),
        measured=_hash(measured_tasks(specification)),
    )
    if share := measured_share(summary_after):
        figures = figures.model_copy(
            update={"accuracy": share.value, "low": share.low, "high": share.high, "tasks": share.n}
        )
    return figures


def _digest(specification: Specification) -> str:
    """Return a digest that is equal for runs that differ in their seed alone."""
    config = specification.config.model_dump(mode="json")
    config["algorithm"].pop("seed")
    return _hash(config)


def _hash(value: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def _noted(ledger: Ledger, entry: Experiment, *, new: bool) -> Answer:
    lines = [f"{'Noted' if new else 'Amended'} {entry.id} in {entry.environment}."]
    for run_id, figures in entry.figures.items():
        if figures.accuracy is None:
            lines.append(f"  {run_id}: {figures.state}, not measured yet; get_handoff looks again.")
        else:
            start = f"{percent(figures.before)} -> " if figures.before is not None else ""
            lines.append(
                f"  {run_id}: {start}{percent(figures.accuracy)} [{percent(figures.low)}, {percent(figures.high)}]"
            )
    stagnation = plateau(ledger.entries(entry.environment))
    if stagnation is not None:
        lines.append(stagnation.says)
    measured_figures = [measured for measured in entry.figures.values() if measured.accuracy is not None]
    if entry.decision == "keep" and len(measured_figures) == 1:
        lines.append("Kept after a single run: the gain may be luck of its seed.")
    if entry.decision == "undecided":
        lines.append(f"Next: {call('note_experiment', experiment_id=entry.id)} with outcome and decision.")
    return Answer("\n".join(lines), answers.ExperimentAnswer(experiment=answers.ExperimentItem.of(entry)))
