"""Train one run on three environments of three ecosystems and measure each.

    python -P -m benchmarks.learning.mixture [--seed N] [--steps N] [--home FOLDER]

The embedded policy (124,000 parameters) first sees a few demonstrations of each task, so that it knows the tasks; that
is a separate run with figures of its own. Then one run trains on the mixture by reward, and held-out tasks of each
environment are measured before and after it. Everything goes through the server's tools, as an agent would do it.
Estimated time: ten minutes; needs reasoning-gym.

- `reasoning_gym/spell_backward`: words of three and four letters backward, exact answers (reasoning-gym).
- `sorted_letters`: three letters in the order of the alphabet (an environment written against our SDK).
- `rotated`: the last of three letters to the front (a reward function and rows, as in TRL).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcp import Client
from rich.console import Console
from rich.table import Table
from toprope_server.cli.demo import server_parameters

from benchmarks.scratch import scratch

__all__ = ["FIRST", "Learned", "Outcome", "measure", "mixture"]

FIRST = "reasoning_gym/spell_backward"
_WAIT_S = 45
_ENDED = ("completed", "failed", "lost", "stopped")

_SDK = '''
"""Letters in the order of the alphabet."""
import random
from toprope.sdk import Environment, Task


class SortedLetters(Environment):
    """Put three letters in the order of the alphabet."""

    name = "sorted_letters"

    def tasks(self):
        while True:
            letters = "".join(self.random.sample("abcdefghijklmnopqrstuvwxyz", 3))
            yield Task(f"sort {letters}", reference="".join(sorted(letters)))

    def score(self):
        return float(self.answer == self.task.reference)
'''
_TRL = '''
"""The last of three letters goes to the front."""
import random


def rows():
    draw = random.Random(0)
    seen = dict.fromkeys("".join(draw.sample("abcdefghijklmnopqrstuvwxyz", 3)) for _ in range(6000))
    return [{"prompt": f"turn {letters}", "solution": letters[2] + letters[:2]} for letters in seen]


def exact(completions, solution, **columns):
    return [float(said == right) for said, right in zip(completions, solution)]
'''
_MIXTURE: list[dict[str, Any]] = [
    {"name": "sorted_letters", "min_share": 0.2},
    {"name": "rotated", "min_share": 0.2},
]
_ALL: dict[str, Any] = {
    "environment.mixture": _MIXTURE,
    "environment.min_share": 0.2,
    "environment.knobs.min_word_len": 3,
    "environment.knobs.max_word_len": 4,
    "evaluation.greedy": False,
    "evaluation.examples": 3,
}
SFT: dict[str, Any] = {
    "algorithm.name": "sft",
    "sft.tasks": 720,
    "sft.traces_per_task": 1,
    "sft.epochs": 3,
    "sft.batch_size": 32,
    "sft.learning_rate": 0.002,
    "evaluation.heldout_tasks": 100,
}
GRPO: dict[str, Any] = {
    "rollout.groups_per_step": 12,
    "rollout.queue_groups": 18,
    "rollout.concurrency": 18,
    "optimizer.lr_scheduler_type": "linear",
    "budget.max_train_seconds": None,
    "evaluation.heldout_tasks": 300,
}
STEPS = 500


@dataclass(frozen=True)
class Learned:
    """One environment's held-out accuracies, each as value, low and high of its 95 % interval."""

    environment: str
    before: tuple[float, float, float]
    after: tuple[float, float, float]
    improved: bool
    """The intervals do not overlap, by the run's own report."""
    share: float
    """Share of the groups that were trained at the end."""


@dataclass(frozen=True)
class Outcome:
    """The result of the run."""

    learned: list[Learned]
    seconds: float
    sft_seconds: float
    steps: int
    run_id: str

    @property
    def mixture_improved(self) -> int:
        """Number of environments on which the one run learned, held-out, beyond the intervals."""
        return sum(one.improved for one in self.learned)

    def figures(self) -> dict[str, Any]:
        """Return the figures as JSON types."""
        return {
            "mixture_improved": self.mixture_improved,
            "mixture_environments": len(self.learned),
            "mixture_seconds": round(self.seconds, 1),
            "mixture_sft_seconds": round(self.sft_seconds, 1),
            "mixture_steps": self.steps,
            "mixture": {
                one.environment: {
                    "before": [round(value, 4) for value in one.before],
                    "after": [round(value, 4) for value in one.after],
                    "share": round(one.share, 3),
                }
                for one in self.learned
            },
        }


