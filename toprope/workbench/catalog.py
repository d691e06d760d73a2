"""Which environments there are, and what one of them is like.

Listing reads files and runs nothing, so it is quick and cannot be disturbed; it is done anew at each question, because
an author edits files while an agent watches. What a file cannot tell is asked of a worker: a process of its own that
gets a time limit and does not outlive the answer. User code never runs here.
"""

from __future__ import annotations

import asyncio
import difflib
import json
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import toprope
from toprope.errors import EnvironmentFailed, InvalidValue, NotFound, shown
from toprope.records.groups import Outcome
from toprope.records.specification import EnvironmentSource
from toprope.sdk.adapters import orchestrator
from toprope.sdk.adapters.reasoning_gym import Listing
from toprope.sdk.discovery import Found, discover_file, environment_files
from toprope.sdk.errors import WorkerDied, WorkerError, WorkerFailure, WorkerTimeout
from toprope.sdk.link import Link, worker_environment
from toprope.workbench.cards import Card, KnobCard, PartCard, SplitSize
from toprope.workbench.datasets import NamedDataset, named_datasets, plain_dataset
from toprope.workbench.described import Described, question
from toprope.workbench.leftovers import MARK, new_mark, sweep

__all__ = ["Card", "Catalog", "Description", "Entry", "Example", "KnobCard", "PartCard", "SplitSize", "shipped_folder"]

JUNK = "qx zv 17 ?!"
"""An answer that no sensible scorer rewards; what does reward it is worth knowing."""

_SURVEY_TASKS = 500
_SURVEY_SECONDS = 1.0
_GRACE_SECONDS = 1.0
_LONGEST_NAME = 100


@dataclass(frozen=True)
class Entry:
    """An environment in the catalog. See `Catalog.entries`."""

    name: str
    description: str
    source: Literal["shipped", "folder", "dataset", "reasoning_gym"]
    status: Literal["ready", "broken", "needs install"]
    problem: str
    """Why it is not ready, and what to do; empty when it is."""
    turns: int | None
    """Most answers in a rollout; None where the file computes it."""
    environment: EnvironmentSource
    tags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Example:
    """A training task, and how the environment scores three answers that say whether its scorer works."""

    messages: tuple[dict[str, Any], ...]
    reference: Any
    scores: dict[str, Outcome]
    """By answer: `reference` (where there is one), `empty`, `junk`. Each is the whole rollout: one answer, scored."""


@dataclass(frozen=True)
class Description:
    """What an environment is like, as its worker saw it."""

    entry: Entry
    card: Card
    examples: tuple[Example, ...]
    splits: dict[str, SplitSize]
    """By name; empty when no examples were asked for."""
    remarks: tuple[str, ...]
    """What looks wrong about the scoring of the examples, in sentences."""
    start_seconds: float
    """From starting the worker to its first answer."""
    load_seconds: float
    """Loading the environment, its imports included."""


def shipped_folder() -> Path:
    """The folder with the environments that ship with us: it lies beside the package."""
    return Path(toprope.__file__).resolve().parent.parent / "environments"


