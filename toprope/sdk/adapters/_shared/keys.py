"""Keys of tasks made of rows, samples or games, where prompts do not tell them apart."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pprint import saferepr
from typing import Any

from toprope.sdk.authoring.environment import Task

__all__ = ["LARGE", "NUMBERING", "held", "keyed", "keyed_samples", "written_alike"]

LARGE = 1000
"""Containers with more elements are word lists; games do not change them, so copies share them."""
NUMBERING = re.compile(r"(?i)(^|_)(id|idx|index|uid|uuid)(_|$)")
"""Columns that differ in rows that are the same task, which must not be both trained and held out."""
_NO_PROMPT = "(the task says)"


def keyed(tasks: Iterable[Task], played: bool, prompt: str = "prompt") -> Iterator[Task]:
    """Yield the tasks, each with its row in `data`, and with keys where needed.

    With an environment (`played`), or without a prompt, each row is a task: even equal rows may begin in different
    states. Otherwise rows with equal prompts are tasks of their own if their references differ, or without references
    other columns but their numbers. The first of them keeps its prompt as key, so that its split does not depend on
    later rows, which may be endless.

    Args:
        prompt: The column of prompts.
    """
    alike: Counter[str] = Counter()
    firsts: dict[str, int] = {}
    for task in tasks:
        row = task.data["row"]
        if played or not row.get(prompt):
            text = json.dumps(row, sort_keys=True, default=str)
            key = f"{text} {alike[text]}" if alike[text] else text
            alike[text] += 1
            yield dataclasses.replace(task, key=key)
            continue
        columns = {name: value for name, value in row.items() if name != prompt and not NUMBERING.search(name)}
        text = written_alike(columns if task.reference is None else {"reference": task.reference})
        differs = firsts.setdefault(task.content, hash(text)) != hash(text)
        yield dataclasses.replace(task, key=f"{task.content} {text}") if differs else task


def keyed_samples(tasks: Sequence[Task], folders: Sequence[str] = ()) -> Iterator[Task]:
    """Yield the tasks, each with its sample of inspect in `data`, and with keys where needed.

    Samples whose users say the same are tasks of their own if anything else that a solver or scorer reads differs but
    the numbers in their metadata. If nothing does in all samples, or they say nothing, their ids tell them apart. The
    first of equal ones keeps its prompt as key.

    Args:
        tasks: The samples' tasks, in the order of the data set.
        folders: Folders whose absolute paths are left out of keys, so that a task keeps its keys where it is moved to.
    """
    firsts: dict[str, Task] = {}
    prefixes = sorted((f"{folder}/" for folder in folders if os.path.isabs(folder)), key=len, reverse=True)
    alike = all(_alike(task, tasks[0], prefixes) for task in tasks)
    for place, task in enumerate(tasks):
        sample = task.data["sample"]
        first = firsts.setdefault(task.content, task)
        if not any(message["content"].strip() for message in task.messages):
            yield dataclasses.replace(task, prompt=_NO_PROMPT, key=f"{_NO_PROMPT} {sample.id}")
        elif alike and place:
            yield dataclasses.replace(task, key=f"{task.content} {sample.id}")
        elif _alike(task, first, prefixes):
            yield task
        else:
            digest = hashlib.sha256(_sample_written(task, prefixes).encode("utf-8", "surrogatepass")).hexdigest()
            yield dataclasses.replace(task, key=f"{task.content} {digest}")


def _alike(one: Task, other: Task, folders: Sequence[str]) -> bool:
    if one is other:
        return True
    return one.content == other.content and _sample_written(one, folders) == _sample_written(other, folders)


def _sample_written(task: Task, folders: Sequence[str]) -> str:
    sample = task.data["sample"]
    columns = {name: getattr(sample, name, None) for name in ("target", "choices", "files", "setup", "sandbox")}
    metadata = getattr(sample, "metadata", None) or {}
    columns["metadata"] = {name: value for name, value in metadata.items() if not NUMBERING.search(name)}
    text = written_alike(columns | {"input": task.messages})
    for folder in folders:
        text = text.replace(folder, "")
    return text


def written_alike(columns: dict[str, Any]) -> str:
    """Write columns of any type as a text that is the same in every process, so without addresses of objects."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", saferepr(columns))


def held(value: Any, depth: int = 8) -> Any:
    """Return a JSON form of a value that is equal in every process, without word lists."""
    if value is None or isinstance(value, str | int | float):
        return value
    if hasattr(value, "tolist"):  # arrays
        return value.tolist()
    if depth == 0 or (isinstance(value, list | tuple | set | frozenset | dict) and len(value) > LARGE):
        return type(value).__name__
    if isinstance(value, Mapping):
        return [[str(key), held(item, depth - 1)] for key, item in value.items()]
    if isinstance(value, list | tuple):
        return [held(item, depth - 1) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    return held(vars(value), depth - 1) if hasattr(value, "__dict__") and not callable(value) else type(value).__name__
