"""Train the demo's task under faults: runs that are killed and resumed have to learn as much as undisturbed ones."""

from __future__ import annotations

import json
import random

import anyio
from toprope_server.cli.demo import ENVIRONMENT, PRESET
from toprope_tools.planning.config import edit_config
from toprope_tools.planning.environments import select_environment
from toprope_tools.workshop import Workshop

from benchmarks.faults.judge import Story
from benchmarks.faults.rounds import Stage, play
from toprope.records.run.specification import Specification, TrainPlan
from toprope.settings.owner import Home
from toprope.workbench.launch.freeze import freeze

__all__ = ["accuracy"]

_LIMIT_S = 900.0
_STRIKES = 6


def accuracy(stage: Stage, dice: random.Random) -> Story:
    """Train the demo's task once, with kills spread over it from its first step on."""
    specification = demo_specification(stage)
    launcher = specification.config.launcher
    launcher.restarts, launcher.restart_backoff_s, launcher.resume_lost_backoff_s = 100, 0.1, 0.1
    launcher.resume_lost_limit = 100
    specification.config.logging.save_steps = 50
    pauses = [5.0 + dice.random() * 15.0 for _ in range(_STRIKES)]
    story = play(stage, specification, "the demo's", pauses, dice, finishes=True, limit_s=_LIMIT_S, trains_first=True)
    results = stage.path / "runs" / specification.run_id / "results.json"
    if results.exists():
        report = json.loads(results.read_text())
        story.rose = bool(report["rose"])
        story.accuracy = report["evaluations"]["after"]["sampled"]["accuracy"]
    if not story.rose:
        stage.tally.wrong.append(f"{specification.run_id}: accuracy did not rise as the demo's does: {story.accuracy}")
    return story


def demo_specification(stage: Stage) -> Specification:
    """Return the frozen specification of `make demo`."""
    workshop = Workshop.open(Home(stage.path / "home", stage.path / "config"))

    async def drafted() -> str:
        draft = (await select_environment(workshop, name=ENVIRONMENT, preset=PRESET)).data.draft_id
        await edit_config(workshop, draft_id=draft, changes={"algorithm.seed": 1})
        return draft

    draft = workshop.drafts.get(anyio.run(drafted))
    return freeze(draft, workshop.home.locks(), TrainPlan(), policy_cache=str(workshop.home.policies))