def measure(console: Console | None = None, *, seed: int = 0, steps: int = STEPS, home: Path | None = None) -> Outcome:
    """Fine-tune on a few demonstrations, train one run on the mixture, and read its report.

    Args:
        console: Where to print progress.
        seed: Of both runs.
        steps: Optimizer steps of the run by reward.
        home: A folder for runs and the embedded policy; if None, a new one that is removed.

    Raises:
        SystemExit: A tool refused, or a run did not complete.
    """
    console = console or Console(stderr=True)
    with scratch("mixture", home) as folder:
        return asyncio.run(_measure(console, folder, seed, steps))


async def _measure(console: Console, home: Path, seed: int, steps: int) -> Outcome:
    folder = home / "config" / "environments"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sorted_letters.py").write_text(_SDK)
    (folder / "rotated.py").write_text(_TRL)
    variables = {"TOPROPE_HOME": str(home), "TOPROPE_CONFIG": str(home / "config")}
    common = _ALL | {"algorithm.seed": seed}
    began = time.monotonic()
    async with Client(server_parameters(variables)) as client:
        tuned, _ = await _run(client, console, "A few demonstrations of each task", common | SFT)
        tuned_at = time.monotonic()
        changes = common | GRPO | {"budget.steps": steps, "policy.model": f"run:{tuned}"}
        run_id, results = await _run(client, console, "One run on the mixture, by reward", changes)
    seconds = time.monotonic() - tuned_at
    shares = results.get("metrics") or {}
    learned = []
    for label, before in results["evaluations"]["before"]["environments"].items():
        after = results["evaluations"]["after"]["environments"][label]
        pair = [tuple(one["sampled"][key] for key in ("accuracy", "low", "high")) for one in (before, after)]
        share = float(shares.get(f"environments/{label}/share", 0.0))
        learned.append(Learned(label, pair[0], pair[1], bool(results["rose_each"][label]), share))
    return Outcome(learned, seconds, tuned_at - began, int(results["steps"]), run_id)


async def _run(client: Client, console: Console, what: str, changes: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Select, edit, start and wait; return the run's id and its report."""
    console.print(f"[bold]{what}[/]")
    draft = await _call(client, "select_environment", name=FIRST, preset="cpu-embedded")
    await _call(client, "edit_config", draft_id=draft["draft_id"], changes=changes)
    run_id = (await _call(client, "start_training", draft_id=draft["draft_id"]))["run_id"]
    state, answer = "", {}
    while state not in _ENDED:
        answer = await _call(client, "check_status", run_ids=[run_id], wait_s=_WAIT_S)
        state = answer["runs"][0]["state"]
    if state != "completed":
        raise SystemExit(f"{what}: {run_id} is {state}: {json.dumps(answer)[:2000]}")
    results = (await _call(client, "get_results", run_id=run_id, detail="detailed"))["results"]
    return run_id, results


async def _call(client: Client, tool: str, **arguments: Any) -> dict[str, Any]:
    answer = await client.call_tool(tool, arguments)
    if answer.is_error:
        text = "\n".join(part.text for part in answer.content if part.type == "text")
        raise SystemExit(f"{tool} refused: {text}")
    return answer.structured_content or {}


def mixture() -> dict[str, Any]:
    """The part of `make bench-environments`: print a table for people and return the figures."""
    outcome = measure()
    _show(outcome, Console())
    return outcome.figures()


def _show(outcome: Outcome, console: Console) -> None:
    table = Table(title=f"One run on three environments: {outcome.steps} steps in {outcome.seconds:.0f} s")
    for column in ("environment", "held-out before", "after", "share of groups", "improved"):
        table.add_column(column)
    for one in outcome.learned:
        told = [f"{value:.3f} [{low:.3f}, {high:.3f}]" for value, low, high in (one.before, one.after)]
        table.add_row(one.environment, *told, f"{one.share:.2f}", "yes" if one.improved else "no")
    console.print(table)


def main() -> int:
    """The program: print a table, and as the last line one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--home", type=Path, help="keep runs here")
    options = parser.parse_args()
    console = Console(stderr=True)
    outcome = measure(console, seed=options.seed, steps=options.steps, home=options.home)
    _show(outcome, console)
    print(json.dumps(outcome.figures()))
    return 0 if outcome.mixture_improved == len(outcome.learned) else 1


if __name__ == "__main__":
    sys.exit(main())
