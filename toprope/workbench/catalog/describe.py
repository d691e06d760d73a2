"""Describe an environment with a short-lived worker.

User code runs in the worker only. It has time limits, and no process outlives the description.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from toprope.errors import EnvironmentFailed, InvalidValue, visible
from toprope.records.walls import Walls
from toprope.records.worker_messages import Card, SplitSize, TaskView
from toprope.sdk.checks.answers import JUNK, near_miss
from toprope.sdk.errors import OURS, WorkerDied, WorkerError, WorkerFailure, WorkerTimeout
from toprope.sdk.wall.paths import folders_above
from toprope.sdk.wall.plan import Network
from toprope.sdk.wall.scratch import Scratch
from toprope.supervisor.environment_variables import keeper_variables, split_keeper_variables
from toprope.text_format import call, secret_values
from toprope.training.rollouts.curriculum import level_variant
from toprope.training.rollouts.workers.environment_worker import EnvironmentWorker
from toprope.training.rollouts.workers.walls import environment_wall, missing_wall
from toprope.untrusted import marked, named
from toprope.workbench.adapters import adapters
from toprope.workbench.catalog.describe_cache import Described, question
from toprope.workbench.catalog.remarks import EMPTY, Example, remarks_on
from toprope.workbench.catalog.stray_processes import MARK, new_mark, sweep
from toprope.workbench.entries import Entry

__all__ = ["JUNK", "Describer", "Description", "Example", "WorkerOptions", "failed", "require_usable"]

_EXAMPLES_SECONDS = 10.0
_SURVEY_TASKS = 500
_SURVEY_SECONDS = 1.0
_GRACE_SECONDS = 1.0
_TASKS, _TASKS_SECONDS = 8, 2.0
"""Tasks for the fit check, and the longest time for them."""
_LONGEST = 1000
_FOREIGN = (
    "This is code of other authors: try other knobs (describe_environment with knobs), add what its package says it "
    "needs (the same toprope env add, with --requirement PACKAGE), or choose another environment."
)
_OF_ROWS = "Mend the rows of its file, or set other knobs (describe_environment with knobs)."
BROKEN = "Tell its author, choose another environment, or remove what was added: toprope env remove."
"""Advice to a user of files that cannot be read."""
_UNREACHED = re.compile(r"could not be reached(?: \([^()]*\))?(?:\. Its files read the variables .*)?\.?$")
"""The end of the text of a failure for which data of the internet are missing."""
_SERVICE = re.compile(r"\bPOST\b|\bapi\.[\w.-]+ could not be reached")
"""In the text of a failure for which no data are missing, but a service."""
_BESIDES = "; besides, "
"""Before a host that another call did not reach, which is no cause of this failure."""
_SHUT = re.compile(
    r"\[Errno (?:13|30)\]|Read-only file system|PermissionError|cannot (?:create|touch|move) [^:]*: Permission denied|"
    r"unable to open database file|readonly database"
)
_KEY = re.compile(
    r"\b(?!(?:[A-Z0-9]+_)*(?:INVALID|MISSING|EXPIRED|WRONG|BAD|NO)_)(?:[A-Z][A-Z0-9_]*_(?:API_KEY|ACCESS_KEY|SECRET)|"
    r"(?:[A-Z0-9]+_)*(?:HF|HUB|GITHUB|GH|GITLAB|BOT|ACCESS|AUTH|API)_TOKEN)\b"
)
_VARIABLE = re.compile(
    r"\b[Ss]et (?:the )?(?:environment variable )?[\"'`]?([A-Z][A-Z0-9_]{5,})[\"'`]?"
    r"(?:=\S+| (?:in your|in the|environment))"
)
"""A variable that a text asks to set; a knob has a name in small letters."""
_OF_ROLLOUT = re.compile(r"did not answer '(?:begin|advance|settle|score|run)'")
_IMPORT = re.compile(
    r"\b(?:ImportError|ModuleNotFoundError): |\bCould not import\b|\bMake sure [^.]{1,60} installed\b|"
    r"\bis not installed\b|\bnot found (?:on|in) (?:your |the )?PATH\b"
)
_PROGRAM = re.compile(r"\[Errno 2\] No such file or directory: '(?P<program>[\w+-]+)'")
_OTHER_VERSION = re.compile(r"; the installed (?P<package>[\w.-]+) (?P<version>\S+) lacks it\)?$")
_LACKS = re.compile(
    r"pip3? install (?:-[\w-]+ )*[\"'`]?(?P<package>(?![\w+.-]+://)[\w.-]+(?:\[[\w,-]+\])?)|"
    r"No module named '(?P<module>[\w.]+)'"
)
_PLAIN_MODULES = frozenset("common config core data helpers lib main models scripts src tests utils".split())
"""Modules of an author's own project; packages of these names on an index are of strangers."""


