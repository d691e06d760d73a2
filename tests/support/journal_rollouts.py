"""Groups as they lie in a run's journal, for tests that browse rollouts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from toprope.records.journal.file_journal import FileJournal
from toprope.records.journal.groups import Group, Outcome
from toprope.records.journal.marks import GroupNote
from toprope.records.run.folder import RunFolder


def group(
    number: int,
    rewards: Sequence[float],
    task: str = "t",
    answers: list[str] | None = None,
    error: str | None = None,
    parsed: float | None = None,
) -> Group:
    """A group with one row of three tokens per reward.

    Args:
        number: Its policy version, and the number in its id and prompt.
        rewards: Reward of each rollout; `exact` is the reward, `style` the rest.
        task: Task id.
        answers: Text of each answer.
        error: Error of the first rollout.
        parsed: Reward part `parsed` of each rollout.
    """
    outcomes = [
        Outcome(reward, {"exact": reward, "style": 1 - reward} | ({} if parsed is None else {"parsed": parsed}))
        for reward in rewards
    ]
    outcomes[0].error = error
    rows = [[1, 2, 3]] * len(rewards)
    return Group(
        tokens=rows, masks=rows, scores=list(rewards), group_id=f"g{number}", task_id=task, outcomes=outcomes,
        versions=[[(number, 3)]] * len(rewards), prompt=f"prompt {number}", answers=answers or ["a"] * len(rewards),
    )  # fmt: skip


def write(folder: RunFolder, groups: Iterable[Group], **options: Any) -> None:
    """Append groups to a run's journal; options are those of FileJournal."""
    journal = FileJournal(folder.journal, **options)
    for one in groups:
        journal.append(msgspec.json.encode(one), GroupNote(rows=len(one.tokens)))
    journal.close()
