"""Find the answer in a model's text and decide whether it is right.

Answers are free text, so extraction looks where instructed models put them: within <answer>, in \\boxed{}, after
"####", after "the answer is". There are two families of comparisons:

- `exact`, `numeric`, `choice`, `matches` and `mathematical` each follow one rule and take an extracted answer. They
  return a `Verdict`: whether the answer could be read at all, and whether it is right.
- `is_correct` finds the answer itself and compares text or numbers as people write them: thousands separators,
  fractions, percentages, powers of ten, a currency or a unit. If both sides name a unit, the units must agree.
"""

from __future__ import annotations

import importlib.util
import math
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from toprope.sdk.errors import InvalidRequest, LoadError
from toprope.sdk.sandbox import passes_tests

__all__ = [
    "Number",
    "Verdict",
    "choice",
    "exact",
    "extract",
    "extract_answer",
    "is_correct",
    "matches",
    "mathematical",
    "need_math",
    "normalize_number",
    "number_in",
    "numeric",
    "read_number",
    "unit_tests",
]

Verdict = tuple[bool, bool]
"""(the answer could be read, it is right)."""

_LONGEST_ANSWER = 20_000
_WORDS_OF_AN_EXPRESSION = 8
_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
_HASHES = re.compile(r"####\s*(.+)")
_ANSWER_IS = re.compile(
    r"\b(?:final[ _]answer|answer|result)\s*(?:\*\*)?\s*(?:is\b|:|=)\s*"
    r"(?:approximately\b|about\b|exactly\b|:)?([^\n]+)",
    re.IGNORECASE,
)
_PLAIN_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?(?:\s*/\s*\d+)?")
_FENCE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)
_LETTER = re.compile(r"(?<![A-Za-z])\(?([A-Za-z])\)?(?![A-Za-z'])")
_NUMBER = re.compile(
    r"(?P<sign>[-+\u2212])?\s*(?P<money>[$€£¥])?\s*"
    r"(?P<whole>\d{1,3}(?:[,\u00a0\u202f'_ ]\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)"
    r"(?:\s*(?:[eE]|[x×*]\s*10\s*(?:\^|\*\*))\s*(?P<power>[-+\u2212]?\d+))?"
    r"(?:\s*/\s*(?P<below>\d+(?:\.\d+)?))?"
    r"\s*(?P<unit>%|percent\b|°?[A-Za-zµΩ]+(?:/[A-Za-z]+)?(?:\^?[23²³])?)?"
)
_MIXED = re.compile(r"(?P<sign>[-+\u2212])?\s*(?P<whole>\d+)\s+(?P<above>\d+)\s*/\s*(?P<below>\d+)")
_SAID = re.compile(
    r"(?:FINAL[_ ]ANSWER|\banswer|\bresult|\bsolution|\btotal)\s*(?:is|are|=|:|equals|was)?\s*"
    r"(?:approximately|about|roughly|around|exactly|:|=|≈)?\s*(?P<said>.+)",
    re.IGNORECASE,
)
_FILLER = frozenset("and or is in of the a an to at so which because as by for x".split())