@dataclass(frozen=True)
class WorkerOptions:
    """Options with which a worker opens an environment, to describe or to check it."""

    knobs: Mapping[str, Any] = field(default_factory=dict)
    """Knobs that differ from the defaults."""
    reward_weights: Mapping[str, float] = field(default_factory=dict)
    levels: tuple[Mapping[str, Any], ...] = ()
    """Knobs of the levels of a curriculum, each of which is opened."""
    load_timeout_s: float = 120.0
    """Seconds for the worker's start, and again for loading."""
    call_timeout_s: float = 20.0
    """Seconds for each later call."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Additional environment variables."""
    tool_variables: Mapping[str, str] = field(default_factory=dict)
    """Those of the tools that the owner lends, see `OwnerSettings.tool_variables`."""
    network: Network = "allow"
    walls: Walls = field(default_factory=Walls)
    """The owner's decisions about walls."""

    async def start(
        self, entry: Entry, variables: Mapping[str, str], folder: str | None, stderr: Any = None
    ) -> EnvironmentWorker:
        """Start a worker in a folder, without opening the environment."""
        wall = environment_wall(self.walls, entry.environment, network=self.network)
        worker = await EnvironmentWorker.behind(
            wall,
            entry.environment.interpreter,
            env={**_as_in_runs(), **self.variables, **variables},
            cwd=folder,
            stderr=stderr,
            timeout=self.load_timeout_s,
        )
        worker.secrets += secret_values(self.tool_variables)
        return worker

    async def open(self, worker: EnvironmentWorker, entry: Entry, **more: Any) -> Card:
        """Open the environment in a started worker, with its reward functions and the levels of its curriculum."""
        card = await worker.open(
            entry.environment.for_worker(self.tool_variables, self.knobs, *self.levels),
            timeout=self.load_timeout_s,
            knobs=dict(self.knobs),
            reward_weights=dict(self.reward_weights),
            rewards=[reward.model_dump() for reward in entry.environment.rewards],
            **more,
        )
        for number, knobs in enumerate(self.levels):
            await worker.vary(level_variant(number), knobs, timeout=self.load_timeout_s)
        return card


def _as_in_runs() -> dict[str, str]:
    """Return the variables of this process that the components of a run get as well: no keys."""
    return split_keeper_variables(keeper_variables({}))[0]


_DEFAULTS = WorkerOptions()


@dataclass(frozen=True)
class Description:
    """The description of an environment by its worker."""

    entry: Entry
    card: Card
    examples: tuple[Example, ...]
    splits: dict[str, SplitSize]
    """Task counts by split; empty if no examples were requested."""
    remarks: tuple[str, ...]
    """Problems with the scores of the examples, as sentences."""
    load_seconds: float
    """Seconds to load the environment, imports included."""
    score_seconds: float | None = None
    """Mean seconds to begin a rollout and score one answer."""
    memory_mb: float | None = None
    """Memory of the worker afterwards."""
    tasks: tuple[TaskView, ...] = ()
    """A few training tasks; empty if there are none or they take too long."""
    refused: str = ""
    """Why there are no tasks with these knobs, in the environment's words; empty if there are some."""


