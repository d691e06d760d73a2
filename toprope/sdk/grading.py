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
    "letter_of",
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
    r"\b(?:final[ _]answer|answer|result)\s*(?:\*\*\s*)?(?:is\b|:|=)\s*"
    r"(?:approximately\b|about\b|exactly\b|:)?([^\n]+)",
    re.IGNORECASE,
)
_PLAIN_NUMBER = re.compile(  # a comma parts thousands or numbers; a hyphen behind a word or a digit is no sign
    r"(?:(?<![^\W_])[-+])?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"
    r"(?:[eE][-+]?\d+)?(?:\s*/\s*\d+(?:\.\d+)?)?"
)
_FENCE = re.compile(  # a tag, a colon, bold text or, before one of Python, any text may stand right before a fence
    r"(?:(?<![^\s>:*])|(?=```[ \t]*py))```([^\n`]*)\n(.*?)```", re.DOTALL | re.IGNORECASE
)
_PYTHON = re.compile(r"\s*py", re.IGNORECASE)
_LETTER = re.compile(r"(?<![A-Za-z])\(?([A-Za-z])\)?(?![A-Za-z'])")
_NUMBER = re.compile(  # spaces only behind a sign: two optional runs of them in a row take cubic time
    r"(?:(?P<sign>[-+])\s*)?(?:(?P<money>[$€£¥])\s*)?"
    r"(?P<whole>\d{1,3}(?:[,\u00a0\u202f'_ ]\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)"
    r"(?:\s*[eE]\s*(?P<power>[-+]?\d+))?"
    r"(?:\s*/\s*(?P<below>\d+(?:\.\d+)?))?"
    r"\s*(?P<unit>%|percent\b|°?[A-Za-zµΩ]+(?:/[A-Za-z]+)?(?:\^?[23²³])?)?"
)
_MIXED = re.compile(r"(?P<sign>[-+])?\s*(?P<whole>\d+)\s+(?P<above>\d+)\s*/\s*(?P<below>\d+)")
_LATEX_TEXT = re.compile(r"\\(?:text\w*|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}")
_LATEX_FRACTION = re.compile(r"\\[dtc]?frac\s*(?:\{\s*([-+]?[\d.]+)\s*\}|(\d))\s*(?:\{\s*([\d.]+)\s*\}|(\d))")
_LATEX_SIGN = re.compile(r"\{,\}|\\(?:(?:times|cdot|left|right)(?![A-Za-z])|[,;:! %$])")
_LATEX_MEANT = {"{,}": ",", "\\times": "×", "\\cdot": "×", "\\%": "%", "\\$": "$", "\\!": ""}
_POWER_OF_TEN = re.compile(
    r"(?:(?<=\d)\s*[x×*]\s*10\s*(?:\^|\*\*)\s*|(?<![\w.^*])10(?:\s*\^\s*|\*\*))(?:\{\s*([-+]?\d+)\s*\}|([-+]?\d+))"
)
_RAISED = re.compile(r"(?<=[A-Za-z0-9)}\]])[\^_](?:\{[^{}]*\}|[-+]?\w+)")
_MULTIPLIERS = {"thousand": 1e3, "k": 1e3, "million": 1e6, "m": 1e6, "billion": 1e9, "bn": 1e9, "trillion": 1e12}
_MONEY = {"dollar": "$", "dollars": "$", "usd": "$", "euro": "€", "euros": "€", "eur": "€"}
_SAID = re.compile(
    r"(?:FINAL[_ ]ANSWER|\banswer|\bresult|\bsolution|\btotal)\s*(?:is|are|=|:|equals|was)?\s*"
    r"(?:approximately|about|roughly|around|exactly|:|=|≈)?\s*(?P<said>.+)",
    re.IGNORECASE,
)
_UNITS = {
    name: group.split()[0]
    for group in (
        "ns nanosecond, us µs microsecond, ms millisecond, s sec second, min minute, h hr hour, d day, wk week, month,"
        " yr year, decade, century, nm nanometer nanometre, um µm micrometer micrometre, mm millimeter millimetre,"
        " cm centimeter centimetre, dm decimeter decimetre, m meter metre, km kilometer kilometre, inch inches, ft foot"
        " feet, yd yard, mi mile, ug µg microgram, mg milligram, g gram, kg kilogram, t tonne, ton, oz ounce, lb pound,"
        " stone, ml milliliter millilitre, cl centiliter centilitre, dl deciliter decilitre, l liter litre, gal gallon,"
        " pint, quart, cup, tsp teaspoon, tbsp tablespoon, c celsius, f fahrenheit, k kelvin, $, €, £ gbp, ¥ jpy yen,"
        " cent, penny pence, yuan, rupee, deg degree, rad radian, arcminute, arcsecond, bit, byte, kb kilobyte,"
        " mb megabyte, gb gigabyte, tb terabyte, kib, mib, gib, tib, kbit kilobit, mbit megabit, gbit gigabit,"
        " hz hertz, khz, mhz, ghz, n newton, j joule, kj, cal calorie, kcal, w watt, kw, wh, kwh, v volt, a amp ampere,"
        " pa pascal, kpa, bar, ohm ω, acre, ha hectare, mph, kmh kph, mol mole"
    ).split(",")
    for name in group.split()
}
"""Common units, each by one of its names. In a sentence, any other word after a number is no unit: 12 more."""
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
        return _last_match(_TAG, text)
    if how == "boxed":
        return _boxed(text)
    if how == "pattern":
        return _last_match(re.compile(pattern, re.DOTALL), text)
    for candidate in (_last_match(_TAG, text), _boxed(text), _last_match(_HASHES, text), _last_match(_ANSWER_IS, text)):
        if candidate:
            return candidate
    return None


