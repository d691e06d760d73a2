"""Real runs for `make bench-findings`, started and read with the tools that an agent has."""

from __future__ import annotations

import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import anyio
import yaml
from toprope_tools.answers.answer import Answer
from toprope_tools.experiments.config_history import fork_config
from toprope_tools.planning.config import edit_config
from toprope_tools.planning.environments import select_environment
from toprope_tools.results.results import get_results
from toprope_tools.runs.training import start_training
from toprope_tools.workshop import Workshop

from benchmarks.findings.changes import ENVIRONMENTS
from toprope.settings.owner import Home
from toprope.settings.presets import load_preset
from toprope.settings.yamlfiles import read_yaml
from toprope.shipped import CONFIGS

__all__ = ["Done", "Runner"]

_T, _R = TypeVar("_T"), TypeVar("_R")
PRESET = "short"
HELDOUT_TASKS = 300
STEPS = 300


@dataclass(frozen=True)
class Done:
    """A run that ended.

    `answer` is the structure of get_results; accuracies are those of the sampled held-out answers after training, with
    the 95 % interval.
    """

    run_id: str
    state: str
    answer: dict[str, Any]
    text: str
    accuracy: float | None
    low: float | None
    high: float | None
    before: float | None
    train_s: float | None
    """Seconds of training."""
    seconds: float
    """Seconds from the start to the end."""

    @property
    def causes(self) -> list[dict[str, Any]]:
        return list(self.answer.get("causes", {}).get("ranked", []))

    @property
    def advice(self) -> dict[str, Any]:
        """The changes that the first advice of the answer names."""
        return dict(self.answer.get("causes", {}).get("changes", {}))

    @property
    def differs(self) -> list[str]:
        """Fields that differ from the preset, in the answer's order."""
        return list(self.answer.get("causes", {}).get("differs", {}))


class Runner:
    """Starts runs in a home of its own, with the shipped locks and limits.

    The preset is cpu-embedded with less training time and fewer held-out tasks.

    Args:
        home: An empty folder.
        seconds: Training time of the preset.
    """

    def __init__(self, home: Path, seconds: float) -> None:
        self.seconds = seconds
        configuration = home / "config"
        (configuration / "presets").mkdir(parents=True, exist_ok=True)
        own = read_yaml(CONFIGS / "presets" / "cpu-embedded.yaml")
        own["config"]["budget"] = {"steps": STEPS, "max_train_seconds": seconds}
        own["config"]["evaluation"] = {"heldout_tasks": HELDOUT_TASKS, "greedy": False, "examples": 0}
        _write_yaml(configuration / "presets" / f"{PRESET}.yaml", own)
        _write_yaml(configuration / "settings.yaml", {"environments": [str(Path(__file__).with_name("environments"))]})
        load_preset(PRESET, [configuration / "presets"])
        self._home = Home(home, configuration)
        self._ending = threading.Event()

    def each(self, work: Callable[[_T], _R], tasks: Sequence[_T], at_once: int) -> list[_R]:
        """Call `work` for each task, several at a time; when interrupted, stop what runs and begin nothing more."""
        pool = ThreadPoolExecutor(at_once)
        try:
            return list(pool.map(work, tasks))
        except BaseException:
            self._ending.set()
            raise
        finally:
            pool.shutdown(cancel_futures=True)

    def train(self, environment: str, changes: dict[str, Any], name: str) -> Done:
        """Train a draft of the preset with changes to its end.

        Raises:
            ValueError: Not one of the benchmark's environments.
        """
        if environment not in ENVIRONMENTS:
            raise ValueError(f"{environment!r} is none of {', '.join(ENVIRONMENTS)}.")
        workshop = Workshop.open(self._home)
        draft = _call(select_environment, workshop, name=environment, preset=PRESET).data.draft_id
        return self._train(workshop, draft, changes, name)

    def mend(self, run_id: str, changes: dict[str, Any], name: str) -> Done:
        """Fork a run, apply changes, and train it to its end."""
        workshop = Workshop.open(self._home)
        draft = _call(fork_config, workshop, run_id=run_id).data.draft_id
        return self._train(workshop, draft, changes, name)

    def _train(self, workshop: Workshop, draft: str, changes: dict[str, Any], name: str) -> Done:
        began = time.monotonic()
        if changes:
            _call(edit_config, workshop, draft_id=draft, changes=changes)
        run_id = _call(start_training, workshop, draft_id=draft, name=name).data.run_id
        limit = began + 600 + 4 * self.seconds
        while not (status := workshop.runs.status(run_id)).ended:
            if self._ending.is_set():
                workshop.runs.stop(run_id)
                raise SystemExit(f"{run_id} was stopped.")
            if time.monotonic() > limit:
                workshop.runs.stop(run_id)
            time.sleep(0.5)
        answer = _call(get_results, workshop, run_id=run_id)
        results = answer.data.results
        after, before = (
            (results.get("evaluations", {}).get(label) or {}).get("sampled") or {} for label in ("after", "before")
        )
        return Done(
            run_id,
            status.state,
            results,
            answer.text,
            after.get("accuracy"),
            after.get("low"),
            after.get("high"),
            before.get("accuracy"),
            (results.get("seconds") or {}).get("training"),
            time.monotonic() - began,
        )


def _call(tool: Callable[..., Awaitable[Answer]], workshop: Workshop, **arguments: Any) -> Any:
    async def call() -> Answer:
        return await tool(workshop, **arguments)

    return anyio.run(call)


def _write_yaml(path: Path, content: dict[str, Any]) -> None:
    path.write_text(yaml.safe_dump(content))
