"""Next steps in messages: calls of tools, which each front end words for its readers.

A message names a next step as `toprope.text_format.call` writes it, `read_logs(run_id="x", component="trainer")`, or by
the name of a tool alone. This notation is what models read and what run folders store. A front end with other words
takes the steps out of a message with `split` and words them itself.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

_CONSTANTS = {"true": True, "false": False, "null": None}


@dataclass(frozen=True)
class Step:
    """A call of a tool that a message proposes."""

    tool: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Those that the message gives; a placeholder, such as N or `...`, is a text."""
    written: str = ""
    """As the message has it."""


def split(message: str, tools: Collection[str]) -> list[str | Step]:
    """Split a message into its words and the steps between them; joined again they are the message.

    Args:
        message: A text with calls in the notation of `call`.
        tools: The names that are tools. Other calls are words.
    """
    if not tools:
        return [message]
    parts: list[str | Step] = []
    names = re.compile(rf"(?<![\w./-])({'|'.join(map(re.escape, tools))})(?![\w/-]|\.\w)")
    place = 0
    while (match := names.search(message, place)) is not None:
        end, arguments = _arguments(message, match.end())
        parts += [message[place : match.start()], Step(match[1], arguments, message[match.start() : end])]
        place = end
    parts.append(message[place:])
    return [part for part in parts if part]


def _arguments(message: str, start: int) -> tuple[int, dict[str, Any]]:
    """Read the arguments in parentheses at `start`; return where they end, and `start` if there are none."""
    if not message.startswith("(", start):
        return start, {}
    end = message.find(")", start)
    while end >= 0:
        try:
            tree = ast.parse(f"f{message[start : end + 1]}", mode="eval").body
        except SyntaxError:  # the parenthesis is within a text
            end = message.find(")", end + 1)
            continue
        if isinstance(tree, ast.Call) and not tree.args:
            return end + 1, {keyword.arg: _value(keyword.value) for keyword in tree.keywords if keyword.arg}
        return end + 1, {}
    return start, {}


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Name):
        return _CONSTANTS.get(node.id, node.id)
    try:
        value = ast.literal_eval(node)
    except ValueError:
        return ast.unparse(node)
    return "..." if value is ... else value
