"""Detect equal tasks with different texts: leaks between splits.

`toprope.sdk.worker.splits` already treats texts that differ in case and white space as equal. This module finds the
rest: another spelling of the same characters, a number or label in front, and the same question within other words with
the same right answer. Beginnings and endings that nearly all tasks of a split share are ignored first. Paraphrases are
not detected: in generated tasks, one different word often makes another task.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Overlap", "overlap", "prompts_of_most", "words_of"]

_WORD = re.compile(r"\w+|(?:([^\w\s])\1*)")
"""A word, or a run of one character: in a drawing the length of the run matters."""
_LABEL = re.compile(
    r"^\s*(?:(?:task|question|problem|item|example|exercise|number|no|nr|q)[ .#]{0,3}|#?)\d+[.:)]\s+(?![-\s+*/=<>^×÷])"
)
"""A label in front: `Task 17:`, `#17) `. Without a mark behind it, or before an operator, the number is an operand."""
_QUOTES = str.maketrans({"“": '"', "”": '"', "„": '"', "’": "'", "‘": "'", "–": "-", "—": "-", "−": "-"})
_NEARLY_ALL = 0.9
_FEW = 8


@dataclass(frozen=True)
class Overlap:
    """The number of tasks that two splits share."""

    tasks: int
    """Number of compared tasks of the unseen split."""
    copies: int
    """Tasks with the same words in another spelling."""
    near: int
    """Tasks with the same words within shared text, and the same right answer."""


def words_of(text: str) -> list[str]:
    """Return the normalised words and characters of a prompt, without a number in front."""
    plain = unicodedata.normalize("NFKC", text).translate(_QUOTES).casefold()
    plain = "".join(c for c in plain if unicodedata.category(c) != "Cf")
    plain = _LABEL.sub("", plain, count=1)
    return [match.group() for match in _WORD.finditer(plain.rstrip(" \t\r\n.!?"))]


def overlap(unseen: Sequence[tuple[str, str | None]], seen: Sequence[tuple[str, str | None]]) -> Overlap:
    """Count tasks of one split that are copies or near copies of another's.

    Prompts that most tasks of a split share, one among all or each with another, tell no task from another: something
    hidden differs.

    Args:
        unseen: Prompts and right answers of tasks that must not occur elsewhere.
        seen: Prompts and right answers of the other split.
    """
    shared = prompts_of_most(unseen) | prompts_of_most(seen)
    tasks = len(unseen)
    unseen = [pair for pair in unseen if pair[0] not in shared]
    seen = [pair for pair in seen if pair[0] not in shared]
    unseen_words = [words_of(prompt) for prompt, _ in unseen]
    seen_words = [words_of(prompt) for prompt, _ in seen]
    word_tuples = {tuple(words) for words in seen_words}
    copies = [tuple(words) in word_tuples for words in unseen_words]
    unseen_middles, seen_middles = _middles(unseen_words), _middles(seen_words)
    same = {
        (_plain(reference), tuple(words))
        for (_, reference), words in zip(seen, seen_middles, strict=True)
        if reference is not None and words
    }
    near = sum(
        not copy and reference is not None and (_plain(reference), tuple(words)) in same
        for (_, reference), words, copy in zip(unseen, unseen_middles, copies, strict=True)
    )
    return Overlap(tasks, sum(copies), near)


def prompts_of_most(tasks: Sequence[tuple[str, str | None]]) -> set[str]:
    """Return the prompts that most tasks of a split share; see `overlap`."""
    counts = Counter(prompt for prompt, _ in tasks)
    most = {prompt for prompt, count in counts.most_common(1) if count > max(len(tasks) / 2, 1)}
    repeated = {task: count for task, count in Counter(tasks).items() if task[1] is None and count > 1}
    return most | {prompt for prompt, _ in repeated} if sum(repeated.values()) > len(tasks) / 2 else most


def _middles(tasks: Sequence[Sequence[str]]) -> list[Sequence[str]]:
    """Return each task's words without the beginning and end that nearly all tasks share."""
    if len(tasks) < _FEW:
        return list(tasks)
    start, end = _shared_start(tasks), _shared_start([list(reversed(words)) for words in tasks])
    middles: list[Sequence[str]] = []
    for words in tasks:
        skipped_start = len(start) if list(words[: len(start)]) == start else 0
        skipped_end = len(end) if end and list(reversed(words[-len(end) :])) == end else 0
        middles.append(
            words[skipped_start : len(words) - skipped_end] if skipped_start + skipped_end < len(words) else words
        )
    return middles


def _shared_start(tasks: Sequence[Sequence[str]]) -> list[str]:
    """Return the longest beginning that nearly all share."""
    shared: list[str] = []
    going = list(tasks)
    while True:
        place = len(shared)
        counted = Counter(words[place] for words in going if len(words) > place)
        if not counted:
            return shared
        word, count = counted.most_common(1)[0]
        if count < _NEARLY_ALL * len(tasks):
            return shared
        going = [words for words in going if len(words) > place and words[place] == word]
        shared.append(word)


def _plain(text: str) -> str:
    return " ".join(text.casefold().split())
