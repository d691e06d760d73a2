"""A trainer of one's own: what to write, the checks before anything is spent, and the states that it goes through.

    class Reinforce(Trainer):
        def train(self, session):
            model = load(session.policy)
            for batch in session.batches():
                ...                                  # one step on batch.samples
                session.publish(model)               # inference samples from these weights from now on
                session.log({"loss": loss})          # one row of metrics; ends the step
            return Metrics(loss=loss)

        def save(self, folder): ...                  # what from_pretrained loads goes into folder / "model"
        def evaluate(self, session): ...

It is used by `algorithm.name: custom` and `algorithm.trainer: "file.py:Reinforce"`, from a folder that the owner named
in settings.yaml under `trainers`. It runs in the trainer's process, with everything around it (rollouts, queue,
weights to inference, checkpoints, stop and resume) as any run has it. `Trainer.live` goes through the whole life and
needs nothing but a `Session`, so a trainer can be tried without a run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

__all__ = ["CHECKS", "Batch", "CheckFailed", "Data", "Metrics", "Sample", "Session", "State", "TrainConfig", "Trainer"]

CHECKS = ("config", "agent", "dataset", "reward")
"""The checks, in their order."""


class State(StrEnum):
    """Where a trainer is in its life."""

    CREATED = "created"
    VALIDATING = "validating"
    VALIDATED = "validated"
    TRAINING = "training"
    TRAINED = "trained"
    EVALUATING = "evaluating"
    COMPLETE = "complete"
    ERROR = "error"


@dataclass(frozen=True)
class TrainConfig:
    """What every trainer is given. In a run `batch_size` is rollouts a step, `eval_every` evaluation.every_steps."""

    epochs: int = 1
    """Passes over each batch, or over the data."""
    batch_size: int = 64
    learning_rate: float = 1e-5
    warmup_steps: int = 0
    eval_every: int = 0
    """Steps between evaluations on validation tasks; 0: none."""
    steps: int = 1000
    """The most steps there will be."""
    seed: int = 0
    device: str = "cpu"
    threads: int = 1
    max_grad_norm: float = 1.0
    temperature: float = 1.0
    """At which answers are sampled, and their log-probabilities taken."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The trainer's own: algorithm.trainer_settings."""


@dataclass(frozen=True)
class Metrics:
    """What training or an evaluation found; None where it says nothing of it."""

    loss: float | None = None
    accuracy: float | None = None
    reward: float | None = None


@dataclass(frozen=True)
class Data:
    """What is trained on, as the environment's worker found it."""

    environment: str
    tasks: Mapping[str, int]
    """Tasks that were looked for and found, by split."""
    example: Mapping[str, Any]
    """One task that is not held out: `prompt` and `reference`, as texts."""
    parts: Mapping[str, Mapping[str, Any]]
    """The parts of the reward: weight, low, high, description."""
    reference_outcome: Mapping[str, Any]
    """How the example's own reference was scored: reward, parts, success, error."""


@dataclass(frozen=True)
class Sample:
    """One sequence that was sampled: `prompt` ids, then `completion` ids.

    `trained[t]` is False where the environment wrote completion[t]; `logprobs[t]` is the sampler's natural
    log-probability, 0.0 there. A rollout whose turns do not extend each other has several sequences.
    """

    prompt: list[int]
    completion: list[int]
    trained: list[bool]
    logprobs: list[float]
    reward: float
    """Of the whole rollout."""
    advantage: float
    """The reward against its group's mean, by the group's deviation."""
    rollout: int
    """Which rollout of the batch."""
    truncated: bool
    version: int | None
    """The oldest policy version that sampled a token of it."""


@dataclass(frozen=True)
class Batch:
    """The rollouts of one step."""

    step: int
    """From 1."""
    samples: list[Sample]


class CheckFailed(Exception):
    """Checks found something; `problems` by the check's name."""

    def __init__(self, problems: Mapping[str, list[str]]) -> None:
        self.problems = {name: list(found) for name, found in problems.items()}
        super().__init__("; ".join(f"check_{name}: {' '.join(found)}" for name, found in self.problems.items()))


