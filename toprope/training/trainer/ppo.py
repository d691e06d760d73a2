"""The trainer's program for `ppo`: the same groups, crew, metrics and checkpoints as GRPO, and a value function.

TRL has no PPO any more, so the loop is our own; it needs neither TRL nor accelerate, which makes it start sooner and
smaller. A step of the run is one batch of groups: `ppo.epochs` passes over it with `ppo.minibatches` updates each, then
one version is published. The importance ratio is against the sampler's own log-probabilities, however many versions lie
between, so passes over a batch and its age are held by the same clip.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from toprope.settings.schema import Config
from toprope.training.component.member import CrewMember
from toprope.training.trainer.base import Learner, TrainingRun, make_optimizer
from toprope.training.trainer.batch_source import GroupBatch, Row, rows_of
from toprope.training.trainer.collate import collate
from toprope.training.trainer.ppo_loss import Estimates, Losses, estimate, step_loss
from toprope.training.trainer.step_metrics import AGES, Movement, StepClock, ages
from toprope.training.trainer.value_head import FILE, ValueHead, with_values

__all__ = ["PpoLearner", "PpoRun"]

_MASKED = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask", "sampling_per_token_logps")


class PpoRun(TrainingRun):
    """One attempt of training with PPO."""

    def __init__(self, member: CrewMember) -> None:
        super().__init__(member)
        self._head: ValueHead | None = None

    def _learns_by(self) -> Callable[[Path, str, list[str]], Learner]:
        def make(folder: Path, device: str, report_to: list[str]) -> Learner:
            assert self._head is not None
            return PpoLearner(
                self._config,
                self._model,
                self._head,
                _reference(folder, self._config, self._model),
                pad=int(self._tokenizer.pad_token_id),
                device=device,
                next_batch=self._next_batch,
                on_row=_reporting(self._on_row, report_to, self.note_reporting),
                optimizers=(self._optimizer, self._scheduler),
                beat=self.beat,
                ends=self.after_step,
            )

        return make

    def _optimizer_of(self, trained: dict[str, Any]) -> Any:
        section = self._config.optimizer
        some = next(iter(trained.values()))
        torch.manual_seed(self._config.algorithm.seed)
        self._head = ValueHead(self._model.config.get_text_config().hidden_size).to(some.device)
        optimizer = make_optimizer(self._config, trained)
        rate = self._config.ppo.value_learning_rate or section.learning_rate
        optimizer.add_param_group({"params": list(self._head.parameters()), "lr": rate, "weight_decay": 0.0})
        return optimizer

    def _beside(self) -> dict[str, Any]:
        return {} if self._head is None else {FILE: self._head}


def _reference(folder: Path, config: Config, model: Any) -> Any | None:
    """What the KL penalty is against: the policy as it started. None without a penalty, and with adapters, where it is
    the model without them."""
    if config.ppo.kl_coef == 0 or hasattr(model, "peft_config"):
        return None
    from toprope.training.policy.loading import load_model

    reference = load_model(folder, config).eval()
    return reference.requires_grad_(False)


def _reporting(
    on_row: Callable[[int, dict[str, float | None]], None], report_to: list[str], began: Callable[[], None]
) -> Callable[[int, dict[str, float | None]], None]:
    """Tells Weights & Biases as well, where that is wanted."""
    if not report_to:
        return on_row
    import wandb

    wandb.init()  # project, name and mode are in the environment
    began()

    def tell(step: int, numbers: dict[str, float | None]) -> None:
        told = {f"train/{name}": value for name, value in numbers.items() if value is not None}
        wandb.log(told | {"train/global_step": step})
        on_row(step, numbers)

    return tell


class PpoLearner:
    """Batches in, optimizer steps out.

    Args:
        config: The run's configuration.
        model: The policy, with adapters or without.
        head: Its value head.
        reference: The starting policy, for a KL penalty; see `_reference`.
        pad: Id of the padding token.
        device: `cpu` or `cuda`.
        next_batch: Gives the groups of the next step; raising ends the training.
        on_row: Called with (step, numbers) after every step.
        optimizers: The optimizer and its scheduler.
        beat: Called between passes.
        ends: Asked after every step whether it was the last.
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
        on_row: Callable[[int, dict[str, float | None]], None],
        optimizers: tuple[Any, Any],
        beat: Callable[[], None] = lambda: None,
        ends: Callable[[], bool] = lambda: False,
    ) -> None:
        self._config, self._model, self._head, self._reference = config, model, head, reference
        self._pad, self._device = pad, device
        self._next_batch, self._on_row, self._beat, self._ends = next_batch, on_row, beat, ends
        self._optimizer, self._scheduler = optimizers
        self._trained = [value for value in model.parameters() if value.requires_grad] + list(head.parameters())
        self._movement, self._clock = Movement(), StepClock()
        self.first_step = 0
        if config.optimizer.gradient_checkpointing:
            model.activation_checkpointing_enable()

    def train(self) -> None:
        """See `Learner`."""
        for step in range(self.first_step + 1, self._config.budget.steps + 1):
            asked = time.perf_counter()
            batch = self._next_batch()
            self._clock.prepares()
            rows = rows_of(batch.groups, self._config)
            tensors = self._tensors(rows, batch.version)
            towards, about = self._estimate(rows, tensors)
            self._clock.prepared()
            numbers: dict[str, float | None] = {**self._update(step, tensors, towards), **about}
            numbers["learning_rate"] = self._optimizer.param_groups[0]["lr"]
            self._scheduler.step()
            numbers["step_time"] = time.perf_counter() - asked
            numbers |= self._movement.take() | self._clock.take(numbers, batch.metrics.get("wait_seconds", 0.0))
            self._on_row(step, numbers | batch.metrics)
            self._beat()
            if self._ends():
                return

    def _tensors(self, rows: list[Row], version: int | None) -> dict[str, torch.Tensor]:
        mask_truncated = self._config.algorithm.mask_truncated_completions
        whole = collate(rows, self._pad, mask_truncated=mask_truncated, device=self._device)
        tensors = {name: whole[name] for name in _MASKED}
        tensors[AGES] = ages(rows, version, self._device)
        tensors["mask"] = (tensors["completion_mask"] * tensors["tool_mask"]).bool()
        return tensors

    def _estimate(self, rows: list[Row], tensors: dict[str, torch.Tensor]) -> tuple[Estimates, dict[str, float]]:
        """Advantages and returns, by the value function and the reference as they are before the batch, and what is to
        be told of them."""
        section = self._config.ppo
        values, reference = [], []
        self._model.eval()
        with torch.no_grad():
            for part in self._passes(torch.arange(len(rows), device=self._device)):
                some = {name: value[part] for name, value in tensors.items()}
                values.append(self._forward(self._model, some, values=True, entropies=False)[1])
                if section.kl_coef > 0:
                    reference.append(self._of_reference(some))
                self._beat()
        start = torch.cat(reference) if reference else None
        towards = estimate(
            tensors["mask"],
            [row.rollout for row in rows],
            [row.reward for row in rows],
            torch.cat(values),
            tensors["sampling_per_token_logps"],
            start,
            {place: row.token_advantages for place, row in enumerate(rows) if row.token_advantages is not None},
            section,
        )
        about = _about(tensors["mask"], towards)
        if start is not None and bool(tensors["mask"].any()):
            # The estimator that is never negative, as GRPO reports it.
            away = (start - tensors["sampling_per_token_logps"])[tensors["mask"]]
            about["kl"] = float((away.exp() - 1 - away).mean())
        return towards, about

    def _of_reference(self, part: dict[str, torch.Tensor]) -> torch.Tensor:
        if self._reference is not None:
            return self._forward(self._reference, part, values=False, entropies=False)[0]
        with self._model.disable_adapter():
            return self._forward(self._model, part, values=False, entropies=False)[0]

    def _passes(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Rows in parts that go through the model at once."""
        return rows.split(self._config.optimizer.micro_batch_size or max(len(rows), 1))

    def _update(self, step: int, tensors: dict[str, torch.Tensor], towards: Estimates) -> dict[str, float]:
        """All passes over a batch; what they showed."""
        section, count = self._config.ppo, len(tensors["mask"])
        # Known from the seed and the step alone, so that a run that goes on does as one that was not broken off.
        order = torch.Generator().manual_seed(self._config.algorithm.seed * 1_000_003 + step)
        shown = _Shown()
        self._model.train()
        for epoch in range(section.epochs):
            shuffled = torch.randperm(count, generator=order).to(self._device)
            for rows in shuffled.tensor_split(min(section.minibatches, count)):
                tokens = float(tensors["mask"][rows].sum())
                if not tokens:
                    continue
                for part in self._passes(rows):
                    some = {name: value[part] for name, value in tensors.items()}
                    logprobs, values, entropies = self._forward(self._model, some, values=True, entropies=True)
                    if epoch == 0:  # as sampled, before these passes have moved it: comparable with other algorithms
                        self._movement.add(logprobs.detach(), some)
                    aim = Estimates(
                        towards.advantages[part], towards.returns[part], towards.values[part], towards.rewards[part]
                    )
                    sampled = some["sampling_per_token_logps"]
                    loss = step_loss(logprobs, values, entropies, some["mask"], sampled, aim, section, tokens)
                    loss.total.backward()
                    shown.add(loss, first=epoch == 0)
                    self._beat()
                norm = torch.nn.utils.clip_grad_norm_(self._trained, self._config.optimizer.max_grad_norm)
                self._optimizer.step()
                self._optimizer.zero_grad(set_to_none=True)
                shown.updated(tokens, norm)
        return shown.numbers(section.value_coef, section.entropy_coef)

    def _forward(
        self, model: Any, part: dict[str, torch.Tensor], *, values: bool, entropies: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Log-probabilities of the sampled tokens, values before them, entropies: R x C."""
        ids = torch.cat([part["prompt_ids"], part["completion_ids"]], 1)
        mask = torch.cat([part["prompt_mask"], part["completion_mask"]], 1)
        fast = torch.autocast("cuda", dtype=torch.bfloat16) if self._device == "cuda" else nullcontext()
        with fast:
            logits, found = with_values(
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


class _Shown:
    """What the passes over a batch show, in sums."""

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

    def updated(self, tokens: float, norm: torch.Tensor) -> None:
        self._tokens += tokens
        self._first_tokens += tokens if self._is_first else 0.0
        self._norms.append(norm.detach())

    def numbers(self, value_coef: float, entropy_coef: float) -> dict[str, float]:
        """Means over all passes; clip ratios and entropy, by which runs are judged, over the first pass."""
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


def _about(mask: torch.Tensor, towards: Estimates) -> dict[str, float]:
    """What the value function knew before the batch."""
    if not bool(mask.any()):
        return {}
    values, returns = towards.values[mask], towards.returns[mask]
    spread = returns.var(unbiased=False)
    numbers = {"value/mean": float(values.mean()), "returns/mean": float(returns.mean())}
    if float(spread) > 1e-12:
        numbers["value/explained_variance"] = float(1 - (returns - values).var(unbiased=False) / spread)
    return numbers
