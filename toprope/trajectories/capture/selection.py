"""Filters for items, written by people and agents and validated by name."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from toprope.errors import InvalidValue, shown
from toprope.records.trained_tasks import content_id
from toprope.settings.yamlfiles import nearest
from toprope.trajectories.items import SEALED, TrajectoryItem, as_messages


@dataclass(frozen=True)
class Query:
    """Filters; None means no filter.

    `run`, `environment`, `split`: exact match. `task`: substring of the task id. `min_reward`, `max_reward`: inclusive.
    `min_version`, `max_version`: policy version of the oldest sampled token, which is a step. `whole`: words are
    complete (neither cut nor missing). `per_task`: at most this many rollouts per task, each once, the best by reward,
    then the newest. `limit`: at most this many items, from the beginning.
    """

    run: str | None = None
    environment: str | None = None
    task: str | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    success: bool | None = None
    min_version: int | None = None
    max_version: int | None = None
    split: str | None = None
    whole: bool | None = None
    per_task: int | None = None
    limit: int | None = None

    @classmethod
    def of(cls, filters: Mapping[str, Any] | None) -> Query:
        """Parse a query from a JSON object.

        Raises:
            InvalidValue: A filter is unknown, has the wrong type, or selects the held-out split.
        """
        types = {field.name: str(field.type).split(" ")[0] for field in fields(cls)}
        values: dict[str, Any] = {}
        for name, value in (filters or {}).items():
            if name not in types:
                raise InvalidValue(f"There is no filter {shown(name)}.", hint=nearest(str(name), types))
            if value is not None:
                values[name] = _to_type(name, types[name], value)
        if values.get("split") == SEALED:
            raise InvalidValue(
                "The held-out split is sealed: its rollouts are neither kept nor exported.",
                hint="Omit split, or use split train.",
            )
        for name in ("per_task", "limit"):
            if values.get(name, 1) < 1:
                raise InvalidValue(f"{name} must be at least 1.", hint="Omit it for all.")
        return cls(**values)

    def matches(self, item: TrajectoryItem) -> bool:
        """Return True if an item passes all filters but `per_task` and `limit`, which need several items."""
        metadata = item.metadata
        if metadata.get("split") == SEALED:
            return False
        version = metadata.get("version")
        if not isinstance(version, int) or isinstance(version, bool):
            version = None
        return not (
            (self.run is not None and metadata.get("run") != self.run)
            or (self.environment is not None and metadata.get("environment") != self.environment)
            or (self.task is not None and self.task not in str(metadata.get("task", "")))
            or (self.min_reward is not None and not item.reward >= self.min_reward)
            or (self.max_reward is not None and not item.reward <= self.max_reward)
            or (self.success is not None and item.success is not self.success)
            or (self.min_version is not None and (version is None or version < self.min_version))
            or (self.max_version is not None and (version is None or version > self.max_version))
            or (self.split is not None and metadata.get("split", "train") != self.split)
            or (self.whole is True and metadata.get("text") in ("cut", "none"))
            or (self.whole is False and metadata.get("text") not in ("cut", "none"))
        )

    def select(
        self,
        items: Callable[[], Iterable[TrajectoryItem]],
        *,
        compared: Callable[[], Iterable[TrajectoryItem]] | None = None,
        left_out: Counter[str] | None = None,
    ) -> Iterator[TrajectoryItem]:
        """Yield the items that pass, in order.

        Args:
            items: Returns all items, the same at each call: `per_task` reads them twice.
            compared: Returns what the first of these readings needs, if that costs less.
            left_out: Counts the other items by reason.
        """
        left_out = Counter() if left_out is None else left_out
        best = None
        if self.per_task is not None:
            best = BestOfTasks(filter(self.matches, (compared or items)()), self.per_task)
        count = 0
        for item in items():
            if not self.matches(item):
                left_out["filters"] += 1
            elif best is not None and not best.take(item):
                left_out["not among the best of the task"] += 1
            else:
                count += 1
                yield item
                if count == self.limit:
                    return  # before another item is read, which would count as neither kept nor left out

    def asked(self) -> dict[str, Any]:
        """Return the filters that are set, for a record."""
        return {name: value for name, value in asdict(self).items() if value is not None}


class BestOfTasks:
    """The `count` best rollouts of each task.

    A rollout may come from its run, from data sets, and as mutated copies: the first row with its best reward counts.
    Memory grows with tasks, not with items.
    """

    def __init__(self, items: Iterable[TrajectoryItem], count: int) -> None:
        tasks: dict[tuple[str, ...], dict[tuple[Any, ...], tuple[float, int]]] = {}
        for number, item in enumerate(items):
            task, place = _task_of(item), _place_of(item)
            best = tasks.setdefault(task, {})
            if place not in best or item.reward > best[place][0]:
                best[place] = item.reward, number
            if len(best) > 2 * count:  # seldom, because it sorts
                tasks[task] = _best(best, count)
        self._rewards_left = {
            (task, place): reward for task, best in tasks.items() for place, (reward, _) in _best(best, count).items()
        }

    def take(self, item: TrajectoryItem) -> bool:
        """Return True for one row of each of these rollouts; the items come in the same order again."""
        key = _task_of(item), _place_of(item)
        if self._rewards_left.get(key) != item.reward:
            return False
        del self._rewards_left[key]
        return True


def _best(
    rollouts: Mapping[tuple[Any, ...], tuple[float, int]], count: int
) -> dict[tuple[Any, ...], tuple[float, int]]:
    return dict(heapq.nlargest(count, rollouts.items(), key=lambda rollout: rollout[1]))


def _task_of(item: TrajectoryItem) -> tuple[str, ...]:
    """Return the environment and the task; without a task id, the group of the run, otherwise the question."""
    metadata = item.metadata
    if task := metadata.get("task"):
        return str(metadata.get("environment")), str(task)
    run, group = metadata.get("run"), metadata.get("group")
    if isinstance(run, str) and isinstance(group, int):
        return str(metadata.get("environment")), run, str(group)
    first_prompt = metadata.get("first_prompt") or content_id(as_messages(item.state, "user"))
    return str(metadata.get("environment")), "", str(first_prompt)


def _place_of(item: TrajectoryItem) -> tuple[Any, ...]:
    """Return what identifies a rollout: its position in its run, otherwise its content."""
    metadata = item.metadata
    run, group, rollout = metadata.get("run"), metadata.get("group"), metadata.get("rollout")
    if isinstance(run, str) and isinstance(group, int) and isinstance(rollout, int):
        return run, group, rollout
    return (item.id,)


def _to_type(name: str, kind: str, value: Any) -> Any:
    if kind == "bool":
        if isinstance(value, bool):
            return value
    elif kind == "str":
        if isinstance(value, str):
            return value
    elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        if kind == "float":
            return float(value)
        if float(value).is_integer():
            return int(value)
    words = {"bool": "true or false", "str": "a text", "float": "a number", "int": "a whole number"}
    raise InvalidValue(f"The filter {name} must be {words[kind]}, not {shown(value)}.", hint="Nothing was changed.")
