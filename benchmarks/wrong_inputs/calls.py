"""Wrong arguments: calls that no server can carry out, as a table.

A row is a title, a tool, its arguments, what the answer must name, its cause (one of), its remedy (one of). `@draft`
stands for the id of a draft that exists.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from benchmarks.wrong_inputs.house import Case, Expected, House, Told

__all__ = ["CASES"]

_UP = "../../../etc/passwd"
_DEEP: Any = None
for _ in range(150):
    _DEEP = [_DEEP]
_Row = tuple[str, str, dict[str, Any], tuple[str, ...], tuple[str, ...], tuple[str, ...]]

_NAMES: list[_Row] = [
    (
        "environment misspelt",
        "describe_environment",
        {"name": "chain_sun"},
        ("chain_sun",),
        ("no environment",),
        ("reasoning_gym/chain_sum",),
    ),
    (
        "environment unknown",
        "select_environment",
        {"name": "chess"},
        ("chess",),
        ("no environment",),
        ("list_environments",),
    ),
    (
        "environment is a path",
        "select_environment",
        {"name": _UP},
        (_UP,),
        ("no environment",),
        ("list_environments",),
    ),
    ("environment empty", "describe_environment", {"name": ""}, ("''",), ("no environment",), ("list_environments",)),
    (
        "environment with NUL",
        "describe_environment",
        {"name": "sort\x00letters"},
        ("sort",),
        ("no environment",),
        ("sort_letters",),
    ),
    (
        "environment in look-alike letters",
        "describe_environment",
        {"name": "ѕort_letters"},
        ("ort_letters",),
        ("no environment",),
        ("sort_letters",),
    ),
    (
        "environment with a direction mark",
        "describe_environment",
        {"name": "sort_letters\u202e"},
        ("sort_letters",),
        ("no environment",),
        ("list_environments",),
    ),
    (
        "environment of a million letters",
        "select_environment",
        {"name": "x" * 1_000_000},
        ("xxx",),
        ("no environment",),
        ("list_environments",),
    ),
    (
        "preset unknown",
        "select_environment",
        {"name": "sort_letters", "preset": "cpu-embeded"},
        ("cpu-embeded",),
        ("no preset",),
        ("cpu-embedded",),
    ),
    (
        "preset is a path",
        "select_environment",
        {"name": "sort_letters", "preset": "../presets/cpu-embedded"},
        ("../presets/cpu-embedded",),
        ("no preset",),
        ("cpu-embedded",),
    ),
    (
        "preset is an absolute path",
        "select_environment",
        {"name": "sort_letters", "preset": "/etc/passwd"},
        ("/etc/passwd",),
        ("no preset",),
        ("cpu-embedded",),
    ),
    (
        "draft unknown",
        "get_config",
        {"draft_id": "draft-none"},
        ("draft-none",),
        ("no draft",),
        ("@draft", "There are"),
    ),
    ("draft is a path", "get_config", {"draft_id": "../index.db"}, ("../index.db",), ("no draft",), ("@draft",)),
    (
        "draft is SQL",
        "get_config",
        {"draft_id": "' OR 1=1 --"},
        ("OR 1=1",),
        ("no draft",),
        ("@draft",),
    ),
    ("draft is missing", "start_training", {}, ("draft_id",), ("is missing",), ("@draft",)),
    (
        "draft of a hundred thousand letters",
        "start_training",
        {"draft_id": "d" * 100_000},
        ("ddd",),
        ("no draft",),
        ("@draft",),
    ),
    ("draft id given for a run", "get_results", {"run_id": "@draft"}, ("@draft",), ("no run",), ("list_runs",)),
    (
        "run id given for a draft",
        "start_training",
        {"draft_id": "sort-letters-261121-0158-k7f3"},
        ("sort-letters-261121-0158-k7f3",),
        ("no draft",),
        ("@draft",),
    ),
    ("run unknown", "stop_training", {"run_id": "no-run"}, ("no-run",), ("no run",), ("list_runs",)),
    ("run is missing", "stop_training", {}, ("run_id",), ("is missing",), ("no runs yet", "start_training")),
    ("run is a path", "get_results", {"run_id": "../home"}, ("../home",), ("no run",), ("list_runs",)),
    ("run is absolute", "read_logs", {"run_id": "/etc", "component": "api"}, ("/etc",), ("no run",), ("list_runs",)),
    ("run is a dot", "check_status", {"run_ids": ["."]}, ("'.'",), ("no run",), ("list_runs",)),
    ("run with NUL", "check_status", {"run_ids": ["a\x00b"]}, ("a",), ("no run",), ("list_runs",)),
    ("run with a newline", "stop_training", {"run_id": "a\n"}, ("a",), ("no run",), ("list_runs",)),
    (
        "more runs than a call takes",
        "check_status",
        {"run_ids": [f"run-{number}" for number in range(500)]},
        ("500",),
        ("too many",),
        ("at most 20",),
    ),
    (
        "cursor is garbage",
        "list_environments",
        {"cursor": "'; DROP TABLE"},
        ("DROP",),
        ("not a cursor",),
        ("Omit it",),
    ),
    ("cursor is negative", "list_environments", {"cursor": "-20"}, ("-20",), ("not a cursor",), ("Omit it",)),
    ("cursor of another list", "list_runs", {"cursor": "20"}, ("20",), ("not a cursor",), ("Omit it",)),
    (
        "tool unknown",
        "train",
        {},
        ("train",),
        ("no tool",),
        ("start_training",),
    ),
    (
        "tool is an attribute of Python",
        "__class__",
        {},
        ("__class__",),
        ("no tool",),
        ("list_environments",),
    ),
]

_ARGUMENTS: list[_Row] = [
    (
        "argument misspelt",
        "list_environments",
        {"querry": "x"},
        ("querry",),
        ("no argument",),
        ("'query'",),
    ),
    (
        "argument unknown",
        "get_config",
        {"draft_id": "@draft", "colour": "red"},
        ("colour",),
        ("no argument",),
        ("section",),
    ),
    (
        "many wrong arguments at once",
        "read_logs",
        {"component": "trainr", "lines": "many", "befor": 1},
        ("trainr", "many", "befor", "run_id"),
        ("no argument",),
        ("trainer",),
    ),
    ("number for a text", "describe_environment", {"name": 7}, ("7",), ("is not a text",), ("text",)),
    ("null for a text", "describe_environment", {"name": None}, ("null",), ("is not a text",), ("text",)),
    ("object for a text", "get_config", {"draft_id": {"id": 1}}, ("draft_id",), ("is not a text",), ("text",)),
    (
        "deep list for a text",
        "get_config",
        {"draft_id": _DEEP},
        ("draft_id",),
        ("is not a text",),
        ("text",),
    ),
    (
        "section unknown",
        "get_config",
        {"draft_id": "@draft", "section": "optimiser"},
        ("optimiser",),
        ("is not one of",),
        ("optimizer",),
    ),
    (
        "text for a whole number",
        "test_inference",
        {"draft_id": "@draft", "tasks": "a few"},
        ("a few",),
        ("is not a whole number",),
        ("1 to 10000",),
    ),
    (
        "fraction for a whole number",
        "test_inference",
        {"draft_id": "@draft", "tasks": 1.5},
        ("1.5",),
        ("whole number",),
        ("1 to 10000",),
    ),
    (
        "whole number out of bounds",
        "test_inference",
        {"draft_id": "@draft", "group_size": 0},
        ("group_size", "0"),
        ("is not a whole number",),
        ("1 to 1024",),
    ),
    (
        "more rollouts than a test makes",
        "test_inference",
        {"draft_id": "@draft", "tasks": 10_000, "group_size": 1000},
        ("10000", "1000"),
        ("are not from 1 to",),
        ("64 tasks",),
    ),
    ("wait too long", "check_status", {"wait_s": 36000}, ("36000",), ("is not a number",), ("0 to 3600",)),
    ("wait of no length", "check_status", {"wait_s": -1}, ("-1",), ("is not a number",), ("0 to 3600",)),
    (
        "lines out of bounds",
        "read_logs",
        {"run_id": "r", "component": "api", "lines": 10**9},
        ("1000000000",),
        ("is not a whole number",),
        ("1 to 200",),
    ),
    (
        "name too long",
        "start_training",
        {"draft_id": "@draft", "name": "n" * 65},
        ("name",),
        ("is not a text",),
        ("64 characters",),
    ),
    (
        "word for true or false",
        "start_training",
        {"draft_id": "@draft", "again": "perhaps"},
        ("perhaps",),
        ("is not true or false",),
        ("true or false",),
    ),
]

_EDITS: list[tuple[str, Any, tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = [
    ("changes are empty", {}, ("changes",), ("is empty",), ("get_config",)),
    ("changes are a text", "faster", ("faster",), ("is not an object",), ("object of names and values",)),
    (
        "field misspelt",
        {"optimizer.learning_rat": 1e-5},
        ("learning_rat",),
        ("no field",),
        ("optimizer.learning_rate",),
    ),
    ("field without its section", {"lr": 1}, ("lr",), ("no field",), ("get_config", "Did you mean")),
    ("field is a section", {"rollout": 8}, ("rollout",), ("is a section",), ("rollout.group_size",)),
    ("field of Python", {"policy.__class__": 1}, ("policy.__class__",), ("no field",), ("get_config", "Did you mean")),
    (
        "field of a hundred thousand letters",
        {"x" * 100_000: 1},
        ("xxx",),
        ("no field",),
        ("get_config",),
    ),
    ("wrong type", {"rollout.group_size": "eight"}, ("eight",), ("is not a whole number",), (">= 2",)),
    ("out of bounds", {"rollout.group_size": 1}, ("rollout.group_size", "1"), ("is not",), (">= 2",)),
    ("not a number", {"optimizer.max_grad_norm": "nan"}, ("nan",), ("is not a number",), ("> 0",)),
    ("infinite", {"optimizer.max_grad_norm": "1e999"}, ("1e999",), ("is not a number",), ("> 0",)),
    (
        "a number of a thousand digits",
        {"budget.steps": 10**1000},
        ("budget.steps",),
        ("is not a whole number", "locked", "keeps"),
        ("20000", "10000000"),
    ),
    (
        "choice unknown",
        {"algorithm.loss_type": "ppo"},
        ("ppo",),
        ("is not one of",),
        ("dapo",),
    ),
    (
        "null where there must be a value",
        {"rollout.group_size": None},
        ("null",),
        ("is not a whole number",),
        (">= 2",),
    ),
    (
        "values nested a hundred and fifty deep",
        {"rollout.stop": _DEEP},
        ("rollout.stop",),
        ("is not a list",),
        ("list such as",),
    ),
    (
        "locked field",
        {"logging.wandb_project": "mine"},
        ("logging.wandb_project",),
        ("owner",),
        ("toprope",),
    ),
    (
        "beyond the owner's bound",
        {"budget.steps": 50_000},
        ("budget.steps", "50000"),
        ("owner",),
        ("20000",),
    ),
    (
        "the environment's name",
        {"environment.name": "number_guess"},
        ("environment.name",),
        ("cannot be edited",),
        ("select_environment",),
    ),
    (
        "knob out of bounds",
        {"environment.knobs.shortest": 99},
        ("environment.knobs.shortest",),
        ("is not a whole number",),
        ("<= 26",),
    ),
    (
        "knob unknown",
        {"environment.knobs.shortes": 3},
        ("shortes",),
        ("no field",),
        ("environment.knobs.shortest",),
    ),
    (
        "a batch that no micro-batch divides",
        {"optimizer.micro_batch_size": 7},
        ("optimizer.micro_batch_size", "7"),
        ("does not divide",),
        ("rollout.group_size",),
    ),
    (
        "answers longer than the context",
        {"rollout.max_new_tokens": 64},
        ("rollout.max_new_tokens",),
        ("leaves no room",),
        ("policy.max_context",),
    ),
    (
        "one wrong field among good ones",
        {"optimizer.learning_rate": 1e-4, "rollout.group_size": "x", "budget.step": 5},
        ("rollout.group_size", "budget.step"),
        ("2 problems",),
        ("budget.steps",),
    ),
]


def _row(row: _Row) -> Case:
    title, tool, arguments, names, cause, remedy = row

    async def play(house: House) -> AsyncIterator[tuple[Told, Expected]]:
        draft_id = await _some_draft(house)

        def fill(value: Any) -> Any:
            return draft_id if value == "@draft" else value

        house.mark()
        told = await house.call(tool, **{name: fill(value) for name, value in arguments.items()})
        yield told, Expected(tuple(map(fill, names)), tuple(map(fill, cause)), tuple(map(fill, remedy)))

    return Case("a call's arguments" if row in _ARGUMENTS else "names and ids", title, play)


async def _some_draft(house: House) -> str:
    """One draft for all rows of a house."""
    if "draft" not in house.kept:
        house.kept["draft"] = await house.draft()
    return house.kept["draft"]


def _edit(title: str, changes: Any, names: tuple[str, ...], cause: tuple[str, ...], remedy: tuple[str, ...]) -> Case:
    async def play(house: House) -> AsyncIterator[tuple[Told, Expected]]:
        draft_id = await _some_draft(house)
        house.mark()
        told = await house.call("edit_config", draft_id=draft_id, changes=changes)
        yield told, Expected((*names, "Nothing was changed"), cause, remedy)

    return Case("edits of a draft", title, play)


CASES: list[Case] = [*map(_row, [*_NAMES, *_ARGUMENTS]), *(_edit(*row) for row in _EDITS)]