def exact(answer: str | None, reference: Any, ignore_case: bool) -> Verdict:
    """Equal texts, apart from white space and a final full stop; of a list of references, equal to one."""
    if not answer or not answer.strip():
        return False, False
    references = reference if isinstance(reference, list | tuple) else [reference]
    return True, any(_plain(answer, ignore_case) == _plain(str(expected), ignore_case) for expected in references)


def numeric(answer: str | None, reference: Any, tolerance: float) -> Verdict:
    """Numbers that differ by at most `tolerance`, relative to the reference if that is above 1.

    Raises:
        InvalidRequest: The reference holds no number.
    """
    number, right_number = number_in(answer), number_in(extract(str(reference), "auto") or str(reference))
    if right_number is None:
        raise InvalidRequest(f"The reference {str(reference)[:80]!r} holds no number, which the numeric scorer needs.")
    if number is None:
        return False, False
    return True, abs(number - right_number) <= tolerance * max(1.0, abs(right_number))


def number_in(text: str | None) -> float | None:
    """The number that a text is, whatever its unit, else the last in it: 1,234.5, -3e4, 3/4; None if it holds none."""
    text = _without_latex(text or "")
    if (sole := _sole(text)) is not None:
        return sole[0]
    numbers = _PLAIN_NUMBER.findall(_RAISED.sub(" ", text) if "^" in text or "_" in text else text)
    if not numbers:
        return None
    top, _, bottom = numbers[-1].replace(",", "").partition("/")
    try:
        value = float(top) / float(bottom or 1)
    except ZeroDivisionError:
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
    right_letter = letter_of(reference, options)
    valid = {chr(65 + index) for index in range(len(options))} if options else {chr(65 + index) for index in range(26)}
    answer_text = answer if answer is not None else text
    for index, option in enumerate(options):
        if _plain(answer_text, True) == _plain(option, True):
            return True, chr(65 + index) == right_letter
    letters = [letter.upper() for letter in _LETTER.findall(answer_text) if letter.upper() in valid]
    if answer is None and len(answer_text.strip(" .()")) > 1:  # free text is full of words like "a" and "I"
        letters = [
            letter for letter in _LETTER.findall(answer_text) if letter in valid and letter not in "AI"
        ] or letters[:0]
    if not letters:
        return False, False
    return True, (letters[0] if answer is not None else letters[-1]) == right_letter


def letter_of(reference: Any, options: list[str]) -> str:
    """The letter of the right option.

    Args:
        reference: A letter, an index from 0, or the text of an option.
        options: Texts of the options; empty if they are unknown.

    Raises:
        InvalidRequest: The reference is not one of the three.
    """
    if isinstance(reference, int) and not isinstance(reference, bool) and 0 <= reference < (len(options) or 26):
        return chr(65 + reference)
    reference_text = str(reference).strip()
    for index, option in enumerate(options):
        if _plain(reference_text, True) == _plain(option, True):
            return chr(65 + index)
    bare = reference_text.strip("() .")
    if len(bare) == 1 and bare.isalpha():
        return bare.upper()
    if bare.isdecimal() and int(bare) < len(options):
        return chr(65 + int(bare))
    raise InvalidRequest(
        f"The reference {reference_text[:80]!r} is not a letter, an index from 0 or the text of an option."
    )


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

    reference_expression = _expression(parse, str(reference))
    if not reference_expression:
        raise InvalidRequest(f"The reference {str(reference)[:80]!r} is not an expression that math-verify can read.")
    answer_expression = _expression(parse, answer or "")
    return bool(answer_expression), bool(answer_expression) and bool(verify(reference_expression, answer_expression))


