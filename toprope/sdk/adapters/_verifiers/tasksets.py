"""Read a taskset of verifiers 0.4: its settings and its tasks."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterable, Iterator
from typing import Any

from toprope.sdk.adapters._verifiers.load_environment import RANGE
from toprope.sdk.adapters._verifiers.prompts import messages_of_task, with_texts
from toprope.sdk.authoring.environment import Task
from toprope.sdk.authoring.knobs import knob, settable

__all__ = ["OURS", "knobs_of", "tasks_of"]

OURS = ("harness", "turns", "reward_low", "reward_high", "success_reward", "config")
"""Knobs that are not settings of the taskset."""
_REFERENCES = ("answer", "reference", "solution", "expected", "ground_truth", "target")
_LOOK_AT = 8
"""Tasks whose prompts are compared."""


def knobs_of(config: Any) -> tuple[dict[str, str], type]:
    """Return the taskset's settings with JSON values by knob, and a dataclass of our knobs and these."""
    ours: list[tuple[str, Any, Any]] = [
        (
            "harness",
            str,
            knob("auto", help="auto: the taskset's own, otherwise one in this process; or an id of verifiers"),
        ),
        ("turns", int, knob(16, ge=1, le=1000, help="most answers in a rollout")),
        *RANGE,
        ("success_reward", float | None, knob(None, help="reward that counts as solved; null: the largest possible")),
        ("config", dict, knob({}, help="the rest of verifiers' configuration, as its [env] block")),
    ]
    fields, made = {}, ours
    for name, field in config.model_fields.items():
        plain = settable(field.annotation)
        if name in ("id", "task", "system_prompt") or not plain and not field.is_required():
            continue
        # Setup finds out if a required field is missing, because `config` may give it too.
        default = None if field.is_required() else field.get_default(call_default_factory=True)
        taken = f"taskset_{name}" if name in OURS else name
        fields[taken] = name
        made.append((taken, field.annotation if plain else Any, knob(default, help=field.description or "")))
    return fields, dataclasses.make_dataclass("Knobs", made)


def tasks_of(taskset: Iterable[Any]) -> Iterator[Task]:
    """Yield the tasks of a taskset, which may be endless.

    Games have one opening for many seeds: if at most half of the first prompts are distinct, all data of a task, rather
    than its prompt, tell it apart.
    """
    stream = with_texts(taskset, messages_of_task)
    first = list(itertools.islice(stream, _LOOK_AT))
    repeating = len(first) > 1 and 2 * len({json.dumps(messages) for messages, _ in first}) <= len(first)
    for messages, task in itertools.chain(first, stream):
        key = None
        if repeating:
            rest = task.data.model_dump(mode="json", exclude={"idx", "name", "prompt", "system_prompt"})
            key = json.dumps([messages, rest], sort_keys=True)
        yield Task(messages, reference=_reference_of(task.data), data={"task": task}, key=key)


def _reference_of(data: Any) -> Any:
    """Return the value of the first field that is named like a right answer; None without one."""
    for name in _REFERENCES:
        value = getattr(data, name, None)
        if isinstance(value, str | int | float) and not isinstance(value, bool):
            return str(value)
    return None
