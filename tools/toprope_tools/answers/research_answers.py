"""Structures of the answers about what was learned from runs: comparisons.

Like `toprope_tools.answers.base`, this is read at the server's start and imports nothing of the engine.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

__all__ = ["CompareAnswer", "ComparedSide", "Judged"]


class _Data(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ComparedSide(_Data):
    """`cost`: totals over the runs, and by run; null where it was not measured."""

    name: str
    runs: list[str]
    seeds: list[int]
    cost: dict[str, Any]


class Judged(_Data):
    """One kind of answer. Shares of 1; `difference` is b less a. `verdict`: a, b, or none: no difference shown."""

    verdict: str
    why: str
    a: dict[str, Any]
    b: dict[str, Any]
    difference: dict[str, float]
    noise_floor: float
    floor_basis: str
    p_tasks: float
    effect_h: float
    tasks_only_a: int
    tasks_only_b: int
    rests_on: list[str]
    lone_wins: dict[str, int]


class CompareAnswer(_Data):
    a: ComparedSide
    b: ComparedSide
    tasks: int
    split: str
    sampled: Judged
    greedy: Judged | None = None
    remarks: list[str]
