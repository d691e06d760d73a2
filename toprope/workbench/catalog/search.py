"""Search in the catalog by words: as they are written, then by their roots and by words of the same meaning."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence

from toprope.workbench.entries import Entry

_ENOUGH = 3
"""With fewer entries that contain every word, entries with related words follow."""
_SUFFIX = re.compile(r"(?<=\w{4})(ings?|ed|ers?|als?|es|s|e)$")
_RELATED = (
    "reverse backward invert mirror",
    "word spell letter string text language",
    "sort order arrange rank",
    "math arithmetic calculate number algebra",
    "add addition sum plus total",
    "code program python software",
    "game play player board",
    "logic puzzle deduce riddle",
    "tool agent function",
    "count frequency occurrence",
    "guess hidden secret",
)
"""Words that people use for the same thing, a meaning a line."""


def search(entries: Iterable[Entry], query: str) -> list[Entry]:
    """Return entries whose name, description, source, ecosystem or tags contain every word of the query.

    Matches by name come first. If there are few, entries follow that have a word of the same root or meaning for every
    word of the query: `reversing words` finds `spell_backward`.
    """
    words = query.casefold().split()
    matches: list[Entry] = []
    others: list[Entry] = []
    for entry in entries:
        (matches if all(word in _text(entry) for word in words) else others).append(entry)
    matches.sort(key=lambda entry: sum(word not in entry.name.casefold() for word in words))
    if len(matches) < _ENOUGH and words:
        matches += _related(others, words)
    return matches


def _related(entries: Iterable[Entry], words: Sequence[str]) -> list[Entry]:
    """Return the entries that have a related word for each of the words, those with most of the roots first."""
    wanted = [_root(word) for word in words]
    meanings = [_meaning(root) for root in wanted]
    ranked = []
    for entry in entries:
        roots = {_root(word) for word in re.findall(r"[^\W\d_]+", _text(entry))}
        if all(meaning & roots for meaning in meanings):
            ranked.append((sum(root not in roots for root in wanted), entry))
    return [entry for _, entry in sorted(ranked, key=lambda pair: pair[0])]


@functools.cache
def _meanings() -> list[frozenset[str]]:
    return [frozenset(_root(word) for word in line.split()) for line in _RELATED]


def _meaning(root: str) -> frozenset[str]:
    """Return the roots of all words that may mean the same."""
    return frozenset({root}.union(*(meaning for meaning in _meanings() if root in meaning)))


@functools.lru_cache(maxsize=4096)
def _root(word: str) -> str:
    """Return the root of an English word, near enough to compare two: reversing, reversal and reverse are one."""
    return _SUFFIX.sub("", _SUFFIX.sub("", word))


def _text(entry: Entry) -> str:
    return " ".join([entry.name, entry.description, entry.source, entry.ecosystem, *entry.tags]).casefold()
