"""Edit JSON with comments without touching the rest: members are set and removed in the text itself.

Editors keep comments and trailing commas in their settings, which a JSON library would refuse or lose.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_SPACE = re.compile(r"(?:\s+|//[^\n]*|/\*.*?\*/)*", re.S)
_TEXT = re.compile(r'"(?:[^"\\]|\\.)*"')
_SCALAR = re.compile(r"[-+.\w]+")
_REST_OF_LINE = re.compile(r"[ \t]*(,)?(?:[ \t]*(?://[^\n]*|/\*[^\n]*?\*/))?")


@dataclass
class _Node:
    """A value and its place in the text."""

    start: int
    end: int = 0
    value: Any = None
    members: dict[str, tuple[int, _Node]] | None = None
    """Of an object: where each key starts, and its value."""


def loads(text: str) -> Any:
    """The value of a text; an empty text is an empty object.

    Raises:
        ValueError: Not JSON with comments.
    """
    return _parse(text).value if text.strip() else {}


def set_member(text: str, path: Sequence[str], value: Any) -> str:
    """The text with a member set, below objects that are created if they are missing.

    Args:
        path: Keys from the root to the member.

    Raises:
        ValueError: Not JSON with comments, or something on the way is not an object.
    """
    if not text.strip():
        text = "{}\n"
    root = node = _parse(text)
    for depth, key in enumerate(path):
        if node.members is None:
            raise ValueError(f"{'.'.join(path[:depth]) or 'the file'} is not an object")
        if key not in node.members:
            for missing in reversed(path[depth + 1 :]):
                value = {missing: value}
            return _inserted(text, root, node, key, value)
        _, node = node.members[key]
    return text[: node.start] + _dumped(value, _indent(text, node.start)) + text[node.end :]


def remove_member(text: str, path: Sequence[str]) -> str:
    """The text without a member, if it has it.

    Raises:
        ValueError: Not JSON with comments.
    """
    node, start = _parse(text), 0
    for key in path:
        if node.members is None or key not in node.members:
            return text
        parent, (start, node) = node, node.members[key]
    end = node.end
    following = _skip(text, end)
    if text.startswith(",", following):
        end = following + 1
    else:
        ends = [other.end for begin, other in (parent.members or {}).values() if begin < start]
        if ends:  # no comma may stay behind the last member: most readers refuse it
            comma = _skip(text, max(ends))
            text, start, end = text[:comma] + text[comma + 1 :], start - 1, end - 1
    before = text[:start].rstrip(" \t")
    return before.removesuffix("\n") + text[end:] if before.endswith("\n") else before + text[end:].lstrip(" \t")


def _inserted(text: str, root: _Node, node: _Node, key: str, value: Any) -> str:
    """The text with a new last member in an object."""
    assert node.members is not None
    outer = _indent(text, node.start)
    if not node.members:
        indent = outer + ("  " if root.members is None or not root.members else _unit(text, root))
        member = f"{json.dumps(key)}: {_dumped(value, indent)}"
        inside = text[node.start + 1 : node.end - 1].rstrip()
        return f"{text[: node.start + 1]}{inside}\n{indent}{member}\n{outer}{text[node.end - 1 :]}"
    start, last_value = list(node.members.values())[-1]
    indent = _indent(text, start)
    if "\n" not in text[node.start : start]:
        indent = outer + "  "
    line_rest = _REST_OF_LINE.match(text, last_value.end)
    assert line_rest is not None
    comma, place = ("", line_rest.end()) if line_rest[1] else (",", line_rest.end())
    if text[place : place + 1] not in ("\n", "\r", ""):  # more of the object is on this line
        comma, place = ("", line_rest.end(1)) if line_rest[1] else (",", last_value.end)
    member = f"{json.dumps(key)}: {_dumped(value, indent)}{',' if line_rest[1] else ''}"
    closes = "" if "\n" in text[last_value.end : node.end] else f"\n{outer}"
    return f"{text[: last_value.end]}{comma}{text[last_value.end : place]}\n{indent}{member}{closes}{text[place:]}"


def _dumped(value: Any, indent: str) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False).replace("\n", f"\n{indent}")


def _indent(text: str, place: int) -> str:
    """The white space that begins the line of a place."""
    line = text[text.rfind("\n", 0, place) + 1 : place]
    return line[: len(line) - len(line.lstrip(" \t"))]


def _unit(text: str, root: _Node) -> str:
    """The indentation of the root's first member."""
    assert root.members is not None
    start, _ = next(iter(root.members.values()))
    return _indent(text, start) or "  "


def _parse(text: str) -> _Node:
    node = _value(text, _skip(text, 1 if text.startswith("\ufeff") else 0))
    if _skip(text, node.end) != len(text):
        raise ValueError(f"unexpected text at line {_line(text, _skip(text, node.end))}")
    return node


def _value(text: str, place: int) -> _Node:
    if text.startswith("{", place):
        return _object(text, place)
    if text.startswith("[", place):
        return _array(text, place)
    match = _TEXT.match(text, place) or _SCALAR.match(text, place)
    if match is None:
        raise ValueError(f"a value is missing at line {_line(text, place)}")
    return _Node(place, match.end(), json.loads(match[0]))


def _object(text: str, place: int) -> _Node:
    node = _Node(place, value={}, members={})
    at = _skip(text, place + 1)
    while not text.startswith("}", at):
        key = _TEXT.match(text, at)
        colon = _skip(text, key.end()) if key else at
        if key is None or not text.startswith(":", colon):
            raise ValueError(f"a key or '}}' is missing at line {_line(text, at)}")
        member = _value(text, _skip(text, colon + 1))
        name = json.loads(key[0])
        node.value[name] = member.value
        assert node.members is not None
        node.members[name] = (at, member)
        at = _next(text, member.end, "}")
    node.end = at + 1
    return node


def _array(text: str, place: int) -> _Node:
    node = _Node(place, value=[])
    at = _skip(text, place + 1)
    while not text.startswith("]", at):
        item = _value(text, at)
        node.value.append(item.value)
        at = _next(text, item.end, "]")
    node.end = at + 1
    return node


def _next(text: str, place: int, end: str) -> int:
    """The next member or the end, after a comma if there is one."""
    at = _skip(text, place)
    if text.startswith(",", at):
        return _skip(text, at + 1)
    if not text.startswith(end, at):
        raise ValueError(f"',' or '{end}' is missing at line {_line(text, at)}")
    return at


def _skip(text: str, place: int) -> int:
    """The first character that is neither white space nor comment."""
    match = _SPACE.match(text, place)
    assert match is not None
    return match.end()


def _line(text: str, place: int) -> int:
    return text.count("\n", 0, place) + 1
