"""Tasks of inspect-ai with their data set, solver and scorers.

The target is inspect's name of a task: `/path/task.py@name`, or `package/name` of an installed package. Each scorer is
a part of the reward. inspect allows one evaluation per process at a time, so rollouts that arrive meanwhile wait and
form the next evaluation; within one they run concurrently, each with its own key. inspect is made for evaluation, which
limits the speed of training.

This relies on an undocumented interface of inspect (its OpenAI-compatible provider), tested with 0.3.285.
"""

from __future__ import annotations

import asyncio
import copy
import math
import os
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, make_dataclass, replace
from pathlib import Path
from typing import Any, Literal

from toprope.sdk.adapters._harbor.sandbox import require_wall
from toprope.sdk.adapters._inspect_ai.commands import confine_commands, with_refusal
from toprope.sdk.adapters._inspect_ai.images import files_of_images
from toprope.sdk.adapters._inspect_ai.listing import declared, installed
from toprope.sdk.adapters._inspect_ai.loading import load
from toprope.sdk.adapters._inspect_ai.named_models import GRADER, PROVIDER, play_named_models
from toprope.sdk.adapters._inspect_ai.packages import more_requirements
from toprope.sdk.adapters._inspect_ai.provider import Rollout, give_agents_a_key, named, register
from toprope.sdk.adapters._inspect_ai.score_values import (
    UNKNOWN,
    counted,
    is_mark,
    marks_of,
    number_of,
    reports_accuracy,
    require_names,
    unique_names,
    values_of,
)
from toprope.sdk.adapters._shared.bounds import bounds_of, within
from toprope.sdk.adapters._shared.keys import keyed_samples
from toprope.sdk.authoring.env_managed import OwnLoop, Played, Session, off_the_clock
from toprope.sdk.authoring.environment import Messages, Part, Task
from toprope.sdk.authoring.knobs import knob
from toprope.sdk.errors import EnvironmentMistake, InvalidRequest, LoadError

__all__ = ["PACKAGE", "REQUIREMENTS", "Inspect", "declared", "installed", "make", "more_requirements"]

REQUIREMENTS = ("inspect-ai>=0.3.285,<0.4", "datasets", "mcp", "openai")
PACKAGE = "inspect_ai"
EXTRAS = {
    "inspect-evals>=0.26": (
        "agentdojo", "agentic-misalignment", "b3", "bfcl", "core-bench", "gdm-stealth", "healthbench", "makemesay",
        "math", "medqa", "mind2web", "niah", "personality", "scicode", "usaco", "worldsense",
    )
}  # fmt: skip
"""Extras that `toprope env add PACKAGE` takes unless others are named: what tasks import, without torch and Docker, and
without what package indexes lack. By the package, with the oldest version that has them."""
_CURE = "environment.model_roles names a stronger grader"
_UNSCORED = "unscored"
_SHARE = (0.0, 1.0)
"""Bounds of scores that are shares of right answers."""
_NO_GOAL = "; the knob success_reward says which number counts as solved, because its largest is not known"
_OF_SHARES = ("inspect_ai/exact", "inspect_ai/f1")
"""inspect's own scorers that report the mean of values from 0 to 1."""
_LONGEST_REASON = 500
_RAISED = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Exit|Interrupt)\b")
_SHOWN = 6
"""Files of an image that are named."""
_TOGETHER = 256
"""Most rollouts in one evaluation."""


@dataclass
class InspectKnobs:
    """Knobs of an inspect task."""

    args: dict[str, Any] = knob({}, help="parameters of the task")
    turns: int = knob(32, ge=1, le=1000, help="most answers in a rollout")
    limit: int = knob(0, ge=0, help="most samples to read; 0: all")
    sandbox: Literal["task", "local"] = knob(
        "task",
        help="local: tools run as processes, each rollout's behind a wall of its own, without the task's image",
    )
    reward_low: float | None = knob(
        None,
        help="smallest score; null: 0 if its scorer reports accuracy, or else not known (mean alone bounds nothing)",
    )
    reward_high: float | None = knob(
        None,
        help="largest score; null: 1 if its scorer reports accuracy, or else not known (mean alone bounds nothing)",
    )
    success_reward: float | None = knob(
        None, help="score that counts as solved; null: the largest one, or if that is not known, C and true alone"
    )
    values: list[str] = knob(
        [],
        help="of scores with several values, those that count, by their mean; *: all; empty: the main one (score ...)",
    )


