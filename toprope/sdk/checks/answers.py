"""Probe answers that test a scorer.

Scorers fail in typical ways: on text that is not a number, on very long text, on characters that look like digits, on a
repeated prompt. The best wrong answer is the right answer of another task: its form is right and only its content is
wrong.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["JUNK", "WORTHLESS", "Probe", "bare", "near_miss", "probes"]

JUNK = "qx zv 17 ?!"
"""An answer that no sound scorer rewards."""
WORTHLESS = ("empty", "junk", "letters", "unicode", "nan", "structure", "long", "echo")
"""Kinds that should earn little or no reward."""

_LETTERS = "wkfh pqlz mrvd tjgx bncs"
_UNICODE = "\u00b2\u0664\u2167 \u202e\ufffd\U0001f9ea\u0000 \u00e9e\u0301"
"""Signs that str.isdigit or float take for numbers and int does not, a change of direction, NUL, two spellings of e."""
_LONG = "the answer may be 12 or 13 or " * 700
"""Some 20,000 characters: longer than most answers of a policy, and cheap for a scorer of linear cost."""
_STRUCTURES = ('[{"a": [null, {}], "b": "x"}, []]', '{"a": [null, {}], "b": [[1, "x"]]}', "[[1, 2], [3]]", "[]")
_LONGEST_ECHO = 20_000
_INTEGER = re.compile(r"[+-]?\d{1,18}")
_NUMBER = re.compile(r"\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")
_LETTER = re.compile(r"[A-Za-z](?![^<>]{0,20}>)")
"""A letter outside a tag, without which a scorer finds no answer."""

_FORMS = tuple(
    re.compile(form, re.DOTALL | re.IGNORECASE)
    for form in (r"(.*<answer>)(.*)(</answer>\s*)", r"(.*\\boxed\{)(.*)(\}[\s$.]*)")
)
"""References that mark the answer."""


@dataclass(frozen=True)
class Probe:
    """One answer to try."""

    kind: str
    text: str


def probes(prompt: str, reference: str | None, others: Sequence[str] = (), *, full: bool = False) -> list[Probe]:
    """Return the answers to try on a task, most informative first.

    Args:
        prompt: The prompt as one text.
        reference: The right answer if known.
        others: Right answers to other tasks; the first different one is used.
        full: Also try further kinds.
    """
    tried = [] if reference is None else [Probe("reference", reference)]
    tried += [Probe("empty", ""), Probe("junk", JUNK)]
    if reference is not None:
        plain = _plain(reference)
        other = next((text for text in others if _plain(text) != plain), None)
        if other is not None:
            tried.append(Probe("other", other))
        if (near := near_miss(reference)) is not None:
            tried.append(Probe("near_miss", near))
        if other is not None:  # neither first nor last, which a scorer of free text may read
            third = next((text for text in others if _plain(text) not in (plain, _plain(other))), other)
            tried.append(Probe("several", f"{other} {reference} {third}"))
    tried += [
        Probe("letters", _LETTERS),
        Probe("unicode", _UNICODE),
        Probe("nan", "nan"),
        Probe("long", _LONG),
        Probe("echo", prompt[:_LONGEST_ECHO]),
    ]
    if reference is not None:
        before, answer, after = _split_reference(reference)
        words = answer.split()
        if len(words) > 1:
            tried.append(Probe("first_word", f"{before}{words[0]}{after}"))
        if words:
            tried.append(Probe("appended", f"{before}{answer}zzz{after}"))
    tried += [Probe("structure", text) for text in _STRUCTURES[: None if full else 1]]
    return tried


def bare(reference: str) -> str:
    """Return the answer in a reference that ends in <answer>...</answer> or \\boxed{...}; else the reference."""
    return _split_reference(reference)[1].strip()


def near_miss(reference: str) -> str | None:
    """Return a minimally wrong answer; None if nothing can be changed."""
    text = reference.strip()
    if _INTEGER.fullmatch(text):
        return str(int(text) + 1)
    numbers = list(_NUMBER.finditer(text))
    if numbers:  # Change the first digit, because a scorer may allow for rounding.
        at = numbers[-1].start()
        return f"{text[:at]}{int(text[at]) % 9 + 1}{text[at + 1 :]}"
    letters = list(_LETTER.finditer(text))
    if letters:
        at = letters[-1].start()
        return text[:at] + _next_letter(text[at]) + text[at + 1 :]
    return text[:-1] if len(text) > 1 else None


def _split_reference(reference: str) -> tuple[str, str, str]:
    """The answer of a reference, with the text before and after it that says where the answer is."""
    for form in _FORMS:
        if match := form.fullmatch(reference):
            return match[1], match[2], match[3]
    return "", reference, ""


def _next_letter(letter: str) -> str:
    alphabet_start = ord("a" if letter.islower() else "A")
    return chr(alphabet_start + (ord(letter) - alphabet_start + 7) % 26)


def _plain(text: str) -> str:
    return " ".join(text.casefold().split())
