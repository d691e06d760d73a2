"""The owner's locks: fields that an agent cannot change, or only within bounds, each with the owner's reason.

They are enforced when a specification is frozen, however a value was set; `refusal` lets an edit fail early. The file
is read again at each use, so a lock holds as soon as it is saved, and a file that cannot be read stops every start: a
lock never fails open.

    locks:
      - field: launcher.kind
        value: local
        reason: Runs stay on this laptop.
      - field: optimizer.learning_rate
        max: 0.01
        reason: Higher rates have only ever collapsed here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toprope.errors import InvalidValue, LockedField, NotFound, shown
from toprope.settings.changes import Change
from toprope.settings.fields import KNOBS, Field, all_fields, find_field, get_value
from toprope.settings.schema import LEAST_VALUE_RATE, Config
from toprope.settings.yamlfiles import check_keys, read_yaml

_KEYS = ("field", "value", "min", "max", "reason")
_FOLLOWS = {"ppo.value_learning_rate": "optimizer.learning_rate"}
"""Fields that take the value of another field, or `LEAST_VALUE_RATE` if that is higher, if they are null."""
_JOB_TIME = "launcher.time_limit_minutes"
_NO_LIMIT = frozenset(
    {
        *("environment.memory_mb", "evaluation.every_steps", "launcher.stall_after_s", _JOB_TIME),
        *("optimizer.micro_batch_size", "ppo.value_clip_range"),
    }
)
"""Fields whose value 0 means that there is no limit: never, all at once, as long as the partition allows."""


@dataclass(frozen=True)
class Lock:
    """One lock: fixed to `value`, or bounded by `min` and `max`, both inclusive."""

    field: str
    reason: str
    fixed: bool = False
    value: Any = None
    min: float | None = None
    max: float | None = None

    @property
    def says(self) -> str:
        """The allowed values, in a few words."""
        if self.fixed:
            return f"fixed at {self.value!r}" if isinstance(self.value, str) else f"fixed at {self.value}"
        parts = [f"at least {self.min}"] if self.min is not None else []
        parts += [f"at most {self.max}"] if self.max is not None else []
        return " and ".join(parts)

    def allows(self, value: Any) -> bool:
        """Return True if the owner allows this value.

        Null is outside any bounds unless another field decides then, and a value that stands for no limit is above any
        highest value.
        """
        if self.fixed:
            if isinstance(value, dict | list):  # == would take 0 for false within
                return _text(value) == _text(self.value)
            return value == self.value and isinstance(value, bool) == isinstance(self.value, bool)
        if value is None and self.field in _FOLLOWS:
            return self.max is None or self.max >= LEAST_VALUE_RATE
        if self.max and self.field in _NO_LIMIT and value == 0:
            return False
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        return (self.min is None or value >= self.min) and (self.max is None or value <= self.max)

    def nearest(self, value: Any) -> Any:
        """The allowed value closest to this one."""
        if self.fixed:
            return self.value
        if isinstance(value, bool) or not isinstance(value, int | float):
            return self.max if self.max is not None else self.min
        if self.max and self.field in _NO_LIMIT and value == 0:
            return self.max
        if self.min is not None and value < self.min:
            return self.min
        return self.max if self.max is not None and value > self.max else value

    def record(self) -> dict[str, Any]:
        """The lock as the file has it, for specifications and answers."""
        if self.fixed:
            return {"value": self.value, "reason": self.reason}
        bounds = {"min": self.min, "max": self.max}
        return {key: value for key, value in bounds.items() if value is not None} | {"reason": self.reason}


class Locks:
    """All locks of the owner, by field."""

    def __init__(self, locks: dict[str, Lock], source: Path | None = None) -> None:
        self._locks = locks
        self.source = source

    @classmethod
    def read(cls, path: Path) -> Locks:
        """The locks in a file.

        Raises:
            InvalidValue: The file or an entry is wrong; the message names it.
        """
        data = check_keys(read_yaml(path), ("locks",), str(path))
        return cls(parse_locks(data.get("locks"), str(path)), path)

    def under(self, others: Iterable[Lock]) -> Locks:
        """These locks with others below them: where both lock a field, what both allow, else what these allow."""
        joined = {lock.field: lock for lock in others}
        for upper in self:
            lower = joined.get(upper.field)
            joined[upper.field] = upper if lower is None else _join(upper, lower)
        return Locks(joined, self.source)

    def __iter__(self) -> Iterator[Lock]:
        return iter(self._locks.values())

    def get(self, field: str) -> Lock | None:
        """The lock on a field, or None."""
        return self._locks.get(field)

    def refusal(self, field: str, value: Any) -> str | None:
        """The reason why the owner does not allow this value, or None if it is allowed."""
        lock = self._locks.get(field)
        if lock is None or lock.allows(value):
            return None
        value_text = "null" if value is None else shown(value)
        return f"{field} is locked by the owner: {lock.says}, not {value_text}. Reason: {lock.reason}"

    def nearest(self, field: str, value: Any) -> Any:
        """The allowed value of a field that is closest to this one."""
        lock = self._locks.get(field)
        return value if lock is None or lock.allows(value) else lock.nearest(value)

    def require(self, values: Mapping[str, Any], hint: str = "") -> None:
        """Require values that the owner allows: whatever sets a field, by whatever name, is held here.

        Args:
            values: By dotted field name.
            hint: The next step; by default the allowed values.

        Raises:
            LockedField: A value is not allowed; the message names every violation with its reason.
        """
        refusals = {field: text for field, value in values.items() if (text := self.refusal(field, value))}
        if refusals:
            allowed = ", ".join(f"{field} {self._locks[field].says}" for field in refusals)
            raise LockedField("\n".join(refusals.values()), hint=hint or f"Allowed: {allowed}.")

    def adjust(self, config: Config, fields: dict[str, Field]) -> tuple[dict[str, Any], list[Change]]:
        """The smallest edit that makes a configuration allowed: values by field, and the changes.

        Locks on fields that this environment does not have are ignored.
        """
        changes = []
        for lock in self._that_apply(config, fields):
            value = _effective(config, fields, lock.field)
            if not lock.allows(value):
                changes.append(Change(lock.field, get_value(config, fields[lock.field]), lock.nearest(value)))
        return {change.field: change.after for change in changes}, changes

    def enforce(self, config: Config, fields: dict[str, Field]) -> None:
        """Require a configuration that the owner allows.

        Raises:
            LockedField: It is not allowed; the message names every violation with its reason.
        """
        allowed, _ = self.adjust(config, fields)
        values = {lock.field: _effective(config, fields, lock.field) for lock in self._that_apply(config, fields)}
        self.require(values, f"edit_config with changes {allowed} sets what is allowed.")

    def _that_apply(self, config: Config, fields: dict[str, Field]) -> list[Lock]:
        """The locks on the fields of the environment; without one on a job's time for a run that is not a job."""
        idle = _JOB_TIME if config.launcher.kind != "slurm" and not config.launcher.time_limit_minutes else ""
        return [lock for lock in self if lock.field in fields and lock.field != idle]

    def record(self) -> dict[str, Any]:
        """All locks as a mapping, for a run's specification."""
        return {lock.field: lock.record() for lock in self}


