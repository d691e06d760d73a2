"""Whether an answer is right: as text, as a number within a tolerance, found within what a model says around it.

Numbers are read as people write them: thousands separators, fractions, percentages, powers of ten, a currency or a
unit beside them. Where reference and answer name different units the answer is wrong; where one of them names none,
the numbers decide.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

__all__ = ["Number", "extract_answer", "is_correct", "normalize_number", "read_number"]

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
_BOXED = re.compile(r"\\boxed\{(?P<said>(?:[^{}]|\{[^{}]*\})*)\}")
_FILLER = {
    "and",
    "or",
    "is",
    "in",
    "of",
    "the",
    "a",
    "an",
    "to",
    "at",
    "so",
    "which",
    "because",
    "as",
    "by",
    "for",
    "x",
}


@dataclass(frozen=True)
class Number:
    """A number with its unit, lower-cased; empty where there is none. A percentage is a hundredth, without a unit."""

    value: float
    unit: str = ""


def read_number(text: str) -> Number | None:
    """The number that `text` is, if it is one and little else: a currency, a unit, a final stop may stand beside it."""
    text = text.strip().strip("*_`\"'").rstrip(".!").strip()
    mixed = _MIXED.fullmatch(text)
    if mixed is not None and int(mixed["below"]):
        value = int(mixed["whole"]) + int(mixed["above"]) / int(mixed["below"])
        return Number(-value if mixed["sign"] in ("-", "\u2212") else value)
    found = _NUMBER.fullmatch(text)
    return None if found is None else _number(found)


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


def normalize_number(text: str) -> float | None:
    """The value of the number that `text` is; None when it is none. `3/4` -> 0.75, `12 %` -> 0.12."""
    number = read_number(text)
    return None if number is None else number.value


def extract_answer(text: str) -> str:
    """The answer within what a model says: after its last "the answer is", in its last box, else its last line.

    `Therefore, the answer is approximately 4.` -> `4`; `Result: 4.0` -> `4.0`; `4` -> `4`.
    """
    boxed = list(_BOXED.finditer(text))
    if boxed:
        return boxed[-1]["said"].strip()
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    for line in reversed(lines):
        said = None
        for place in re.finditer(r"FINAL[_ ]ANSWER|\banswer|\bresult|\bsolution|\btotal", line, re.IGNORECASE):
            said = _SAID.match(line, place.start()) or said
        if said is not None and (answer := said["said"].strip().strip("*_`").rstrip(".").strip()):
            return answer
    return lines[-1].rstrip(".").strip() if lines else ""


def is_correct(answer: str, reference: str, *, relative: float = 1e-6, absolute: float = 1e-9) -> bool:
    """Whether `answer` says what `reference` says.

    Args:
        answer: What the policy said; the answer is looked for within it.
        reference: The right answer.
        relative: How far a number may be off, as a share of the reference.
        absolute: How far a number may be off in any case.
    """
    said = extract_answer(answer)
    if _plain(said) == _plain(reference) or _plain(answer) == _plain(reference):
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


def _plain(text: str) -> str:
    return " ".join(text.strip().strip("*_`\"'").rstrip(".").casefold().split())
