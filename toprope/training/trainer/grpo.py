"""TRL's GRPOTrainer, fed from the trajectory API instead of its own generation.

TRL generates inside its trainer; here rollouts come from elsewhere, with the sampler's log-probabilities. The subclass
replaces that one step and keeps TRL's losses. `_generate_and_score_completions` is private to TRL, so the version is
pinned (`trl==1.16.*`) and tests/training/trainer/test_grpo.py holds the contract on the keys that `_compute_loss`
reads.

The sampler's log-probabilities stand in for `old_per_token_logps`: the importance ratio is between the policy that is
trained and the one that sampled, however many versions lie between.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from datasets import Dataset
from transformers import PrinterCallback, ProgressCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import use_adapter

from toprope.settings.schema import Config
from toprope.training.policy.quantization import quantized
from toprope.training.trainer.batch_source import GroupBatch, Row, rows_of
from toprope.training.trainer.collate import BATCH_KEYS, collate
from toprope.training.trainer.step_metrics import AGES, Movement, StepClock, ages

__all__ = ["BATCH_KEYS", "GroupTrainer", "arguments", "collate"]


def arguments(config: Config, output: str, device: str, report_to: list[str]) -> GRPOConfig:
    """TRL's configuration for ours. Steps, saving and logging are driven from outside (trainer.py)."""
    algorithm, optimizer, rollout = config.algorithm, config.optimizer, config.rollout
    sequences = rollout.group_size * rollout.groups_per_step
    micro = optimizer.micro_batch_size or sequences
    # TRL loads the reference itself, and only the reference, with these: the policy comes to it as an object.
    eight = algorithm.reference_8bit and algorithm.beta > 0 and not config.policy.lora
    return GRPOConfig(
        model_init_kwargs={"quantization_config": quantized("algorithm.reference_8bit")} if eight else None,
        output_dir=output,
        max_steps=config.budget.steps,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=sequences // micro,
        num_generations=rollout.group_size,
        max_completion_length=rollout.max_new_tokens,
        temperature=rollout.temperature,
        learning_rate=optimizer.learning_rate,
        max_grad_norm=optimizer.max_grad_norm,
        activation_checkpointing=optimizer.gradient_checkpointing,
        loss_type=algorithm.loss_type,
        beta=algorithm.beta,
        epsilon=algorithm.epsilon,
        epsilon_high=algorithm.epsilon_high,
        scale_rewards=algorithm.scale_rewards,
        importance_sampling_level=algorithm.importance_sampling_level,
        mask_truncated_completions=algorithm.mask_truncated_completions,
        seed=algorithm.seed,
        use_cpu=device == "cpu",
        bf16=device == "cuda",
        logging_steps=1,
        # Our own check ends the run on a loss that is no number; it has to see it.
        logging_nan_inf_filter=False,
        save_strategy="no",
        report_to=report_to,
        disable_tqdm=True,
        dataloader_num_workers=0,
        remove_unused_columns=False,
        use_vllm=False,
    )


_BATCHES_AN_EPOCH = 256
"""The trainer's loader starts anew at every epoch, which costs a few milliseconds: long epochs make that rare."""


