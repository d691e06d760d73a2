"""The owner's limits on runs (all together, each run, each day) and the price of an hour.

The file is read again before every start, so a limit holds as soon as it is saved, and a file that cannot be read stops
every start. The limits that held at a run's start are frozen with it: its keeper stops the run at a cap, with or
without a connected client. A limit is a number, or a number with the owner's reason:

    concurrent_runs: 4
    per_run:
      wall_hours: 12
    per_day:
      cost_usd: {max: 5, reason: The month's budget is 150 USD.}
    prices:
      cpu_hour_usd: 0.04
      gpu_hour_usd: {H100: 2.5}
    confirm: {above: {cost_usd: 1}}

A day is a calendar day of UTC. CPU-hours are processor time as the kernel counts it, over all processes of a
run; GPU-hours are hours for which a run has a GPU to itself; wall time runs from when the run leaves the queue.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel

from toprope.errors import InvalidValue
from toprope.settings.yamlfiles import check_keys, read_yaml

PER_RUN = ("wall_hours", "steps", "cpu_hours", "gpu_hours", "cost_usd", "disk_gb")
PER_DAY = ("runs", "cpu_hours", "gpu_hours", "cost_usd")
ALL = ("concurrent_runs", "disk_gb")
UNITS: Mapping[str, str] = {
    "wall_hours": "hours of wall time",
    "steps": "steps",
    "cpu_hours": "CPU-hours",
    "gpu_hours": "GPU-hours",
    "cost_usd": "USD",
    "disk_gb": "GB on disk",
    "runs": "runs",
    "concurrent_runs": "runs at the same time",
}
_KEYS = (*ALL, "per_run", "per_day", "prices", "confirm")
_ANY = "*"

Confirm = Literal["never", "always", "above"]


class Limit(BaseModel, frozen=True):
    """One limit: `name` as the file has it (`per_day.cost_usd`), its value, and the owner's reason."""

    name: str
    max: float
    reason: str = ""


class Prices(BaseModel, frozen=True):
    """USD for an hour of a CPU, and of a GPU by part of its name (`*`: any other). None or missing: unknown."""

    cpu_hour_usd: float | None = None
    gpu_hour_usd: dict[str, float] = {}

    def of_gpu(self, name: str | None) -> float | None:
        """The price of an hour of that GPU, by the longest name that fits; None if the file has none."""
        fits = [key for key in self.gpu_hour_usd if key != _ANY and name and key.casefold() in name.casefold()]
        return self.gpu_hour_usd.get(max(fits, key=len) if fits else _ANY)


class Cap(BaseModel, frozen=True):
    """The value at which a run is stopped, the limit that sets it, and the owner's reason."""

    value: float
    limit: str
    reason: str = ""
    together: float | None = None
    """The limit on all runs together that left this one `value`; the run is stopped where their sum reaches it, too."""

    def is_used_up(self, used: float) -> bool:
        """True if nothing is left. A run that uses nothing may go on under a cap of 0."""
        return used > self.value or used == self.value > 0


class FrozenLimits(BaseModel, frozen=True):
    """The limits that held when a run started, as stored in its specification.

    `caps` and `reserved` are keyed by quantity (`wall_hours`, `cpu_hours`, ...). `reserved` is the most that the run
    may use of quantities that several runs share; it counts as used until the run has ended.
    """

    source: str
    """Origin of the limits: who set them, and in which file."""
    caps: dict[str, Cap] = {}
    reserved: dict[str, float] = {}
    cpu_hour_usd: float | None = None
    gpu_hour_usd: float | None = None
    gpu: str | None = None


class Limits:
    """The limits of a file."""

    def __init__(
        self,
        limits: Mapping[str, Limit],
        prices: Prices | None = None,
        *,
        confirm: Confirm = "never",
        above: Mapping[str, float] | None = None,
        source: str = "the limits that ship with Toprope",
    ) -> None:
        self._limits = dict(limits)
        self.prices = prices or Prices()
        self.confirm, self.above = confirm, dict(above or {})
        self.source = source

    def get(self, name: str) -> Limit | None:
        """The limit of that name, or None."""
        return self._limits.get(name)

    def __iter__(self) -> Iterator[Limit]:
        return iter(self._limits.values())

    @classmethod
    def read(cls, path: Path, *, owners: bool = True) -> Limits:
        """The limits in a file.

        Args:
            owners: Whether the owner wrote it; otherwise it ships with Toprope.

        Raises:
            InvalidValue: The file or an entry is wrong; the message names it.
        """
        data = check_keys(read_yaml(path), _KEYS, str(path))
        limits: dict[str, Limit] = {}
        for name in ALL:
            _take(limits, name, data.get(name), path)
        for section, names in (("per_run", PER_RUN), ("per_day", PER_DAY)):
            entries = check_keys(data.get(section) or {}, names, f"{path}, {section}")
            for name, entry in entries.items():
                _take(limits, f"{section}.{name}", entry, path)
        confirm, above = _confirm(data.get("confirm"), path)
        source = f"the owner, in {path}" if owners else f"the limits that ship with Toprope ({path})"
        return cls(limits, _prices(data.get("prices"), path), confirm=confirm, above=above, source=source)


def _take(limits: dict[str, Limit], name: str, value: Any, path: Path) -> None:
    if value is None:
        return
    reason = ""
    if isinstance(value, dict):
        entry = check_keys(value, ("max", "reason"), f"{path}, {name}")
        value, reason = entry.get("max"), entry.get("reason") or ""
        if not isinstance(reason, str):
            raise InvalidValue(f"{path}, {name}: reason must be text.", hint="Fix the file.")
    limits[name] = Limit(name=name, max=_number(value, f"{path}, {name}"), reason=reason.strip())


def _number(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise InvalidValue(f"{where} must be a number of at least 0, not {value!r}.", hint="Fix the file.")
    return float(value)


def _prices(value: Any, path: Path) -> Prices:
    entry = check_keys(value or {}, ("cpu_hour_usd", "gpu_hour_usd"), f"{path}, prices")
    cpu, gpus = entry.get("cpu_hour_usd"), entry.get("gpu_hour_usd") or {}
    if not isinstance(gpus, dict):
        gpus = {_ANY: gpus}
    return Prices(
        cpu_hour_usd=None if cpu is None else _number(cpu, f"{path}, prices.cpu_hour_usd"),
        gpu_hour_usd={str(name): _number(price, f"{path}, prices.gpu_hour_usd.{name}") for name, price in gpus.items()},
    )


def _confirm(setting: Any, path: Path) -> tuple[Confirm, dict[str, float]]:
    if setting is None or setting is False or setting == "never":
        return "never", {}
    if setting is True or setting == "always":
        return "always", {}
    if not isinstance(setting, dict):
        raise InvalidValue(
            f"{path}, confirm must be never, always, or above with quantities, not {setting!r}.",
            hint="For example: confirm: {above: {cost_usd: 1}}",
        )
    entry = check_keys(setting, ("above",), f"{path}, confirm")
    above = check_keys(entry.get("above") or {}, PER_RUN, f"{path}, confirm.above")
    return "above", {name: _number(value, f"{path}, confirm.above.{name}") for name, value in above.items()}
