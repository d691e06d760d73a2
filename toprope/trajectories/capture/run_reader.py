"""Read every rollout of a run as an item, one journal group at a time.

Demonstrations of a run of kind `sft` are included: its teacher's rollouts, or the items of its data set. Held-out tasks
are sealed: journals do not contain them, and groups that an outside environment posts for a task that the run held out
are skipped and counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from toprope.records.journal.demonstrations import read_traces
from toprope.records.journal.frames import GROUP, scan
from toprope.records.journal.groups import MASKED, Group, Outcome, outcomes_of
from toprope.records.journal.segments import open_segment, ordinals, sample_path, sampled_ordinals, segment_path
from toprope.records.run.folder import RunFolder
from toprope.records.run.specification import Specification
from toprope.records.trained_tasks import heldout_tasks
from toprope.trajectories.capture.texts import Reader, Words, kept_words, reader_of
from toprope.trajectories.items import TrajectoryItem


class _Body(msgspec.Struct):
    """The fields of a group that an item needs."""

    tokens: list[list[int]]
    masks: list[list[int]]
    scores: list[float]
    messages: list[Any] | None = None
    environment: str | None = None
    task_id: str | None = None
    rollouts: list[int] | None = None
    outcomes: list[Outcome] | None = None
    versions: list[list[tuple[int, int]]] | None = None
    prompt: str | None = None
    answers: list[str] | None = None
    variant: str | None = None


_decode = msgspec.json.Decoder(_Body).decode


@dataclass
class Captured:
    """Counts of skipped groups and items by reason, and of items by the source of their words."""

    items: int = 0
    unreadable: int = 0
    """Groups that are malformed or damaged."""
    sealed: int = 0
    """Items of held-out tasks, which are sealed."""
    removed: bool = False
    """True if older groups were removed (logging.keep_rollouts: none, or all but a sample of them)."""
    texts: dict[str, int] = field(default_factory=dict)


class RunReader:
    """Reads the items of one run.

    Args:
        words: Decode state and action; without words they are empty and reading is fast.
    """

    def __init__(self, folder: RunFolder, *, words: bool = True) -> None:
        self.folder, self._with_words = folder, words
        self.specification = Specification.read(folder)
        self.captured = Captured()
        self._reader: Reader | None = reader_of(folder, self.specification) if words else None
        self._sealed = heldout_tasks(folder)

    def __iter__(self) -> Iterator[TrajectoryItem]:
        yield from self._of_journal()
        yield from self._of_teacher()

    def _of_journal(self) -> Iterator[TrajectoryItem]:
        journal = self.folder.journal
        present = ordinals(journal)
        sampled = set(sampled_ordinals(journal)) - set(present)
        self.captured.removed = bool(sampled) or (bool(present) and present[0] > 1)
        for ordinal in sorted(sampled.union(present)):
            damage: list[str] = []
            try:
                path = (sample_path if ordinal in sampled else segment_path)(journal, ordinal)
                with open_segment(path) as view:
                    for frame in scan(path, damage):
                        if frame.kind == GROUP:
                            yield from self._of_group(
                                frame.seq, view[frame.body_at : frame.body_at + frame.body_length]
                            )
            except FileNotFoundError:  # A checkpoint has passed these groups meanwhile, and they are not kept.
                self.captured.removed = True
            self.captured.unreadable += len(damage)

    def words_of(self, group: Group) -> list[Words] | None:
        """Return the words of a group's rollouts, in the order of their outcomes; None if its task is held out.

        Raises:
            IndexError: Its rows do not fit its outcomes.
        """
        if group.task_id is not None and group.task_id in self._sealed:
            return None
        rows: list[list[int]] = [[] for _ in group.outcomes or group.scores]
        for row in range(len(group.tokens)):
            rows[group.outcome_of(row)].append(row)
        return [self._words(group, place, rollout_rows) for place, rollout_rows in enumerate(rows)]

    def _of_group(self, seq: int, raw: bytes) -> Iterator[TrajectoryItem]:
        try:
            body = _decode(raw)
            outcomes = outcomes_of(body.outcomes, body.scores)
            rows: list[list[int]] = [[] for _ in outcomes]
            for row in range(len(body.tokens)):
                rows[row if body.rollouts is None else body.rollouts[row]].append(row)
        except (msgspec.DecodeError, UnicodeDecodeError, IndexError):
            self.captured.unreadable += 1
            return
        if body.task_id is not None and body.task_id in self._sealed:
            self.captured.sealed += len(outcomes)
            return
        for place, outcome in enumerate(outcomes):
            yield self._item(seq, body, place, outcome, rows[place])

    def _item(self, seq: int, body: _Body, place: int, outcome: Outcome, rows: list[int]) -> TrajectoryItem:
        sampled, oldest = 0, None
        for row in rows:
            sampled += sum(token != MASKED for token in body.masks[row]) if self._with_words else 0
            if body.versions is not None and row < len(body.versions):
                for version, _ in body.versions[row]:
                    oldest = version if oldest is None or version < oldest else oldest
        words = self._words(body, place, rows)
        self.captured.items += 1
        self.captured.texts[words.source] = self.captured.texts.get(words.source, 0) + 1
        return TrajectoryItem(
            words.state,
            words.action,
            outcome.reward,
            {
                "run": self.folder.run_id,
                "environment": body.environment or self.specification.environment.name,
                "task": body.task_id or "",
                "group": seq,
                "rollout": place,
                "version": oldest,
                "split": "train",
                **({"success": None, "unscored": True} if outcome.unjudged else {"success": outcome.success}),
                "turns": outcome.turns,
                "truncated": outcome.truncated,
                "error": outcome.error,
                "parts": outcome.parts,
                "tokens": sampled,
                "text": words.source,
                **({} if body.variant is None else {"variant": body.variant}),
            },
        )

    def _words(self, body: _Body | Group, place: int, rows: list[int]) -> Words:
        if not self._with_words:
            return kept_words(None, None)
        posted = body.messages
        if posted and rows and rows[-1] < len(posted):
            words = kept_words(None, None, posted[rows[-1]])
            if words.source == "messages":
                return words
        kept = kept_words(body.prompt, body.answers[place] if body.answers and place < len(body.answers) else None)
        if self._reader is None or not rows:
            return kept
        decoded = self._reader.words([(body.tokens[row], body.masks[row]) for row in rows], MASKED, body.prompt)
        # Text kept whole is words alone; rendered text still has the template's markers.
        return kept if decoded.source == "rendered" and kept.source == "kept" else decoded

    def _of_teacher(self) -> Iterator[TrajectoryItem]:
        if not self.specification.run_kind.demonstrates:
            return
        for number, trace in enumerate(read_traces(self.folder.path / "traces.jsonl")):
            if trace.task_id in self._sealed:
                self.captured.sealed += 1
                continue
            prompt_length = len(trace.prompt)
            self.captured.items += 1
            self.captured.texts["messages"] = self.captured.texts.get("messages", 0) + 1
            yield TrajectoryItem(
                trace.messages[:prompt_length],
                trace.messages[prompt_length:],
                trace.reward,
                {
                    "run": self.folder.run_id,
                    "environment": self.specification.environment.name,
                    "task": trace.task_id,
                    "group": number + 1,
                    "rollout": trace.variant,
                    "version": None,
                    "split": "train",
                    **({"success": True} if self.specification.dataset is None else trace.verdict),
                    "turns": trace.turns,
                    "truncated": False,
                    "error": None,
                    "parts": trace.parts,
                    "tokens": None,
                    "text": "messages",
                    "teacher": trace.teacher,
                    **({"tools": trace.tools} if trace.tools else {}),
                },
            )
