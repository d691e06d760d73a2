"""Detect a run whose groups are all dropped: no step happens, so no metrics row shows it.

The trainer skips groups that are too old or carry no signal. If that is all of them, it waits for ever; only its own
reports and the API's counts of groups show it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toprope.analysis.findings.rules import MEASURED, edit, longer_answers, said
from toprope.records.run.status import Finding
from toprope.settings.schema import Config

_SMALL_GROUP, _USUAL_GROUP = 4, 8
LEAST_GROUPS = 8
"""Steps' worth of consecutive dropped groups that count as a standstill."""


def standstill(
    dropped: Mapping[str, int], config: Config, *, step: int = 0, accuracy: float | None = None
) -> Finding | None:
    """Return a finding if groups for several steps were dropped since the last step.

    Args:
        dropped: Groups dropped since the last step, by reason.
        step: The last step; 0 before the first.
        accuracy: Accuracy before training if it was measured; it separates tasks that are too hard from those that are
            too easy.
    """
    total = sum(dropped.values())
    rollout = config.rollout
    if total < LEAST_GROUPS * rollout.groups_per_step:
        return None
    why = max(dropped, key=lambda reason: dropped[reason])
    observed = {f"dropped_{reason}": count for reason, count in sorted(dropped.items())} | {"last_step": step}
    since = f"since step {step}" if step else "and no step has happened"
    changes: dict[str, Any] = {}
    rule, next_ = "no_signal", "test_inference(group_size=16) shows answers with their scores"
    if why == "stale":
        rule = "dropped_stale"
        next_ = edit(
            f"rollout.max_staleness to {max(4, 2 * rollout.max_staleness)} and rollout.queue_groups to "
            f"{rollout.groups_per_step}"
        )
        what = f"All {total} groups were dropped {since}, most because they were too old on arrival."
    elif why == "zero_signal":
        what = f"All {total} groups were dropped {since}: all answers to a task get the same reward"
        if accuracy is not None and accuracy >= 0.98 and not step:
            rule, what = "all_right", f"{what}, and before training nearly all were right."
            next_ = "make the tasks harder, or check with test_inference if the scorer is too generous"
        elif rollout.group_size < _SMALL_GROUP:  # so few answers rarely differ; the tasks may be as they should
            rule, what = "group_too_small", f"{what}. Groups of {rollout.group_size} answers rarely differ."
            changes = {"rollout.group_size": _USUAL_GROUP}
            next_ = edit(said(changes))
        elif accuracy is not None and accuracy <= 0.02 and not step:
            rule, what = "all_wrong", f"{what}, and before training hardly any was right."
            next_ = (
                "make the tasks easier (describe_environment lists the knobs), give partial credit, or take a "
                "stronger policy.model"
            )
        else:
            what += "."
    elif why == "empty" and config.algorithm.mask_truncated_completions:
        what = f"All {total} groups were dropped {since}, most because all their answers were cut off."
        longer = said(longer_answers(config, 2 * rollout.max_new_tokens))
        next_ = edit(f"{longer}, or algorithm.mask_truncated_completions to false")
    else:
        what = f"All {total} groups were dropped {since}, most as {why}."
    return Finding(
        rule=rule,
        level="critical",
        what=what,
        observed=observed,
        threshold=f"{LEAST_GROUPS} steps' worth of consecutive groups dropped",
        source=MEASURED,
        confidence="high" if rule != "no_signal" else "medium",
        next=next_,
        changes=changes,
        step=step,
    )
