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
            _safely("evaluator", lambda: _sources([one for one in (before, after) if one])),
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
    own = next((one for one in group if one.run_id == run_id), None)
    if own is None:
        return unknown
    mine = Side(run_id, (own,))
    rest = [one for one in group if one.run_id != run_id and not unlike(mine, Side(one.run_id, (one,)))]
    if not rest or unlike(mine, Side("others", tuple(rest))):
        return unknown
    # An answer that its judge left out is missing in one run alone.
    (own,), others = (side.runs for side in on_shared_tasks(mine, Side("others", tuple(rest))))
    by_task = list(zip(own.sampled.wins, *(one.sampled.wins for one in others), strict=True))
    alone = sum(won > 0 and not any(rest) for won, *rest in by_task)
    rival = max(others, key=lambda one: one.sampled.accuracy)
    best = rival.sampled.accuracy
    # Answers are sampled, so some tasks are solved by one seed alone by chance.
    differences = [mine - theirs for mine, theirs in zip(own.sampled.wins, rival.sampled.wins, strict=True)]
    lucky = own.sampled.accuracy - best > max(best / 2, _SHARE) and sign_flip(differences) < _UNLIKELY
    what = f"{alone} of {len(by_task)} tasks are solved by this seed alone; the next best seed reaches {best:.1%}."
    return Check(
        name="seeds",
        state="warning" if lucky else "ok",
        what=f"{what} A win of one seed alone is no gain." if lucky else what,
        observed={"alone": alone, "tasks": len(by_task), "accuracy": own.sampled.accuracy, "next_best": best},
    )


def lineage_of(folder: RunFolder, model: str) -> list[dict[str, Any]]:
    """Return the run and step that each ancestor's weights came from, nearest first.

    Args:
        folder: Folder of the run that started from `model`; ancestors are searched beside it.
        model: policy.model: a Hub id, `embedded`, or a folder, possibly a checkpoint of another run.
    """
    runs, line = folder.path.parent.resolve(), []
    for _ in range(_LONGEST_LINE_OF_DESCENT):
        found = _checkpoint_of(runs, model)
        if found is None:
            break
        run_id, step = found
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
        seen = {split: max(int(one["seen"][split]) for one in attempts) for split in attempts[0]["seen"]}
        copies = {pair: max(int(one["copies"][pair]) for one in attempts) for pair in attempts[0]["copies"]}
        sharing = max(int(one["heldout_sharing_passages"]) for one in attempts)
        words = int(attempts[-1]["passage_words"])
        skipped = sum(int(one["train_not_looked_at"]) for one in attempts)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError):
        return Check(name=name, state="unknown", what="The sampled tasks were not recorded.")
    observed = {"seen": seen, "copies": copies, "sharing_passages": sharing, "train_not_looked_at": skipped}
    told = f"{seen.get('train', 0)} training, {seen.get('validation', 0)} validation and {seen.get('heldout', 0)} "
    told += "held-out tasks were seen"
    if skipped:
        told += f", of {skipped} training tasks whole texts only"
    problems = [f"{count} {pair.replace('_', ' and ')} copies" for pair, count in copies.items() if count]
    if sharing:
        problems.append(f"{sharing} held-out tasks that share a passage of {words} words with training tasks")
    if problems:
        what = f"{told}: {', '.join(problems)}. Accuracy on held-out tasks may be remembered, not learned."
        return Check(name=name, state="warning", what=what, observed=observed)
    if not seen.get("train") or not seen.get("heldout"):
        return Check(name=name, state="unknown", what=f"{told}, too few to tell.", observed=observed)
    return Check(name=name, state="ok", what=f"{told}; none is a copy of a task in another split.", observed=observed)


def _sources(evaluations: Sequence[Mapping[str, Any]]) -> Check:
    name = "evaluator"
    told = [one.get("evaluator") or {} for one in evaluations]
    loaded = [one.get("loaded") for one in told]
    if not loaded or not all(isinstance(one, dict) for one in loaded):
        return Check(name=name, state="unknown", what="The code that measured was not recorded.")
    observed = {"loaded": loaded[-1], "versions": told[-1].get("versions") or {}}
    if any(one != loaded[0] for one in loaded):
        what = "Different code of environment or evaluator measured before and after training."
        return Check(name=name, state="warning", what=what, observed=observed | {"before": loaded[0]})
    on_disk = next((one["on_disk"] for one in told if one.get("on_disk")), None)
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
    told = " which started from ".join(
        f"step {one['step']} of {one['run']}," if "run" in one else str(one["model"] or "an unknown model")
        for one in line
    )
    what = f"The weights started from {told}"
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
    measured = _two(before, after, "answer_tokens")
    if measured is not None:
        pairs["held-out"] = measured
    if not pairs:
        return Check(name=name, state="unknown", what="Answer lengths were not measured twice.")
    observed = {where: {"first": round(first, 3), "last": round(last, 3)} for where, (first, last) in pairs.items()}
    told = ", ".join(f"{where} {first:.3g} to {last:.3g} tokens" for where, (first, last) in pairs.items())
    drifted = any(last > _LENGTH_FACTOR * first or first > _LENGTH_FACTOR * last for first, last in pairs.values())
    what = f"Mean answer length: {told}."
    if drifted:
        what += (
            f" They changed by more than {_LENGTH_FACTOR:g} times: read some (get_results detailed, ask_checkpoint)."
        )
    return Check(name=name, state="warning" if drifted else "ok", what=what, observed=observed)


def _format(before: Mapping[str, Any] | None, after: Mapping[str, Any] | None) -> Check:
    found = {name: _two(before, after, name) for name in ("parse_failures", "truncated")}
    known = {name: pair for name, pair in found.items() if pair is not None}
    if not known:
        return Check(name="format", state="unknown", what="The form of held-out answers was not measured twice.")
    words = {"parse_failures": "answers that could not be read", "truncated": "answers that were cut off"}
    told = ", ".join(f"{words[name]} {first:.1%} to {last:.1%}" for name, (first, last) in known.items())
    worse = any(last - first > _SHARE for first, last in known.values())
    what = f"Held-out, before to after: {told}."
    if worse:
        what += " An increase suggests a reward that can be had without answering."
    observed = {name: {"before": first, "after": last} for name, (first, last) in known.items()}
    return Check(name="format", state="warning" if worse else "ok", what=what, observed=observed)


def _two(before: Mapping[str, Any] | None, after: Mapping[str, Any] | None, name: str) -> tuple[float, float] | None:
    found: list[float] = []
    for one in (before, after):
        value = ((one or {}).get("sampled") or {}).get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        found.append(float(value))
    return found[0], found[1]


def _read(path: Path) -> Any:
    try:
        return read_json(path)
    except (NotFound, Corrupt):
        return None
