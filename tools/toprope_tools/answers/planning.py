"""Structures of the answers about environments, their installation and check, drafts and configurations."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from toprope_tools.answers.answer import IN_TEXT, Structure


class EnvironmentItem(Structure):
    name: str
    summary: Annotated[str, IN_TEXT]
    state: str = "ready"
    ecosystem: str = "toprope"
    tools: bool = False


class Environments(Structure):
    environments: list[EnvironmentItem]
    total: int
    next_cursor: str | None = None


class Tested(Structure):
    run_id: str
    policy: str
    tasks: int
    group_size: int
    pass_rate: float
    all_wrong_share: float
    all_right_share: float


class Description(Structure):
    name: str
    max_turns: int
    tags: list[str]
    knobs: list[dict[str, Any]]
    reward_parts: dict[str, dict[str, Any]]
    max_reward: float
    splits: dict[str, dict[str, Any]]
    ecosystem: str = "toprope"
    state: str = "ready"
    tools: bool = False
    load_seconds: float = 0.0
    score_seconds: float | None = None
    memory_mb: int | None = None
    prompt_characters: list[int] = []
    answer_characters: list[int] = []
    tokens_of: str = ""
    """The policy whose tokens the next two count, if its tokenizer is on this machine."""
    prompt_tokens: list[int] = []
    answer_tokens: list[int] = []
    tested: Tested | None = None


class CheckFinding(Structure):
    rule: str
    level: Literal["note", "warning", "critical"]
    what: Annotated[str, IN_TEXT]
    observed: dict[str, Any]
    threshold: Annotated[str, IN_TEXT]
    next: Annotated[str, IN_TEXT]


class CheckAnswer(Structure):
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
    tokens_of: str = ""
    prompt_tokens: dict[str, int] = {}
    answer_tokens: dict[str, int] = {}
    repeatable: bool | None
    """None: no other process was held against the first."""
    start_seconds: float
    task_seconds: float | None
    score_seconds: float | None
    memory_mb: float | None
    not_checked: Annotated[list[str], IN_TEXT]
    seconds: float


class Installed(Structure):
    """Result of the installation, or its progress."""

    name: str
    done: bool
    packages: int = 0
    megabytes: float = 0.0
    seconds: float = 0.0
    environments: int = 0
    news: str = ""


class SavedEnvironment(Structure):
    path: str
    environments: list[str]


class FieldChange(Structure):
    field: str
    before: Any
    after: Any


class DraftAnswer(Structure):
    draft_id: str
    environment: str
    preset: str
    revision: int
    moved_by_locks: list[FieldChange] = []


class ConfigAnswer(Structure):
    draft_id: str
    environment: str
    preset: str
    revision: int
    values: dict[str, Any] = {}
    """By field name, of the whole configuration or of one section."""
    conflicts: list[str] = []


class EditAnswer(Structure):
    draft_id: str
    revision: int
    changed: list[FieldChange]


class FieldDiff(Structure):
    field: str
    a: Any
    b: Any


class ConfigDiff(Structure):
    a: str
    b: str
    fields: list[FieldDiff]


class Forked(Structure):
    draft_id: str
    run_id: str
    environment: str
    revision: int
    moved_by_locks: list[FieldDiff]
    dropped: list[str]


class Undone(Structure):
    draft_id: str
    revision: int
    back_to: int
    changed: list[FieldDiff]
    kept_by_locks: list[FieldDiff]
