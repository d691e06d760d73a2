"""One attempt of a run's training: what every kind of training shares, and training by reward.

It loads the policy, trains it with TRL on the groups that the trajectory API delivers, publishes weights after every
step, appends one row a step to metrics.jsonl, and writes checkpoints between generations. It says `Finished` only when
its last checkpoint is on disk; whatever else happens, it fails.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from toprope.errors import DiskFull, TopropeError
from toprope.records.messages import Checkpointed, Finished, NoRoom, Ready, Stepped, Warned
from toprope.records.run.checkpoints import newest_sound, nothing_sound, set_aside
from toprope.records.run.lines import NO_ROOM, PatientLines
from toprope.records.run.metrics import header
from toprope.settings.schema import Config
from toprope.training.component.member import CrewMember
from toprope.training.component.peer_addresses import PeerAway
from toprope.training.trainer.wandb_link import note_wandb

__all__ = ["TrainingRun", "after_step_of", "all_finite", "make_optimizer", "rate_factor"]

_SAVE_AGAIN_S = 2.0
_ROWS_IN_MEMORY = 100_000
"""Rows that wait for room on the disk; of more the oldest are lost."""


def rate_factor(config: Config, step: int, elapsed_s: float) -> float:
    """What the learning rate is multiplied with at `step`.

    Warm-up is by steps. The decay of `linear` and `cosine` follows the nearer of the two limits, steps and seconds, so
    that it has ended when the run does.
    """
    optimizer, budget = config.optimizer, config.budget
    warmup = 0 if optimizer.lr_scheduler_type == "constant" else optimizer.warmup_steps
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if optimizer.lr_scheduler_type in ("constant", "constant_with_warmup"):
        return 1.0
    progress = (step - warmup) / max(1, budget.steps - warmup)
    if budget.max_train_seconds is not None and not config.algorithm.deterministic:
        progress = max(progress, elapsed_s / budget.max_train_seconds)
    progress = min(max(progress, 0.0), 1.0)
    if optimizer.lr_scheduler_type == "linear":
        return 1.0 - progress
    return 0.5 * (1.0 + math.cos(math.pi * progress))


class Learner(Protocol):
    """What turns batches into steps: it asks for a batch, steps, tells of the step's numbers, until it is done."""

    first_step: int
    """Steps that were done before, by an earlier attempt of the run."""

    def train(self) -> Any:
        """Trains until the budget is used or a stop is asked for. Raises Ending where no further batch will come."""


