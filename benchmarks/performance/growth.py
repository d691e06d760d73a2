"""Measure how cost grows with the size of the work, axis by axis: `make bench-growth`.

    python -P -m benchmarks growth [--rounds N] [--axes NAME ...] [--picture FILE]

Axes: tokens of an answer, rows of a decode batch, answers to one prompt, parameters of the model, and the same of the
trainer's step; steps of a run (groups accepted, delivered and committed by the trajectory API), environments in
parallel (lanes of that API, with groups in proportion), groups that are browsed, rows of metrics that are read, and
runs that are listed. Each point is the least of the rounds'
processor seconds, because other load only adds. The exponent is the slope of log cost over log size on the upper half
of an axis without the fixed cost, which is where a line through the two smallest sizes meets size 0 (the cost of the
smallest size would be too much: it holds that size's work): 1 is proportional. Where the work itself is not
proportional (attention reads all earlier tokens, so an answer's work has a term in the square of its length), sizes are
counted in multiplications.

Control: an engine that concatenates its cache has to have an exponent above the goal, and every axis has to cost more
at its end than at its beginning; otherwise the benchmark exits with 2. Estimated time: 35 minutes on a quiet machine;
needs nothing else.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import random
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.performance.decode import (
    GROUP,
    concatenated_cache,
    decode,
    make_prompts,
    processor_seconds,
    start_engine,
)
from benchmarks.report import report
from benchmarks.scratch import scratch
from benchmarks.server.many_runs import make_run, row
from toprope.machine import keep_freed_memory
from toprope.records.journal.file_journal import FileJournal
from toprope.records.journal.groups import MASKED, PROMPT_LOGPROB, Group, Outcome
from toprope.records.journal.marks import GroupNote
from toprope.records.journal.rollout_browser import Query, find_rollouts
from toprope.records.run.folder import RunFolder
from toprope.records.run.metrics import header, read_history
from toprope.settings.schema import Config
from toprope.supervisor.launchers.local import LocalLauncher
from toprope.supervisor.runs.manager import RunManager
from toprope.training.api.storage.store import TrajectoryStore
from toprope.training.policy.loading import load_pretrained, load_tokenizer
from toprope.training.policy.tiny_model import RECIPES, build
from toprope.training.trainer.batch_source import GroupBatch
from toprope.training.trainer.grpo import GrpoLearner
from toprope.training.trainer.optimization import make_optimizer
from toprope.training.trainer.step.learner import StepHooks

GOAL = 1.2
PROMPT = 8

Points = dict[float, Callable[[], object]]
"""The work of each size."""

MODELS = {
    0.1e6: {"hidden_size": 64, "intermediate_size": 192, "layers": 2, "heads": 4},
    1e6: {"hidden_size": 128, "intermediate_size": 384, "layers": 4, "heads": 4},
    4e6: {"hidden_size": 256, "intermediate_size": 688, "layers": 5, "heads": 4},
    10e6: {"hidden_size": 320, "intermediate_size": 864, "layers": 8, "heads": 5},
    40e6: {"hidden_size": 640, "intermediate_size": 1728, "layers": 8, "heads": 10},
    100e6: {"hidden_size": 832, "intermediate_size": 2240, "layers": 12, "heads": 13},
}


def exponent(costs: Mapping[float, float]) -> float:
    """Slope of log cost over log size on the upper half, without the fixed cost; see the module.

    Not a number if the cost does not grow: then the work was not measured.
    """
    sizes = sorted(costs)
    first, second = sizes[:2]
    slope = (costs[second] - costs[first]) / (second - first)
    fixed = min(max(costs[first] - slope * first, 0.0), costs[first])
    upper = [size for size in sizes[len(sizes) // 2 :] if costs[size] > fixed]
    if len(upper) < 2 or costs[sizes[-1]] < 2 * costs[first]:
        return math.nan
    x = numpy.log([size for size in upper])
    y = numpy.log([costs[size] - fixed for size in upper])
    return float(numpy.polyfit(x, y, 1)[0])


class Engines:
    """Models of several sizes behind engines, made when they are needed."""

    def __init__(self, root: Path) -> None:
        self._root, self._made = root, dict[float, Any]()
        keep_freed_memory()  # as the processes of engine and trainer do

    def close(self) -> None:
        for engine, _ in self._made.values():
            engine.stop()

    def get(self, size: float) -> tuple[Any, Any]:
        """The engine of a model, and the model."""
        if size not in self._made:
            model = self._model(size).eval().requires_grad_(False)
            self._made[size] = start_engine(model, load_tokenizer(self._folder(size)), 256), model
        return self._made[size]

    def _folder(self, size: float) -> Path:
        return self._root / f"model-{size:.0f}"

    def _model(self, size: float) -> Any:
        if not self._folder(size).exists():
            build(self._folder(size), replace(RECIPES["embedded"], steps=0, **MODELS[size]))
        return load_pretrained(self._folder(size), "cpu", dtype=torch.float32)

    def parameters(self, size: float) -> float:
        return float(sum(parameter.numel() for parameter in self.get(size)[1].parameters()))

    def decoding(self, size: float, groups: int, length: int, answers: int = GROUP) -> Callable[[], object]:
        engine, _ = self.get(size)
        prompts = make_prompts(groups)
        return lambda: decode(engine, prompts, length, answers)

    def training(self, size: float, groups: int, length: int, precision: str = "float32") -> Callable[[], object]:
        """One step of the trainer on groups of answers of a length."""
        config, model = Config.model_validate({"optimizer": {"precision": precision}}), self._model(size)
        config.rollout.group_size, config.rollout.groups_per_step = GROUP, groups
        config.algorithm.drop_zero_signal, config.budget.steps = False, 1
        optimizer = make_optimizer(config, dict(model.named_parameters()))
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        batch = [make_group(number, length) for number in range(groups)]
        hooks = StepHooks(lambda: GroupBatch(batch, 0, version=0), lambda step, metrics: None)
        options: Any = {"pad": 0, "device": "cpu", "optimizers": (optimizer, scheduler)}
        return GrpoLearner(config, model, None, hooks=hooks, **options).train

    def multiplications(self, size: float, length: int) -> float:
        """Multiplications for one answer: each token uses every weight, and the keys and values of all before it."""
        config = self.get(size)[1].config
        attention = 2 * config.num_hidden_layers * config.hidden_size
        return length * self.parameters(size) + attention * sum(range(PROMPT, PROMPT + length))


def answer_tokens(engines: Engines) -> Points:
    return {
        engines.multiplications(10e6, length): engines.decoding(10e6, 1, length)
        for length in (16, 32, 64, 128, 256, 512, 1024)
    }


def decode_rows(engines: Engines) -> Points:
    return {groups * GROUP: engines.decoding(0.1e6, groups, 32) for groups in (1, 2, 4, 8, 16, 32)}


def parameters(engines: Engines) -> Points:
    return {engines.parameters(size): engines.decoding(size, 1, 8) for size in MODELS}


def group_answers(engines: Engines) -> Points:
    return {answers: engines.decoding(0.1e6, 1, 32, answers) for answers in (4, 8, 16, 32, 64, 128, 256)}


def trained_tokens(engines: Engines) -> Points:
    return {
        engines.multiplications(1e6, length): engines.training(1e6, 1, length)
        for length in (16, 32, 64, 128, 256, 512, 1024)
    }


def trained_rows(engines: Engines) -> Points:
    return {groups * GROUP: engines.training(0.1e6, groups, 32) for groups in (1, 2, 4, 8, 16, 32)}


def trained_parameters(engines: Engines) -> Points:
    return {engines.parameters(size): engines.training(size, 1, 8) for size in MODELS}


def make_group(number: int, length: int) -> Group:
    """Answers of a length to a prompt of its own, half of them right; equal tokens would be computed once."""
    chooser = random.Random(number)
    prompt = [chooser.randrange(5, 200) for _ in range(PROMPT)]
    said = [[chooser.randrange(5, 200) for _ in range(length)] for _ in range(GROUP)]
    return Group(
        tokens=[prompt + answer for answer in said],
        masks=[[MASKED] * len(prompt) + answer for answer in said],
        scores=[float(place % 2) for place in range(GROUP)],
        inference_logprobs=[[PROMPT_LOGPROB] * len(prompt) + [-3.0] * length for _ in said],
        versions=[[(0, length)] for _ in said],
        group_id=f"g-{number}",
        outcomes=[Outcome(float(place % 2)) for place in range(GROUP)],
    )


def make_body(number: int, environment: str = "words") -> bytes:
    """A group of 8 rows of 16 tokens, as the driver posts it."""
    tokens = [[5 + (number + place + at) % 200 for at in range(16)] for place in range(GROUP)]
    group = Group(
        tokens=tokens,
        masks=[[-100] * 8 + one[8:] for one in tokens],
        scores=[float(place % 2) for place in range(GROUP)],
        inference_logprobs=[[1.0] * 8 + [-0.123456789 * (place + 1)] * 8 for place in range(GROUP)],
        versions=[[(number // 8, 8)] for _ in tokens],
        group_id=f"g-{number}",
        environment=environment,
        task_id=f"task-{number % 1000}",
        outcomes=[Outcome(float(place % 2), success=bool(place % 2)) for place in range(GROUP)],
        prompt="Spell this word backward",
        answers=["an answer"] * GROUP,
    )
    return msgspec.json.encode(group)


def store_groups(root: Path, groups: int, lanes: int = 1) -> None:
    """Accept, deliver and commit groups as a run does, eight a step, then recover the account as a restart does."""
    folder = root / f"store-{groups}-{lanes}-{time.monotonic_ns()}"
    journal = FileJournal(folder, recent=True)
    store = TrajectoryStore(journal)
    cursor = 0
    for first in range(0, groups, 8):
        for number in range(first, first + 8):
            store.post(make_body(number, f"words-{number % lanes}"))
        batch = store.next_batch(cursor, 8 * GROUP)
        assert batch is not None, "eight groups fill a batch"
        cursor = batch.plan.end
        if first // 8 % 50 == 49:
            store.commit(cursor)
    journal.close()
    journal = FileJournal(folder, recent=True)
    assert TrajectoryStore(journal).queue.counts().accepted == groups
    journal.close()
    shutil.rmtree(folder)


def steps(root: Path) -> Points:
    return {count: lambda count=count: store_groups(root, 8 * count) for count in (50, 100, 200, 400, 800, 1600)}


def environments(root: Path) -> Points:
    return {lanes: lambda lanes=lanes: store_groups(root, 64 * lanes, lanes) for lanes in (1, 2, 4, 8, 16, 32, 64)}


def browsed_groups(root: Path) -> Points:
    def points(count: int) -> Callable[[], object]:
        folder = RunFolder.create(root / "browsed", f"run-{count}")
        journal = FileJournal(folder.journal)
        for number in range(count):
            journal.append(make_body(number), GroupNote(rows=GROUP))
        journal.close()
        for ordinal in journal.compressible()[:-1]:
            journal.compress(ordinal)

        def browse() -> None:
            (folder.journal / "rollouts.idx").unlink(missing_ok=True)
            page = find_rollouts(folder, Query(order="best"), seconds=600)
            assert page.scanned == count

        return browse

    (root / "browsed").mkdir()
    # From 8,000 on there are compressed segments to read, which cost more than one that is still open.
    return {count: points(count) for count in (1000, 2000, 4000, 8000, 16000, 32000, 64000)}


def metric_rows(root: Path) -> Points:
    def points(count: int) -> Callable[[], object]:
        path = root / f"metrics-{count}.jsonl"
        encode = msgspec.json.Encoder().encode
        with path.open("wb") as file:
            file.write(header(1))
            for step in range(1, count + 1):
                file.write(encode(row(step, count, 0.0)) + b"\n")
        return lambda: read_history(path, count)

    return {count: points(count) for count in (1000, 2000, 4000, 8000, 16000, 32000)}


def listed_runs(root: Path) -> Points:
    def points(count: int) -> Callable[[], object]:
        runs = root / f"home-{count}" / "runs"
        runs.mkdir(parents=True)
        for number in range(count):
            make_run(runs, 1000 + number, 20, 1.6e9)

        def listed() -> None:
            assert len(RunManager(runs, LocalLauncher()).list()) == count

        return listed

    return {count: points(count) for count in (25, 50, 100, 200, 400, 800)}


def measure(points: Points, rounds: int) -> dict[float, float]:
    """The least processor seconds of each size. The sizes alternate, so that load falls on all of them."""
    # A full collection walks the modules of torch, which are no part of the work and fall on the largest size alone.
    gc.collect()
    gc.freeze()
    costs = dict.fromkeys(points, math.inf)
    for _ in range(rounds):
        for size, work in points.items():
            costs[size] = min(costs[size], processor_seconds(work))
    return costs


def draw(curves: Mapping[str, Mapping[float, float]], exponents: Mapping[str, float], path: Path) -> None:
    """Draw all curves, each over its size and in multiples of its least cost, into one PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    figure, places = pyplot.subplots(-(-len(curves) // 4), 4, figsize=(13, 3 * -(-len(curves) // 4)), squeeze=False)
    for place, (name, costs) in zip(places.flat, curves.items(), strict=False):
        sizes = sorted(costs)
        place.loglog(sizes, [costs[size] for size in sizes], marker="o")
        top = sizes[-1]
        place.loglog(sizes, [costs[top] * size / top for size in sizes], linestyle=":", color="gray")
        place.set_title(f"{name.replace('_', ' ')}: exponent {exponents[name]:.2f}", fontsize=9)
        place.tick_params(labelsize=7)
        for axis in (place.xaxis, place.yaxis):
            axis.set_minor_formatter(ticker.NullFormatter())
        place.set_ylabel("processor seconds", fontsize=7)
    figure.suptitle("Cost by size; the dotted line is proportional", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=80)


def main() -> int:
    made: dict[str, Callable[[Any], Points]] = {
        "steps": steps,
        "environments": environments,
        "browsed_groups": browsed_groups,
        "metric_rows": metric_rows,
        "runs": listed_runs,
        "decode_rows": decode_rows,
        "parameters": parameters,
        "answer_tokens": answer_tokens,
        "group_answers": group_answers,
        "trained_rows": trained_rows,
        "trained_parameters": trained_parameters,
        "trained_tokens": trained_tokens,
    }
    of_folder = ("steps", "environments", "browsed_groups", "metric_rows", "runs")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--axes", nargs="*", choices=list(made), default=list(made))
    parser.add_argument("--picture", type=Path, default=None, help="also draw the curves into this PNG")
    options = parser.parse_args()
    torch.set_num_threads(1)
    console, curves = Console(stderr=True), dict[str, dict[float, float]]()
    with scratch("growth") as root:
        engines = Engines(root)
        try:
            for axis in options.axes:
                console.print(axis)
                curves[axis] = measure(made[axis](root if axis in of_folder else engines), options.rounds)
                console.print(json.dumps({f"{size:.4g}": round(cost, 4) for size, cost in curves[axis].items()}))
            console.print("control: a cache that is concatenated")
            with concatenated_cache():
                control = exponent(measure(answer_tokens(engines), options.rounds))
        finally:
            engines.close()
    exponents = {name: exponent(costs) for name, costs in curves.items()}
    if options.picture is not None:
        draw(curves, exponents, options.picture)
    table = Table(title="Growth of cost")
    for column in ("axis", "sizes", "processor seconds", "exponent"):
        table.add_column(column)
    for name, costs in curves.items():
        ends = _ends(sorted(costs)), _ends([costs[size] for size in sorted(costs)])
        table.add_row(name, *ends, f"{exponents[name]:.2f}")
    Console().print(table)
    figures: dict[str, Any] = {f"{name}_exponent": round(value, 3) for name, value in exponents.items()}
    flat = [name for name, value in exponents.items() if math.isnan(value)]
    figures["largest_exponent"] = round(max(exponents.values()), 3)
    figures["control_exponent"] = round(control, 3)
    return report(
        "Exponents",
        figures,
        goals={"largest_exponent": f"<= {GOAL}"},
        control="an engine that concatenates its cache must exceed the goal, and no cost may stay equal.",
        control_failed=f"the cost of {', '.join(flat)} does not grow"
        if flat
        else ""
        if control > GOAL
        else "a cache that is concatenated met the goal",
    )


def _ends(values: Sequence[float]) -> str:
    return f"{values[0]:.3g} to {values[-1]:.3g}"


if __name__ == "__main__":
    sys.exit(main())
