"""TRL's GRPOTrainer, fed from the trajectory API instead of its own generation.

TRL generates inside its trainer; here rollouts come from elsewhere, with the sampler's log-probabilities. The subclass
replaces that one step and keeps TRL's losses. `_generate_and_score_completions` is private to TRL, so the version is
pinned (`trl==1.16.*`) and tests/training/trainer/test_grpo.py checks which keys `_compute_loss` reads.

The sampler's log-probabilities stand in for `old_per_token_logps`: the importance ratio is between the trained policy
and the one that sampled, however many versions lie between.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import PrinterCallback, ProgressCallback, TrainerCallback
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.utils import use_adapter

from toprope.settings.schema import Config
from toprope.training.policy.quantization import quantization_config
from toprope.training.trainer.base import Learner, TrainingRun, step_callback
from toprope.training.trainer.batch_source import GroupBatch, TrainingRow, build_rows
from toprope.training.trainer.collate import collate
from toprope.training.trainer.step_metrics import VERSION_AGES, PolicyDrift, StepTimer, version_ages

_BATCHES_PER_EPOCH = 256
"""TRL's loader restarts at every epoch, which costs a few milliseconds: long epochs make that rare."""


class GrpoRun(TrainingRun):
    """One attempt of training with a loss of the GRPO family."""

    def _make_learner(self, policy: Path, device: str, report_to: list[str]) -> Learner:
        return GroupTrainer(
            self._config,
            self._model,
            self._tokenizer,
            grpo_config(self._config, str(self._member.folder.crew / "trainer"), device, report_to),
            next_batch=self._next_batch,
            on_step=self._finish_step,
            optimizers=(self._optimizer, self._scheduler),
            callbacks=[step_callback(self)],
        )


def grpo_config(config: Config, output: str, device: str, report_to: list[str]) -> GRPOConfig:
    """TRL's configuration for ours; `TrainingRun` saves checkpoints and writes metrics."""
    algorithm, optimizer, rollout = config.algorithm, config.optimizer, config.rollout
    sequences = rollout.group_size * rollout.groups_per_step
    micro = optimizer.micro_batch_size or sequences
    # TRL loads only the reference with these arguments; it gets the policy as an object.
    eight_bit = algorithm.reference_8bit and algorithm.beta > 0 and not config.policy.lora
    return GRPOConfig(
        model_init_kwargs={"quantization_config": quantization_config("algorithm.reference_8bit")}
        if eight_bit
        else None,
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
        # A loss that is not finite must reach our own check, which ends the run.
        logging_nan_inf_filter=False,
        save_strategy="no",
        report_to=report_to,
        disable_tqdm=True,
        dataloader_num_workers=0,
        remove_unused_columns=False,
        use_vllm=False,
    )


