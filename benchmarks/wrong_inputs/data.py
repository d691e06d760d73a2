"""Wrong orders for data: exports and data sets that cannot be made, as calls of a server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from benchmarks.wrong_inputs.house import Case, Expected, House, Told

__all__ = ["CASES"]

_UP = "../../../etc/passwd"
_Row = tuple[str, str, dict[str, Any], tuple[str, ...], tuple[str, ...], tuple[str, ...]]
"""As in `_wrong_calls`: title, tool, arguments, what the answer names, its cause, its remedy."""

_ROWS: list[_Row] = [
    (
        "export of no such run",
        "export_trajectories",
        {"sources": ["no-such"]},
        ("no-such",),
        ("no run",),
        ("list_runs",),
    ),
    ("export of a path", "export_trajectories", {"sources": [_UP]}, (_UP,), ("no run",), ("list_runs",)),
    ("export of nothing", "export_trajectories", {"sources": []}, ("run",), ("No run is named",), ("list_runs",)),
    (
        "export of what is sealed",
        "export_trajectories",
        {"sources": ["x"], "where": {"split": "heldout"}},
        ("held-out",),
        ("sealed",),
        ("train",),
    ),
    (
        "a filter misspelt",
        "export_trajectories",
        {"sources": ["x"], "where": {"sucess": True}},
        ("sucess",),
        ("no filter",),
        ("success",),
    ),
    ("data set of nothing", "build_dataset", {"name": "best"}, ("no sources",), ("nothing to make",), ("runs",)),
    (
        "data set of a path",
        "build_dataset",
        {"name": _UP, "sources": ["x"]},
        (_UP,),
        ("no name of a data set",),
        ("Lower-case",),
    ),
    (
        "data set of an inbox that is none",
        "build_dataset",
        {"name": "best", "sources": ["best@inbox"]},
        ("best",),
        ("Nothing was posted",),
        ("docs/data.md",),
    ),
    (
        "recipe with two things in a step",
        "build_dataset",
        {"name": "best", "recipe": {"target_size": 5, "steps": [{"teacher": "m", "noise": 0.1}]}},
        ("teacher",),
        ("Step 1 has",),
        ("exactly one",),
    ),
    (
        "recipe with a user's file that is nowhere",
        "build_dataset",
        {"name": "best", "recipe": {"target_size": 5, "steps": [{"generate": "mine.py:Mine"}]}},
        ("mine.py",),
        ("no file",),
        ("strategies/",),
    ),
    (
        "recipe with a URL for a teacher",
        "build_dataset",
        {
            "name": "best",
            "recipe": {
                "target_size": 5,
                "steps": [{"templates": ["x"]}, {"teacher": "http://127.0.0.1:9/v1"}],
            },
        },
        ("URL",),
        ("names",),
        ("settings.yaml",),
    ),
]


def _case(row: _Row) -> Case:
    title, tool, arguments, names, cause, remedy = row

    async def play(house: House) -> AsyncIterator[tuple[Told, Expected]]:
        yield await house.call(tool, **arguments), Expected(names, cause, remedy)

    return Case("orders for data", title, play)


CASES: list[Case] = [_case(row) for row in _ROWS]
