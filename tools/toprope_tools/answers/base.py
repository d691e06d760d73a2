"""How an answer is said: a few short lines for the model that reads them, and the same as a typed structure.

Every token of an answer is paid for by somebody's context, so there is a budget, a cut says how to get the rest, and
the structures of all tools are together here, where their names can be kept alike. This module is read at the server's
start (the structures are published with the tools), so it imports nothing of the engine.
"""

from __future__ import annotations

import json
import re
import time
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict

__all__ = [
    "Answer",
    "Asked",
    "ConfigAnswer",
    "Description",
    "DraftAnswer",
    "EditAnswer",
    "EnvironmentItem",
    "Environments",
    "FieldChange",
    "FieldValue",
    "LogAnswer",
    "MetCondition",
    "Result",
    "Resumed",
    "RunItem",
    "Runs",
    "RunStatus",
    "Started",
    "StatusAnswer",
    "Stopped",
    "TOKEN_BUDGET",
    "Tested",
    "ago",
    "call",
    "clip",
    "cut",
    "duration",
    "fitting",
    "number",
    "percent",
    "tokens",
    "value",
]

TOKEN_BUDGET = 10_000
"""Most tokens of an answer, counted as bytes / 4 of its text and its structure together."""


@dataclass(frozen=True)
class Answer:
    """What a tool says: `text` for the model, `data` as the typed structure, without what is at its default where
    `brief`, and a PNG where a picture was asked for."""

    text: str
    data: BaseModel
    brief: bool = False
    picture: bytes | None = None


class _Data(BaseModel):
    model_config = ConfigDict(extra="forbid")


class EnvironmentItem(_Data):
    name: str
    summary: str
    state: str
    ecosystem: str = "toprope"
    tools: bool = False
    tasks: int | None = None


class Environments(_Data):
    environments: list[EnvironmentItem]
    total: int
    next_cursor: str | None = None


class Tested(_Data):
    run_id: str
    policy: str
    tasks: int
    group_size: int
    pass_rate: float
    all_wrong_share: float
    all_right_share: float


class Description(_Data):
    name: str
    summary: str
    max_turns: int
    tags: list[str]
    knobs: list[dict[str, Any]]
    reward_parts: dict[str, dict[str, Any]]
    max_reward: float
    splits: dict[str, dict[str, Any]]
    examples: list[dict[str, Any]]
    remarks: list[str]
    presets: dict[str, str]
    ecosystem: str = "toprope"
    state: str = "ready"
    tools: bool = False
    versions: dict[str, str] = {}
    load_seconds: float = 0.0
    score_seconds: float | None = None
    memory_mb: int | None = None
    prompt_characters: list[int] = []
    answer_characters: list[int] = []
    tested: Tested | None = None


class FieldChange(_Data):
    field: str
    before: Any
    after: Any


class DraftAnswer(_Data):
    draft_id: str
    environment: str
    preset: str
    revision: int
    moved_by_locks: list[FieldChange]
    locked: dict[str, str]


class FieldValue(_Data):
    field: str
    value: Any
    type: str
    bounds: str = ""
    lock: str | None = None
    description: str | None = None


class EditItem(_Data):
    revision: int
    at: float
    changes: list[FieldChange]


class ConfigAnswer(_Data):
    draft_id: str
    environment: str
    preset: str
    revision: int
    fields: list[FieldValue]
    history: list[EditItem]
    conflicts: list[str]


class EditAnswer(_Data):
    draft_id: str
    revision: int
    changed: list[FieldChange]


class Started(_Data):
    run_id: str | None
    kind: str
    draft_id: str
    revision: int
    state: str
    group_id: str | None = None
    run_ids: list[str] | None = None
    preview: dict[str, Any] | None = None


class Asked(_Data):
    run_id: str
    state: str
    asked: str
    answers: list[dict[str, Any]]
    untrusted: bool = True


class Stopped(_Data):
    run_id: str
    state: str
    was_live: bool
    runs: dict[str, str] | None = None


class Resumed(_Data):
    run_id: str
    kind: str
    attempt: int
    state: str
    from_step: int | None = None


