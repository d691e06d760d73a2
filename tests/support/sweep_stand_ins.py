"""Sweeps with the real conductor and stand-ins as the crews of members, so that an epoch takes a second.

As a program:  sweep_stand_ins.py keeper TABLE RUN_FOLDER ...     the keeper of a sweep, or of a member
               sweep_stand_ins.py conductor TABLE TOKEN           the conductor, which starts members with such keepers
               sweep_stand_ins.py NAME BEHAVIOUR TOKEN            a member of a member's crew

The accuracy of a stand-in depends on its settings: its limit is 1 at a learning rate of 1e-3 and falls by a quarter
with each power of ten; the distance to the limit halves with every 10 steps of the run and the runs that it continues.
"""

from __future__ import annotations

import json
import math
import sys
import time
import uuid
from pathlib import Path
from typing import Any

from toprope.atomic import write_json
from toprope.records.run.folder import RunFolder
from toprope.records.run.specification import EnvironmentSource, Specification
from toprope.settings.owner import Home
from toprope.settings.schema import Config
from toprope.supervisor.capacity.reservations import Machine
from toprope.supervisor.launchers.local import LocalLauncher
from toprope.supervisor.runs.manager import RunManager
from toprope.sweeps.planning import make_plan
from toprope.workbench.drafts import Draft
from toprope.workbench.launch import open_runs
from toprope.workbench.launch.freeze import freeze_drafts

PATH = Path(__file__).resolve()
sys.path.append(str(PATH.parent))  # as a program it is started with -P
from tests.support.supervisor_stand_ins import NAMES, StandIn  # noqa: E402


def accuracy_of(rate: float, steps: int) -> float:
    """Return the accuracy of a policy after `steps` steps, rounded to a hundredth."""
    best = max(0.0, 1 - abs(math.log10(rate) + 3) / 4)
    return round(best * (1 - 0.5 ** (steps / 10)), 2)


class Learner(StandIn):
    """A member of a crew whose accuracy depends on its run's settings.

    Behaviour `slow`: seconds before an evaluation.
    """

    def __init__(self, name: str, behaviour: dict[str, Any]) -> None:
        super().__init__(name, behaviour)
        self.spec = Specification.read(self.folder)
        behaviour["steps"] = self.spec.config.budget.steps

    def line_steps(self) -> int:
        """Return the steps of this run and of the runs that it continues."""
        total, spec = 0, self.spec
        while True:
            total += spec.config.budget.steps if spec.kind == "train" else 0
            base = spec.base_run if spec.kind == "test" else spec.member.continues if spec.member else None
            if base is None:
                return total
            spec = Specification.read(RunFolder(self.folder.path.parent / base))

    def evaluate(self, label: str) -> None:
        from toprope.records.messages import Evaluated

        time.sleep(self.behaviour.get("slow", 0.0) if label != "before" else 0.0)
        found = accuracy_of(self.spec.config.optimizer.learning_rate, self.line_steps() if label != "before" else 0)
        split = "heldout" if self.spec.test is not None and self.spec.test.heldout else "validation"
        sampled = {
            "split": split,
            "tasks": 100,
            "successes": round(100 * found),
            "accuracy": found,
            "reward_mean": found,
        }
        content = {"version": 1, "label": label, "sampled": sampled, "greedy": None, "examples": []}
        write_json(self.folder.evaluation(label), content)
        self.report(Evaluated(label, {**sampled, "errors": 0}))


def table_in(path: Path, behaviours: dict[str, dict[str, Any]], token: str) -> Path:
    """Write the file with the argv of every program, and return its path."""
    python = [sys.executable, "-P", str(PATH)]
    table = path / f"programs-{uuid.uuid4().hex[:8]}.json"
    programs = {name: [*python, name, json.dumps(behaviours.get(name, {})), token] for name in NAMES}
    programs["conductor"] = [*python, "conductor", str(table), token]
    programs["plot"] = [sys.executable, "-I", "-S", "-c", "pass"]
    table.write_text(json.dumps(programs))
    return table


def runs_in(home: Home, table: Path) -> RunManager:
    """Return a front end for the runs of a home whose launcher starts stand-ins."""
    command = [sys.executable, "-P", str(PATH), "keeper", str(table)]
    return RunManager(
        home.runs,
        LocalLauncher(command, contained=lambda: "guard"),
        lambda: Machine(threads=4),
        lambda specification: open_runs.variables_to_resume(home, specification),
    )


def sweep_in(home: Home, **plan: Any) -> Specification:
    """Return the specification of a sweep over the learning rate."""
    config = Config()
    config.optimizer.learning_rate = 1e-5
    config.launcher.device, config.launcher.stop_grace_s = "cpu", 1.0
    config.launcher.restart_backoff_s = 0.05
    config.launcher.resume_lost_backoff_s = 0.0
    config.evaluation.heldout_tasks = 100
    for name, value in plan.pop("launcher", {}).items():
        setattr(config.launcher, name, value)
    source = EnvironmentSource(name="dice", file="/nowhere.py", attribute="Dice")
    draft = Draft("draft-1", source, "", config, [], 1, 0.0, 0.0)
    asked = {
        "space": {"optimizer.learning_rate": {"min": 1e-5, "max": 1e-2, "log": True}},
        "strategy": "evolution",
        "population": 3,
        "epochs": 2,
        "selection_ratio": 0.34,
        "mutation_rate": 0.3,
        "steps": 4,
        "evaluate": "train",
    }
    made = make_plan(draft, home.locks(), strategies=home.strategies, **{**asked, **plan})
    [found] = freeze_drafts(home, [draft], made, name="dice")
    return found


def main() -> int:
    table = sys.argv[2]
    if sys.argv[1] == "keeper":
        from toprope.supervisor.keeper.program import main as keeper

        return keeper(sys.argv[3:], programs=json.loads(Path(table).read_text()))
    if sys.argv[1] == "conductor":
        open_runs.open_runs = lambda home: runs_in(home, Path(table))
        from toprope.sweeps.conductor import main as conductor

        return conductor()
    Learner(sys.argv[1], json.loads(sys.argv[2])).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
