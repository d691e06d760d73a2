"""When two tasks are the same although their texts are not: the ways in which splits leak.

Equal text, whatever case and white space, is dealt with where splits are made (toprope.sdk.splits). What gets past that
is looked for here: another spelling of the same signs, a number or label put in front, and long prompts that differ in
hardly a word and have the same right answer. Generated tasks share their template, so likeness is judged by the words
that are not in most of them.
"""

from __future__ import annotations

import difflib
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Overlap", "overlap", "words_of"]

_WORD = re.compile(r"\w+|[^\w\s]")
_LABEL = re.compile(
    r"^\s*(?:(?:task|question|problem|item|example|exercise|number|no|nr|q)\W{0,3}\d+\W{0,3}\s|#?\d+[.:)]\s)\s*"
)
"""`Task 17:`, `#17) `: a label in front. A number and a minus are no label."""
_QUOTES = str.maketrans({"“": '"', "”": '"', "„": '"', "’": "'", "‘": "'", "–": "-", "—": "-", "−": "-"})
_LIKE = 0.9
_TEMPLATE_SHARE = 0.5
_LONGEST_COMPARED = 400
_MOST_COMPARED = 20_000


@dataclass(frozen=True)
class Overlap:
    """How many of one split's tasks are in another."""

    tasks: int
    """Of the split that should be unseen, how many were looked at."""
    copies: int
    """The same words in another spelling."""
    near: int
    """Hardly a word different, and the same right answer."""


def words_of(text: str) -> list[str]:
    """The words and signs of a prompt in one spelling, without a number in front of it."""
    plain = unicodedata.normalize("NFKC", text).translate(_QUOTES).casefold()
    plain = "".join(c for c in plain if unicodedata.category(c) != "Cf")
    plain = _LABEL.sub("", plain, count=1)
    return _WORD.findall(plain.rstrip(" \t\r\n.!?"))


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
    template = _template([*unseen_words, *seen_words])
    by_reference: dict[str, list[list[str]]] = defaultdict(list)
    for (_, reference), words in zip(seen, seen_words, strict=True):
        if reference is not None:
            by_reference[_plain(reference)].append(_told_apart(words, template))
    near, compared = 0, 0
    for (_, reference), words, copy in zip(unseen, unseen_words, copies, strict=True):
        if copy or reference is None:
            continue
        own = _told_apart(words, template)
        for other in by_reference.get(_plain(reference), ()):
            compared += 1
            if compared > _MOST_COMPARED:
                break
            if _alike(own, other):
                near += 1
                break
    return Overlap(len(unseen), sum(copies), near)


def _template(tasks: Sequence[Sequence[str]]) -> set[str]:
    """The words that most tasks have."""
    if len(tasks) < 4:
        return set()
    counted = Counter(word for words in tasks for word in set(words))
    return {word for word, count in counted.items() if count > _TEMPLATE_SHARE * len(tasks) and not word.isdigit()}


def _told_apart(words: Sequence[str], template: set[str]) -> list[str]:
    return [word for word in words if word not in template][:_LONGEST_COMPARED]


def _alike(one: Sequence[str], other: Sequence[str]) -> bool:
    # Of a few words each counts; one number more or less is another task.
    if min(len(one), len(other)) < 8 or abs(len(one) - len(other)) > 0.2 * max(len(one), len(other)):
        return bool(one) and list(one) == list(other)
    matcher = difflib.SequenceMatcher(None, one, other, autojunk=False)
    if matcher.quick_ratio() < _LIKE or matcher.ratio() < _LIKE:
        return False
    # Numbers and single signs that differ are what tells generated tasks apart.
    return Counter(w for w in one if _tells(w)) == Counter(w for w in other if _tells(w))


def _tells(word: str) -> bool:
    return any(c.isdigit() for c in word) or len(word) == 1


def _plain(text: str) -> str:
    return " ".join(text.casefold().split())
