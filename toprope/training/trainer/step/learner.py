"""The training loop of every algorithm that learns from delivered groups, on a CPU and on a GPU.

Accelerate gives precision, backward pass and clipping; the loop, the losses and the forward pass are our own, so that
neither TRL nor the Hugging Face trainer is loaded. A step of the run is one batch of groups: the algorithm makes its
updates, then one version is published.
"""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from toprope.errors import InvalidValue, TopropeError
from toprope.settings.schema import Config
from toprope.training.policy.loading import ADAPTERS, describe_device, load_pretrained
from toprope.training.policy.quantization import quantization_config
from toprope.training.policy.weight_sync import CHECK_EVERY, WeightCheck, check_weights
from toprope.training.trainer.base import BatchReader
from toprope.training.trainer.batch_source import BatchSource, EndOfTraining, GroupBatch, TrainingRow, build_rows
from toprope.training.trainer.checkpoints.checkpoint_folder import CheckpointState
from toprope.training.trainer.checkpoints.checkpoint_io import save_part
from toprope.training.trainer.collate import RowTensors, collate
from toprope.training.trainer.local import LocalRun
from toprope.training.trainer.ranks import Gather, Ranks, Save, Train, settle, whole
from toprope.training.trainer.step.forward import PolicyForward
from toprope.training.trainer.step.prefetch import PrefetchingSource
from toprope.training.trainer.step.utilization import SamplerMeter
from toprope.training.trainer.step_metrics import PolicyDrift, StepTimer

OnStep = Callable[[int, Mapping[str, float | None]], None]


@dataclass(frozen=True)
class StepHooks:
    """The run's side of the loop."""

    next_batch: Callable[[], GroupBatch]
    """Returns the groups of the next step; raises to end the training."""
    on_step: OnStep
    """Called with (step, metrics) after every step."""
    beat: Callable[[], None] = lambda: None
    """Called between passes."""
    should_stop: Callable[[], bool] = lambda: False
    """Called after every step; true ends the training."""
    sampler_share: Callable[[], float | None] = lambda: None
    """Share of the time in which inference samples; None if unknown."""


@dataclass(frozen=True)
class StepBatch:
    """The rows of one step and their tensors."""

    rows: list[TrainingRow]
    tensors: RowTensors

    def part(self, numbers: Sequence[int]) -> StepBatch:
        """Some of the rows."""
        if len(numbers) == len(self.rows) and list(numbers) == list(range(len(self.rows))):
            return self
        return StepBatch([self.rows[number] for number in numbers], self.tensors.part(numbers))