class Describer:
    """Describes environments with workers, and caches descriptions of those that come with the installation.

    Args:
        shipped: Folder of the shipped environments.
    """

    def __init__(self, shipped: Path) -> None:
        self._shipped = shipped
        self._described: Described[Description] = Described()

    async def describe(self, entry: Entry, options: WorkerOptions = _DEFAULTS, *, examples: int = 3) -> Description:
        """Describe an environment.

        Args:
            options: Knobs, limits and permissions of the worker.
            examples: Most training tasks to show and score. 0 asks for the card and a few prompts alone.

        Raises:
            InvalidValue: A knob or weight is invalid.
            EnvironmentFailed: The environment is not ready, does not load, raises, hangs, or ends its process.
        """
        require_usable(entry)
        depends = {name: value for name, value in asdict(options).items() if not name.endswith("_timeout_s")}
        key = question(entry.environment.model_dump(), self._shipped, examples=examples, **depends)
        return await self._described.get(key, lambda: self._describe_in_worker(entry, options, examples))

    async def _describe_in_worker(self, entry: Entry, options: WorkerOptions, examples: int) -> Description:
        link: EnvironmentWorker | None = None
        mark, folder = new_mark(), _folder()
        grace = 0.0  # Only a worker that answered everything gets time to end by itself.
        try:
            link = await options.start(entry, {MARK: mark}, None if folder is None else folder.path)
            rights = [missing] if (missing := missing_wall(link.enclosure)) else []
            if entry.environment.file and (above := folders_above(entry.environment.file, options.walls.closed)):
                rights.append(f"Its code can read all of {', '.join(above)}, because its file imports from there.")
            started = time.monotonic()
            card = await options.open(link, entry)
            loaded = time.monotonic()
            scored: tuple[Example, ...] = ()
            sizes: dict[str, SplitSize] = {}
            refused, score_s = "", None
            if examples:
                try:
                    scored, score_s = await _examples(link, examples, options)
                    left = max(0.0, loaded + options.load_timeout_s - time.monotonic())  # of the time for first tasks
                    limit = options.call_timeout_s + _SURVEY_SECONDS + left
                    sizes = await link.survey(_SURVEY_TASKS, _SURVEY_SECONDS, timeout=limit)
                except WorkerError as failure:
                    if failure.kind != "invalid":
                        raise
                    refused = failure.message  # No tasks with these knobs; the card is still valid.
            memory_mb = await asyncio.to_thread(_memory_mb, link.pid) if examples else None
            grace = _GRACE_SECONDS
            try:
                page = await link.tasks("train", 0, _TASKS, timeout=_TASKS_SECONDS)
                tasks = tuple(page.tasks)
                if not tasks and page.exhausted:
                    refused = refused or EMPTY
            except WorkerFailure as failure:  # the card is valid without tasks
                tasks, grace = (), 0.0
                if isinstance(failure, WorkerError) and failure.kind == "invalid":
                    refused = failure.message
        except WorkerFailure as failure:
            raise failed(entry, failure, options.walls) from failure
        finally:
            if link is not None:
                await asyncio.shield(link.close(grace))
            await asyncio.shield(asyncio.to_thread(sweep, mark))
            if folder is not None:
                folder.remove()
        return Description(
            entry=entry,
            card=card,
            examples=scored,
            splits=sizes,
            remarks=(*rights, *(remarks_on(card, scored, sizes, refused) if examples else ())),
            load_seconds=loaded - started,
            score_seconds=score_s,
            memory_mb=memory_mb,
            tasks=tasks,
            refused=refused,
        )


def _folder() -> Scratch | None:
    """Make a temporary working folder, because some environments write into theirs; None if the disk is full."""
    try:
        return Scratch()
    except OSError:
        return None


def require_usable(entry: Entry) -> None:
    """Check that a worker can open the environment.

    Raises:
        EnvironmentFailed: The environment is broken or not installed.
    """
    if entry.status == "broken":
        cure = "Fix it and list again." if entry.ecosystem == "toprope" else BROKEN
        raise EnvironmentFailed(f"{entry.name} is broken: {entry.problem}", hint=cure)
    if not entry.usable:
        raise EnvironmentFailed(f"{entry.name} is not installed.", hint=entry.problem)


