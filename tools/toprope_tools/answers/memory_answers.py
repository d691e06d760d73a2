"""Structures of the answers about what was: configurations side by side, repeated runs, rollouts, experiments.

Like `toprope_tools.answers.base`, this is read at the server's start and imports nothing of the engine.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

__all__ = [
    "BrowsedGroup",
    "ConfigDiff",
    "ExperimentAnswer",
    "ExperimentItem",
    "FieldDiff",
    "Forked",
    "Handoff",
    "Reproducing",
    "RolloutPage",
    "ShownRollout",
    "Undone",
]


class _Data(BaseModel):
    model_config = ConfigDict(extra="forbid")


class FieldDiff(_Data):
    field: str
    a: Any
    b: Any


class ConfigDiff(_Data):
    a: str
    b: str
    fields: list[FieldDiff]


class Forked(_Data):
    draft_id: str
    run_id: str
    environment: str
    revision: int
    moved_by_locks: list[FieldDiff]
    dropped: list[str]


class Undone(_Data):
    draft_id: str
    revision: int
    back_to: int
    changed: list[FieldDiff]
    kept_by_locks: list[FieldDiff]


class Reproducing(_Data):
    run_id: str
    reproduces: str
    deterministic: bool
    state: str
    result: str = ""


class ShownRollout(_Data):
    reward: float
    parts: dict[str, float] = {}
    success: bool = False
    truncated: bool = False
    error: str | None = None
    answer: str | None = None


class BrowsedGroup(_Data):
    group: int
    task: str
    version: int | None
    reward_mean: float
    successes: int
    size: int
    prompt: str | None = None
    rollouts: list[ShownRollout]
    change: float | None = None


class RolloutPage(_Data):
    run_id: str
    order: str
    groups: list[BrowsedGroup]
    matching: int
    scanned: int
    complete: bool
    next_cursor: str | None = None
    untrusted: bool = True


class ExperimentItem(_Data):
    id: str
    environment: str
    hypothesis: str
    runs: list[str]
    outcome: str = ""
    decision: str = ""
    accuracy: float | None = None


class ExperimentAnswer(_Data):
    experiment: ExperimentItem
    plateau: str = ""
    warnings: list[str] = []


class Handoff(_Data):
    live_runs: list[str]
    experiments: int
    environments: list[str]
