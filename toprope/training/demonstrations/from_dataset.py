"""Takes the demonstrations of an `sft` run from a version of a data set.

The version is checked against the digest that was frozen with the run. Items of tasks that this run holds out are left
out, by id or by words, and counted: a data set may come from other runs, or from anywhere.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from toprope.errors import ComponentFailed, Corrupt, InvalidValue
from toprope.records.journal.demonstrations import Trace, append_traces
from toprope.records.run.specification import DatasetSource, Specification
from toprope.records.trained_tasks import content_id
from toprope.training.rollouts.environment_host import EnvironmentHost

_FLUSH_EVERY = 1000
_HELDOUT_PIECE = 256
_VERDICT = ("success", "score", "unscored", "first_task", "first_prompt")
_MARKER = re.compile(r"\s*(?:<\||<｜|<s>|<bos>|<start_of_turn>|\[(?:INST|gMASK)\])")
"""Begins the prompts that published chat templates render."""


class _Item(msgspec.Struct):
    state: str | list[dict[str, Any]]
    action: str | list[dict[str, Any]]
    reward: float = 0.0
    metadata: dict[str, Any] = {}


_decode = msgspec.json.Decoder(_Item).decode


async def write_dataset_demonstrations(
    hosts: Sequence[EnvironmentHost],
    specification: Specification,
    path: Path,
    progress: Callable[[str, int, int], None],
    on_item: Callable[[str, str, list[dict[str, Any]], set[str]], None],
) -> Path:
    """Writes the items of the run's data set as demonstrations.

    Args:
        hosts: The environments, which know the held-out tasks.
        specification: The run's specification, with its data set.
        path: The file to write; it appears when it is complete.
        progress: Called with what is done, and how many of how many items are.
        on_item: Called with the environment, task id and first messages of every item that is used, and all ids of the
            questions that it rests on, also of the item that a mutation copied.

    Raises:
        Corrupt: The data set differs from the frozen one.
        InvalidValue: No item can be learned from.
        ComponentFailed: The data set cannot be read.
    """
    source = specification.dataset
    assert source is not None
    file = Path(source.file)
    _require_unchanged(file, source)
    heldout = await _heldout_ids(hosts, specification)
    aside = path.with_name(f".{path.name}")
    aside.unlink(missing_ok=True)
    traces: list[Trace] = []
    used = of_heldout = empty = rendered = 0
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            item = _decode(line)
            state = [{"role": "user", "content": item.state}] if isinstance(item.state, str) else item.state
            if item.metadata.get("text") == "rendered" and state and _MARKER.match(str(state[0].get("content"))):
                rendered += 1  # the chat template would be written around its own markers
                continue
            action = [{"role": "assistant", "content": item.action}] if isinstance(item.action, str) else item.action
            has_answer = any(
                message.get("role") == "assistant"
                and (message.get("tool_calls") or str(message.get("content") or "").strip())
                for message in action
            )
            if not state or not has_answer:
                empty += 1
                continue
            prompt_id = content_id(state)
            task = str(item.metadata.get("task") or prompt_id)
            first = str(item.metadata.get("first_task") or task)  # of the item that a mutation copied
            ids = {prompt_id, str(item.metadata.get("first_prompt") or prompt_id), task, first}
            ids |= {name.rpartition("/")[2] for name in (task, first)}  # tasks of a mixture are ENVIRONMENT/ID
            if not heldout.isdisjoint(ids):
                of_heldout += 1
                continue
            used += 1
            on_item(str(item.metadata.get("environment") or source.name), task, state, ids)
            traces.append(
                Trace(
                    task_id=task,
                    variant=number,
                    messages=[*state, *action],
                    reward=item.reward,
                    parts=_parts(item.metadata.get("parts")),
                    turns=sum(message.get("role") == "assistant" for message in action),
                    teacher=source.name,
                    verdict={name: item.metadata[name] for name in _VERDICT if name in item.metadata},
                    first_messages=len(state),
                    tools=_tools(item.metadata.get("tools")),
                )
            )
            if len(traces) >= _FLUSH_EVERY:
                append_traces(aside, traces)
                traces = []
                progress("reading the data set", number, source.items)
    append_traces(aside, traces)
    if not used:
        aside.unlink(missing_ok=True)
        raise InvalidValue(
            f"Nothing of {source.name} can be learned from: {of_heldout} items are of held-out tasks, {empty} lack a "
            f"question or an answer, {rendered} have the markers of a chat template in the question (text: rendered).",
            hint="Build the data set of other tasks, set sft.dataset to another, or build it again: prompts that show "
            "the day are split now.",
        )
    if of_heldout or empty or rendered:
        print(
            f"{source.name}: {of_heldout} items of held-out tasks, {empty} without words and {rendered} with the "
            "markers of a chat template in the question were left out",
            flush=True,
        )
    os.replace(aside, path)
    progress("reading the data set", source.items, source.items)
    return path


def _parts(value: Any) -> dict[str, float]:
    """The numeric parts of a reward; items from outside may have anything there."""
    items = value.items() if isinstance(value, dict) else ()
    return {name: float(part) for name, part in items if isinstance(part, int | float)}


def _tools(value: Any) -> list[dict[str, Any]]:
    """The tools of an item; a data set may come from anywhere."""
    return [tool for tool in value if isinstance(tool, dict)] if isinstance(value, list) else []


def _require_unchanged(file: Path, source: DatasetSource) -> None:
    try:
        with file.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise ComponentFailed(
            f"The data set {source.name} cannot be read: {file}: {error.strerror or error}.",
            hint="It was moved or removed since the run was started. Set sft.dataset to one that is there.",
        ) from None
    if digest != source.sha256:
        raise Corrupt(
            f"The data set {source.name} is not what was frozen with this run: {file} has another SHA-256.",
            hint="A version never changes: build a new one, and set sft.dataset to it.",
        )


async def _heldout_ids(hosts: Sequence[EnvironmentHost], specification: Specification) -> set[str]:
    """Ids of the held-out tasks that evaluations use, and ids of their prompts."""
    ids: set[str] = set()
    for host in hosts:
        worker = await host.worker.current()
        evaluated = min(specification.config.evaluation.heldout_tasks, host.sizes.get("heldout", 0))
        total = host.number("heldout", evaluated - 1) + 1 if evaluated else 0
        for start in range(0, total, _HELDOUT_PIECE):
            count = min(_HELDOUT_PIECE, total - start)
            page = await worker.tasks("heldout", start, count, timeout=host.plan.section.load_timeout_s)
            for task in page.tasks if not page.shared else ():  # too few to hold any out
                ids |= {task.id, content_id(task.messages)}
    return ids