def extract(text: str, how: str, pattern: str = "") -> str | None:
    """The answer in a model's text; None if there is none of the kind.

    Args:
        text: The whole text. Everything up to the end of a <think> block is skipped.
        how: `whole`, `last_line`, `tag`, `boxed`, `pattern`, or `auto`: the first of tag, boxed, ####, "the answer is".
        pattern: A regular expression for `pattern`: the first group of its last match, or the match if it has no group.
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
    for found in (_last(_TAG, text), _boxed(text), _last(_HASHES, text), _last(_ANSWER_IS, text)):
        if found:
            return found
    return None


def exact(answer: str | None, reference: Any, ignore_case: bool) -> Verdict:
    """Equal texts, apart from white space and a final full stop; of a list of references, equal to one."""
    if not answer or not answer.strip():
        return False, False
    wanted = reference if isinstance(reference, list | tuple) else [reference]
    return True, any(_plain(answer, ignore_case) == _plain(str(one), ignore_case) for one in wanted)


def numeric(answer: str | None, reference: Any, tolerance: float) -> Verdict:
    """Numbers that differ by at most `tolerance`, relative to the reference if that is above 1.

    Raises:
        InvalidRequest: The reference holds no number.
    """
    given, wanted = number_in(answer), number_in(extract(str(reference), "auto") or str(reference))
    if wanted is None:
        raise InvalidRequest(f"The reference {str(reference)[:80]!r} holds no number, which the numeric scorer needs.")
    if given is None:
        return False, False
    return True, abs(given - wanted) <= tolerance * max(1.0, abs(wanted))


def number_in(text: str | None) -> float | None:
    """The last number in a text, such as 1,234.5, -3e4 or 3/4; None if it holds none."""
    found = _PLAIN_NUMBER.findall(text or "")
    if not found:
        return None
    try:
        top, _, bottom = found[-1].replace(",", "").replace(" ", "").partition("/")
        value = float(Fraction(top) / Fraction(bottom)) if bottom else float(top)
    except (ValueError, ZeroDivisionError, OverflowError):
        return None
    return value if math.isfinite(value) else None


def choice(text: str, answer: str | None, reference: Any, options: list[str]) -> Verdict:
    """The right letter; the text of an option counts as its letter.

    Args:
        text: The whole text, used if no answer was extracted.
        answer: The extracted answer.
        reference: A letter, an index from 0, or the text of an option.
        options: Texts of the options; empty if they are unknown.

    Raises:
        InvalidRequest: The reference is none of the three.
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
    """The whole answer matches the regular expression in the reference.

    Raises:
        InvalidRequest: The reference is not a regular expression.
    """
    try:
        pattern = re.compile(str(reference), re.DOTALL | (re.IGNORECASE if ignore_case else 0))
    except re.error as error:
        raise InvalidRequest(f"The reference {str(reference)[:80]!r} is not a regular expression: {error}.") from None
    if not answer or not answer.strip():
        return False, False
    return True, pattern.fullmatch(answer.strip()) is not None


def need_math() -> None:
    """Check that math-verify is installed.

    Raises:
        LoadError: It is not; the message says how to install it.
    """
    if importlib.util.find_spec("math_verify") is None:
        raise LoadError(
            f'The scorer math needs math-verify. Install it: {sys.executable} -m pip install "math-verify[antlr4_13_2]"'
        )


def mathematical(answer: str | None, reference: Any) -> Verdict:
    """Mathematically equal according to math-verify (LaTeX and plain expressions, sets, intervals, equations).

    Raises:
        InvalidRequest: math-verify cannot read the reference.
    """
    from math_verify import parse, verify

    wanted = _expression(parse, str(reference))
    if not wanted:
        raise InvalidRequest(f"The reference {str(reference)[:80]!r} is not an expression that math-verify can read.")
    given = _expression(parse, answer or "")
    return bool(given), bool(given) and bool(verify(wanted, given))


def unit_tests(text: str, tests: Any, seconds: float, memory_mb: int) -> Verdict:
    """The code in an answer (its last fenced block, else all of it) passes the tests; see `passes_tests`."""
    fenced = _FENCE.findall(text)
    code = (fenced[-1] if fenced else text.rpartition("</think>")[2]).strip()
    if not code:
        return False, False
    program = "\n".join(map(str, tests)) if isinstance(tests, list | tuple) else str(tests)
    return True, passes_tests(code, program, seconds=seconds, memory_mb=memory_mb)


@dataclass(frozen=True)
class Number:
    """A number with its unit in lower case, empty if it has none. A percentage is a hundredth without a unit."""

    value: float
    unit: str = ""


def read_number(text: str) -> Number | None:
    """The number in a text that holds little else: a currency, a unit or a final full stop; None otherwise."""
    text = text.strip().strip("*_`\"'").rstrip(".!").strip()
    mixed = _MIXED.fullmatch(text)
    if mixed is not None and int(mixed["below"]):
        value = int(mixed["whole"]) + int(mixed["above"]) / int(mixed["below"])
        return Number(-value if mixed["sign"] in ("-", "\u2212") else value)
    found = _NUMBER.fullmatch(text)
    return None if found is None else _number(found)


