"""Check if a run's figures can be trusted: causes other than learning.

Agents in charge of training have trained on test sets, swapped the starting model, and trusted a lucky seed. An
accuracy shows none of that, so every report checks the overlap of splits, the code that measures, the origin of the
weights, changes in answer length and form, and wins of a single seed. A check without data answers `unknown`, never
`ok`.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel

from toprope.analysis.statistics.comparison import Measured, Side, on_shared_tasks, unlike
from toprope.analysis.statistics.sign_flip import sign_flip
from toprope.errors import Corrupt, NotFound
from toprope.records.run.folder import RUN_ID, RunFolder, read_json
from toprope.records.run.manifest import Manifest
from toprope.records.run.specification import Specification

_LENGTH_FACTOR = 2.0
_SHARE = 0.05
_UNLIKELY = 0.01
_LONGEST_LINE_OF_DESCENT = 16
_CHECKPOINT = re.compile(r"^step-(\d+)$")


class Check(BaseModel):
    """The result of one check."""

    name: str
    state: Literal["ok", "warning", "unknown"]
    what: str
    observed: dict[str, Any] = {}


class Integrity(BaseModel):
    """All checks of a run."""

    checks: list[Check] = []

    @property
    def warnings(self) -> list[Check]:
        """The checks that need attention."""
        return [check for check in self.checks if check.state == "warning"]


def examine(
    folder: RunFolder,
    specification: Specification,
    evaluations: Mapping[str, Mapping[str, Any]],
    rows: Sequence[Mapping[str, Any]],
) -> Integrity:
    """Run all checks of a training run on its records. Missing or damaged records give `unknown`.

    Args:
        evaluations: Label -> content of evaluations/<label>.json.
        rows: Rows of metrics.jsonl, oldest first.
    """
    before, after = evaluations.get("before"), evaluations.get("after")
    return Integrity(
        checks=[
            _safely("splits", lambda: _splits(_read(folder.path / "contents.json"))),
            _safely("evaluator", lambda: _sources([evaluation for evaluation in (before, after) if evaluation])),
            _safely("lineage", lambda: _lineage(folder, specification)),
            _safely("length", lambda: _length(rows, before, after)),
            _safely("format", lambda: _format(before, after)),
        ]
    )


def _safely(name: str, check: Callable[[], Check]) -> Check:
    """Run a check; `unknown` if a record does not have the expected form."""
    try:
        return check()
    except (TypeError, ValueError, KeyError, AttributeError, OSError) as error:
        return Check(name=name, state="unknown", what=f"The run's records cannot be read for this: {error!r:.200}.")


def lone_wins(run_id: str, group: Sequence[Measured]) -> Check:
    """Check that other seeds of a group solve the tasks that this run solves.

    Args:
        group: All measured runs of its group, this one included.
    """
    unknown = Check(name="seeds", state="unknown", what="No other seed of its group was measured on the same tasks.")
    measured = next((run for run in group if run.run_id == run_id), None)
    if measured is None:
        return unknown
    own_side = Side(run_id, (measured,))
    other_runs = [run for run in group if run.run_id != run_id and not unlike(own_side, Side(run.run_id, (run,)))]
    if not other_runs or unlike(own_side, Side("others", tuple(other_runs))):
        return unknown
    # An answer that its judge left out is missing in one run alone.
    (measured,), others = (side.runs for side in on_shared_tasks(own_side, Side("others", tuple(other_runs))))
    by_task = list(zip(measured.sampled.wins, *(run.sampled.wins for run in others), strict=True))
    alone = sum(won > 0 and not any(rival_wins) for won, *rival_wins in by_task)
    rival = max(others, key=lambda run: run.sampled.accuracy)
    best = rival.sampled.accuracy
    # Answers are sampled, so some tasks are solved by one seed alone by chance.
    differences = [
        own_wins - best_wins for own_wins, best_wins in zip(measured.sampled.wins, rival.sampled.wins, strict=True)
    ]
    lucky = measured.sampled.accuracy - best > max(best / 2, _SHARE) and sign_flip(differences) < _UNLIKELY
    what = f"{alone} of {len(by_task)} tasks are solved by this seed alone; the next best seed reaches {best:.1%}."
    return Check(
        name="seeds",
        state="warning" if lucky else "ok",
        what=f"{what} A win of one seed alone is no gain." if lucky else what,
        observed={"alone": alone, "tasks": len(by_task), "accuracy": measured.sampled.accuracy, "next_best": best},
    )


def lineage_of(folder: RunFolder, model: str) -> list[dict[str, Any]]:
    """Return the run and step that each ancestor's weights came from, nearest first.

    Args:
        folder: Folder of the run that started from `model`; ancestors are searched beside it.
        model: policy.model: a Hub id, `embedded`, or a folder, possibly a checkpoint of another run.
    """
    runs, line = folder.path.parent.resolve(), []
    for _ in range(_LONGEST_LINE_OF_DESCENT):
        checkpoint = _checkpoint_of(runs, model)
        if checkpoint is None:
            break
        run_id, step = checkpoint
        line.append({"run": run_id, "step": step})
        spec = _read(runs / run_id / "spec.json")
        try:
            model = str(spec["config"]["policy"]["model"]) if spec else ""
        except (KeyError, TypeError):
            break
    line.append({"model": model})
    return line


def _checkpoint_of(runs: Path, model: str) -> tuple[str, int] | None:
    path = Path(model).expanduser()
    try:
        parts = path.resolve().relative_to(runs).parts
    except (ValueError, OSError, RuntimeError):
        return None
    if len(parts) < 3 or parts[1] != "checkpoints" or not RUN_ID.fullmatch(parts[0]):
        return None
    step = _CHECKPOINT.match(parts[2])
    return (parts[0], int(step[1])) if step else None


def _splits(contents: Any) -> Check:
    name = "splits"
    try:
        attempts = list(contents["attempts"].values())
        seen = {split: max(int(attempt["seen"][split]) for attempt in attempts) for split in attempts[0]["seen"]}
        copies = {pair: max(int(attempt["copies"][pair]) for attempt in attempts) for pair in attempts[0]["copies"]}
        sharing = max(int(attempt["heldout_sharing_passages"]) for attempt in attempts)
        words = int(attempts[-1]["passage_words"])
        skipped = sum(int(attempt["train_not_looked_at"]) for attempt in attempts)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError):
        return Check(name=name, state="unknown", what="The sampled tasks were not recorded.")
    observed = {"seen": seen, "copies": copies, "sharing_passages": sharing, "train_not_looked_at": skipped}
    tasks_seen = (
        f"{seen.get('train', 0)} training, {seen.get('validation', 0)} validation and {seen.get('heldout', 0)} "
    )
    tasks_seen += "held-out tasks were seen"
    if skipped:
        tasks_seen += f", of {skipped} training tasks whole texts only"
    problems = [f"{count} {pair.replace('_', ' and ')} copies" for pair, count in copies.items() if count]
    if sharing:
        problems.append(f"{sharing} held-out tasks that share a passage of {words} words with training tasks")
    if problems:
        what = f"{tasks_seen}: {', '.join(problems)}. Accuracy on held-out tasks may be remembered, not learned."
        return Check(name=name, state="warning", what=what, observed=observed)
    if not seen.get("train") or not seen.get("heldout"):
        return Check(name=name, state="unknown", what=f"{tasks_seen}, too few to tell.", observed=observed)
    return Check(
        name=name, state="ok", what=f"{tasks_seen}; none is a copy of a task in another split.", observed=observed
    )


def _sources(evaluations: Sequence[Mapping[str, Any]]) -> Check:
    name = "evaluator"
    evaluators = [evaluation.get("evaluator") or {} for evaluation in evaluations]
    loaded = [evaluator.get("loaded") for evaluator in evaluators]
    if not loaded or not all(isinstance(versions, dict) for versions in loaded):
        return Check(name=name, state="unknown", what="The code that measured was not recorded.")
    observed = {"loaded": loaded[-1], "versions": evaluators[-1].get("versions") or {}}
    if any(versions != loaded[0] for versions in loaded):
        what = "Different code of environment or evaluator measured before and after training."
        return Check(name=name, state="warning", what=what, observed=observed | {"before": loaded[0]})
    on_disk = next((evaluator["on_disk"] for evaluator in evaluators if evaluator.get("on_disk")), None)
    if on_disk:
        what = "The code of environment or evaluator changed on disk during the run; the run kept the loaded version."
        return Check(name=name, state="warning", what=what, observed=observed | {"on_disk": on_disk})
    if len(loaded) < 2:
        return Check(name=name, state="unknown", what="Only one evaluation was made so far.", observed=observed)
    what = "The same code measured before and after, and it did not change on disk."
    return Check(name=name, state="ok", what=what, observed=observed)


def _lineage(folder: RunFolder, specification: Specification) -> Check:
    policy = specification.config.policy
    line = lineage_of(folder, policy.model)
    try:
        manifest = Manifest.read(folder)
    except Corrupt:
        manifest = None
    sha, hashed = (manifest.policy.sha256, manifest.policy.hashed) if manifest else (None, "")
    ancestry = " which started from ".join(
        f"step {ancestor['step']} of {ancestor['run']},"
        if "run" in ancestor
        else str(ancestor["model"] or "an unknown model")
        for ancestor in line
    )
    what = f"The weights started from {ancestry}"
    if policy.revision:
        what += f" at revision {policy.revision}"
    observed = {"line": line, "revision": policy.revision, "sha256": sha, "hashed": hashed}
    if sha is None:
        what += "; their hash was not recorded."
        return Check(name="lineage", state="unknown", what=what, observed=observed)
    what += f" (hash of {hashed or 'contents'} {sha[:16]})."
    return Check(name="lineage", state="ok", what=what, observed=observed)


def _length(
    rows: Sequence[Mapping[str, Any]], before: Mapping[str, Any] | None, after: Mapping[str, Any] | None
) -> Check:
    """Compare mean lengths in tokens: first and last tenth of the steps, and held-out answers."""
    name = "length"
    lengths = [float(row["completions/mean_length"]) for row in rows if row.get("completions/mean_length") is not None]
    pairs: dict[str, tuple[float, float]] = {}
    if len(lengths) >= 2:
        part = max(1, len(lengths) // 10)
        pairs["training"] = statistics.fmean(lengths[:part]), statistics.fmean(lengths[-part:])
    measured = _values_of(before, after, "answer_tokens")
    if measured is not None:
        pairs["held-out"] = measured
    if not pairs:
        return Check(name=name, state="unknown", what="Answer lengths were not measured twice.")
    observed = {label: {"first": round(first, 3), "last": round(last, 3)} for label, (first, last) in pairs.items()}
    changes = ", ".join(f"{label} {first:.3g} to {last:.3g} tokens" for label, (first, last) in pairs.items())
    drifted = any(last > _LENGTH_FACTOR * first or first > _LENGTH_FACTOR * last for first, last in pairs.values())
    what = f"Mean answer length: {changes}."
    if drifted:
        what += (
            f" They changed by more than {_LENGTH_FACTOR:g} times: read some (get_results detailed, ask_checkpoint)."
        )
    return Check(name=name, state="warning" if drifted else "ok", what=what, observed=observed)


def _format(before: Mapping[str, Any] | None, after: Mapping[str, Any] | None) -> Check:
    pairs = {name: _values_of(before, after, name) for name in ("parse_failures", "truncated")}
    measured = {name: pair for name, pair in pairs.items() if pair is not None}
    if not measured:
        return Check(name="format", state="unknown", what="The form of held-out answers was not measured twice.")
    words = {"parse_failures": "answers that could not be read", "truncated": "answers that were cut off"}
    changes = ", ".join(f"{words[name]} {first:.1%} to {last:.1%}" for name, (first, last) in measured.items())
    worse = any(last - first > _SHARE for first, last in measured.values())
    what = f"Held-out, before to after: {changes}."
    if worse:
        what += " An increase suggests a reward that can be had without answering."
    observed = {name: {"before": first, "after": last} for name, (first, last) in measured.items()}
    return Check(name="format", state="warning" if worse else "ok", what=what, observed=observed)


def _values_of(
    before: Mapping[str, Any] | None, after: Mapping[str, Any] | None, name: str
) -> tuple[float, float] | None:
    values: list[float] = []
    for evaluation in (before, after):
        value = ((evaluation or {}).get("sampled") or {}).get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        values.append(float(value))
    return values[0], values[1]


def _read(path: Path) -> Any:
    try:
        return read_json(path)
    except (NotFound, Corrupt):
        return None