def parse_locks(entries: Any, where: str) -> dict[str, Lock]:
    """The locks in a list of entries, by field.

    Args:
        entries: The list as read from YAML; None: no locks.
        where: The file, for errors.

    Raises:
        InvalidValue: An entry is wrong.
    """
    if not isinstance(entries or [], list):
        raise InvalidValue(f"{where}: locks must be a list of entries with {', '.join(_KEYS)}.", hint="Fix the file.")
    fields = all_fields()
    locks: dict[str, Lock] = {}
    for number, entry in enumerate(entries or [], 1):
        lock = _parse(entry, f"{where}, lock {number}", fields)
        if lock.field in locks:
            raise InvalidValue(f"{where}, lock {number}: {lock.field} is locked twice.", hint="Join the entries.")
        locks[lock.field] = lock
    return locks


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _join(upper: Lock, lower: Lock) -> Lock:
    """A lock that holds what both allow; the first if nothing is allowed by both."""
    if upper.fixed or lower.fixed:
        return lower if lower.fixed and upper.allows(lower.value) else upper
    lows = [lock.min for lock in (upper, lower) if lock.min is not None]
    highs = [lock.max for lock in (upper, lower) if lock.max is not None]
    low, high = max(lows, default=None), min(highs, default=None)
    if low is not None and high is not None and low > high:
        return upper
    return Lock(upper.field, upper.reason, min=low, max=high)


