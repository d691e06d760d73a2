"""Keys of tasks made of rows, where prompts do not tell the rows apart."""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pprint import saferepr
from typing import Any

from toprope.sdk.authoring.environment import Task

__all__ = ["keyed"]

_NUMBERING = re.compile(r"(?i)(^|_)(id|idx|index|uid|uuid)(_|$)")
"""Columns that differ in rows that are the same task, which must not be both trained and held out."""


def keyed(tasks: Iterable[Task], played: bool) -> Iterator[Task]:
    """Yield the tasks, each with its row in `data`, and with keys where needed.

    With an environment (`played`), or without a prompt, each row is a task: even equal rows may begin in different
    states. Otherwise rows with equal prompts are tasks of their own if their references differ, or without references
    other columns but their numbers. The first of them keeps its prompt as key, so that its split does not depend on
    later rows, which may be endless.
    """
    alike: Counter[str] = Counter()
    firsts: dict[str, int] = {}
    for task in tasks:
        row = task.data["row"]
        if played or not row.get("prompt"):
            written = json.dumps(row, sort_keys=True, default=str)
            key = f"{written} {alike[written]}" if alike[written] else written
            alike[written] += 1
            yield dataclasses.replace(task, key=key)
            continue
        told = {name: value for name, value in row.items() if name != "prompt" and not _NUMBERING.search(name)}
        written = _written(told if task.reference is None else {"reference": task.reference})
        differs = firsts.setdefault(task.content, hash(written)) != hash(written)
        yield dataclasses.replace(task, key=f"{task.content} {written}") if differs else task


def _written(columns: dict[str, Any]) -> str:
    """Write columns of any type as a text that is the same in every process, so without addresses of objects."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", saferepr(columns))