class GroupTrainer(GRPOTrainer):
    """GRPOTrainer whose batches come from `next_batch`.

    Args:
        model: The policy, with or without LoRA adapters.
        tokenizer: The policy's tokenizer, with a padding token.
        args: From `grpo_config`.
        next_batch: Returns the groups of the next step; raises to end the training.
        on_step: Called with (step, metrics) after every optimizer step.
        optimizers: The optimizer and its scheduler.
        callbacks: Callbacks for the Hugging Face trainer.
    """

    args: GRPOConfig

    def __init__(
        self,
        config: Config,
        model: Any,
        tokenizer: Any,
        args: GRPOConfig,
        *,
        next_batch: Callable[[], GroupBatch],
        on_step: Callable[[int, Mapping[str, float | None]], None],
        optimizers: tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LambdaLR],
        callbacks: list[TrainerCallback],
    ) -> None:
        rows = (args.generation_batch_size or 1) * _BATCHES_PER_EPOCH
        super().__init__(
            model=model,
            reward_funcs=_no_reward,
            args=args,
            # The loader needs rows to draw; their content is not used.
            train_dataset=Dataset.from_dict({"prompt": [""] * rows}),
            processing_class=tokenizer,
            optimizers=optimizers,
            callbacks=callbacks,
        )
        self._config, self._next_batch, self._on_step = config, next_batch, on_step
        self._pad = int(tokenizer.pad_token_id)
        self._passes: int = args.steps_per_generation or 1
        self._pass = 0
        self._batch_metrics: dict[str, float] = {}
        self._logps: torch.Tensor | None = None
        self._micro_batches: list[dict[str, torch.Tensor]] = []
        self._loss_scales: list[float] = []
        self._drift, self._timer = PolicyDrift(), StepTimer()
        self.first_step = 0
        """Steps done before `train` is called, by an earlier attempt of the run."""
        for callback in (PrinterCallback, ProgressCallback):
            self.remove_callback(callback)

    def _init_training_state(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        # Private to transformers, where only a checkpoint in its own form sets the step. The loop reads the step
        # (`max_steps`, the divisor of the first logged loss) after this.
        found: tuple[int, int] = super()._init_training_state(*args, **kwargs)
        self.state.global_step = self.first_step
        return found

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, torch.Tensor]:
        # Segments and mixed group sizes vary the number of rows; TRL would drop the remainder of the division.
        self._pass = self._step % self._passes
        if self._pass == 0:
            whole = self._generate_and_score_completions(generation_batch)
            rows = torch.arange(len(whole["advantages"])).tensor_split(self._passes)
            self._micro_batches = [
                {name: value if value.dim() == 0 else value[part] for name, value in whole.items()} for part in rows
            ]
            self._loss_scales = [self._loss_scale(part, whole) for part in self._micro_batches]
        return self._micro_batches[self._pass]

    def _loss_scale(self, part: dict[str, torch.Tensor], whole: dict[str, torch.Tensor]) -> float:
        """Factor for the loss of a micro-batch, so that the mean over micro-batches of mixed size is the whole's.

        TRL normalises dapo, cispo and vespo by the whole batch's tokens; its other losses are means over the rows of a
        micro-batch, or for bnpo over its tokens.
        """
        if self.loss_type in ("dapo", "cispo", "vespo"):
            return 1.0
        size, total = float(len(part["advantages"])), float(len(whole["advantages"]))
        if self.loss_type == "bnpo":
            size, total = (
                float((batch["completion_mask"] * batch["tool_mask"]).sum().item()) for batch in (part, whole)
            )
        return size * self._passes / max(total, 1.0)

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss: torch.Tensor = super().compute_loss(model, inputs, *args, **kwargs) * self._loss_scales[self._pass]
        if self._logps is not None:
            self._drift.add(self._logps, inputs)
            self._logps = None
        return loss

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        found = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        if kwargs.get("compute_entropy"):  # set for the loss, not for the reference's pass
            self._logps = found[0].detach()
        return found

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, torch.Tensor]:
        batch = self._next_batch()
        self._timer.start_preparing()
        self._batch_metrics = batch.metrics
        device = self.accelerator.device
        rows = build_rows(batch.groups, self._config)
        missing = self._passes - len(rows)
        if missing > 0:  # every pass needs a row; one without a trained token adds nothing
            rows += [TrainingRow([self._pad], [self._pad], [False], [0.0], 0.0, False)] * missing
        mask_truncated = self._config.algorithm.mask_truncated_completions
        tensors = collate(rows, self._pad, mask_truncated=mask_truncated, device=device)
        tensors[VERSION_AGES] = version_ages(rows, batch.version, device)
        if self.beta != 0.0:
            tensors["ref_per_token_logps"] = self._reference_logps(tensors)
        self._timer.stop_preparing()
        return tensors

    def _reference_logps(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
        keep, size = batch["completion_ids"].size(1), self.args.per_device_train_batch_size

        def logps(model: Any) -> torch.Tensor:
            found: torch.Tensor = self._get_per_token_logps_and_entropies(model, ids, mask, keep, batch_size=size)[0]
            return found

        with torch.no_grad():
            if self.ref_model is not None:
                return logps(self.ref_model)
            policy = self.accelerator.unwrap_model(self.model)
            with use_adapter(policy, adapter_name="ref" if "ref" in policy.peft_config else None):
                return logps(self.model)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "train_runtime" in logs:  # the final summary, not a step
            return
        metrics: dict[str, float | None] = {name: value for name, value in logs.items() if name != "epoch"}
        for name, values in self._metrics["train"].items():
            known = [value for value in values if value == value]
            metrics[name] = sum(known) / len(known) if known else None
        self._metrics["train"].clear()
        waited = self._batch_metrics.get("wait_seconds", 0.0)
        metrics |= {**self._drift.take(), **self._timer.take(metrics, waited), **self._batch_metrics}
        if self.args.report_to:
            super().log({name: value for name, value in metrics.items() if value is not None}, start_time)
        self._on_step(self.state.global_step, metrics)


def _no_reward(completions: list[Any], **columns: Any) -> list[float | None]:
    raise AssertionError("rewards come with the groups; TRL's own scoring is not used")