class Catalog:
    """The environments of some folders, and those of the ecosystems that are installed.

    Args:
        folders: The owner's folders, searched in this order after our own. One that does not exist is empty.
        shipped: Our folder.
        datasets: Folders whose files the environments `dataset` and `orchestrator` may read.
        tools: The owner's tools by name, as `LentTool.declaration` says them.
    """

    def __init__(
        self,
        folders: Iterable[Path] = (),
        *,
        shipped: Path | None = None,
        datasets: Iterable[Path] = (),
        tools: Mapping[str, Any] | None = None,
    ) -> None:
        self._shipped = shipped or shipped_folder()
        own = (Path(folder).expanduser().absolute() for folder in folders)
        self._folders = [folder for folder in dict.fromkeys(own) if folder != self._shipped]
        self._datasets = [Path(folder).expanduser().absolute() for folder in datasets]
        self._tools = dict(tools or {})
        self._reasoning_gym = Listing()
        self._described: Described[Description] = Described()
        self._read: dict[Path, tuple[tuple[int, int], list[Found]]] = {}

    def entries(self) -> list[Entry]:
        """All environments: ours, the owner's by folder and file, data sets, then reasoning-gym's by name. Files are
        read again when they changed."""
        entries: list[Entry] = []
        taken: dict[str, str] = {}
        for folder in [self._shipped, *self._folders]:
            source: Literal["shipped", "folder"] = "shipped" if folder == self._shipped else "folder"
            for found in self._discovered(folder):
                entries.append(_entry(found, source, taken))
        for dataset in [plain_dataset(self._datasets), *named_datasets(self._folders, self._datasets)]:
            entries.append(_dataset_entry(dataset, taken))
        entries.append(_orchestrator_entry(self._datasets, self._tools, taken))
        entries.extend(self._from_reasoning_gym())
        return entries

    def search(self, query: str = "") -> list[Entry]:
        """Entries whose name, description or tags contain every word of a query; those that match by name first."""
        words = query.casefold().split()
        entries = self.entries()

        def missing_from_name(entry: Entry) -> int:
            return sum(word not in entry.name.casefold() for word in words)

        found = [entry for entry in entries if all(word in _text(entry) for word in words)]
        return sorted(found, key=missing_from_name)

    def find(self, name: str) -> Entry:
        """The environment of that name.

        Raises:
            NotFound: There is none; the message names the three nearest.
        """
        entries = self.entries()
        named = [entry for entry in entries if entry.name == name]
        for entry in named:
            if entry.status == "ready":
                return entry
        if named:
            return named[0]
        close = _nearest(name, [entry.name for entry in entries])
        hint = f"The nearest: {', '.join(close)}." if close else ""
        raise NotFound(f"There is no environment {shown(name)}.", hint=f"{hint} list_environments shows all.".strip())

    async def describe(
        self,
        entry: Entry,
        knobs: Mapping[str, Any] | None = None,
        *,
        reward_weights: Mapping[str, float] | None = None,
        examples: int = 3,
        load_timeout_s: float = 60.0,
        call_timeout_s: float = 20.0,
        variables: Mapping[str, str] | None = None,
    ) -> Description:
        """Asks a worker what an environment is like.

        Args:
            entry: Which.
            knobs: Settings to describe it with; the defaults for the rest.
            reward_weights: Weights to describe it with.
            examples: Training tasks to show and score; fewer where there are fewer. With 0 the card is all that is
                asked for: no task is made.
            load_timeout_s: Seconds for the worker's start, and again for loading.
            call_timeout_s: Seconds for each call after that.
            variables: Variables for the worker beside the usual ones.

        Raises:
            InvalidValue: A knob or weight is wrong.
            EnvironmentFailed: It is not ready, does not load, raises, hangs, or ends its process.
        """
        _require_ready(entry)
        source = entry.environment.model_dump()
        asked = question(
            source, self._shipped, knobs=knobs, weights=reward_weights, examples=examples, variables=variables
        )
        limits = load_timeout_s, call_timeout_s
        return await self._described.get(
            asked, lambda: self._ask(entry, knobs, reward_weights, examples, *limits, variables)
        )

    async def _ask(
        self,
        entry: Entry,
        knobs: Mapping[str, Any] | None,
        reward_weights: Mapping[str, float] | None,
        examples: int,
        load_timeout_s: float,
        call_timeout_s: float,
        variables: Mapping[str, str] | None,
    ) -> Description:
        began = time.monotonic()
        link: Link | None = None
        mark = new_mark()
        grace = 0.0  # only a worker that answered to the end gets time to end by itself
        try:
            surroundings = worker_environment({**(variables or {}), MARK: mark})
            link = await Link.start(entry.environment.interpreter, env=surroundings, timeout=load_timeout_s)
            started = time.monotonic()
            opened = await link.call(
                "open",
                timeout=load_timeout_s,
                source=entry.environment.model_dump(include={"file", "attribute", "adapter", "target"}),
                knobs=dict(knobs or {}),
                reward_weights=dict(reward_weights or {}),
            )
            card, loaded = Card.model_validate(opened), time.monotonic()
            shown: tuple[Example, ...] = ()
            sizes: dict[str, Any] = {}
            refused = ""
            if examples:
                try:
                    shown = await _examples(link, examples, call_timeout_s)
                    sizes = await link.call(
                        "survey", timeout=call_timeout_s + _SURVEY_SECONDS, limit=_SURVEY_TASKS, seconds=_SURVEY_SECONDS
                    )
                except WorkerError as failure:
                    if failure.kind != "invalid":
                        raise
                    refused = failure.message  # it has no tasks with these knobs, and says why: the card stands
            grace = _GRACE_SECONDS
        except WorkerFailure as failure:
            raise _failed(entry, failure) from failure
        finally:
            if link is not None:
                await asyncio.shield(link.close(grace))
            await asyncio.shield(asyncio.to_thread(sweep, mark))
        return Description(
            entry=entry,
            card=card,
            examples=shown,
            splits={name: SplitSize.model_validate(size) for name, size in sizes.items()},
            remarks=(refused,) if refused else tuple(_remarks(card, shown)) if examples else (),
            start_seconds=started - began,
            load_seconds=loaded - started,
        )

    def _discovered(self, folder: Path) -> list[Found]:
        found: list[Found] = []
        for file in environment_files(folder):
            try:
                stat = file.stat()
            except OSError:
                continue  # removed since it was listed
            stamp = (stat.st_mtime_ns, stat.st_size)
            known = self._read.get(file)
            if known is None or known[0] != stamp:
                known = self._read[file] = (stamp, discover_file(file))
            found.extend(known[1])
        return found

    def _from_reasoning_gym(self) -> list[Entry]:
        tasks = self._reasoning_gym.tasks()
        if tasks:
            return [
                Entry(
                    name=f"reasoning_gym/{task.name}",
                    description=task.description,
                    source="reasoning_gym",
                    status="ready",
                    problem="",
                    turns=1,
                    environment=_gym_source(task.name),
                    tags=(task.category,),
                )
                for task in tasks
            ]
        return [
            Entry(
                name="reasoning_gym",
                description="More than a hundred generated reasoning tasks",
                source="reasoning_gym",
                status="needs install",
                problem=f"Install it: {sys.executable} -m pip install reasoning-gym",
                turns=1,
                environment=EnvironmentSource(name="reasoning_gym"),
            )
        ]


