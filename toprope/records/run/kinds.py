"""The kinds of runs, one object each. Code asks the object; only stored files and answers carry the name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

KindName = Literal["train", "sft", "test", "ask", "sweep"]


@dataclass(frozen=True)
class RunKind:
    """Facts about all runs of one kind."""

    name: str
    """The stored name, in spec.json, status.json and the index."""
    title: str
    """Begins a sentence about such a run in a report."""
    members: tuple[str, ...]
    """The crew in start order. The slowest to start come first: it saves milliseconds on a busy machine."""
    trains: bool = False
    """Has a trainer, optimizer steps and checkpoints."""
    samples: bool = False
    """Trains on rollouts that its policy samples; the API serves them and the journal keeps them."""
    starts_runs: bool = False
    """Computes nothing itself; its conductor starts other runs."""
    final_evaluation: str | None = None
    """Label of the evaluation without which the run is not complete."""
    last_members: tuple[str, ...] = ("environment",)
    """Members that must have finished before the run is complete."""
    measures: bool = False
    """The final evaluation scores a policy on tasks, so runs can be compared and repeated."""
    progress_event: str | None = None
    """Event that proves progress. A lost run goes on by itself only if its kind has one."""
    start_tool: str = "start_training"
    """Tool that starts such a run."""
    repeat_hint: str = ""
    """Advice to somebody who wants to repeat a run that `measures` nothing."""

    @property
    def demonstrates(self) -> bool:
        """Trains on demonstrations instead of sampled rollouts."""
        return self.trains and not self.samples

    @property
    def has_plot(self) -> bool:
        """A plot is drawn when the run ends."""
        return self.trains or self.starts_runs


KINDS: dict[str, RunKind] = {
    kind.name: kind
    for kind in (
        RunKind(
            name="train",
            title="Training",
            members=("policy", "trainer", "inference", "environment", "api"),
            trains=True,
            samples=True,
            final_evaluation="after",
            last_members=("trainer",),
            measures=True,
            progress_event="checkpoint",
        ),
        RunKind(
            name="sft",
            title="Fine-tuning",
            members=("policy", "trainer", "inference", "environment"),
            trains=True,
            final_evaluation="after",
            last_members=("trainer",),
            measures=True,
            progress_event="checkpoint",
        ),
        RunKind(
            name="test",
            title="A test",
            members=("policy", "inference", "environment"),
            final_evaluation="test",
            measures=True,
            start_tool="test_inference",
        ),
        RunKind(
            name="ask",
            title="Questions",
            members=("policy", "inference", "environment"),
            final_evaluation="ask",
            start_tool="ask_checkpoint",
            repeat_hint="ask_checkpoint asks again.",
        ),
        RunKind(
            name="sweep",
            title="A sweep",
            members=("conductor",),
            starts_runs=True,
            last_members=("conductor",),
            progress_event="evaluation",
            start_tool="start_sweep",
            repeat_hint="Repeat one of its runs, or start_sweep again: the same seed draws the same first candidates.",
        ),
    )
}


def kind_named(name: str) -> RunKind:
    """The kind of a stored name. A name that this version does not know has no crew and no abilities."""
    return KINDS.get(name) or RunKind(name=name, title=f"A run of kind {name}", members=(), last_members=())