def normalize_number(text: str) -> float | None:
    """Value of the number that `text` is, or None if it is not a number. `3/4` -> 0.75, `12 %` -> 0.12."""
    number = read_number(text)
    return None if number is None else number.value


def extract_answer(text: str) -> str:
    """The answer in a model's text: its last box, else the text after its last "the answer is", else its last line.

    `Therefore, the answer is approximately 4.` -> `4`; `Result: 4.0` -> `4.0`; `4` -> `4`.
    """
    if (boxed := _boxed(text)) is not None:
        return boxed
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    for line in reversed(lines):
        said = None
        for place in re.finditer(r"FINAL[_ ]ANSWER|\banswer|\bresult|\bsolution|\btotal", line, re.IGNORECASE):
            said = _SAID.match(line, place.start()) or said
        if said is not None and (answer := said["said"].strip().strip("*_`").rstrip(".").strip()):
            return answer
    return lines[-1].rstrip(".").strip() if lines else ""


def is_correct(answer: str, reference: str, *, relative: float = 1e-6, absolute: float = 1e-9) -> bool:
    """Return True if `answer` equals `reference`, as text or as a number.

    Args:
        answer: The policy's text; see `extract_answer`.
        reference: The right answer.
        relative: Tolerance of a number, as a share of the reference.
        absolute: Tolerance of a number in absolute terms.
    """
    said = extract_answer(answer)
    if _words(said) == _words(reference) or _words(answer) == _words(reference):
        return True
    right = read_number(reference)
    if right is None:
        return False
    given = read_number(said)
    if given is None:
        # "4 apples are left": the only number of a sentence is meant.
        found = [one for one in map(_number, _NUMBER.finditer(said)) if one is not None]
        if len(found) != 1:
            return False
        given = Number(found[0].value, found[0].unit if found[0].unit == right.unit else "")
    if given.unit and right.unit and given.unit != right.unit:
        return False
    return math.isclose(given.value, right.value, rel_tol=relative, abs_tol=absolute)


def _expression(parse: Callable[[str], list[Any]], text: str) -> list[Any]:
    """Parse a text with math-verify. A bare expression is read as LaTeX first: as prose, x+1 would be a 1."""
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
    raise InvalidRequest(f"The reference {said[:80]!r} is not a letter, an index from 0 or the text of an option.")


def _plain(text: str, ignore_case: bool) -> str:
    plain = " ".join(text.split()).strip().rstrip(".").strip()
    return plain.casefold() if ignore_case else plain


def _last(pattern: re.Pattern[str], text: str) -> str | None:
    found = next(reversed(list(pattern.finditer(text))), None)
    if found is None:
        return None
    return ((found.group(1) if pattern.groups else found.group(0)) or "").strip().strip("*`").strip()


def _boxed(text: str) -> str | None:
    """Content of the last \\boxed{...}, with balanced braces."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth, begin = 0, start + len("\\boxed")
    for place in range(begin, len(text)):
        depth += (text[place] == "{") - (text[place] == "}")
        if depth == 0:
            return text[begin + 1 : place].strip()
    return None


def _number(found: re.Match[str]) -> Number | None:
    value = float(re.sub(r"[,\u00a0\u202f'_ ]", "", found["whole"]))
    if found["power"]:
        try:
            value *= 10.0 ** int(found["power"].replace("\u2212", "-"))
        except OverflowError:
            return None
    if found["below"]:
        below = float(found["below"])
        if below == 0:
            return None
        value /= below
    if found["sign"] in ("-", "\u2212"):
        value = -value
    unit = (found["unit"] or "").lower()
    if unit in ("%", "percent"):
        value, unit = value / 100, ""
    elif found["money"]:
        unit = found["money"]
    if not math.isfinite(value):
        return None
    return Number(value, "" if unit in _FILLER else unit.lstrip("°"))


def _words(text: str) -> str:
    return " ".join(text.strip().strip("*_`\"'").rstrip(".").casefold().split())