def _gym_source(task: str) -> EnvironmentSource:
    return EnvironmentSource(name=f"reasoning_gym/{task}", adapter="reasoning_gym", target=task)


def _entry(found: Found, source: Literal["shipped", "folder"], taken: dict[str, str]) -> Entry:
    problem = found.problem
    if not problem:
        holder = taken.setdefault(found.name, f"{found.file}:{found.line}")
        if holder != f"{found.file}:{found.line}":
            problem = (
                f"The name {found.name!r} is taken by {holder}. Set another `name` in {found.attribute} "
                f"({found.file}:{found.line})."
            )
    return Entry(
        name=found.name,
        description=found.description,
        source=source,
        status="broken" if problem else "ready",
        problem=problem,
        turns=found.max_turns,
        environment=EnvironmentSource(name=found.name, file=str(found.file), attribute=found.attribute or None),
        tags=found.tags,
    )


def _orchestrator_entry(folders: list[Path], tools: Mapping[str, Any], taken: dict[str, str]) -> Entry:
    name = orchestrator.Orchestrator.name
    target = json.dumps({"folders": [str(folder) for folder in folders], "tools": tools}, sort_keys=True)
    holder = taken.setdefault(name, "Toprope itself")
    problem = "" if holder == "Toprope itself" else f"The name {name!r} is taken by {holder}. Rename that one."
    return Entry(
        name=name,
        description=orchestrator.DESCRIPTION,
        source="shipped",
        status="broken" if problem else "ready",
        problem=problem,
        turns=orchestrator.Orchestrator.max_turns,
        environment=EnvironmentSource(name=name, adapter="orchestrator", target=target),
        tags=orchestrator.Orchestrator.tags,
    )


def _dataset_entry(dataset: NamedDataset, taken: dict[str, str]) -> Entry:
    problem = dataset.problem
    if not problem:
        holder = taken.setdefault(dataset.name, dataset.origin)
        if holder != dataset.origin:
            problem = f"The name {dataset.name!r} is taken by {holder}. Rename {dataset.origin}."
    return Entry(
        name=dataset.name,
        description=dataset.description,
        source="dataset",
        status="broken" if problem else "ready",
        problem=problem,
        turns=1,
        environment=EnvironmentSource(name=dataset.name, adapter="dataset", target=dataset.target),
        tags=("dataset", "no-code"),
    )


