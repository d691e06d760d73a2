"""Detects contamination: tasks of one split that repeat, or share passages with, tasks of another.

No task lies in two splits, but an author's own splits, data sets with copies under another spelling, and long texts
that share passages get past the check of ids. The tasks' texts are compared as they are sampled. Only hashes are kept
in memory and only counts are written: held-out texts leave no trace.

Two tasks are copies if their words are equal up to case, Unicode normalization, spaces and closing punctuation. They
overlap if they share a rare passage of n words. n is the 5th percentile of the held-out tasks' lengths, within 8 and
13. A passage that more than ten training tasks have is a template, as in Brown et al., Language Models are Few-Shot
Learners (2020), appendix C; so is one that more than a twentieth of the held-out tasks have. Shorter tasks are compared
whole.
"""

from __future__ import annotations

import hashlib
import re
import sys
import unicodedata
from collections import Counter
from collections.abc import Sequence
from typing import Any

from toprope.atomic import write_json
from toprope.errors import Corrupt, NotFound
from toprope.records.run.folder import RunFolder, read_json

_MIN_WORDS, _MAX_WORDS = 8, 13
_TEMPLATE = 10
_MOST_PASSAGES = 200_000
"""Distinct passages of training tasks that are kept, some 20 MB; later training tasks are only counted."""
_WORD = re.compile(r"\w+|[^\w\s]")
_SEALED = "heldout"


def normalized_words(messages: Sequence[dict[str, Any]]) -> list[str]:
    """Words and punctuation of a task's messages in normalized spelling."""
    text = " ".join(str(message.get("content", "")) for message in messages)
    plain = "".join(c for c in unicodedata.normalize("NFKC", text).casefold() if unicodedata.category(c) != "Cf")
    return _WORD.findall(plain.rstrip(" \t\r\n.!?"))


class ContaminationTracker:
    """Hashes of the tasks seen of each split. `heldout` and `validation` are small; `train` is bounded."""

    def __init__(self) -> None:
        self._ids: dict[str, set[str]] = {"train": set(), "validation": set(), _SEALED: set()}
        self._whole: dict[str, Counter[int]] = {split: Counter() for split in self._ids}
        self._texts: dict[str, list[list[str]]] = {"validation": [], _SEALED: []}
        self._passages: Counter[int] = Counter()
        self._n: int | None = None
        self._skipped = 0

    def add(self, split: str, task_id: str, messages: Sequence[dict[str, Any]]) -> None:
        """Adds a task that was sampled; a known id costs nothing."""
        if task_id in self._ids[split]:
            return
        self._ids[split].add(task_id)
        words = normalized_words(messages)
        self._whole[split][_hash(words)] += 1
        if split != "train":
            self._texts[split].append(words)
            return
        if self._n is None:
            self._n = _length(self._texts[_SEALED] or self._texts["validation"])
        if len(self._passages) >= _MOST_PASSAGES:
            self._skipped += 1
            return
        # A passage that a task repeats counts once.
        self._passages.update(set(_passages(words, self._n)))

    def report(self) -> dict[str, Any]:
        """Counts of distinct tasks by split, of tasks with a copy in another split, and of held-out tasks that share a
        rare passage with training tasks."""
        n, shared = self._n or _length(self._texts[_SEALED]), self._shared()
        whole = self._whole
        sealed = [set(_passages(words, n)) for words in self._texts[_SEALED] if _hash(words) not in shared]
        common = Counter(passage for passages in sealed for passage in passages)
        limit = max(1, len(sealed) // 20)
        rare = [{passage for passage in passages if common[passage] <= limit} for passages in sealed]
        overlapping = sum(any(0 < self._passages[passage] <= _TEMPLATE for passage in passages) for passages in rare)
        return {
            "seen": {split: len(ids) for split, ids in self._ids.items()},
            "copies": {
                "train_heldout": _count_copies(whole[_SEALED], whole["train"], shared),
                "train_validation": _count_copies(whole["validation"], whole["train"], shared),
                "validation_heldout": _count_copies(whole[_SEALED], whole["validation"], shared),
            },
            "passage_words": n,
            "heldout_sharing_passages": overlapping,
            "train_not_looked_at": self._skipped,
        }

    def _shared(self) -> set[int]:
        """Texts of most tasks of a split: they tell no task from another, because something hidden differs."""
        most = (counts.most_common(1) for counts in self._whole.values())
        return {
            content
            for split, found in zip(self._ids, most, strict=True)
            for content, count in found
            if count > max(len(self._ids[split]) / 2, 1)
        }


def _count_copies(counts: Counter[int], contents: Counter[int], shared: set[int]) -> int:
    return sum(count for content, count in counts.items() if content in contents and content not in shared)


def _length(texts: Sequence[list[str]]) -> int:
    lengths = sorted(len(words) for words in texts)
    return min(max(lengths[len(lengths) // 20], _MIN_WORDS), _MAX_WORDS) if lengths else _MAX_WORDS


def _passages(words: Sequence[str], n: int) -> list[int]:
    if len(words) < n:
        return []  # compared whole
    return [_hash(words[start : start + n]) for start in range(len(words) - n + 1)]


def _hash(words: Sequence[str]) -> int:
    return int.from_bytes(hashlib.blake2b(" ".join(words).encode("utf-8", "surrogatepass"), digest_size=8).digest())


def write_contamination(folder: RunFolder, attempt: int, tracker: ContaminationTracker) -> None:
    """Adds this attempt's report to contents.json; prints an error if the file cannot be written."""
    path = folder.path / "contents.json"
    try:
        attempts = dict(read_json(path)["attempts"])
    except (NotFound, Corrupt, TypeError, KeyError, ValueError):
        attempts = {}
    try:
        write_json(path, {"version": 1, "attempts": {**attempts, str(attempt): tracker.report()}})
    except OSError as error:
        print(f"contents.json could not be written: {error}", file=sys.stderr, flush=True)
