"""Supervised fine-tuning in this process: TRL's SFTTrainer with the loss on the assistant's tokens only."""

from __future__ import annotations

import time
from typing import Any

from datasets import Dataset
from torch.utils.data import SequentialSampler
from transformers import TrainerCallback
from transformers.utils.import_utils import is_torch_bf16_gpu_available
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from toprope.training.policy.loading import describe_device
from toprope.training.trainer.demonstration_run import DemonstrationRun, TokenizedRow
from toprope.training.trainer.local import LocalRun
from toprope.training.trainer.step.learner import mixed_precision


class SftRun(DemonstrationRun, LocalRun):
    """One attempt of supervised fine-tuning in this process."""

    def hold(self) -> None:
        """Waits while the run is paused."""
        self._hold()

    def log_step(self, step: int, metrics: dict[str, float]) -> None:
        """Finishes step number `step` of this attempt, with metrics as TRL names them."""
        numbers = {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}
        self._finish_step(self._first_step + step, numbers)

    def _train(self, rows: list[TokenizedRow], order: list[int]) -> None:
        config, device = self._config, describe_device(self._config)
        optimizer, batch = config.optimizer, config.sft.batch_size
        size = min(optimizer.micro_batch_size or batch, batch)
        while batch % size:  # passes of equal size, so that together they are the batch
            size -= 1
        in_half = mixed_precision(config, device) == "bf16"
        if optimizer.precision == "auto":
            in_half = in_half and is_torch_bf16_gpu_available()
        arguments = SFTConfig(
            output_dir=str(self._member.folder.crew / "trainer"),
            per_device_train_batch_size=size,
            gradient_accumulation_steps=batch // size,
            max_steps=len(order) // batch,
            max_grad_norm=config.optimizer.max_grad_norm,
            activation_checkpointing=config.optimizer.gradient_checkpointing,
            use_cpu=device == "cpu",
            bf16=in_half,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            seed=config.algorithm.seed,
            data_seed=config.algorithm.seed,
            max_length=None,
            packing=False,
            dataset_kwargs={"skip_prepare_dataset": True},
            remove_unused_columns=False,
            dataloader_num_workers=0,
        )
        stored = [(value, value.data) for value in self._trained.values()]
        trainer = _OrderedTrainer(
            self,
            model=self._model,
            processing_class=self._tokenizer,
            args=arguments,
            train_dataset=Dataset.from_list([rows[place] for place in order]),
            optimizers=(self._optimizer, self._scheduler),
        )
        for value, tensor in stored:  # TRL rounds adapters above quantized weights, in copies that nobody publishes
            value.data = tensor
        self._began = time.monotonic()
        trainer.train()


class _StepCallback(TrainerCallback):
    """Reports signs of life, and waits while the run is paused."""

    def __init__(self, run: SftRun) -> None:
        self._run = run

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._run.hold()

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._run.beat()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._run.beat()


class _OrderedTrainer(SFTTrainer):
    """SFTTrainer that takes the rows in their order, logs every step to the run, and ends when the run should."""

    def __init__(self, run: SftRun, **arguments: Any) -> None:
        super().__init__(callbacks=[_StepCallback(run)], **arguments)
        self._run = run

    def _get_train_sampler(self, *arguments: Any) -> SequentialSampler:
        assert isinstance(self.train_dataset, Dataset)
        return SequentialSampler(self.train_dataset)

    def log(self, logs: dict[str, float], *arguments: Any, **keywords: Any) -> None:
        if "loss" in logs:
            self._run.log_step(self.state.global_step, logs)
            if self._run.should_stop():
                self.control.should_training_stop = True
        super().log(logs, *arguments, **keywords)