class Inspect(OwnLoop):
    """A task of inspect-ai."""

    listed = finite = takes_turns = True
    packages = ("inspect-ai",)
    tags = ("inspect", "evaluation", "model-roles")
    Knobs: type = InspectKnobs

    def __init__(self, target: str) -> None:
        self._target = target
        file = target.partition("@")[0]
        self.files = (file,) if Path(file).is_file() else ()
        name = target.rpartition("@")[2] if "@" in target else target.rpartition("/")[2].removesuffix(".py")
        self.name = f"inspect_ai/{name}"
        self.__doc__ = f"The inspect-ai task {name}"
        self._task: Any = None
        self._values: dict[str, tuple[str, str]] = {}
        """The scorer of each part, and the name of its value; empty if it is the whole score."""
        self._desk = _Desk()
        self._lacks = ""
        """Which files of the task's image its tools lack, for the descriptions of parts."""

    def setup(self) -> None:
        give_agents_a_key()
        play_named_models()
        self._task, samples, parameters = load(self._target, self.knobs.args)
        arguments = knob({}, help=f"parameters of the task: {parameters or 'it has none'}")
        self.Knobs = make_dataclass("InspectKnobs", [("args", dict[str, Any], arguments)], bases=(InspectKnobs,))
        self._use_local_sandboxes(samples)
        self._set_parts()
        self.max_turns = self.knobs.turns
        self._desk = _Desk()

    def _use_local_sandboxes(self, samples: list[Any]) -> None:
        """Replace sandboxes of other types if the owner allows that, and note what the tools lack then."""
        sandboxes = [item.sandbox for item in (self._task, *samples) if item.sandbox is not None]
        kinds = {sandbox.type for sandbox in sandboxes}
        self._lacks = ""
        if kinds:  # each ends up as processes here
            require_wall()
            confine_commands()
        if foreign := ", ".join(sorted(kinds - {"local"})):
            if self.knobs.sandbox != "local":
                raise InvalidRequest(
                    f"The task runs its tools in a sandbox of type {foreign}, which is not to be had here. Set the "
                    "knob sandbox to local to run them as processes behind the worker's wall, without its image."
                )
            from inspect_ai._eval.task.util import task_run_dir
            from inspect_ai.util import SandboxEnvironmentSpec

            if files := files_of_images(task_run_dir(self._task), (one for one in sandboxes if one.type != "local")):
                names = ", ".join([*files[:_SHOWN], *["..."] * (len(files) > _SHOWN)])
                self._lacks = f"; files of its image are not here ({names}): rewards may be alike"
            self._task.sandbox = SandboxEnvironmentSpec("local")

    def _set_parts(self) -> None:
        from inspect_ai._util.registry import registry_info

        scorers = self._task.scorer or []
        full_names = (registry_info(scorer).name for scorer in scorers)
        scorer_names = unique_names(name.partition("/")[2] or name for name in full_names)
        self.parts, self._values = {}, {}
        for name, scorer in zip(scorer_names, scorers, strict=True):
            metrics = getattr(self._task, "metrics", None) or registry_info(scorer).metadata.get("metrics")
            by_value, marks = values_of(metrics), marks_of(scorer)
            for key, value_metrics in by_value.items() or [("", metrics)]:
                is_share = registry_info(scorer).name in _OF_SHARES or reports_accuracy(value_metrics)
                part = f"{name}_{key}" if key else name
                weight = 1.0 / (len(scorer_names) * max(1, len(by_value)))
                self.parts[part] = self._part(weight, marks or (_SHARE if is_share else UNKNOWN))
                self._values[part] = name, key
        if not scorers:
            why = "always the lowest: the task has no scorer, and environment.rewards adds judges"
            self.parts = {_UNSCORED: replace(self._part(1.0, _SHARE), description=why)}

    def _part(self, weight: float, bounds: tuple[float, float]) -> Part:
        low, high = bounds_of(self.knobs, *bounds)
        unknown = high == UNKNOWN[1] and self.knobs.success_reward is None
        return Part(weight, low, high, f"a scorer{_NO_GOAL if unknown else ''}{self._lacks}")

    def success(self, parts: dict[str, float], reward: float) -> bool:
        if self.knobs.success_reward is None and all(part.high != UNKNOWN[1] for part in self.parts.values()):
            return super().success(parts, reward)
        return self._reaches_goals(parts)

    def _reaches_goals(self, parts: dict[str, float], marked: Collection[str] = ()) -> bool:
        """Return True if each part that counts reaches its goal; 1 is the goal of those that are marks."""
        goal = self.knobs.success_reward
        goals = {name: 1.0 if name in marked else part.high for name, part in self.parts.items() if part.weight > 0}
        return all(parts[name] >= (highest if goal is None else goal) - 1e-9 for name, highest in goals.items())

    def tasks(self) -> Iterator[Task]:
        listed = []
        samples = self._task.dataset[: self.knobs.limit or None]
        numbers = Counter(str(sample.id) for sample in samples if sample.id is not None)
        if repeated := [name for name, times in numbers.items() if times > 1]:
            raise InvalidRequest(f"Samples of {self._target} share the id {repeated[0]!r}, which inspect refuses.")
        for number, sample in enumerate(samples, 1):
            if sample.id is None:  # as inspect would, unless the number is taken
                sample.id = number if str(number) not in numbers else f"sample {number}"
            target = sample.target if isinstance(sample.target, str) else "\n".join(sample.target)
            listed.append(Task(_prompt_of(sample), reference=target or None, data={"sample": sample}))
        file, data = next(iter(self.files), ""), getattr(self._task.dataset, "location", None) or ""
        return keyed_samples(listed, [os.path.dirname(file), os.path.dirname(data), sys.prefix])

    async def rollout(self, session: Session) -> Played:
        rollout = Rollout(session)
        sample = await self._desk.played(self._task, self.task.data["sample"], rollout, self.max_turns)
        return self._result_of(sample, rollout)

    def _result_of(self, sample: Any, rollout: Rollout) -> Played:
        from inspect_ai.scorer import value_to_float

        messages = [_message(message) for message in rollout.messages(sample.messages)]
        turns = sum(message["role"] == "assistant" for message in messages)
        truncated = sample.limit is not None or "max_tokens" in [choice.stop_reason for choice in sample.output.choices]
        conversation: dict[str, Any] = {"messages": messages, "turns": turns, "truncated": truncated}
        if sample.error is not None:
            return Played({}, error=_reason(sample.error), **conversation)
        if _UNSCORED in self.parts:
            return Played({_UNSCORED: self.parts[_UNSCORED].low}, **conversation)
        to_float, parts, marked = value_to_float(), {}, set()
        scores = sample.scores or {}
        require_names((score.value for score in scores.values()), self.knobs.values)
        for name, (scorer, key) in self._values.items():
            score = scores.get(scorer)
            value = None if score is None else score.value
            value = counted(value.get(key) if key and isinstance(value, dict) else value, self.knobs.values)
            parts[name] = number_of(value, to_float)
            if is_mark(value) and self.parts[name].high == UNKNOWN[1]:
                marked.add(name)
            if math.isnan(parts[name]):
                why = " ".join(str(getattr(score, "explanation", None) or "it gives no reason").split())
                why = f"the scorer {name} gave no score: {why[:_LONGEST_REASON]}"
                return Played({}, error=f"{why} ({_CURE})" if "Grade not found" in why else why, **conversation)
            if (bounded := within(parts[name], self.parts[name].low, self.parts[name].high)) is None:
                raise EnvironmentMistake(
                    f"Score {name!r} is {parts[name]:g}: set the knobs reward_low and reward_high to hold it."
                )
            parts[name] = bounded
        return Played(parts, success=self._reaches_goals(parts, marked) if marked else None, **conversation)


