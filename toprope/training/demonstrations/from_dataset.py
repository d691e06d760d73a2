"""Demonstrations that are given instead of made: a version of a data set becomes what an `sft` run learns from.

The version is held against the digest that was frozen with the run. Whatever asks for a task that this run holds out is
left out, by its id or by its words, and counted: a data set may be of other runs, or of anywhere.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from toprope.errors import ComponentFailed, Corrupt, InvalidValue
from toprope.records.journal.demonstrations import Trace, append_traces
from toprope.records.run.specification import DatasetSource, Specification
from toprope.training.rollouts.environment_host import Hosted

__all__ = ["content_id", "take_given"]

_KEEP_EVERY = 1000
_HELDOUT_PIECE = 256


class _Item(msgspec.Struct):
    state: str | list[dict[str, Any]]
    action: str | list[dict[str, Any]]
    reward: float = 0.0
    metadata: dict[str, Any] = {}


_decode = msgspec.json.Decoder(_Item).decode


def content_id(messages: Sequence[dict[str, Any]]) -> str:
    """The id that a task with this prompt has where nothing else makes its content
    (toprope.sdk.authoring.environment.Task)."""
    asked = [str(one.get("content", "")) for one in messages if one.get("role") == "user"]
    said = " ".join(asked or [str(one.get("content", "")) for one in messages])
    return hashlib.sha256(" ".join(said.casefold().split()).encode("utf-8", "surrogatepass")).hexdigest()[:16]


async def take_given(
    hosts: Sequence[Hosted],
    specification: Specification,
    path: Path,
    tell: Callable[[str, int, int], None],
    saw: Callable[[str, str, list[dict[str, Any]]], None],
) -> Path:
    """Writes the items of the run's data set as demonstrations.

    Args:
        hosts: The environments, which know what is held out.
        specification: The run's, with its data set.
        path: The file to write, at once.
        tell: Progress: what, done, total.
        saw: Told of every item that is taken: its environment, task and first messages.

    Raises:
        Corrupt: The data set is not what was frozen.
        InvalidValue: Nothing of it can be learned from.
    """
    source = specification.dataset
    assert source is not None
    file = Path(source.file)
    _require_sound(file, source)
    sealed = await _heldout(hosts, specification)
    aside = path.with_name(f".{path.name}")
    aside.unlink(missing_ok=True)
    traces: list[Trace] = []
    taken = left = empty = 0
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            item = _decode(line)
            state = [{"role": "user", "content": item.state}] if isinstance(item.state, str) else item.state
            action = [{"role": "assistant", "content": item.action}] if isinstance(item.action, str) else item.action
            answered = any(one.get("role") == "assistant" and str(one.get("content") or "").strip() for one in action)
            if not state or not answered:
                empty += 1
                continue
            told = content_id(state)
            task = str(item.metadata.get("task") or told)
            if not sealed.isdisjoint((task, task.rpartition("/")[2], told)):  # a mixture's tasks are ENVIRONMENT/ID
                left += 1
                continue
            taken += 1
            saw(str(item.metadata.get("environment") or source.name), task, state)
            traces.append(
                Trace(
                    task_id=task,
                    variant=number,
                    messages=[*state, *action],
                    reward=item.reward,
                    parts=_parts(item.metadata.get("parts")),
                    turns=sum(one.get("role") == "assistant" for one in action),
                    teacher=source.name,
                )
            )
            if len(traces) >= _KEEP_EVERY:
                append_traces(aside, traces)
                traces = []
                tell("reading the data set", number, source.items)
    append_traces(aside, traces)
    if not taken:
        aside.unlink(missing_ok=True)
        raise InvalidValue(
            f"Nothing of {source.name} can be learned from: {left} items are of held-out tasks, {empty} lack a "
            "question or an answer.",
            hint="Build the data set of other tasks, or set sft.dataset to another.",
        )
    if left or empty:
        print(f"{source.name}: {left} items of held-out tasks and {empty} without words were left out", flush=True)
    os.replace(aside, path)
    tell("reading the data set", source.items, source.items)
    return path


def _parts(told: Any) -> dict[str, float]:
    """Parts of a reward, as far as they are some: an item of outside may call anything so."""
    found = told.items() if isinstance(told, dict) else ()
    return {name: float(value) for name, value in found if isinstance(value, int | float)}


def _require_sound(file: Path, source: DatasetSource) -> None:
    try:
        with file.open("rb") as opened:
            found = hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError as error:
        raise ComponentFailed(
            f"The data set {source.name} cannot be read: {file}: {error.strerror or error}.",
            hint="It was moved or removed since the run was started. Set sft.dataset to one that is there.",
        ) from None
    if found != source.sha256:
        raise Corrupt(
            f"The data set {source.name} is not what was frozen with this run: {file} has another SHA-256.",
            hint="A version never changes: build a new one, and set sft.dataset to it.",
        )


async def _heldout(hosts: Sequence[Hosted], specification: Specification) -> set[str]:
    """Ids of the held-out tasks, as far as they are played."""
    found: set[str] = set()
    for host in hosts:
        link = await host.worker.link()
        wanted = min(specification.config.evaluation.heldout_tasks, host.sizes.get("heldout", 0))
        for start in range(0, wanted, _HELDOUT_PIECE):
            count = min(_HELDOUT_PIECE, wanted - start)
            page = await link.tasks("heldout", start, count, timeout=host.plan.section.load_timeout_s)
            for task in page.tasks:
                found |= {task.id, content_id(task.messages)}
    return found