class StepLearner(ABC):
    """Takes optimizer steps on batches.

    Args:
        model: The policy, with or without adapters.
        reference: The starting policy for a KL term, see `load_reference`.
        pad: Id of the padding token.
        device: `cpu` or `cuda`.
        optimizers: The optimizer and its scheduler.
        modules: Modules that are trained beside the model.
        ranks: The processes that train the model, each its share of the rows.
    """

    def __init__(
        self,
        config: Config,
        model: Any,
        reference: Any | None,
        *,
        pad: int,
        device: str,
        hooks: StepHooks,
        optimizers: tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LambdaLR],
        modules: Sequence[nn.Module] = (),
        ranks: Ranks | None = None,
    ) -> None:
        self._config, self._model, self._reference, self._hooks = config, model, reference, hooks
        self._modules, self._ranks = modules, ranks or Ranks()
        self._optimizer, self._scheduler = optimizers
        self._accelerator = Accelerator(cpu=device == "cpu", mixed_precision=mixed_precision(config, device))
        self._trained = [value for value in model.parameters() if value.requires_grad]
        self._trained += [value for module in modules for value in module.parameters()]
        self._drift, self._timer = PolicyDrift(), StepTimer()
        self.first_step = 0
        """Steps done before by an earlier attempt of the run."""
        torch.manual_seed(config.algorithm.seed + self._ranks.number)  # for dropout
        if config.optimizer.gradient_checkpointing:
            model.activation_checkpointing_enable()
        self._forward = PolicyForward(
            model,
            pad,
            temperature=config.rollout.temperature,
            autocast=self._accelerator.autocast,
            joint=not self._ranks.alone,
            short=self._accelerator.mixed_precision == "no" and not config.optimizer.gradient_checkpointing,
        )

    def train(self) -> None:
        """See `Learner`."""
        for step in range(self.first_step + 1, self._config.budget.steps + 1):
            began = time.perf_counter()
            delivered = self._hooks.next_batch()
            self._timer.start_preparing()
            batch = self._collate(delivered)
            prepared = self._prepare(batch)
            self._timer.stop_preparing()
            if not self._model.training:
                self._model.train()
            metrics = self._update(step, batch, prepared)
            metrics["learning_rate"] = self._optimizer.param_groups[0]["lr"]
            self._scheduler.step()
            metrics["step_time"] = time.perf_counter() - began
            waited = delivered.metrics.get("wait_seconds", 0.0)
            metrics |= {**self._drift.take(self._ranks), **self._timer.take(metrics, waited), **delivered.metrics}
            metrics |= self._utilization(metrics)
            self._hooks.on_step(step, metrics)
            self._hooks.beat()
            if self._hooks.should_stop():
                return

    def _utilization(self, metrics: Mapping[str, float | None]) -> dict[str, float]:
        """Shares of the time in which trainer and sampler work."""
        step, waited, sampler = metrics["time/step"] or 0.0, metrics["time/wait"] or 0.0, self._hooks.sampler_share()
        shares = {"utilization/trainer": 1 - waited / step} if step else {}
        return shares if sampler is None else shares | {"utilization/sampler": sampler}

    @abstractmethod
    def _prepare(self, batch: StepBatch) -> Any:
        """Computes what stays fixed during a step, such as the reference's log-probabilities."""

    @abstractmethod
    def _update(self, step: int, batch: StepBatch, prepared: Any) -> dict[str, float | None]:
        """Makes all passes and optimizer updates of a step; returns their metrics."""

    def _collate(self, delivered: GroupBatch) -> StepBatch:
        rows = build_rows(delivered.groups, self._config)
        batch = StepBatch(rows, collate(rows, delivered.version, self._forward.device))
        if unknown := [number for number, row in enumerate(rows) if not row.has_logprobs]:
            # Of what nobody scored, the policy before the step is the best guess; 0 would mean that it was certain.
            batch.tensors.sampled[unknown] = self._ranks.sum(self._logps(batch, unknown, self._model))[unknown]
        return batch

    def _shares(self, rows: Sequence[int]) -> list[list[int]]:
        """Numbers of the rows that this process passes through the model at once, for each of its passes."""
        return self._ranks.shares(rows, self._config.optimizer.micro_batch_size)

    def _backward(self, loss: torch.Tensor) -> None:
        """Adds up the gradients of a pass. Losses of passes and ranks add up to the loss of the step."""
        self._accelerator.backward(loss * self._ranks.count)  # the ranks take the mean of their gradients

    def _reference_logps(self, batch: StepBatch) -> torch.Tensor:
        """R x C log-probabilities of the starting policy; 0 in the rows of other ranks."""
        with self._as_reference() as model:
            return self._logps(batch, range(len(batch.rows)), model)

    @contextmanager
    def _as_reference(self) -> Iterator[Any]:
        """The starting policy, which may be the policy itself with other adapters."""
        if self._reference is None:
            with self._model.disable_adapter():
                yield self._model
        elif isinstance(self._reference, nn.Module):
            yield self._reference
        else:
            adapters = _adapters_of(self._model)
            present = [value.detach().clone() for value in adapters]
            try:
                _copy(self._reference, adapters)
                yield self._model
            finally:
                _copy(present, adapters)

    def _logps(self, batch: StepBatch, rows: Sequence[int], model: Any) -> torch.Tensor:
        """R x C log-probabilities of some rows, without a gradient; 0 in the others and in those of other ranks."""
        logps = torch.zeros_like(batch.tensors.sampled)
        self._model.eval()
        with torch.no_grad():
            for numbers in self._shares(rows):
                part = batch.part(numbers)
                scores = self._forward(part.rows, part.tensors.columns, model=model)
                if scores is not None:
                    logps[numbers] = scores.logps
                self._hooks.beat()
        return logps

    def _take_optimizer_step(self) -> torch.Tensor:
        """Clips and applies the gradients; returns their norm before."""
        max_norm = self._config.optimizer.max_grad_norm
        if self._ranks.alone:  # one call for all tensors, which accelerate makes on GPUs alone
            norm = nn.utils.clip_grad_norm_(self._trained, max_norm, foreach=True)
        else:
            norm = self._accelerator.clip_grad_norm_(self._trained, max_norm)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return whole(norm).detach()


def mixed_precision(config: Config, device: str) -> str:
    """Accelerate's name for the number format of forward and backward passes: `bf16` or `no`.

    Raises:
        InvalidValue: `optimizer.precision` asks for bfloat16 on a CPU that would emulate it.
    """
    precision = config.optimizer.precision
    if precision == "auto":
        return "bf16" if device == "cuda" else "no"
    if precision == "bfloat16" and device == "cpu" and not cpu_computes_bfloat16():
        raise InvalidValue(
            "optimizer.precision is bfloat16, and this CPU has neither AMX nor AVX512-BF16: passes would be slower.",
            hint="Set optimizer.precision to auto or float32.",
        )
    return "bf16" if precision == "bfloat16" else "no"


def cpu_computes_bfloat16() -> bool:
    """True if the CPU multiplies matrices of bfloat16; False also if this PyTorch cannot tell."""
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return bool(capabilities.get("amx_bf16") or capabilities.get("avx512_bf16"))