class RunStatus(_Data):
    run_id: str
    kind: str
    environment: str
    state: str
    fresh: bool
    numbers: dict[str, Any] = {}
    numbers_age_s: float = 0.0
    next_numbers_in_s: float | None = None
    events: list[dict[str, Any]] = []
    events_left: int = 0
    failure: dict[str, Any] | None = None
    lifecycle: str = ""
    checks: dict[str, str] = {}


class RunItem(_Data):
    run_id: str
    kind: str
    environment: str
    state: str
    created_at: float
    ended_at: float | None = None
    summary: str = ""
    group: str | None = None


class MetCondition(_Data):
    run_id: str
    condition: str


class StatusAnswer(_Data):
    runs: list[RunStatus]
    open_runs: list[RunItem] = []
    met: list[MetCondition] = []
    cursor: str = ""
    longest_wait_s: float | None = None


class Runs(_Data):
    runs: list[RunItem]
    total: int
    next_cursor: str | None = None


class Result(_Data):
    run_id: str
    kind: str
    state: str
    complete: bool
    results: dict[str, Any]


class LogAnswer(_Data):
    run_id: str
    component: str
    lines: list[str]
    before: int | None
    components: list[str]
    untrusted: bool = True


def tokens(answer: Answer) -> int:
    """An answer's size in tokens, as bytes / 4."""
    return (len(answer.text.encode()) + len(answer.data.model_dump_json().encode())) // 4


def fitting(make: Callable[[int], Answer]) -> Answer:
    """The answer with values as long as the budget allows: `make` is given the most characters of one."""
    for limit in (4000, 800, 200, 60):
        answer = make(limit)
        if tokens(answer) <= TOKEN_BUDGET:
            break
    return answer


def cut(given: Any, limit: int) -> Any:
    """A configuration's value for a structure; one that is longer than `limit` characters as a text that says so."""
    text = json.dumps(given, ensure_ascii=False, default=str)
    return given if len(text) <= limit else f"{clip(text, limit)} [cut; {len(text)} characters]"


def clip(text: str, limit: int) -> str:
    """The text on one line, cut to `limit` characters, without control and invisible characters: what comes out of
    environments, models and logs must not be able to hide anything from a reader."""
    line = re.sub(r"\s+", " ", str(text)).strip()
    line = "".join(c for c in line if unicodedata.category(c) not in ("Cc", "Cf", "Cs", "Co"))
    return line if len(line) <= limit else line[: limit - 1] + "…"


def number(value: Any) -> str:
    """A number as a person would write it: 1450, 0.431, 1e-05."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int) or abs(value) >= 1000:
        return str(round(value))
    return f"{value:.3g}"


def percent(value: Any) -> str:
    """A share between 0 and 1 as 43.0%; n/a for None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "n/a"  # a status may have been written by somebody else
    return f"{100 * value:.1f}%"


def value(given: Any) -> str:
    """A configuration's value as one would send it."""
    if given is None:
        return "null"
    if isinstance(given, bool):
        return "true" if given else "false"
    if isinstance(given, str):
        return clip(given, 80) if given else '""'
    if isinstance(given, float):
        return f"{given:g}"
    return clip(str(given), 120)


def duration(seconds: float) -> str:
    """52 s, 12 min, 3 h 20 min, 2 d 4 h."""
    seconds = max(0.0, seconds)
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes // 1440} d {minutes % 1440 // 60} h"


def ago(at: float, now: float | None = None) -> str:
    """How long a moment is past."""
    return f"{duration((time.time() if now is None else now) - at)} ago"


def call(tool: str, **arguments: Any) -> str:
    """A tool call as the next step is written: check_status(run_ids=["x"], wait_s=45)."""
    shown = ", ".join(f"{name}={_literal(argument)}" for name, argument in arguments.items())
    return f"{tool}({shown})"


def _literal(argument: Any) -> str:
    if isinstance(argument, list):
        return "[" + ", ".join(_literal(one) for one in argument) + "]"
    return f'"{argument}"' if isinstance(argument, str) else value(argument)
