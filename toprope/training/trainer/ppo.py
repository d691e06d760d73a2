"""Training with PPO: the groups, crew, metrics and checkpoints of GRPO, and a value function.

TRL has no PPO any more, so the loop is our own; it needs neither TRL nor accelerate, so it starts sooner and smaller.
A step of the run is one batch of groups: `ppo.epochs` passes over it with `ppo.minibatches` updates each, then one
version is published. The importance ratio is against the sampler's own log-probabilities, however many versions lie
between, so the same clip bounds the passes over a batch and its age.

The value head reads the expected reward off the policy's last hidden state, one number per token. It uses the policy's
own trunk, so there is no second model in memory. In a checkpoint it is a file of its own (`value_head.safetensors`):
the published model, and the one that `from_pretrained` loads, stays a plain language model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from toprope.settings.schema import Config
from toprope.training.policy.loading import load_model
from toprope.training.trainer.base import Learner, TrainingRun
from toprope.training.trainer.batch_source import GroupBatch, TrainingRow, build_rows
from toprope.training.trainer.collate import collate
from toprope.training.trainer.optimization import make_optimizer
from toprope.training.trainer.ppo_loss import Losses, Targets, compute_targets, step_loss
from toprope.training.trainer.step_metrics import VERSION_AGES, PolicyDrift, StepTimer, version_ages

_VALUE_HEAD = "value_head"
"""Name of the value head's file in a checkpoint."""
_MASKED = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask", "sampling_per_token_logps")
OnStep = Callable[[int, Mapping[str, float | None]], None]


class ValueHead(nn.Module):
    """One hidden layer as wide as the trunk, and one output, which begins at zero: before the first reward was seen, to
    expect nothing is the one guess that does no harm.

    Args:
        width: Size of the trunk's hidden states.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(width, width)
        self.out = nn.Linear(width, 1)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Values of hidden states: ... x width to ..."""
        values: torch.Tensor = self.out(torch.tanh(self.hidden(states)))
        return values.squeeze(-1)