def require_allowed_knobs(
    knobs: Mapping[str, Any], lock_records: Mapping[str, Mapping[str, Any]], environment: str
) -> None:
    """Require that the owner allows the knobs of an opened environment.

    The defaults of an environment without a draft are known only when its worker has opened it.

    Args:
        knobs: Values by name.
        lock_records: The owner's locks, as returned by `Locks.record`.
        environment: Name of the environment.

    Raises:
        LockedField: A knob has a value that is not allowed.
    """
    locks = {
        field: Lock(
            field, record["reason"], "value" in record, record.get("value"), record.get("min"), record.get("max")
        )
        for field, record in lock_records.items()
    }
    values = {f"{KNOBS}.{name}": value for name, value in knobs.items()}
    Locks(locks).require(values, f"Set them among the knobs of {environment}.")


def _parse(entry: Any, where: str, fields: dict[str, Field]) -> Lock:
    check_keys(entry, _KEYS, where)
    name, reason = entry.get("field"), entry.get("reason")
    if not isinstance(name, str) or not name:
        raise InvalidValue(
            f"{where}: field is missing.", hint="Name a field as get_config does: optimizer.learning_rate."
        )
    where = f"{where} ({name})"
    if not isinstance(reason, str) or not reason.strip():
        raise InvalidValue(f"{where}: reason is missing.", hint="Agents are shown the reason; one sentence is enough.")
    bounded, fixed = "min" in entry or "max" in entry, "value" in entry
    if bounded == fixed:
        raise InvalidValue(f"{where}: give either value, or min and max or one of them.", hint="Fix the file.")
    knob = name.startswith(f"{KNOBS}.") and name.count(".") == 2
    try:
        field = None if knob else find_field(name, fields)
        if fixed:
            value = entry["value"] if field is None else field.coerce(entry["value"])
            return Lock(name, reason.strip(), fixed=True, value=value)
        if field is not None and field.kind not in ("integer", "number"):
            raise InvalidValue(f"{name} is a {field.type_text}, which has no min or max.")
        bounds: dict[str, float] = {}
        for key in ("min", "max"):
            if key in entry:
                limit = entry[key]
                if isinstance(limit, str):  # YAML reads 1e-5 as text
                    limit = float(limit)
                if isinstance(limit, bool) or not isinstance(limit, int | float):
                    raise InvalidValue(f"{key} must be a number, not {limit!r}.")
                bounds[key] = limit if field is None else field.coerce(limit)
        if bounds.get("min", float("-inf")) > bounds.get("max", float("inf")):
            raise InvalidValue(f"min {bounds['min']} is above max {bounds['max']}.")
        return Lock(name, reason.strip(), min=bounds.get("min"), max=bounds.get("max"))
    except (InvalidValue, NotFound) as problem:
        near = f" {problem.hint}" if isinstance(problem, NotFound) else ""
        raise InvalidValue(f"{where}: {problem.message}{near}", hint="Fix the file.") from None
    except ValueError:
        raise InvalidValue(f"{where}: min and max must be numbers.", hint="Fix the file.") from None


def _effective(config: Config, fields: Mapping[str, Field], name: str) -> Any:
    """The value that counts for a field: if it is null and follows another field, the one that training takes."""
    value = get_value(config, fields[name])
    if value is None and name in _FOLLOWS:
        return max(get_value(config, fields[_FOLLOWS[name]]), LEAST_VALUE_RATE)
    return value