async def _examples(
    link: EnvironmentWorker, count: int, options: WorkerOptions
) -> tuple[tuple[Example, ...], float | None]:
    """Return examples, and the mean seconds per answer. The first tasks may take as long as loading does."""
    timeout = options.call_timeout_s
    page = await link.tasks("train", 0, count, timeout=timeout + options.load_timeout_s)
    examples, calls, seconds = [], 0, 0.0
    for index, task in enumerate(page.tasks):
        if seconds > _EXAMPLES_SECONDS:
            break  # One example tells enough about a scorer that is slow, such as one with tool servers.
        answers = {"empty": "", "junk": JUNK}
        if task.reference is not None:
            answers = {"reference": str(task.reference), **answers}
            if (near := near_miss(answers["reference"])) is not None:
                answers["near_miss"] = near
        scores: dict[str, Any] = {}
        for label, answer in answers.items():
            if seconds > _EXAMPLES_SECONDS and scores:
                break
            began = time.monotonic()
            scores[label] = await link.score("train", index, answer, timeout=timeout)
            calls, seconds = calls + 1, seconds + time.monotonic() - began
        examples.append(Example(tuple(task.messages), task.reference, scores))
    return tuple(examples), seconds / calls if calls else None


def _memory_mb(pid: int) -> float | None:
    import psutil

    try:
        return psutil.Process(pid).memory_info().rss / (1 << 20)
    except psutil.Error:
        return None


def failed(entry: Entry, failure: WorkerFailure, walls: Walls, trying: str = "") -> EnvironmentFailed | InvalidValue:
    """Convert a worker's failure into an EnvironmentFailed or InvalidValue; its text is untrusted.

    Args:
        trying: The call that gives a knob, as the caller writes it; empty: that of check_environment.
    """
    trying = trying or call("check_environment", name=entry.name, knobs={"NAME": "VALUE"})
    error = _error_of(entry, failure, walls, trying)
    error.message = visible(error.message)
    return error


def _error_of(entry: Entry, failure: WorkerFailure, walls: Walls, trying: str) -> EnvironmentFailed | InvalidValue:
    if isinstance(failure, WorkerError):
        if failure.kind == "invalid":
            hint = f"Its settings are given as knobs, as in {trying}."
            if _is_unreached(failure.message):
                hint = f"{_cure(entry, failure, walls)} {hint}"
            elif wanted := _variable_asked_for(failure.message):
                hint = f"{wanted} {hint}"
            return InvalidValue(f"{entry.name}: {marked(failure.message, _LONGEST)}", hint=hint)
        place = f" at {failure.where}" if failure.where else ""
        raised = f"{entry.name} raised {named(failure.type)}: {marked(failure.message.rstrip('.'), _LONGEST)}{place}."
        if entry.ecosystem != "toprope" and (cure := _cure(entry, failure, walls)):
            return EnvironmentFailed(raised, hint=cure)
        if failure.kind == "load":
            cure = _by_author(entry, "Fix this first.", "Fix this first.")
            return EnvironmentFailed(
                f"{marked(failure.message, _LONGEST)}{place}", hint=f"{entry.name} was not loaded. {cure}"
            )
        return EnvironmentFailed(raised, hint=_by_author(entry, "Fix the environment's code.", _OF_ROWS))
    if isinstance(failure, WorkerTimeout):
        ours = "Look for an endless loop, a download, or slow task generation."
        longer = "" if _OF_ROLLOUT.search(str(failure)) else "; environment.load_timeout_s gives it longer"
        theirs = f"It may wait for a download or a server{longer}. {_by_author(entry, '', _OF_ROWS)}"
        hint = theirs if entry.environment.is_foreign else ours
        words = failure.stderr.rpartition("\n")[2].removeprefix(OURS).strip()
        printed = f" It printed last: {marked(words, _LONGEST)}" if words else ""
        return EnvironmentFailed(f"{entry.name} hangs or is slow. {failure}{printed}", hint=hint)
    if isinstance(failure, WorkerDied) and failure.code is None:
        return EnvironmentFailed(
            f"{entry.name} was not loaded. {failure}.",
            hint="Check this machine's limits (ulimit -a: open files, processes, memory), then call again.",
        )
    died = f"{entry.name} ended its own process. {failure}" if isinstance(failure, WorkerDied) else str(failure)
    return EnvironmentFailed(died, hint="Look for os._exit, a crash in native code, or too little memory.")