def forward_with_values(
    model: Any, head: ValueHead | None, ids: torch.Tensor, mask: torch.Tensor, keep: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Logits and values at the positions from which the last `keep` tokens were chosen.

    Args:
        model: A causal language model, with or without adapters.
        head: The value head; None if values are not needed.
        ids: R x T token ids.
        mask: R x T, 0 at padding.
        keep: Number of tokens C at the end of each row.

    Returns:
        Logits R x C x V in float32, and values R x C.
    """
    states: list[torch.Tensor] = []

    def capture(module: nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
        states.append(arguments[0])

    # The output layer's input is the last hidden state after the final norm, in every architecture, with or without
    # adapters, and costs nothing to keep.
    hook = model.get_output_embeddings().register_forward_pre_hook(capture)
    try:
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        logits: torch.Tensor = model(
            input_ids=ids, attention_mask=mask, position_ids=positions, logits_to_keep=keep + 1, use_cache=False
        ).logits
    finally:
        hook.remove()
    logits = logits[:, -keep - 1 : -1].float()
    if head is None:
        return logits, None
    with torch.autocast(ids.device.type, enabled=False):  # half precision would round values to three digits
        return logits, head(states[-1][:, -keep - 1 : -1].float())


class PpoRun(TrainingRun):
    """One attempt of training with PPO."""

    _head: ValueHead

    def _make_learner(self, policy: Path, device: str, report_to: list[str]) -> Learner:
        return PpoLearner(
            self._config,
            self._model,
            self._head,
            _load_reference(policy, self._config, self._model),
            pad=int(self._tokenizer.pad_token_id),
            device=device,
            next_batch=self._next_batch,
            on_step=_with_wandb(self._finish_step, report_to, self.record_wandb),
            optimizers=(self._optimizer, self._scheduler),
            beat=self.beat,
            should_stop=self.should_stop,
        )

    def _make_optimizer(self, trained: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
        section = self._config.optimizer
        torch.manual_seed(self._config.algorithm.seed)
        device = next(iter(trained.values())).device
        self._head = ValueHead(self._model.config.get_text_config().hidden_size).to(device)
        optimizer = make_optimizer(self._config, trained)
        rate = self._config.ppo.value_learning_rate or section.learning_rate
        optimizer.add_param_group({"params": list(self._head.parameters()), "lr": rate, "weight_decay": 0.0})
        return optimizer

    def _extra_modules(self) -> Mapping[str, nn.Module]:
        return {_VALUE_HEAD: self._head}


def _load_reference(folder: Path, config: Config, model: Any) -> Any | None:
    """The starting policy, for the KL penalty. None without a penalty, and with adapters, where the reference is the
    model without them."""
    if config.ppo.kl_coef == 0 or hasattr(model, "peft_config"):
        return None
    return load_model(folder, config).eval().requires_grad_(False)


def _with_wandb(on_step: OnStep, report_to: list[str], record: Callable[[], None]) -> OnStep:
    """`on_step` that logs to Weights & Biases first, if that is wanted."""
    if not report_to:
        return on_step
    import wandb

    wandb.init()  # project, name and mode are in the environment
    record()

    def log(step: int, metrics: Mapping[str, float | None]) -> None:
        known = {f"train/{name}": value for name, value in metrics.items() if value is not None}
        wandb.log(known | {"train/global_step": step})
        on_step(step, metrics)

    return log


class PpoLearner:
    """Takes optimizer steps on batches.

    Args:
        model: The policy, with or without adapters.
        head: The value head.
        reference: The starting policy for a KL penalty; see `_load_reference`.
        pad: Id of the padding token.
        device: `cpu` or `cuda`.
        next_batch: Returns the groups of the next step; raises to end the training.
        on_step: Called with (step, metrics) after every step.
        optimizers: The optimizer and its scheduler.
        beat: Called between passes.
        should_stop: Called after every step; true ends the training.
    """

    def __init__(
        self,
        config: Config,
        model: Any,
        head: ValueHead,
        reference: Any | None,
        *,
        pad: int,
        device: str,
        next_batch: Callable[[], GroupBatch],
        on_step: OnStep,
        optimizers: tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LambdaLR],
        beat: Callable[[], None] = lambda: None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self._config, self._model, self._head, self._reference = config, model, head, reference
        self._pad, self._device = pad, device
        self._next_batch, self._on_step, self._beat, self._should_stop = next_batch, on_step, beat, should_stop
        self._optimizer, self._scheduler = optimizers
        self._trained = [value for value in model.parameters() if value.requires_grad] + list(head.parameters())
        self._drift, self._timer = PolicyDrift(), StepTimer()
        self.first_step = 0
        if config.optimizer.gradient_checkpointing:
            model.activation_checkpointing_enable()

    def train(self) -> None:
        """See `Learner`."""
        for step in range(self.first_step + 1, self._config.budget.steps + 1):
            asked = time.perf_counter()
            batch = self._next_batch()
            self._timer.start_preparing()
            rows = build_rows(batch.groups, self._config)
            tensors = self._tensors(rows, batch.version)
            targets, value_metrics = self._targets(rows, tensors)
            self._timer.stop_preparing()
            metrics: dict[str, float | None] = {**self._update(step, tensors, targets), **value_metrics}
            metrics["learning_rate"] = self._optimizer.param_groups[0]["lr"]
            self._scheduler.step()
            metrics["step_time"] = time.perf_counter() - asked
            waited = batch.metrics.get("wait_seconds", 0.0)
            metrics |= {**self._drift.take(), **self._timer.take(metrics, waited), **batch.metrics}
            self._on_step(step, metrics)
            self._beat()
            if self._should_stop():
                return

    def _tensors(self, rows: list[TrainingRow], version: int | None) -> dict[str, torch.Tensor]:
        mask_truncated = self._config.algorithm.mask_truncated_completions
        whole = collate(rows, self._pad, mask_truncated=mask_truncated, device=self._device)
        tensors = {name: whole[name] for name in _MASKED}
        tensors[VERSION_AGES] = version_ages(rows, version, self._device)
        tensors["mask"] = (tensors["completion_mask"] * tensors["tool_mask"]).bool()
        return tensors

    def _targets(self, rows: list[TrainingRow], tensors: dict[str, torch.Tensor]) -> tuple[Targets, dict[str, float]]:
        """Advantages and returns by value function and reference before the batch, and metrics of both."""
        section = self._config.ppo
        values, reference = [], []
        self._model.eval()
        with torch.no_grad():
            for part in self._micro_batches(torch.arange(len(rows), device=self._device)):
                some = {name: value[part] for name, value in tensors.items()}
                values.append(self._forward(self._model, some, values=True, entropies=False)[1])
                if section.kl_coef > 0:
                    reference.append(self._reference_logprobs(some))
                self._beat()
        reference_logprobs = torch.cat(reference) if reference else None
        targets = compute_targets(
            tensors["mask"],
            [row.rollout for row in rows],
            [row.reward for row in rows],
            torch.cat(values),
            tensors["sampling_per_token_logps"],
            reference_logprobs,
            {place: row.token_advantages for place, row in enumerate(rows) if row.token_advantages is not None},
            section,
        )
        metrics = _value_metrics(tensors["mask"], targets)
        if reference_logprobs is not None and bool(tensors["mask"].any()):
            # The estimator that is never negative, as GRPO reports it.
            delta = (reference_logprobs - tensors["sampling_per_token_logps"])[tensors["mask"]]
            metrics["kl"] = float((delta.exp() - 1 - delta).mean())
        return targets, metrics

    def _reference_logprobs(self, part: dict[str, torch.Tensor]) -> torch.Tensor:
        if self._reference is not None:
            return self._forward(self._reference, part, values=False, entropies=False)[0]
        with self._model.disable_adapter():
            return self._forward(self._model, part, values=False, entropies=False)[0]

    def _micro_batches(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Row numbers in parts that go through the model at once."""
        return torch.split(rows, self._config.optimizer.micro_batch_size or max(len(rows), 1))

    def _update(self, step: int, tensors: dict[str, torch.Tensor], targets: Targets) -> dict[str, float]:
        """Runs all passes over a batch; returns their metrics."""
        section, count = self._config.ppo, len(tensors["mask"])
        # From seed and step alone, so that a resumed run shuffles as an uninterrupted one.
        order = torch.Generator().manual_seed(self._config.algorithm.seed * 1_000_003 + step)
        sums = _LossSums()
        self._model.train()
        for epoch in range(section.epochs):
            shuffled = torch.randperm(count, generator=order).to(self._device)
            for rows in shuffled.tensor_split(min(section.minibatches, count)):
                tokens = float(tensors["mask"][rows].sum())
                if not tokens:
                    continue
                for part in self._micro_batches(rows):
                    some = {name: value[part] for name, value in tensors.items()}
                    logprobs, values, entropies = self._forward(self._model, some, values=True, entropies=True)
                    if epoch == 0:  # before these passes move the policy: comparable with other algorithms
                        self._drift.add(logprobs.detach(), some)
                    own = Targets(
                        targets.advantages[part], targets.returns[part], targets.values[part], targets.rewards[part]
                    )
                    sampled = some["sampling_per_token_logps"]
                    loss = step_loss(logprobs, values, entropies, some["mask"], sampled, own, section, tokens)
                    torch.autograd.backward(loss.total)
                    sums.add(loss, first=epoch == 0)
                    self._beat()
                norm = torch.nn.utils.clip_grad_norm_(self._trained, self._config.optimizer.max_grad_norm)
                self._optimizer.step()
                self._optimizer.zero_grad(set_to_none=True)
                sums.finish_update(tokens, norm)
        return sums.metrics(section.value_coef, section.entropy_coef)

    def _forward(
        self, model: Any, part: dict[str, torch.Tensor], *, values: bool, entropies: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Log-probabilities of the sampled tokens, values before them, entropies: R x C."""
        ids = torch.cat([part["prompt_ids"], part["completion_ids"]], 1)
        mask = torch.cat([part["prompt_mask"], part["completion_mask"]], 1)
        precision = torch.autocast("cuda", dtype=torch.bfloat16) if self._device == "cuda" else nullcontext()
        with precision:
            logits, found = forward_with_values(
                model, self._head if values else None, ids, mask, part["completion_ids"].size(1)
            )
        logits = logits / self._config.rollout.temperature
        normal = torch.logsumexp(logits, -1)
        logprobs = logits.gather(2, part["completion_ids"].unsqueeze(2)).squeeze(2) - normal
        spread = torch.zeros_like(logprobs)
        if entropies:
            with nullcontext() if self._config.ppo.entropy_coef > 0 else torch.no_grad():
                spread = normal - (torch.softmax(logits, -1) * logits).sum(-1)
        return logprobs, spread if found is None else found, spread


class _LossSums:
    """Sums the losses of the passes over a batch."""

    def __init__(self) -> None:
        self._sums: torch.Tensor | None = None
        self._first: torch.Tensor | None = None
        self._tokens = self._first_tokens = 0.0
        self._norms: list[torch.Tensor] = []
        self._is_first = True

    def add(self, loss: Losses, *, first: bool) -> None:
        parts = [loss.policy, loss.value, loss.entropy, loss.clipped_low, loss.clipped_high, loss.value_clipped]
        sums = torch.stack([part.double() for part in parts])
        self._sums = sums if self._sums is None else self._sums + sums
        self._is_first = first
        if first:
            self._first = sums if self._first is None else self._first + sums

    def finish_update(self, tokens: float, norm: torch.Tensor) -> None:
        self._tokens += tokens
        self._first_tokens += tokens if self._is_first else 0.0
        self._norms.append(norm.detach())

    def metrics(self, value_coef: float, entropy_coef: float) -> dict[str, float]:
        """Means per token over all passes; clip ratios and entropy over the first pass, comparable between runs."""
        if self._sums is None or self._first is None:
            return {"loss": 0.0, "grad_norm": 0.0}
        policy, value, entropy, low, high, value_clipped = (self._sums / max(self._tokens, 1.0)).tolist()
        _, _, at_first, first_low, first_high, _ = (self._first / max(self._first_tokens, 1.0)).tolist()
        return {
            "loss": policy + value_coef * value - entropy_coef * entropy,
            "loss/policy": policy,
            "loss/value": value,
            "grad_norm": float(torch.stack(self._norms).mean()),
            "entropy": at_first,
            "clip_ratio/low_mean": first_low,
            "clip_ratio/high_mean": first_high,
            "clip_ratio/region_mean": first_low + first_high,
            "clip_ratio/all_epochs": low + high,
            "value/clip_ratio": value_clipped,
        }


def _value_metrics(mask: torch.Tensor, targets: Targets) -> dict[str, float]:
    """Metrics of the value function's predictions for the batch."""
    if not bool(mask.any()):
        return {}
    values, returns = targets.values[mask], targets.returns[mask]
    variance = returns.var(unbiased=False)
    metrics = {"value/mean": float(values.mean()), "returns/mean": float(returns.mean())}
    if float(variance) > 1e-12:
        metrics["value/explained_variance"] = float(1 - (returns - values).var(unbiased=False) / variance)
    return metrics
