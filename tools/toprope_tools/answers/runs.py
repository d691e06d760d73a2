"""Structures of the answers about starting, stopping and following runs."""

from __future__ import annotations

from typing import Annotated, Any

from toprope_tools.answers.answer import IN_TEXT, Structure


class Started(Structure):
    run_id: str | None
    kind: str
    draft_id: str
    revision: int
    state: str
    group_id: str | None = None
    run_ids: list[str] | None = None
    preview: dict[str, Any] | None = None


class Asked(Structure):
    run_id: str
    state: str
    asked: str
    answers: list[dict[str, Any]]
    untrusted: bool = True


class Evaluating(Structure):
    run_id: str
    run_ids: list[str]
    tasks: list[str]
    limit: int | None = None


class Serving(Structure):
    run_id: str
    state: str
    url: str | None = None
    until: float | None = None
    key_file: str | None = None


class Stopped(Structure):
    run_id: str
    state: str
    was_live: bool
    runs: dict[str, str] | None = None


class Resumed(Structure):
    run_id: str
    kind: str
    attempt: int
    state: str
    from_step: int | None = None
    continues: str | None = None


class Reproducing(Structure):
    run_id: str
    reproduces: str
    deterministic: bool
    state: str
    result: str = ""


class RunStatus(Structure):
    run_id: str
    kind: str = ""
    """As `environment` only in the first answer about a run."""
    environment: str = ""
    state: str
    fresh: Annotated[bool, IN_TEXT] = False
    numbers: dict[str, Any] = {}
    """Of one of many runs only in the text."""
    next_numbers_in_s: Annotated[float | None, IN_TEXT] = None
    states: Annotated[list[str], IN_TEXT] = []
    """Changes of state since the last answer."""
    events: list[dict[str, Any]] = []
    """Other events; of findings without the sentences, which the text has."""
    events_left: int = 0
    failure: dict[str, Any] | None = None
    lifecycle: str = ""
    """As programs of training know it: see `toprope.records.run.lifecycle`."""
    checks: Annotated[dict[str, str], IN_TEXT] = {}
    components: dict[str, str] = {}
    """By name: running, or exited with its code, with restarts if there were any."""
    logs: str = ""
    """The folder with <component>.log of each."""
    trackers: dict[str, str] = {}
    """Page of the run at each tracker; offline its folder."""


class RunItem(Structure):
    run_id: str
    kind: str
    environment: str
    state: str
    created_at: float
    ended_at: float | None = None
    summary: Annotated[str, IN_TEXT] = ""
    group: str | None = None


class MetCondition(Structure):
    run_id: str
    condition: str


class StatusAnswer(Structure):
    runs: list[RunStatus]
    unchanged: dict[str, int] = {}
    """Of many runs, those without news but numbers: how many by state; they are not in `runs`."""
    open_runs: list[RunItem] = []
    met: list[MetCondition] = []
    cursor: str = ""


class Runs(Structure):
    runs: list[RunItem]
    total: int
    next_cursor: str | None = None


class LogAnswer(Structure):
    run_id: str
    component: str
    before: int | None
    components: list[str]
    untrusted: bool = True