class TrainingRun:
    """One attempt of one run's training."""

    def __init__(self, member: CrewMember) -> None:
        self._member, self._config = member, member.spec.config
        self._began: float | None = None
        self._earlier_s = 0.0
        self._step, self._saved_step = 0, -1
        self._unsaved_since: float | None = None
        self._metrics = PatientLines(member.folder.metrics, most=_ROWS_IN_MEMORY)
        self._header = header(member.attempt)

    def run(self, checkpoint: Path | None = None) -> None:
        """Trains until the budget is used or a stop is asked for; leaves a checkpoint in both cases.

        Args:
            checkpoint: What to go on from: step, weights, optimizer, schedule, seconds used, and groups read.

        Raises:
            TopropeError: The training cannot go on.
        """
        # The slow imports come first: the policy may still be in the making, the API answers long before.
        import torch
        import transformers

        torch.set_num_threads(self._config.launcher.threads)
        transformers.logging.set_verbosity_error()
        from toprope.training.api.clients.sync_client import SyncApiClient
        from toprope.training.policy.loading import describe_device, fix_kernels, load_model, load_tokenizer
        from toprope.training.policy.weight_sync import WeightFile
        from toprope.training.trainer.batch_source import BatchSource, Ending
        from toprope.training.trainer.checkpoint_io import CheckpointState

        make_learner = self._learns_by()
        member, config = self._member, self._config
        fix_kernels(config)
        folder = Path(member.address("policy"))
        self._tokenizer = load_tokenizer(folder)
        self._model = load_model(folder, config, trained=True)
        trained = {name: value for name, value in self._model.named_parameters() if value.requires_grad}
        # Inference may hold what an earlier life of this trainer published, which is no more: it takes even version 0.
        self._publisher = WeightFile(member.folder.crew, trained, -1 if member.life else 0)
        self._optimizer = self._optimizer_of(trained)
        self._scheduler = torch.optim.lr_scheduler.LambdaLR(
            self._optimizer, lambda step: rate_factor(config, step, self._elapsed())
        )
        member.address("api")
        self._api = SyncApiClient(self._where_api_is, member.secret)
        self._api.waits = lambda: not member.ending.is_set()
        report_to = [] if config.logging.wandb == "disabled" else ["wandb"]
        trainer = make_learner(folder, describe_device(config), report_to)
        if checkpoint is None:
            state = CheckpointState(0, 0, 0, 0.0)
            self._take_over(folder)
        else:
            state = self._take_up(self._sound(checkpoint))
        if member.life or state.policy_version:
            self._publisher.version = state.policy_version - 1
            self._publisher.publish()
        trainer.first_step = state.step
        self._source = BatchSource(self._api, config, self._is_ending, state.cursor, state.rollouts, state.dropped)
        member.report(Ready(detail={"parameters": sum(value.numel() for value in trained.values())}))
        if state.step < config.budget.steps and not self._out_of_time():
            try:
                trainer.train()
            except Ending:
                pass
        self._save_at_last()
        if report_to:
            import wandb

            wandb.finish()
        member.report(Finished({"step": self._step, "train_seconds": round(self._elapsed(), 3)}))

    def _learns_by(self) -> Callable[[Path, str, list[str]], Learner]:
        """Imports what this kind of training needs, and returns what makes its learner of (the policy's folder, the
        device, where to report), once the model and its optimizer are there."""
        from toprope.training.trainer.grpo import GroupTrainer, arguments

        def make(folder: Path, device: str, report_to: list[str]) -> Learner:
            return GroupTrainer(
                self._config,
                self._model,
                self._tokenizer,
                arguments(self._config, str(self._member.folder.crew / "trainer"), device, report_to),
                next_batch=self._next_batch,
                on_row=self._on_row,
                optimizers=(self._optimizer, self._scheduler),
                callbacks=[after_step_of(self)],
            )

        return make

    def _optimizer_of(self, trained: dict[str, Any]) -> Any:
        """The optimizer of the policy's trained parameters, and of what is trained beside them."""
        return make_optimizer(self._config, trained)

    def _beside(self) -> dict[str, Any]:
        """Modules that are trained beside the policy, and are no part of it, by the name of their file."""
        return {}

    def _sound(self, checkpoint: Path) -> Path:
        """The checkpoint, or where it is damaged the one before it that is not.

        Raises:
            Corrupt: None is sound.
        """
        folder, step = self._member.folder, int(checkpoint.name.removeprefix("step-"))
        found, damaged = newest_sound(folder, below=step)
        if found is None:
            raise nothing_sound(folder, damaged)
        for damage in damaged:
            aside = set_aside(damage.path)
            self._member.report(
                Warned(f"{damage} It is kept as {aside.name}; training goes on from step {found.step}.")
            )
        if damaged:
            self._member.report(Checkpointed(found.step, str(found.path.relative_to(folder.path)), found.cursor))
        return found.path

    def _take_over(self, policy: Path) -> None:
        """Where a member of a sweep goes on with another's weights, its optimizer does so with the other's moments."""
        member = self._member.spec.member
        if member is None or member.continues is None:
            return
        from toprope.training.trainer.checkpoint_io import load_moments

        found = load_moments(policy.parent, model=self._model, optimizer=self._optimizer, beside=self._beside())
        print(f"going on from {member.continues}: moments of {found} parameters", file=sys.stderr, flush=True)

    def _take_up(self, checkpoint: Path) -> Any:
        """Becomes what the checkpoint was."""
        from toprope.training.trainer.checkpoint_io import load, load_weights

        load_weights(checkpoint, self._model)
        state = load(
            checkpoint,
            model=self._model,
            optimizer=self._optimizer,
            scheduler=self._scheduler,
            beside=self._beside(),
        )
        self._step = self._saved_step = state.step
        self._earlier_s = state.train_seconds
        # A trainer that was killed may have written the checkpoint and not have said so.
        cursor = self._api.take_up(state.cursor)
        if cursor != state.cursor:
            lost = f"ends {state.cursor - cursor} groups before it" if cursor < state.cursor else "is past it"
            self._member.report(
                Warned(f"The checkpoint of step {state.step} was made at group {state.cursor}, and the journal {lost}: "
                       f"training goes on with what comes after group {cursor} there.")
            )  # fmt: skip
        print(f"going on from step {state.step}, group {cursor}", file=sys.stderr, flush=True)
        return replace(state, cursor=cursor)

    def note_reporting(self) -> None:
        """Leaves word of where Weights & Biases keeps this run, if it does."""
        note_wandb(self._member.folder, self._config.logging.wandb)

    def beat(self) -> None:
        """Says that the training goes on."""
        self._member.beat()

    def after_step(self) -> bool:
        """Whether the training is to end."""
        return self._member.ending.is_set() or self._out_of_time()

    def _out_of_time(self) -> bool:
        limit = self._config.budget.max_train_seconds
        return limit is not None and self._elapsed() >= limit

    def _hold(self) -> None:
        """Waits while the run is held, which does not count as training; what found no room on the disk goes there
        now."""
        held_s = self._member.hold(self._member.beat)
        if held_s:
            if self._began is not None:
                self._began += held_s
            self._metrics.catch_up()
            if self._unsaved_since is not None:
                self._save()

    def _is_ending(self) -> bool:
        """Asked about once a second while there are no groups."""
        self._member.beat()
        self._hold()
        return self._member.ending.is_set()

    def _where_api_is(self) -> str | None:
        """Asked before every call of the API, and while it is away."""
        self._member.beat()
        url = self._member.peer("api")
        if url is None and self._member.ending.is_set():
            raise PeerAway("The trajectory API was away when the run ended.")
        return url

    def _next_batch(self) -> Any:
        self._hold()
        self._api.policy_version = self._publisher.version
        try:
            batch = self._source.next(self._publisher.version)
        except (DiskFull, PeerAway):
            if not self._member.ending.is_set():  # else both are waited for
                raise
            from toprope.training.trainer.batch_source import Ending

            raise Ending from None
        if self._began is None:
            self._began = time.monotonic()
        return batch

    def _elapsed(self) -> float:
        """Seconds of training so far, those of earlier attempts included."""
        return self._earlier_s + (0.0 if self._began is None else time.monotonic() - self._began)

    def _on_row(self, step: int, numbers: dict[str, float | None]) -> None:
        self._step = step
        unsound = self._unsound(numbers.get("loss"))
        if unsound is None:
            self._publisher.publish()
        row: dict[str, Any] = {"step": step, "time": round(time.time(), 3)}
        row |= {name: _short(value) for name, value in numbers.items()}
        row |= {"version": self._publisher.version, "train_seconds": round(self._elapsed(), 3)}
        line, self._header = self._header + (json.dumps(row) + "\n").encode(), b""
        if not self._metrics.append(line):
            self._member.report(NoRoom(f"{self._metrics.behind} rows of metrics.jsonl wait for room on the disk"))
        self._member.report(Stepped(step, self._config.budget.steps, row | {"eta_s": self._eta(step)}))
        if unsound is not None:
            raise TopropeError(
                f"{unsound} at step {step} is not a number. Nothing of that step was published or saved.",
                hint="Lower optimizer.learning_rate or optimizer.max_grad_norm; metrics.jsonl has the steps before.",
            )
        waited = self._unsaved_since is not None and time.monotonic() - self._unsaved_since >= _SAVE_AGAIN_S
        if waited or (self._unsaved_since is None and step % self._config.logging.save_steps == 0):
            self._save()

    def _unsound(self, loss: float | None) -> str | None:
        """What of a step is not finite; None: it may be published."""
        if loss is None or not math.isfinite(loss):
            return "The loss"
        trained = [value for value in self._model.parameters() if value.requires_grad]
        trained += [value for module in self._beside().values() for value in module.parameters()]
        return None if all_finite(trained) else "A weight"

    def _eta(self, step: int) -> float:
        elapsed, budget = self._elapsed(), self._config.budget
        left = (budget.steps - step) * elapsed / max(step, 1)
        if budget.max_train_seconds is not None:
            left = min(left, max(budget.max_train_seconds - elapsed, 0.0))
        return round(left, 1)

    def _save_at_last(self) -> None:
        """The checkpoint of the end, for which a full disk is waited for unless the run is to end at once."""
        while not (self._save() and self._metrics.catch_up()):
            if self._member.ending.wait(_SAVE_AGAIN_S):
                text = f"There was no room for a checkpoint of step {self._step}; the one before it stands."
                self._member.report(Warned(text))
                return

    def _save(self) -> bool:
        """Writes a checkpoint, unless this step has one; False where there is no room for it on the disk.

        Raises:
            TopropeError: It cannot be written for another reason.
        """
        from toprope.training.trainer.checkpoint_io import CheckpointState

        if self._saved_step == self._step:
            return True
        moments = [
            value for kept in self._optimizer.state.values() for value in kept.values() if hasattr(value, "numel")
        ]
        if not all_finite(moments):
            raise TopropeError(
                f"The optimizer's state at step {self._step} holds what is not a number, and was not saved.",
                hint="Lower optimizer.learning_rate or optimizer.max_grad_norm; the checkpoint before it stands.",
            )
        source = self._source
        state = CheckpointState(
            self._step, source.cursor, self._publisher.version, self._elapsed(), source.rollouts, dict(source.dropped)
        )
        try:
            path = self._write(state)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise TopropeError(f"The checkpoint of step {self._step} could not be written: {error}.") from error
            self._unsaved_since = time.monotonic()
            self._member.report(NoRoom(f"the checkpoint of step {self._step} waits for room on the disk"))
            return False
        self._saved_step, self._unsaved_since = self._step, None
        relative = str(path.relative_to(self._member.folder.path))
        self._member.report(Checkpointed(self._step, relative, state.cursor))
        with suppress(DiskFull, PeerAway):  # whoever goes on from here says it again
            self._api.commit(state.cursor)
        return True

    def _write(self, state: Any) -> Path:
        """Writes the checkpoint of this state. Raises: OSError."""
        from toprope.training.trainer.checkpoint_io import save

        return save(
            self._member.folder.checkpoints,
            state,
            model=self._model,
            tokenizer=self._tokenizer,
            optimizer=self._optimizer,
            scheduler=self._scheduler,
            keep=self._config.logging.save_total_limit,
            beside=self._beside(),
        )