def _text(entry: Entry) -> str:
    return " ".join([entry.name, entry.description, entry.source, *entry.tags]).casefold()


def _nearest(name: str, names: Sequence[str]) -> list[str]:
    """Up to three names, compared whole and without what comes before the slash."""
    wanted = name[:_LONGEST_NAME].casefold()  # the comparison takes time by length

    def likeness(candidate: str) -> float:
        return max(
            difflib.SequenceMatcher(None, wanted, form).ratio() for form in (candidate, candidate.rpartition("/")[2])
        )

    ranked = sorted(((likeness(candidate), candidate) for candidate in names), key=lambda pair: -pair[0])
    return [candidate for ratio, candidate in ranked[:3] if ratio >= 0.4]


def _require_ready(entry: Entry) -> None:
    if entry.status == "broken":
        raise EnvironmentFailed(f"{entry.name} is broken: {entry.problem}", hint="Mend the file and list again.")
    if entry.status == "needs install":
        raise EnvironmentFailed(f"{entry.name} is not installed.", hint=entry.problem)


async def _examples(link: Link, count: int, timeout: float) -> tuple[Example, ...]:
    found = await link.call("tasks", timeout=timeout, split="train", start=0, count=count)
    examples = []
    for index, task in enumerate(found["tasks"]):
        answers = {"empty": "", "junk": JUNK}
        if task["reference"] is not None:
            answers = {"reference": str(task["reference"]), **answers}
        scores = {}
        for label, answer in answers.items():
            scored = await link.call("score", timeout=timeout, split="train", index=index, answer=answer)
            scores[label] = Outcome(**scored)
        examples.append(Example(tuple(task["messages"]), task["reference"], scores))
    return tuple(examples)


def _remarks(card: Card, examples: Sequence[Example]) -> list[str]:
    """What the scores of the examples say about the scorer."""
    remarks = []
    if not examples:
        return ["The train split has no tasks."]
    for label in ("reference", "empty", "junk"):
        outcomes = [example.scores[label] for example in examples if label in example.scores]
        errors = [outcome.error for outcome in outcomes if outcome.error]
        if errors:
            remarks.append(f"Scoring the {label} answer raises: {errors[0]} (such a rollout gets reward 0).")
        elif label == "reference" and not all(outcome.success for outcome in outcomes):
            best = max(outcome.reward for outcome in outcomes)
            remarks.append(f"The reference answer does not succeed everywhere (best reward {best:g}).")
        elif label != "reference" and any(outcome.success for outcome in outcomes):
            remarks.append(f"An answer that is {label} succeeds: the scorer can be fooled.")
        elif label != "reference" and any(outcome.reward > 0 for outcome in outcomes):
            most = max(outcome.reward for outcome in outcomes)
            remarks.append(f"An answer that is {label} is rewarded with up to {most:g} of {card.max_reward:g}.")
    return remarks


def _failed(entry: Entry, failure: WorkerFailure) -> EnvironmentFailed | InvalidValue:
    """A worker's failure in the words of our own tree."""
    if isinstance(failure, WorkerError):
        if failure.kind == "invalid":
            return InvalidValue(f"{entry.name}: {failure.message}")
        place = f" at {failure.where}" if failure.where else ""
        if failure.kind == "load":
            return EnvironmentFailed(f"{failure.message}{place}", hint=f"{entry.name} was not loaded; mend this first.")
        return EnvironmentFailed(
            f"{entry.name} raised {failure.type}: {failure.message.rstrip('.')}{place}.",
            hint="Mend the environment's code.",
        )
    if isinstance(failure, WorkerTimeout):
        return EnvironmentFailed(
            f"{entry.name} hangs or is slow. {failure}",
            hint="Look for an endless loop, a download, or tasks that take long to make.",
        )
    if isinstance(failure, WorkerDied) and failure.code is None:
        return EnvironmentFailed(
            f"{entry.name} was not loaded. {failure}.",
            hint="Look at this machine's limits (ulimit -a: open files, processes, memory), then call again.",
        )
    died = f"{entry.name} ended its own process. {failure}" if isinstance(failure, WorkerDied) else str(failure)
    return EnvironmentFailed(died, hint="Look for os._exit, a crash in native code, or too little memory.")