_Pending = tuple[Any, Rollout, "asyncio.Future[None]", "asyncio.Future[Any]"]
"""A sample, its rollout, and the futures of the start of its evaluation and of its log."""


class _Desk:
    """Collects rollouts and runs them in consecutive evaluations of inspect."""

    def __init__(self) -> None:
        self._waiting: list[_Pending] = []
        self._working: asyncio.Task[None] | None = None

    async def played(self, task: Any, sample: Any, rollout: Rollout, turns: int) -> Any:
        """Return the sample of inspect's log."""
        begun, done = (asyncio.get_running_loop().create_future() for _ in range(2))
        self._waiting.append((sample, rollout, begun, done))
        if self._working is None or self._working.done():
            self._working = asyncio.create_task(self._work(task, turns))
        with off_the_clock():
            await begun
        return await done

    async def _work(self, task: Any, turns: int) -> None:
        await asyncio.sleep(0)  # The rollouts of a group arrive together.
        while waiting := [pending for pending in self._waiting if not pending[2].done()]:
            settings = _settings_of(waiting[0])
            alike = _together([pending for pending in waiting if _settings_of(pending) == settings])
            self._waiting = [pending for pending in waiting if pending not in alike]
            for _, _, begun, _ in alike:
                begun.set_result(None)
            try:
                samples = await _evaluate(task, [(sample, rollout) for sample, rollout, _, _ in alike], turns)
            except Exception as error:
                for _, _, _, done in alike:
                    if not done.done():
                        done.set_exception(RuntimeError(f"inspect: {type(error).__name__}: {error}"))
                continue
            for (_, _, _, done), sample in zip(alike, samples, strict=True):
                if isinstance(sample, Exception) and not done.done():
                    done.set_exception(sample)
                elif not done.done():
                    done.set_result(sample)