def load_reference(folder: Path, config: Config, model: Any, weight: float) -> Any | None:
    """The starting policy for a KL term of some weight: a model, or the values of the adapters that the run began with.
    None without a KL term, and with new adapters, where the reference is the model without them.

    Raises:
        InvalidValue: It cannot be loaded, or not in 8 bits.
    """
    if weight == 0:
        return None
    if hasattr(model, "peft_config"):
        has_adapters = (folder / ADAPTERS).is_file()
        return [value.detach().clone() for value in _adapters_of(model)] if has_adapters else None
    if config.algorithm.reference_8bit:
        reference = load_pretrained(folder, None, quantization_config=quantization_config("algorithm.reference_8bit"))
    else:
        reference = load_pretrained(folder, str(model.device), dtype=model.dtype)
    return reference.eval().requires_grad_(False)


def _adapters_of(model: Any) -> list[torch.Tensor]:
    return [value for value in model.parameters() if value.requires_grad]


def _copy(values: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    with torch.no_grad():
        for value, target in zip(values, targets, strict=True):
            target.copy_(value)


class SteppedRun(LocalRun):
    """One attempt of a training whose learner is a `StepLearner`, or one rank of several that share the work."""

    _checked: WeightCheck | None = None
    _gathered = 0

    def run(self, checkpoint: Path | None = None) -> None:
        """See `TrainingRun.run`. A rank that follows does what rank 0 orders, until that ends."""
        ranks = Ranks.follow(self._config.launcher.num_processes, describe_device(self._config))
        if ranks is None:
            super().run(checkpoint)
            return
        self._ranks = ranks
        try:
            learner, _ = self._set_up(Path(self._member.address("policy")), checkpoint)
            with suppress(EndOfTraining):
                learner.train()
                self._next_ordered_batch()
        except TopropeError as error:  # nobody reads this rank's reports; the trainer's log shows it
            print(f"rank {ranks.number}: {error.message} {error.hint}", file=sys.stderr, flush=True)
            raise

    def _make_step_learner(self, kind: type[StepLearner], policy: Path, kl_weight: float) -> StepLearner:
        """A learner of this class; `kl_weight` is that of its KL term."""
        return kind(
            self._config,
            self._model,
            load_reference(policy, self._config, self._model, kl_weight),
            pad=int(self._tokenizer.pad_token_id),
            device=describe_device(self._config),
            hooks=self._hooks(),
            optimizers=(self._optimizer, self._scheduler),
            modules=tuple(self._extra_modules().values()),
            ranks=self._ranks,
        )

    def _start_ranks(self, policy: Path, checkpoint: Path | None) -> None:
        if (count := self._config.launcher.num_processes) > 1:
            self._ranks = Ranks.lead(self._member, count, describe_device(self._config), policy, checkpoint)
            self._check = lambda: self._checked

    def _make_source(self, state: CheckpointState) -> BatchReader:
        if self._config.samples_in_step:  # sampling waits for the weights of each step
            return super()._make_source(state)
        client = self._make_client(self._look_up_api)
        ending, steps = self._member.ending, self._config.budget.steps
        counted = state.cursor, state.rollouts, state.dropped
        source = BatchSource(client, self._config, ending.is_set, *counted, tell=self._member.report)
        return PrefetchingSource(source, self._is_ending, lambda: self._step + 1 < steps)

    def _gather_weights(self) -> bool:
        if not self._ranks.alone:
            due = self._config.inference.engine == "vllm" or self._gathered % CHECK_EVERY == 0
            self._gathered += 1
            self._checked = check_weights(self._model) if due else None  # a forward pass of all ranks
            if due:
                settle(self._model)
        return super()._gather_weights()

    def _hooks(self) -> StepHooks:
        if self._ranks.leads:
            meter = SamplerMeter(lambda: self._member.peer("inference"), self._member.secret)
            return StepHooks(self._next_batch, self._finish_step, self.beat, self.should_stop, meter.share)
        return StepHooks(self._next_ordered_batch, lambda step, metrics: None)

    def _next_batch(self) -> GroupBatch:
        batch = super()._next_batch()
        self._ranks.order(Train(batch, [group["lr"] for group in self._optimizer.param_groups]))
        return batch

    def _next_ordered_batch(self) -> GroupBatch:
        """Carries out orders of rank 0 until one is to take a step."""
        while not isinstance(order := self._ranks.next_order(), Train):
            if isinstance(order, Gather):
                self._gather_weights()
            elif isinstance(order, Save):
                with suppress(OSError, TopropeError):  # rank 0 knows, and decides
                    save_part(
                        Path(order.folder),
                        model=self._model,
                        optimizer=self._optimizer,
                        extra_modules=self._extra_modules(),
                        ranks=self._ranks,
                    )
            else:
                raise EndOfTraining
        for group, rate in zip(self._optimizer.param_groups, order.rates, strict=True):
            group["lr"] = rate  # its schedule may depend on rank 0's clock
        return order.batch