def all_finite(tensors: Iterable[Any]) -> bool:
    """Whether every number in them is one."""
    import torch

    with torch.no_grad():
        # The largest magnitude of each: one pass without a copy, and what is no number stays none.
        floating = [tensor for tensor in tensors if tensor.numel() and tensor.is_floating_point()]
        largest = [torch.linalg.vector_norm(tensor, float("inf")).float() for tensor in floating]
        return not largest or bool(
            torch.isfinite(torch.stack([value.to(largest[0].device) for value in largest])).all()
        )


def make_optimizer(config: Config, parameters: dict[str, Any]) -> Any:
    """AdamW; weight decay on matrices only, as usual."""
    import torch

    section = config.optimizer
    matrices = [value for value in parameters.values() if value.dim() > 1]
    vectors = [value for value in parameters.values() if value.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": section.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    groups, betas = [group for group in groups if group["params"]], (section.adam_beta1, section.adam_beta2)
    if section.eight_bit:
        from toprope.training.policy.quantization import adamw

        return adamw(groups, lr=section.learning_rate, betas=betas)
    return torch.optim.AdamW(groups, lr=section.learning_rate, betas=betas, fused=True)


def after_step_of(run: TrainingRun) -> Any:
    from transformers import TrainerCallback

    class AfterStep(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            run.note_reporting()

        def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            run.beat()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            run.beat()
            if run.after_step():
                control.should_training_stop = True

    return AfterStep()


def _short(value: float | None) -> float | None:
    """Six significant digits; null for what is no number, since JSON has none."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.6g}")
