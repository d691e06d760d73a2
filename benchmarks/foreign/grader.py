"""The verdicts of the model that grades here: each as bad as possible, in the form that the request asks for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["verdict"]

_PLAIN = "GRADE: I"
"""Incorrect, as inspect-ai's graders say it: for requests without a form that can be recognised."""
_OF_VERDICTS = re.compile(
    r"(?i)scor|rating|grade|verdict|result|correct|judg|label|class|decision|pass|winner|answer|\bmet\b|_met\b"
)
_PLACEHOLDER = re.compile(r"<[^<>{}\n]*>")
_CHOICE = re.compile(r'((?:"[^"\n]*"|\b\w+\b)(?: *(?:\||/|\bor\b) *(?:"[^"\n]*"|\b\w+\b))+)(?=\s*[,}\n])')
_BLANK = re.compile(r"\b([A-Z]{4,}): ?<")
_LABEL = re.compile(r"\[\[[^\[\]\n]{1,40}\]\]")
_ELEMENT = re.compile(
    r"(?i)<(answer|classification|grade|judge?ment|label|rating|result|score|verdict)>\s*([^<>]{0,80}?)\s*</\1>"
)
_ONE_OF = re.compile(
    r"(?i:repl(?:y|ies)|respond|answer|return|output|say)\b[^.\n]{0,60}?[ \"'`]"
    r"([A-Z][A-Z_]+)[\"'`]?(?:, [\"'`]?[A-Z][A-Z_]+[\"'`]?)*,? or [\"'`]?([A-Z][A-Z_]+)\b"
)


def verdict(body: Mapping[str, Any]) -> str:
    """Return the answer to a request for a completion."""
    wanted = body.get("response_format") or {}
    if schema := (wanted.get("json_schema") or {}).get("schema"):
        return json.dumps(_instance(schema, schema))
    text = "\n".join(_text(message) for message in body.get("messages") or [])
    if re.search(r"(?i)\bjson\b", text) and (shown := list(_shown(text))):
        return json.dumps(shown[-1])
    if elements := _ELEMENT.findall(text):
        name, shown = elements[-1]
        words = re.findall(r"\w+", shown) or ["0"]
        return f"<{name}>{'no' if 'no' in words else words[-1]}</{name}>"
    if choice := _ONE_OF.search(text):
        return choice[2]
    if blank := _BLANK.search(text):
        return f"{blank[1]}: 0"
    labels = _LABEL.findall(text)
    return labels[-1] if labels else _PLAIN


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "\n".join(str(part.get("text") or "") for part in content)


def _instance(schema: Mapping[str, Any], root: Mapping[str, Any], inside: tuple[str, ...] = ()) -> Any:
    """Return a value of a JSON schema: null if it may be, the last of several values, the lowest number.

    Args:
        root: The whole schema, which references are relative to.
        inside: References that this schema is part of. A reference to one of them, or to nothing, has the value null.
    """
    while "$ref" in schema:
        reference = str(schema["$ref"])
        found = None if reference in inside else _referred(reference, root)
        if found is None:
            return None
        schema, inside = found, (*inside, reference)
    if options := schema.get("anyOf") or schema.get("oneOf"):
        return None if {"type": "null"} in options else _instance(options[-1], root, inside)
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return schema["enum"][-1]
    kind = schema.get("type")
    if kind == "object":
        return {name: _instance(one, root, inside) for name, one in (schema.get("properties") or {}).items()}
    if kind == "array":
        return [_instance(schema.get("items") or {}, root, inside)] * int(schema.get("minItems") or 0)
    if kind in ("integer", "number"):
        return schema.get("minimum", 0)
    return None if kind == "null" else False if kind == "boolean" else "none"


def _referred(reference: str, root: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the part of `root` that a reference such as `#/definitions/Class` names; None if there is none."""
    place: Any = root
    for name in reference.removeprefix("#").split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        place = place.get(name) if isinstance(place, Mapping) else None
    return place if isinstance(place, Mapping) else None


def _shown(text: str) -> Iterator[dict[str, Any]]:
    """Yield the objects that a text shows as the form of a verdict, their blanks filled in."""
    end = 0
    for begin in (found.start() for found in re.finditer(r"\{", text)):
        if begin < end:
            continue
        depth = 0
        for place in range(begin, min(begin + 4000, len(text))):
            depth += (text[place] == "{") - (text[place] == "}")
            if depth == 0:
                value = _filled(text[begin : place + 1])
                if value is not None and any(map(_OF_VERDICTS.search, value)):
                    end = place
                    yield value
                break


def _filled(shown: str) -> dict[str, Any] | None:
    shown = _PLACEHOLDER.sub(lambda blank: (re.findall(r"\d+", blank[0]) or ['"none"'])[0], shown)
    shown = _CHOICE.sub(lambda choice: re.findall(r'"[^"\n]*"|\w+', choice[1])[-1], shown)
    shown = re.sub(r'""(\w+)""', r'"\1"', shown)  # a blank within quotation marks
    try:
        value = json.loads(shown, strict=False)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