def _together(waiting: list[_Pending]) -> list[_Pending]:
    """Return what the next evaluation plays: samples that have as many rollouts as the first, its epochs."""
    by_sample: dict[str, list[_Pending]] = {}
    for pending in waiting:
        by_sample.setdefault(str(pending[0].id), []).append(pending)
    groups = [group[:_TOGETHER] for group in by_sample.values()]
    alike = [group for group in groups if len(group) == len(groups[0])]
    return [pending for group in alike[: _TOGETHER // len(groups[0])] for pending in group]


def _settings_of(pending: _Pending) -> tuple[Any, ...]:
    """Return what all rollouts of one evaluation have in common."""
    session = pending[1].session
    addresses = sorted((role, model["base_url"]) for role, model in session.roles.items())
    sampling = session.temperature, session.top_p, session.max_tokens, session.stop
    return session.base_url, session.model, sampling, session.timeout_s, addresses


async def _evaluate(task: Any, pairs: list[tuple[Any, Rollout]], turns: int) -> list[Any]:
    """Run samples in inspect, each epoch for its rollout; return their logs in order. All have as many epochs."""
    from inspect_ai import eval_async, task_with
    from inspect_ai.dataset import MemoryDataset
    from inspect_ai.model import get_model
    from inspect_ai.util._display import init_display_type

    init_display_type("none")  # There is no terminal for its progress display.
    register()
    samples = {str(sample.id): sample for sample, _ in pairs}
    epochs: Counter[str] = Counter()
    rollouts: dict[tuple[str, int], Rollout] = {}
    for sample, rollout in pairs:
        epochs[str(sample.id)] += 1
        rollouts[str(sample.id), epochs[str(sample.id)]] = rollout
    session = pairs[0][1].session
    folder = tempfile.mkdtemp(prefix="toprope-inspect-")
    try:
        names = sorted({GRADER, *(getattr(task, "model_roles", None) or ()), *session.roles})
        own = {"model": session.model, "base_url": session.base_url}
        policy, *graders = (
            get_model(
                f"{PROVIDER}/{named(session.roles.get(role, own)['model'], role)}",
                base_url=session.roles.get(role, own)["base_url"],
                api_key="of the rollout",
                memoize=False,
                rollouts=rollouts,
                plays=role,
            )
            for role in ("", *names)
        )
        logs = await eval_async(
            task_with(_copy(task), dataset=MemoryDataset(list(samples.values())), epochs=max(epochs.values())),
            model=policy,
            model_roles=dict(zip(names, graders, strict=True)),
            log_dir=folder,
            log_format="json",
            log_level="warning",
            log_realtime=False,
            log_samples=True,
            score_display=False,
            ctl_server=False,
            acp_server=False,
            fail_on_error=False,
            turn_limit=_lower(turns, task.turn_limit),
            time_limit=_lower(max(1, int(session.timeout_s)), task.time_limit),
            max_samples=len(pairs),
            max_connections=len(pairs),
            max_retries=2,
            temperature=session.temperature,
            top_p=session.top_p,
            max_tokens=session.max_tokens,
            **({"stop_seqs": list(session.stop)} if session.stop else {}),
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    log = logs[0]
    logged = {(str(sample.id), sample.epoch): sample for sample in log.samples or ()}
    if not logged:
        raise RuntimeError(f"no sample was played: {log.error.message if log.error else log.status}")
    return [logged.get(name) or RuntimeError(f"the sample was not played ({log.status})") for name in rollouts]


def _copy(task: Any) -> Any:
    copied = copy.copy(task)  # task_with modifies its argument
    copied.early_stopping = None  # It would leave out samples that others make redundant for an evaluation.
    copied.model = None  # The policy answers, whichever model the author names.
    return copied


def _lower(limit: int, authors: int | None) -> int:
    return limit if authors is None else min(limit, authors)


def make(target: str) -> Inspect:
    """Make the environment of a task. See the module.

    Raises:
        LoadError: inspect-ai or its OpenAI client is not installed.
    """
    try:
        import inspect_ai  # noqa: F401
        import openai  # noqa: F401
    except ModuleNotFoundError as error:
        raise LoadError(
            f"inspect-ai is not complete for {sys.executable} ({error}). Make it an interpreter of its own with "
            f"{', '.join(REQUIREMENTS)}."
        ) from error
    return Inspect(target)


def _prompt_of(sample: Any) -> Messages:
    if isinstance(sample.input, str):
        text = sample.input
        if sample.choices:
            text += "\n" + "\n".join(f"{chr(65 + place)}) {choice}" for place, choice in enumerate(sample.choices))
        return [{"role": "user", "content": text}]
    return [_message(message) for message in sample.input]


def _message(message: Any) -> dict[str, Any]:
    converted = {"role": message.role, "content": message.text}
    if calls := getattr(message, "tool_calls", None):
        converted["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.function, "arguments": call.arguments}}
            for call in calls
        ]
    return converted


def _reason(error: Any) -> str:
    """Return the last exception of a failed sample, with the start of its message."""
    lines = [line.strip() for line in (getattr(error, "traceback", None) or error.message or "").splitlines()]
    places = [place for place, line in enumerate(lines) if _RAISED.match(line)]
    text = " ".join(lines[places[-1] :]) if places else error.message or ""
    if "EOF when reading a line" in text:
        text = f"It asks a person, and nobody is there: {text}"
    return " ".join(with_refusal(text).split())[:_LONGEST_REASON] or "inspect gives no reason"
