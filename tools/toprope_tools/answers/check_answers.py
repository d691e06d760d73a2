"""The structure of the answer about whether an environment is fit to train on.

Like `toprope_tools.answers.base`, this is read at the server's start and imports nothing of the engine.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

__all__ = ["CheckAnswer", "CheckFinding"]


class _Data(BaseModel):
    model_config = ConfigDict(extra="forbid")


class CheckFinding(_Data):
    rule: str
    level: Literal["note", "warning", "critical"]
    what: str
    observed: dict[str, Any]
    threshold: str
    next: str


class CheckAnswer(_Data):
    environment: str
    draft_id: str | None = None
    verdict: Literal["ok", "warning", "critical"]
    full: bool
    findings: list[CheckFinding]
    scores: dict[str, float]
    """Mean reward by kind of answer, as a share of the highest."""
    tasks_tried: int
    splits: dict[str, dict[str, Any]]
    prompt_characters: dict[str, int]
    answer_characters: dict[str, int]
    repeatable: bool | None
    """None: no other process was held against the first."""
    start_seconds: float
    task_seconds: float | None
    score_seconds: float | None
    memory_mb: float | None
    not_checked: list[str]
    seconds: float
