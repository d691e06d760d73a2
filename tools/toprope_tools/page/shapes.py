"""The shapes of the page's answers, version 1. Times are seconds since the epoch, shares 0 to 1; None means unknown.

Text of environments, models, logs, agents and programs is `Foreign` and never a bare string, so that a page cannot
take it for Toprope's own words. What `page/` reads has the same names there.
"""

from __future__ import annotations

from typing import Any

import msgspec

from toprope.text_format import value
from toprope.untrusted import cleaned

VERSION = 1
"""Rises when an older page would misread an answer."""

Value = int | float | bool | None


class Foreign(msgspec.Struct, frozen=True):
    """Text that somebody else wrote: cut, and without invisible characters."""

    foreign: str


def foreign(text: object, limit: int = 400, *, lines: bool = False) -> Foreign:
    """Mark text as foreign, at most `limit` characters of it, on one line unless `lines`."""
    return Foreign(cleaned(str(text), limit, lines=lines))


def plain(data: Any) -> Foreign | Value:
    """A value as it is if it is a number, a yes or no, or unknown; otherwise its text, as foreign."""
    if data is None or isinstance(data, bool | int | float):
        return data
    return foreign(data if isinstance(data, str) else value(data), 200)


class Share(msgspec.Struct, frozen=True):
    """A share with its 95 % interval over `tasks` tasks; None and 0 without one."""

    value: float
    low: float | None = None
    high: float | None = None
    tasks: int = 0


class Progress(msgspec.Struct):
    """The newest numbers of a run."""

    step: int | None = None
    total_steps: int | None = None
    reward: float | None = None
    success: float | None = None
    eta_s: float | None = None
    share: float | None = None
    what: str | None = None
    done: int | None = None
    total: int | None = None


class Gravest(msgspec.Struct):
    """The gravest open finding of a run."""

    rule: str
    level: str


class RunItem(msgspec.Struct):
    """A run as an entry of a list."""

    run_id: str
    kind: str
    title: str
    detail: str
    environment: str
    state: str
    live: bool
    created_at: float
    started_at: float | None
    ended_at: float | None
    accuracy: Share | None
    before: float | None
    finding: Gravest | None
    progress: Progress
    spark: list[float | None] | None = None


class Ask(msgspec.Struct):
    """A start that waits for a person."""

    hash: str
    text: str
    at: float
    expires_at: float
    approved: bool
    details: dict[str, Any] | None


class Best(msgspec.Struct):
    """A run among the best of its environment."""

    run: RunItem
    before: Share | None
    accuracy: Share


class Call(msgspec.Struct):
    """One line of the audit trail."""

    n: int
    at: float
    by: Foreign
    tool: Foreign
    arguments: Foreign
    outcome: str
    said: Foreign | None
    ms: float | None
    run_ids: list[str]


class Limited(msgspec.Struct):
    """A limit of the owner, and what of it is used."""

    name: str
    label: str
    unit: str
    max: float
    used: float | None
    reason: Foreign | None


class Held(msgspec.Struct):
    """A lock of the owner."""

    field: str
    says: Foreign
    reason: Foreign


class Rope(msgspec.Struct):
    """Locks and limits of the owner, with their files."""

    limits_file: str
    locks_file: str
    confirm_by: str
    confirm: str
    limits: list[Limited]
    locks: list[Held]
    folder: str
    """The owner's configuration folder, whose files replace the shipped ones."""


class Frozen(msgspec.Struct):
    """The owner's stop of everything."""

    reason: Foreign
    at: float


class Answer(msgspec.Struct, kw_only=True):
    """The head of every answer; `at` is this machine's clock."""

    version: int = VERSION
    what: str
    at: float


class Now(Answer, kw_only=True):
    """The present activity."""

    read_only: bool
    may_act: bool
    waiting: list[Ask]
    live: list[RunItem]
    best: list[Best]
    diary: list[Call]
    rope: Rope
    last_end: float | None
    today: dict[str, float | None]
    frozen: Frozen | None
    counts: dict[str, int]


