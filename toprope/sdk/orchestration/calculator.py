"""Evaluate arithmetic in text safely: only numbers, operators and a list of functions."""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable
from typing import Any

from toprope.sdk.errors import InvalidRequest

__all__ = ["calculate", "said"]

_LONGEST = 1000
_LARGEST = 10.0**300
_MOST_BITS = 4000
_MOST_DIGITS = 400
_PERCENT = re.compile(r"([\d.]+)%(?!\s*[\w(.])")
_CALL = re.compile(r"[A-Za-z_]\w*\s*\(")
_SEPARATOR = re.compile(r",\s")
_TIGHT = re.compile(r",(?=\S)")
_THOUSANDS = re.compile(r"(?<![\w.,])\d{1,3}(?:,\d{3})+(?!,?\d)")


def _rounded(value: Any, digits: Any = 0) -> Any:
    if abs(digits) > _MOST_DIGITS:  # it would compute that power of ten
        raise InvalidRequest("Those are too many digits to round to.")
    return round(value, digits) if digits else round(value)


_OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    name: getattr(math, name)
    for name in ("sqrt", "exp", "log", "log2", "log10", "sin", "cos", "tan", "asin", "acos", "atan", "floor", "ceil")
} | {"abs": abs, "round": _rounded, "min": min, "max": max, "gcd": math.gcd, "lcm": math.lcm}
_NAMES = {"pi": math.pi, "e": math.e, "tau": math.tau}


def calculate(text: str) -> int | float:
    """The value of an arithmetic expression: + - * / // % ** ^, parentheses, `sqrt(2)`, `pi`, `1,000`, `50%`.

    Raises:
        InvalidRequest: Not an arithmetic expression, a division by zero, or too large a number.
    """
    if len(text) > _LONGEST:
        raise InvalidRequest(f"An expression may have {_LONGEST} characters; this one has {len(text)}.")
    source = text.strip().rstrip("=?").strip()
    joined = _THOUSANDS.sub(lambda number: number[0].replace(",", ""), source)
    if _SEPARATOR.search(source) and joined != source:
        # Then a comma without a space is within a number, as in max(12,000, 8,500), unless one cannot be.
        if _TIGHT.search(joined):
            raise InvalidRequest("A comma may part thousands or arguments here: write the numbers without commas.")
        source = joined
    for sign, operator_text in (("×", "*"), ("·", "*"), ("÷", "/"), ("−", "-"), ("^", "**"), (",", "")):
        if sign != "," or not _CALL.search(source):  # there a comma separates arguments
            source = source.replace(sign, operator_text)
    source = _PERCENT.sub(r"(\1/100)", source)
    try:
        tree = ast.parse(source, mode="eval")
        value = _value(tree.body)
    except InvalidRequest:
        raise
    except ZeroDivisionError:
        raise InvalidRequest("It divides by zero.") from None
    except (SyntaxError, ValueError, TypeError, OverflowError, RecursionError, MemoryError) as error:
        why = str(error).split("(")[0].strip() or type(error).__name__
        raise InvalidRequest(f"{text[:80]!r} is not an arithmetic expression: {why}.") from None
    if isinstance(value, complex) or not math.isfinite(value):
        raise InvalidRequest("The value is not a real number.")
    assert isinstance(value, int | float)
    return value


def _value(node: ast.AST) -> Any:
    match node:
        case ast.Constant(value=bool()):
            raise InvalidRequest("True and False are not numbers.")
        case ast.Constant(value=int() | float() as number):
            return number
        case ast.Name(id=name) if name in _NAMES:
            return _NAMES[name]
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(operand))
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_value(left), _value(right))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _bounded(_OPERATORS[type(op)](_value(left), _value(right)))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _FUNCTIONS:
            return _bounded(_FUNCTIONS[name](*(_value(argument) for argument in arguments)))
        case ast.Name(id=name) | ast.Call(func=ast.Name(id=name)):
            known_names = ", ".join(sorted({*_FUNCTIONS, *_NAMES}))
            raise InvalidRequest(f"Unknown name {name[:40]!r}; known: {known_names}.")
    raise InvalidRequest(f"{type(node).__name__} is not arithmetic.")


def _power(base: Any, exponent: Any) -> Any:
    if base and abs(exponent) * max(1.0, abs(math.log2(abs(base)))) > _MOST_BITS:
        raise InvalidRequest("The power is too large.")
    return _bounded(base**exponent)


def _bounded(value: Any) -> Any:
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        raise InvalidRequest("The number is too large.")
    if isinstance(value, float) and abs(value) > _LARGEST:
        raise InvalidRequest("The number is too large.")
    return value


def said(value: int | float) -> str:
    """Format a value: whole numbers without a decimal point, others with at most twelve digits."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        value = int(value)
    return str(value) if isinstance(value, int) else f"{value:.12g}"
