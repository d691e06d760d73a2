"""Answers are found in free text and compared with the reference."""

from __future__ import annotations

import pytest

from toprope.sdk.grading import extract, extract_answer, is_correct, normalize_number


@pytest.mark.parametrize("find", [extract_answer, lambda text: extract(text, "boxed")])
def test_last_box_is_read_with_balanced_braces(find) -> None:
    assert find(r"\boxed{1} and \boxed{\frac{\sqrt{2}}{2}} is it") == r"\frac{\sqrt{2}}{2}"


@pytest.mark.parametrize(
    ("answer", "reference", "right"),
    [
        *[(text, "4", True) for text in ("The answer is 4", "Result: 4.0", "4", "4 apples", r"so \boxed{4}")],
        ("Therefore, the answer is approximately 4", "4", True),
        ("The answer is not 5 but 4", "4", False),
        ("1,234", "1234", True),
        ("three quarters is 3/4", "0.75", True),
        ("3/4", "0.75", True),
        ("1 1/2", "1.5", True),
        ("75 %", "3/4", True),
        ("$5", "5", True),
        ("5 km", "5 m", False),
        ("5 km", "5", True),
        ("1.5e3", "1500", True),
        ("\u22124", "-4", True),
        ("-4", "4", False),
        ("41", "4", False),
        ("Paris.", "PARIS", True),
        ("", "4", False),
        ("1/0", "4", False),
    ],
)
def test_answers_are_graded(answer, reference, right):
    assert is_correct(answer, reference) is right


def test_tolerance_is_relative():
    assert is_correct("101", "100", relative=0.02) and not is_correct("103", "100", relative=0.02)
    assert normalize_number("12 %") == 0.12 and normalize_number("twelve") is None