class Session(ABC):
    """What a trainer may ask of the run that it is part of."""

    policy: Path
    """The folder of the policy that training starts from: `from_pretrained` loads it, with its tokenizer."""
    data: Data
    resumed: Path | None = None
    """The checkpoint that this attempt goes on from; `Trainer.load` was given it."""
    step: int = 0
    """Steps that are done."""

    @abstractmethod
    def batches(self) -> Iterator[Batch]:
        """Batches of rollouts until the budget is used or the run is to end; then it stops, and `train` returns."""

    @abstractmethod
    def publish(self, weights: Any) -> int:
        """Gives inference new weights: a module, or tensors by the names that the policy has for its parameters.

        Returns:
            The version by which samples name them.
        """

    @abstractmethod
    def log(self, numbers: Mapping[str, float]) -> None:
        """Writes the row of a step, with `loss` and whatever else it has, and ends the step."""

    @abstractmethod
    def checkpoint(self) -> None:
        """Saves now by `Trainer.save`. It is done every logging.save_steps, at a stop and at the end without asking."""


class Trainer(ABC):
    """Write `train`, `evaluate` and `save`; checks where there is something to check.

    A check returns what is wrong, in sentences: one, several, or None. It must not change anything.

    Args:
        config: What the run's configuration says.
    """

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self.state = State.CREATED

    def check_config(self, config: TrainConfig) -> str | Iterable[str] | None:
        """Whether it can be trained like this."""
        return None

    def check_agent(self, policy: Path) -> str | Iterable[str] | None:
        """Whether this policy can be trained."""
        return None

    def check_dataset(self, data: Data) -> str | Iterable[str] | None:
        """Whether there is enough of the right kind to train on."""
        return None

    def check_reward(self, data: Data) -> str | Iterable[str] | None:
        """Whether the reward says what is wanted."""
        return None

    @abstractmethod
    def train(self, session: Session) -> Metrics | None:
        """Trains until the session has no more batches."""

    @abstractmethod
    def evaluate(self, session: Session) -> Metrics:
        """What was reached, as the trainer itself sees it. The run measures held-out tasks besides."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Writes the policy as `from_pretrained` loads it, with its tokenizer, into `folder / "model"` (weights as
        safetensors), and beside it whatever `load` needs."""

    def load(self, folder: Path) -> None:
        """Goes on from what `save` wrote. Called before `train` in a run that is resumed."""
        raise NotImplementedError(f"{type(self).__name__} cannot go on from a checkpoint: write load(self, folder).")

    def validate(self, session: Session, told: Callable[[str, list[str]], None] = lambda name, found: None) -> None:
        """Makes every check, all of them even where one finds something.

        Args:
            session: Policy and data.
            told: Called with each check's name and what it found.

        Raises:
            CheckFailed: There is something wrong.
        """
        self.state = State.VALIDATING
        asked: dict[str, Callable[[], Any]] = {
            "config": lambda: self.check_config(self.config),
            "agent": lambda: self.check_agent(session.policy),
            "dataset": lambda: self.check_dataset(session.data),
            "reward": lambda: self.check_reward(session.data),
        }
        problems = {}
        for name in CHECKS:
            try:
                found = _sentences(asked[name]())
            except Exception as error:  # a check that cannot be made has not passed
                found = [f"it raised {type(error).__name__}: {error}"]
            told(name, found)
            if found:
                problems[name] = found
        if problems:
            self.state = State.ERROR
            raise CheckFailed(problems)
        self.state = State.VALIDATED

    def live(
        self,
        session: Session,
        told: Callable[[str, list[str]], None] = lambda name, found: None,
        trained: Callable[[], None] = lambda: None,
    ) -> Metrics:
        """The whole life: checks, training, evaluation.

        Args:
            session: The run.
            told: See `validate`.
            trained: Called between training and evaluation.

        Raises:
            CheckFailed: A check found something; nothing was trained.
        """
        try:
            if self.state is State.CREATED:
                self.validate(session, told)
            if session.resumed is not None:
                self.load(session.resumed)
            self.state = State.TRAINING
            self.train(session)
            self.state = State.TRAINED
            trained()
            self.state = State.EVALUATING
            found = self.evaluate(session)
            if not isinstance(found, Metrics):
                raise TypeError(f"evaluate() returned {type(found).__name__}, not toprope.sdk.training.Metrics")
        except BaseException:
            self.state = State.ERROR
            raise
        self.state = State.COMPLETE
        return found


def _sentences(found: Any) -> list[str]:
    if found is None:
        return []
    return [str(one) for one in ([found] if isinstance(found, str) else found)]