class Runs(Answer, kw_only=True):
    """A page of the list of runs."""

    runs: list[RunItem]
    total: int
    next_cursor: str | None


class Setting(msgspec.Struct):
    """A field that differs from its default or is locked."""

    field: str
    value: Foreign | Value
    default: Foreign | Value
    lock: str | None
    reason: Foreign | None


class RunFixed(msgspec.Struct):
    """The part that stays while a run lives."""

    preset: str | None
    model: str
    algorithm: str
    seed: int
    settings: list[Setting]
    lineage: dict[str, Any]
    limits: list[dict[str, Any]]
    folder: str


class Standing(msgspec.Struct):
    """The state of a run with its data."""

    reason: Foreign | None
    since: float
    attempt: int


class Verdict(msgspec.Struct):
    """The result of a run."""

    split: str
    before: Share | None
    after: Share | None
    greedy: Share | None
    sentence: str


class Facts(msgspec.Struct):
    """The cost of a run."""

    steps: int
    total_steps: int | None
    rollouts: int | None
    rollouts_per_second: float | None
    training_s: float | None
    total_s: float
    cpu_s: float | None
    gpu_s: float | None
    usd: float | None


class Check(msgspec.Struct):
    """One check of integrity, or of an environment."""

    name: str
    state: str
    what: str | Foreign


class Measured(msgspec.Struct):
    """One evaluation."""

    label: str
    step: int | None
    split: str
    sampled: Share | None
    greedy: Share | None


class Model(msgspec.Struct):
    """One model of a test of several."""

    name: Foreign
    accuracy: Share | None
    error: Foreign | None
    seconds: float
    usd: float | None


class Span(msgspec.Struct):
    """A finding with the steps over which it held; `to_step` None: it still holds."""

    rule: str
    level: str
    what: str
    observed: dict[str, Foreign | Value]
    threshold: str
    source: str
    confidence: str
    next: str
    follows: str | None
    from_step: int | None
    to_step: int | None
    open: bool


class Member(msgspec.Struct):
    """One component of the crew."""

    name: str
    state: str
    since: float
    restarts: int
    worker_restarts: int
    exit_code: int | None


class Account(msgspec.Struct):
    """The account of groups: the driver's part, then the API's."""

    begun: int
    posted: int
    unanswered: int
    given_up: dict[str, int]
    accepted: int
    waiting: int
    delivered: int
    committed: int
    dropped: dict[str, int]


class Failed(msgspec.Struct):
    """The cause of a run's failure."""

    component: str
    kind: str
    reason: Foreign
    hint: str
    excerpt: list[Foreign]


class Happened(msgspec.Struct):
    """One event, in words."""

    seq: int
    at: float
    kind: str
    text: str
    detail: Foreign | None
    level: str | None
    step: int | None


class Series(msgspec.Struct):
    """Buckets of metrics from the index `from` on; see `toprope.records.run.series.Piece`."""

    generation: int
    start: int = msgspec.field(name="from")
    width: int
    rows: int
    last_step: int
    complete: bool
    x: list[int]
    columns: dict[str, dict[str, list[float | None]]]
    names: dict[str, Foreign]


class RunLive(msgspec.Struct):
    """The part that changes while a run lives. Events and series are those after the reader's cursor; `damage` names
    records that cannot be read."""

    cursor: str
    run: RunItem
    state: Standing
    verdict: Verdict | None
    facts: Facts
    integrity: list[Check] | None
    evaluations: list[Measured]
    models: list[Model]
    checkpoints: list[dict[str, Any]]
    findings: list[Span]
    crew: list[Member]
    account: Account | None
    failure: Failed | None
    damage: list[str]
    may: dict[str, bool]
    events: list[Happened]
    events_before: int
    series: Series | None


class Run(Answer, kw_only=True):
    """One run; `gone` if it was deleted while it was watched."""

    run_id: str
    gone: bool
    fixed: RunFixed | None = None
    live: RunLive | None = None
