"""When two tasks are the same although their texts are not: the ways in which splits leak.

Equal text, whatever case and white space, is dealt with where splits are made (toprope.sdk.worker.splits). What gets
past that
is looked for here: another spelling of the same signs, a number or label in front, and the same question within other
words, with the same right answer. Generated tasks begin and end alike, which makes no two of them the same: what nearly
all tasks of a split have there is set aside first. Paraphrases are not seen: of generated tasks one other word is often
another task.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Overlap", "overlap", "words_of"]

_WORD = re.compile(r"\w+|(?:([^\w\s])\1*)")
"""A word, or the same sign so many times: in a drawing it matters how they stand together."""
_LABEL = re.compile(
    r"^\s*(?:(?:task|question|problem|item|example|exercise|number|no|nr|q)\W{0,3}\d+\W{0,3}\s|#?\d+[.:)]\s)\s*"
)
"""`Task 17:`, `#17) `: a label in front. A number and a minus are no label."""
_QUOTES = str.maketrans({"“": '"', "”": '"', "„": '"', "’": "'", "‘": "'", "–": "-", "—": "-", "−": "-"})
_NEARLY_ALL = 0.9
_FEW = 8


@dataclass(frozen=True)
class Overlap:
    """How many of one split's tasks are in another."""

    tasks: int
    """Of the split that should be unseen, how many were looked at."""
    copies: int
    """The same words in another spelling."""
    near: int
    """The same words within others that all tasks of their splits have, and the same right answer."""


def words_of(text: str) -> list[str]:
    """The words and signs of a prompt in one spelling, without a number in front of it."""
    plain = unicodedata.normalize("NFKC", text).translate(_QUOTES).casefold()
    plain = "".join(c for c in plain if unicodedata.category(c) != "Cf")
    plain = _LABEL.sub("", plain, count=1)
    return [match.group() for match in _WORD.finditer(plain.rstrip(" \t\r\n.!?"))]


def overlap(unseen: Sequence[tuple[str, str | None]], seen: Sequence[tuple[str, str | None]]) -> Overlap:
    """Tasks of one split that are copies, or near copies, of another's.

    Args:
        unseen: Prompt and right answer of tasks that should not occur elsewhere.
        seen: Those of the other split.
    """
    unseen_words = [words_of(prompt) for prompt, _ in unseen]
    seen_words = [words_of(prompt) for prompt, _ in seen]
    known = {tuple(words) for words in seen_words}
    copies = [tuple(words) in known for words in unseen_words]
    own, others = _middles(unseen_words), _middles(seen_words)
    same = {
        (_plain(reference), tuple(words))
        for (_, reference), words in zip(seen, others, strict=True)
        if reference is not None and words
    }
    near = sum(
        not copy and reference is not None and (_plain(reference), tuple(words)) in same
        for (_, reference), words, copy in zip(unseen, own, copies, strict=True)
    )
    return Overlap(len(unseen), sum(copies), near)


def _middles(tasks: Sequence[Sequence[str]]) -> list[Sequence[str]]:
    """Each task's words without the beginning and the end that nearly all tasks of its split share."""
    if len(tasks) < _FEW:
        return list(tasks)
    start, end = _shared(tasks), _shared([list(reversed(words)) for words in tasks])
    found: list[Sequence[str]] = []
    for words in tasks:
        first = len(start) if list(words[: len(start)]) == start else 0
        last = len(end) if end and list(reversed(words[-len(end) :])) == end else 0
        found.append(words[first : len(words) - last] if first + last < len(words) else words)
    return found


def _shared(tasks: Sequence[Sequence[str]]) -> list[str]:
    """The longest beginning that nearly all have."""
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