def _by_author(entry: Entry, own: str, rows: str) -> str:
    """Return the advice for code of the owner, for their rows without code, or for code of other authors."""
    return rows if entry.environment.of_rows else _FOREIGN if entry.environment.is_foreign else own


def _is_unreached(text: str) -> bool:
    return bool(_UNREACHED.search(text))


def _kept(entry: Entry, walls: Walls) -> str:
    """Say which folder keeps what an environment loads, and how the owner fills it; empty if no folder does."""
    wall = environment_wall(walls, entry.environment)
    if wall.home is None or wall.trusted or entry.source == "server" or entry.environment.adapter == "harbor":
        return ""
    filled = f"`toprope env try {entry.name}` (with the same knobs) fills it where that host can be reached, or "
    if wall.home.endswith("@agent") and entry.environment.rewards:  # of an agent, which that command does not have
        filled = ""
    return (
        f"Its HOME, {wall.home}, keeps what it loads: {filled}the owner copies data there (the Hub's to "
        ".cache/huggingface, NLTK's to nltk_data)."
    )


def _cure(entry: Entry, failure: WorkerError, walls: Walls) -> str:
    """Return what helps against a failure of other authors' code; empty if its text does not tell."""
    text = failure.message
    if _is_unreached(text):
        if _SERVICE.search(text):
            return (
                "It asks a service there. Where that can be reached, environment.network: allow lets it, and "
                "settings.yaml gives it a key, variables: {environment: {NAME: ...}}; or choose other knobs or another "
                "environment."
            )
        begun = "Its settings may be at fault (describe_environment with knobs), or it" if _BESIDES in text else "It"
        kept = _kept(entry, walls) or "Run it where that host can be reached."
        return (
            f"{begun} needs data from there. {kept} Else name data of your own by its knobs, set environment.network: "
            "allow, or choose another environment."
        )
    if match := _OTHER_VERSION.search(text):
        package, version = named(match["package"]), named(match["version"])
        played = {adapter.distribution for adapter in adapters() if adapter.name == entry.environment.adapter}
        if canonicalize_name(match["package"]) in played:
            return (
                f"It was written for another version of {package} than {version}, which Toprope plays: adapt it in a "
                "copy, or choose another environment."
            )
        return (
            f"It was written for another version of {package} than {version}. If the owner agrees, they repeat its "
            f"toprope env add with --requirement '{package}==VERSION', a version of its time."
        )
    if _IMPORT.search(f"{failure.type}: {text}") and (lacks := _LACKS.search(text)):
        root = (lacks["module"] or "").partition(".")[0]
        if root in _PLAIN_MODULES:
            return (
                f"It imports {root}, as many projects name a folder of their own: it is played with the whole project. "
                "The owner gives toprope env add that folder, and with --requirement a project that its page names."
            )
        package = named(lacks["package"]) if lacks["package"] else f"the package of {named(lacks['module'])}"
        return (
            f"Its text asks for {package}. If the owner agrees, they repeat its toprope env add with --requirement and "
            "that package."
        )
    if program := _PROGRAM.search(text):
        return (
            f"It looks for {named(program['program'])}. If that is a program, the owner may install it on this "
            "machine, or repeat its toprope env add with --requirement and a package that brings it; a file is one of "
            "its own."
        )
    if _SHUT.search(text):
        return (
            "Behind its wall it writes only below its HOME and TMPDIR, and to a /tmp of its own unless code lies there."
            " The owner may make the folder, or take the one that is to hold a file, and list it in settings.yaml, "
            f"environment: {{{entry.name}: {{writes: [FOLDER]}}}}, or trust it."
        )
    return _variable_asked_for(text)


def _variable_asked_for(text: str) -> str:
    """Say how the owner sets a variable for which a text asks; empty if it asks for none."""
    if key := _KEY.search(text):
        kind, name = "a key", key[0]
    elif variable := _VARIABLE.search(text):
        kind, name = "a variable", variable[1]
    else:
        return ""
    return (
        f"Its text asks for {kind}. If the owner agrees, settings.yaml gives it to environments, variables: "
        f"{{environment: {{{named(name)}: ...}}}}; or choose another environment."
    )
