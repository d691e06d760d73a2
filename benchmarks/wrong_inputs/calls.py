"""Wrong arguments: the calls of calls.yaml as cases. One existing draft serves all cases of an installation."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import yaml

from benchmarks.wrong_inputs.installation import Answer, Case, Expected, Installation

__all__ = ["CASES", "read_table", "texts"]

EDITS = "edits of a draft"


class _Loader(yaml.SafeLoader):
    """YAML with tags for values that are too large to write down."""


def _repeat(loader: yaml.SafeLoader, node: yaml.SequenceNode) -> Any:
    value, count = loader.construct_sequence(node, deep=True)
    return value * count


def _numbered(loader: yaml.SafeLoader, node: yaml.SequenceNode) -> list[str]:
    prefix, count = loader.construct_sequence(node)
    return [f"{prefix}{number}" for number in range(count)]


def _nested(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> Any:
    value = None
    for _ in range(int(node.value)):
        value = [value]
    return value


def _bytes(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> bytes:
    return node.value.encode("latin-1")


_Loader.add_constructor("!repeat", _repeat)
_Loader.add_constructor("!numbered", _numbered)
_Loader.add_constructor("!nested", _nested)
_Loader.add_constructor("!bytes", _bytes)
_Loader.add_constructor("!power_of_ten", lambda loader, node: 10 ** int(node.value))


def read_table(name: str) -> Any:
    """Read the table `name`.yaml beside this file."""
    text = Path(__file__).with_name(f"{name}.yaml").read_text(encoding="utf-8")
    return yaml.load(text, _Loader)  # noqa: S506 (a SafeLoader with five more tags)


def texts(value: str | list[str]) -> tuple[str, ...]:
    """Return the texts of a cell; a single text stands for a list of one."""
    return (value,) if isinstance(value, str) else tuple(value)


def _call(kind: str, title: str, tool: str, arguments: dict[str, Any], *wanted: str | list[str]) -> Case:
    async def play(site: Installation) -> AsyncIterator[tuple[Answer, Expected]]:
        if "draft" not in site.kept:
            site.kept["draft"] = await site.draft()
        draft_id = site.kept["draft"]
        site.mark()
        filled = {name: draft_id if value == "$draft" else value for name, value in arguments.items()}
        answer = await site.call(tool, **filled)
        yield answer, Expected(*(tuple(text.replace("$draft", draft_id) for text in texts(cell)) for cell in wanted))

    return Case(kind, title, play)


def _edit(title: str, changes: Any, names: str | list[str], cause: str | list[str], remedy: str | list[str]) -> Case:
    arguments = {"draft_id": "$draft", "changes": changes}
    return _call(EDITS, title, "edit_config", arguments, [*texts(names), "Nothing was changed"], cause, remedy)


CASES: list[Case] = [
    _edit(*row) if kind == EDITS else _call(kind, *row) for kind, rows in read_table("calls").items() for row in rows
]
