"""Says whether an answer is right: how it is found in what a model wrote, and how it is held against the reference.

Every scorer returns whether the answer could be read at all, and whether it is right. Answers are free text, so the
extraction looks where instructed models put them: within <answer>, \\boxed{}, after "####", after "the answer is".
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from fractions import Fraction
from pathlib import Path
from typing import Any

from toprope.sdk.errors import InvalidRequest, LoadError

__all__ = [
    "Verdict",
    "choice",
    "exact",
    "extract",
    "mathematical",
    "matches",
    "need_math",
    "number_in",
    "numeric",
    "unit_tests",
]

Verdict = tuple[bool, bool]
"""(could be read, is right)."""

_GUARD = Path(__file__).with_name("test_program.py")
_LONGEST_ANSWER = 20_000
_WORDS_OF_AN_EXPRESSION = 8
_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
_HASHES = re.compile(r"####\s*(.+)")
_SAID = re.compile(
    r"\b(?:final[ _]answer|answer|result)\s*(?:\*\*)?\s*(?:is\b|:|=)\s*"
    r"(?:approximately\b|about\b|exactly\b|:)?([^\n]+)",
    re.IGNORECASE,
)
_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?(?:\s*/\s*\d+)?")
_FENCE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)
_LETTER = re.compile(r"(?<![A-Za-z])\(?([A-Za-z])\)?(?![A-Za-z'])")


def extract(text: str, how: str, pattern: str = "") -> str | None:
    """The answer within what a model wrote; None where there is none of that kind.

    Args:
        text: All of it. What comes before the end of a <think> block is passed over.
        how: `whole`, `last_line`, `tag`, `boxed`, `pattern`, or `auto`: the first of tag, boxed, ####, "the answer is".
        pattern: For `pattern`: its last match counts, by its first group where it has one.
    """
    text = text[-_LONGEST_ANSWER:].rpartition("</think>")[2].strip()
    if how == "whole":
        return text or None
    if how == "last_line":
        return text.splitlines()[-1].strip() if text else None
    if how == "tag":
        return _last(_TAG, text)
    if how == "boxed":
        return _boxed(text)
    if how == "pattern":
        return _last(re.compile(pattern, re.DOTALL), text)
    for found in (_last(_TAG, text), _boxed(text), _last(_HASHES, text), _last(_SAID, text)):
        if found:
            return found
    return None


def exact(answer: str | None, reference: Any, ignore_case: bool) -> Verdict:
    """Equal texts, white space and a full stop at the end aside. A list of references: equal to one of them."""
    if not answer or not answer.strip():
        return False, False
    wanted = reference if isinstance(reference, list | tuple) else [reference]
    return True, any(_plain(answer, ignore_case) == _plain(str(one), ignore_case) for one in wanted)


def numeric(answer: str | None, reference: Any, tolerance: float) -> Verdict:
    """Numbers that differ by at most `tolerance`, relative to the reference where that is above 1."""
    given, wanted = number_in(answer), number_in(extract(str(reference), "auto") or str(reference))
    if wanted is None:
        raise InvalidRequest(f"The reference {str(reference)[:80]!r} holds no number, which the numeric scorer needs.")
    if given is None:
        return False, False
    return True, abs(given - wanted) <= tolerance * max(1.0, abs(wanted))


def number_in(text: str | None) -> float | None:
    """The last number in a text, None where there is none: 1,234.5, -3e4, 3/4, 12 %."""
    found = _NUMBER.findall(text or "")
    if not found:
        return None
    try:
        top, _, bottom = found[-1].replace(",", "").replace(" ", "").partition("/")
        value = float(Fraction(top) / Fraction(bottom)) if bottom else float(top)
    except (ValueError, ZeroDivisionError, OverflowError):
        return None
    return value if math.isfinite(value) else None


def choice(text: str, answer: str | None, reference: Any, options: list[str]) -> Verdict:
    """The right letter. An answer that is the text of an option counts as its letter.

    Raises:
        InvalidRequest: The reference is no letter, index (from 0) or text of an option.
    """
    wanted = _letter_of(reference, options)
    valid = {chr(65 + index) for index in range(len(options))} if options else {chr(65 + index) for index in range(26)}
    given = answer if answer is not None else text
    for index, option in enumerate(options):
        if _plain(given, True) == _plain(option, True):
            return True, chr(65 + index) == wanted
    letters = [letter.upper() for letter in _LETTER.findall(given) if letter.upper() in valid]
    if answer is None and len(given.strip(" .()")) > 1:  # free text is full of words like "a" and "I"
        letters = [letter for letter in _LETTER.findall(given) if letter in valid and letter not in "AI"] or letters[:0]
    if not letters:
        return False, False
    return True, (letters[0] if answer is not None else letters[-1]) == wanted


def matches(answer: str | None, reference: Any, ignore_case: bool) -> Verdict:
    """The whole answer matches the regular expression that the reference is.

    Raises:
        InvalidRequest: It is none.
    """
    try:
        pattern = re.compile(str(reference), re.DOTALL | (re.IGNORECASE if ignore_case else 0))
    except re.error as error:
        raise InvalidRequest(f"The reference {str(reference)[:80]!r} is no regular expression: {error}.") from None
    if not answer or not answer.strip():
        return False, False
    return True, pattern.fullmatch(answer.strip()) is not None


def need_math() -> None:
    """Passes when the library that compares mathematics is there.

    Raises:
        LoadError: It is not; the message says how to install it.
    """
    if importlib.util.find_spec("math_verify") is None:
        raise LoadError(
            f'The scorer math needs math-verify. Install it: {sys.executable} -m pip install "math-verify[antlr4_13_2]"'
        )


def mathematical(answer: str | None, reference: Any) -> Verdict:
    """Mathematically equal, by math-verify (LaTeX and plain expressions, sets, intervals, equations)."""
    from math_verify import parse, verify

    wanted = _expression(parse, str(reference))
    if not wanted:
        raise InvalidRequest(f"The reference {str(reference)[:80]!r} is no expression that math-verify can read.")
    given = _expression(parse, answer or "")
    return bool(given), bool(given) and bool(verify(wanted, given))


def unit_tests(text: str, tests: Any, seconds: float, memory_mb: int) -> Verdict:
    """The code in an answer (its last fenced block, else all of it) passes the tests, in a guarded process."""
    fenced = _FENCE.findall(text)
    code = (fenced[-1] if fenced else text.rpartition("</think>")[2]).strip()
    if not code:
        return False, False
    tests = "\n".join(map(str, tests)) if isinstance(tests, list | tuple) else str(tests)
    request = json.dumps({"code": code, "tests": tests, "seconds": seconds, "memory_mb": memory_mb})
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "LC_ALL") if name in os.environ}
    with tempfile.TemporaryDirectory(prefix="toprope-tests-") as folder:
        try:
            done = subprocess.run(
                [sys.executable, "-I", str(_GUARD)],
                input=request.encode("utf-8", "replace"),
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                cwd=folder,
                env=kept | {"TMPDIR": folder, "HOME": folder},
                timeout=seconds + 5,
            )
            return True, bool(json.loads(done.stdout)["passed"])
        except (subprocess.TimeoutExpired, ValueError, KeyError):
            return True, False  # the code took its guard down with it


def _expression(parse: Any, text: str) -> list[Any]:
    """What math-verify reads in a text. A bare expression is read as LaTeX first: as prose, x+1 would be a 1."""
    bare = len(text.split()) <= _WORDS_OF_AN_EXPRESSION and not any(mark in text for mark in ("$", "\\(", "\\["))
    for form in (f"${text}$", text) if bare else (text,):
        found = parse(form)
        if found:
            return found
    return []


def _letter_of(reference: Any, options: list[str]) -> str:
    if isinstance(reference, int) and not isinstance(reference, bool) and 0 <= reference < max(len(options), 26):
        return chr(65 + reference)
    said = str(reference).strip()
    for index, option in enumerate(options):
        if _plain(said, True) == _plain(option, True):
            return chr(65 + index)
    bare = said.strip("() .")
    if len(bare) == 1 and bare.isalpha():
        return bare.upper()
    if bare.isdigit() and options and int(bare) < len(options):
        return chr(65 + int(bare))
    raise InvalidRequest(f"The reference {said[:80]!r} is no letter, no index from 0 and no text of an option..")


def _plain(text: str, ignore_case: bool) -> str:
    plain = " ".join(text.split()).strip().rstrip(".").strip()
    return plain.casefold() if ignore_case else plain


def _last(pattern: re.Pattern[str], text: str) -> str | None:
    found = next(reversed(list(pattern.finditer(text))), None)
    if found is None:
        return None
    return ((found.group(1) if pattern.groups else found.group(0)) or "").strip().strip("*`").strip()


def _boxed(text: str) -> str | None:
    """The content of the last \\boxed{...}, braces within it balanced."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth, begin = 0, start + len("\\boxed")
    for place in range(begin, len(text)):
        depth += (text[place] == "{") - (text[place] == "}")
        if depth == 0:
            return text[begin + 1 : place].strip()
    return None