class GroupTrainer(GRPOTrainer):
    """GRPOTrainer whose batches come from `next_batch`.

    Args:
        config: The run's configuration.
        model: The policy, possibly with LoRA adapters.
        tokenizer: Its tokenizer.
        args: From `arguments`.
        next_batch: Gives the groups of the next step; raising ends the training.
        on_row: Called with (step, numbers) after every optimizer step.
        optimizers: The optimizer and its scheduler.
        callbacks: Called by the Hugging Face trainer.
    """

    def __init__(
        self,
        config: Config,
        model: Any,
        tokenizer: Any,
        args: GRPOConfig,
        *,
        next_batch: Callable[[], GroupBatch],
        on_row: Callable[[int, dict[str, float | None]], None],
        optimizers: tuple[Any, Any],
        callbacks: list[TrainerCallback],
    ) -> None:
        super().__init__(
            model=model,
            reward_funcs=_no_reward,
            args=args,
            # The loader must have rows to draw; nothing of them is used.
            train_dataset=Dataset.from_dict({"prompt": [""] * (args.generation_batch_size * _BATCHES_AN_EPOCH)}),
            processing_class=tokenizer,
            optimizers=optimizers,
            callbacks=callbacks,
        )
        self._toprope, self._next_batch, self._on_row = config, next_batch, on_row
        self._numbers: dict[str, float] = {}
        self._logps: torch.Tensor | None = None
        self._movement, self._clock = Movement(), StepClock()
        self.first_step = 0
        """Steps that were done before `train` is called, by an earlier attempt of the run."""
        for callback in (PrinterCallback, ProgressCallback):
            self.remove_callback(callback)

    def _init_training_state(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        # Private to transformers, where only a checkpoint in its own form sets the step. What the loop counts from
        # (`max_steps`, the divisor of the first loss that is logged) is read after this.
        found = super()._init_training_state(*args, **kwargs)
        self.state.global_step = self.first_step
        return found

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, torch.Tensor]:
        # Rows vary with segments and mixed group sizes: TRL would cut what does not divide by the accumulation.
        index = self._step % self.args.steps_per_generation
        if index == 0:
            whole = self._generate_and_score_completions(generation_batch)
            rows = len(whole["advantages"])
            parts = torch.arange(rows).tensor_split(self.args.steps_per_generation)
            self._buffered_inputs = [
                {name: value if value.dim() == 0 else value[part] for name, value in whole.items()} for part in parts
            ]
            self._shares = [self._share(part, whole) for part in self._buffered_inputs]
        self._part = index
        return self._buffered_inputs[index]

    def _share(self, part: dict[str, torch.Tensor], whole: dict[str, torch.Tensor]) -> float:
        """What a part's loss is multiplied with, so that the parts' mean is the whole's: parts differ in size.

        TRL normalises dapo, cispo and vespo by the whole batch's tokens; its other losses are means over a part's
        rows, or for bnpo over its tokens.
        """
        if self.loss_type in ("dapo", "cispo", "vespo"):
            return 1.0
        if self.loss_type == "bnpo":
            size, total = ((batch["completion_mask"] * batch["tool_mask"]).sum().item() for batch in (part, whole))
        else:
            size, total = len(part["advantages"]), len(whole["advantages"])
        return size * self.args.steps_per_generation / max(total, 1)

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().compute_loss(model, inputs, *args, **kwargs) * self._shares[self._part]
        if self._logps is not None:
            self._movement.add(self._logps, inputs)
            self._logps = None
        return loss

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        found = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        if kwargs.get("compute_entropy"):  # the loss asks for it, the reference's pass does not
            self._logps = found[0].detach()
        return found

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, torch.Tensor]:
        batch = self._next_batch()
        self._clock.prepares()
        self._numbers = batch.metrics
        algorithm = self._toprope.algorithm
        rows = rows_of(batch.groups, self._toprope)
        missing = self.args.steps_per_generation - len(rows)
        if missing > 0:  # every pass needs a row; one without a trained token adds nothing
            rows += [Row([self._pad], [self._pad], [False], [0.0], 0.0, False)] * missing
        tensors = collate(
            rows, self._pad, mask_truncated=algorithm.mask_truncated_completions, device=self.accelerator.device
        )
        tensors[AGES] = ages(rows, batch.version, self.accelerator.device)
        if self.beta != 0.0:
            tensors["ref_per_token_logps"] = self._reference_logprobs(tensors)
        self._clock.prepared()
        return tensors

    @property
    def _pad(self) -> int:
        return int(self.processing_class.pad_token_id)

    def _reference_logprobs(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
        keep = batch["completion_ids"].size(1)
        size = self.args.per_device_train_batch_size
        with torch.no_grad():
            if self.ref_model is not None:
                return self._get_per_token_logps_and_entropies(self.ref_model, ids, mask, keep, batch_size=size)[0]
            policy = self.accelerator.unwrap_model(self.model)
            with use_adapter(policy, adapter_name="ref" if "ref" in policy.peft_config else None):
                return self._get_per_token_logps_and_entropies(self.model, ids, mask, keep, batch_size=size)[0]

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "train_runtime" in logs:  # the summary at the end is no step
            return
        numbers: dict[str, float | None] = {"epoch": None} | dict(logs)
        numbers.pop("epoch")
        for name, values in self._metrics["train"].items():
            finite = [value for value in values if value == value]
            numbers[name] = sum(finite) / len(finite) if finite else None
        self._metrics["train"].clear()
        numbers |= self._movement.take() | self._clock.take(numbers, self._numbers.get("wait_seconds", 0.0))
        numbers |= self._numbers
        if self.args.report_to:
            super().log({name: value for name, value in numbers.items() if value is not None}, start_time)
        self._on_row(self.state.global_step, numbers)


def _no_reward(completions: list[Any], **columns: Any) -> list[float]:
    raise AssertionError("rewards come with the groups; TRL's own scoring is not used")