def unit_tests(text: str, tests: Any, seconds: float, memory_mb: int) -> Verdict:
    """The code in an answer passes the tests; see `passes_tests`.

    The code is the last fenced block of Python, else the last one without a label, else the whole answer.
    """
    # Blocks of other languages are matched too: else the end of one would open a block of prose.
    blocks = _FENCE.findall(text)
    # A block without a label behind one of Python is often the output that the answer expects.
    fenced = [code for label, code in blocks if _PYTHON.match(label)] or [
        code for label, code in blocks if not label.strip()
    ]
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
    sole = _sole(_without_latex(text))
    return None if sole is None else _number(*sole)


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
        match = None
        for keyword in re.finditer(r"FINAL[_ ]ANSWER|\banswer|\bresult|\bsolution|\btotal", line, re.IGNORECASE):
            match = _SAID.match(line, keyword.start()) or match
        if match is not None and (answer := match["said"].strip().strip("*_`").rstrip(".").strip()):
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
    extracted = extract_answer(answer)
    if _words(extracted) == _words(reference) or _words(answer) == _words(reference):
        return True
    right = read_number(reference)
    if right is None:
        return False
    number = read_number(extracted)
    if number is None:
        # "4 apples are left": the only number of a sentence is meant.
        readings = [
            reading for reading in map(_read_match, _NUMBER.finditer(_without_latex(extracted))) if reading is not None
        ]
        if len(readings) != 1:
            return False
        number = _number(*readings[0])
        if number.unit != right.unit and _unit(number.unit) is None:
            number = Number(number.value)
    if number.unit and right.unit and (_unit(number.unit) or number.unit) != (_unit(right.unit) or right.unit):
        return False
    return math.isclose(number.value, right.value, rel_tol=relative, abs_tol=absolute)


def _expression(parse: Callable[[str], list[Any]], text: str) -> list[Any]:
    """Parse a text with math-verify. A bare expression is read as LaTeX first: as prose, x+1 would be a 1."""
    bare = len(text.split()) <= _WORDS_OF_AN_EXPRESSION and not any(mark in text for mark in ("$", "\\(", "\\["))
    for form in (f"${text}$", text) if bare else (text,):
        expression = parse(form)
        if expression:
            return expression
    return []


def _plain(text: str, ignore_case: bool) -> str:
    plain = " ".join(text.split()).strip().rstrip(".").strip()
    return plain.casefold() if ignore_case else plain


def _last_match(pattern: re.Pattern[str], text: str) -> str | None:
    match = next(reversed(list(pattern.finditer(text))), None)
    if match is None:
        return None
    return ((match.group(1) if pattern.groups else match.group(0)) or "").strip().strip("*`").strip()


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


def _without_latex(text: str) -> str:
    """Write fractions, powers of ten, units and spaces of LaTeX as plain text."""
    text = text.replace("\u2212", "-")
    if "\\" in text or "{" in text:
        text = _LATEX_SIGN.sub(lambda match: _LATEX_MEANT.get(match[0], " "), _LATEX_TEXT.sub(r" \1", text))
        text = _LATEX_FRACTION.sub(_fraction_text, text)
    if "^" in text or "**" in text:
        text = _POWER_OF_TEN.sub(lambda match: f"{'1' * match[0].startswith('10')}e{match[1] or match[2]}", text)
    return text


def _fraction_text(match: re.Match[str]) -> str:
    mixed = match.start() > 0 and match.string[match.start() - 1].isdigit()
    return f"{' ' if mixed else ''}{match[1] or match[2]}/{match[3] or match[4]}"


_Read = tuple[float, str, str]
"""(value, currency, unit)."""


def _sole(text: str) -> _Read | None:
    """Read the number that a text is; None if it holds more."""
    text = text.strip().strip("*_`\"'").rstrip(".!").strip()
    mixed = _MIXED.fullmatch(text)
    if mixed is not None and float(mixed["below"]):
        value = float(mixed["whole"]) + float(mixed["above"]) / float(mixed["below"])
        return (-value if mixed["sign"] == "-" else value), "", ""
    match = _NUMBER.fullmatch(text)
    return None if match is None else _read_match(match)


def _read_match(match: re.Match[str]) -> _Read | None:
    below = float(match["below"] or 1)
    whole = float(re.sub(r"[,\u00a0\u202f'_ ]", "", match["whole"]) + f"e{match['power'] or 0}")
    if not below or not math.isfinite(whole / below):
        return None
    return (-whole if match["sign"] == "-" else whole) / below, match["money"] or "", (match["unit"] or "").lower()


def _number(value: float, money: str, unit: str) -> Number:
    if unit in ("%", "percent"):
        return Number(value / 100)
    if money:
        return Number(value * _MULTIPLIERS.get(unit, 1.0), money)
    return Number(value, "" if unit in _FILLER else _MONEY.get(unit, unit.lstrip("°")))


def _unit(word: str) -> str | None:
    """One name for all those of a unit, km/h and m^2 included; None if it is not a common one."""
    ends = len(word.rstrip("^23²³"))
    parts = [_UNITS.get(part) or _UNITS.get(part.removesuffix("s")) for part in word[:ends].split("/")]
    power = word[ends:].lstrip("^").translate({0xB2: "2", 0xB3: "3"})
    return None if None in parts else "/".join(map(str, parts)) + power


def _words(text: str) -> str:
    return " ".join(text.strip().strip("*_`\"'").rstrip(".").casefold().split())
