"""The trainer's program for runs of kind `sft`: demonstrations in, weights and checkpoints out.

TRL's SFTTrainer with the loss on the assistant's tokens only; everything around it (metrics, checkpoints, weights for
inference, a full disk, a stop) is what `trainer` does for every run.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from toprope.errors import InvalidValue
from toprope.records.journal.traces import Trace, read_traces
from toprope.records.messages import Finished, Ready
from toprope.settings.schema import Config
from toprope.training.component.member import CrewMember
from toprope.training.trainer.base import TrainingRun, rate_factor

__all__ = ["FineTuning", "as_training", "examples_of", "order_of"]

_IGNORED = -100


def examples_of(tokenizer: Any, traces: Sequence[Trace], max_length: int) -> tuple[list[dict[str, list[int]]], int]:
    """Demonstrations as sequences of tokens whose labels are the assistant's.

    Turns that extend what was rendered before them share a sequence; where the chat template rewrites earlier turns
    (some drop old thoughts) an answer gets a sequence of its own, as the policy will see it.

    Returns:
        Rows with `input_ids` and `labels`, both (tokens,), and how many were left out for being longer than
        `max_length` tokens.
    """
    rows, too_long = [], 0
    for trace in traces:
        ids: list[int] = []
        labels: list[int] = []
        made: list[tuple[list[int], list[int]]] = []
        for place, message in enumerate(trace.messages):
            if message["role"] != "assistant":
                continue
            before = _rendered(tokenizer, trace.messages[:place], True)
            after = _rendered(tokenizer, trace.messages[: place + 1], False)
            if after[: len(before)] != before:
                continue  # the template puts something else in place of the prompt: nothing can be said of its tokens
            if ids and before[: len(ids)] != ids:
                made.append((ids, labels))
                ids, labels = [], []
            labels = [*labels, *[_IGNORED] * (len(before) - len(ids)), *after[len(before) :]]
            ids = after
        if ids:
            made.append((ids, labels))
        for sequence, learned in made:
            if len(sequence) > max_length:
                too_long += 1
            elif any(label != _IGNORED for label in learned):
                rows.append({"input_ids": sequence, "labels": learned})
    return rows, too_long


def _rendered(tokenizer: Any, messages: list[dict[str, Any]], prompt: bool) -> list[int]:
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
    ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    if not prompt:
        # Templates put a line's end behind the last message; the policy never samples past its end token.
        while ids and ids[-1] != tokenizer.eos_token_id and tokenizer.eos_token_id in ids[-3:]:
            ids.pop()
    return ids


def order_of(rows: int, batch: int, epochs: int, seed: int) -> list[int]:
    """Which row comes when: every epoch all of them in another order; the last batch is filled up from the beginning.

    Known from the seed alone, so that a resumed run goes on where it was.
    """
    chooser, order = random.Random(seed), []
    for _ in range(epochs):
        order += chooser.sample(range(rows), rows)
    return order + order[: -len(order) % batch]


def as_training(config: Config, steps: int, per_epoch: int) -> Config:
    """The configuration as the trainer of any run reads it: the `sft` section in place of optimizer and budget."""
    section = config.sft
    return config.model_copy(
        update={
            "optimizer": config.optimizer.model_copy(
                update={
                    "learning_rate": section.learning_rate,
                    "weight_decay": section.weight_decay,
                    "max_grad_norm": section.max_grad_norm,
                    "lr_scheduler_type": "linear",
                    "warmup_steps": round(section.warmup_ratio * steps),
                }
            ),
            "budget": config.budget.model_copy(update={"steps": steps}),
            "logging": config.logging.model_copy(update={"save_steps": max(1, per_epoch * section.save_epochs)}),
        }
    )


class FineTuning(TrainingRun):
    """One attempt of supervised fine-tuning."""

    def __init__(self, member: CrewMember) -> None:
        super().__init__(member)
        self._source = SimpleNamespace(cursor=0, rollouts=0, dropped={})
        self._api = SimpleNamespace(commit=lambda cursor: None, take_up=lambda cursor: cursor)

    def run(self, checkpoint: Path | None = None) -> None:
        """Trains for `sft.epochs` or until a stop is asked for; leaves a checkpoint in both cases.

        Raises:
            TopropeError: The training cannot go on.
        """
        import torch
        import transformers

        torch.set_num_threads(self._config.launcher.threads)
        transformers.logging.set_verbosity_error()
        from toprope.training.policy.loading import describe_device, load_model, load_tokenizer
        from toprope.training.policy.weight_sync import WeightFile
        from toprope.training.trainer.base import make_optimizer
        from toprope.training.trainer.checkpoint_io import CheckpointState

        member, section = self._member, self._config.sft
        folder = Path(member.address("policy"))
        self._tokenizer = load_tokenizer(folder)
        self._model = load_model(folder, self._config, trained=True)
        trained = {name: value for name, value in self._model.named_parameters() if value.requires_grad}
        self._publisher = WeightFile(member.folder.crew, trained, -1 if member.life else 0)
        member.report(Ready(detail={"parameters": sum(value.numel() for value in trained.values())}))
        rows, too_long = examples_of(
            self._tokenizer, list(read_traces(Path(self._demonstrations()))), section.max_length
        )
        if not rows:
            raise InvalidValue(
                f"None of the demonstrations fits into sft.max_length ({section.max_length} tokens); {too_long} are "
                "longer.",
                hint="Raise sft.max_length, or shorten the environment's prompts.",
            )
        order = order_of(len(rows), section.batch_size, section.epochs, self._config.algorithm.seed)
        steps = len(order) // section.batch_size
        self._config = as_training(self._config, steps, math.ceil(len(rows) / section.batch_size))
        self._optimizer = make_optimizer(self._config, trained)
        self._scheduler = torch.optim.lr_scheduler.LambdaLR(
            self._optimizer, lambda step: rate_factor(self._config, step, self._elapsed())
        )
        state = CheckpointState(0, 0, 0, 0.0) if checkpoint is None else self._take_up(self._sound(checkpoint))
        if member.life or state.policy_version:
            self._publisher.version = state.policy_version - 1
            self._publisher.publish()
        self._first_step, self._per_step = state.step, section.batch_size
        if state.step < steps and not self._out_of_time():
            wandb = self._config.logging.wandb != "disabled"
            self._train(rows, order[state.step * section.batch_size :], describe_device(self._config), wandb)
        self._save_at_last()
        if self._config.logging.wandb != "disabled":
            import wandb

            wandb.finish()
        detail = {"step": self._step, "train_seconds": round(self._elapsed(), 3), "left_out": too_long}
        member.report(Finished(detail))

    def _demonstrations(self) -> str:
        """Where the driver put them; waits until it has."""
        return self._member.address("environment")

    def _train(self, rows: list[dict[str, list[int]]], order: list[int], device: str, wandb: bool) -> None:
        import time

        from datasets import Dataset
        from transformers.utils import is_torch_bf16_gpu_available
        from trl import SFTConfig

        config = self._config
        arguments = SFTConfig(
            output_dir=str(self._member.folder.crew / "trainer"),
            per_device_train_batch_size=config.sft.batch_size,
            max_steps=len(order) // config.sft.batch_size,
            max_grad_norm=config.optimizer.max_grad_norm,
            activation_checkpointing=config.optimizer.gradient_checkpointing,
            use_cpu=device == "cpu",
            bf16=device != "cpu" and is_torch_bf16_gpu_available(),
            logging_steps=1,
            save_strategy="no",
            report_to=["wandb"] if wandb else [],
            disable_tqdm=True,
            seed=config.algorithm.seed,
            data_seed=config.algorithm.seed,
            max_length=None,
            packing=False,
            dataset_kwargs={"skip_prepare_dataset": True},
            remove_unused_columns=False,
            dataloader_num_workers=0,
        )
        trainer = _trainer_class()(
            run=self,
            model=self._model,
            processing_class=self._tokenizer,
            args=arguments,
            train_dataset=Dataset.from_list([rows[place] for place in order]),
            optimizers=(self._optimizer, self._scheduler),
        )
        self._began = time.monotonic()
        trainer.train()

    def logged(self, step: int, numbers: dict[str, Any]) -> None:
        """A step's numbers, as TRL names them."""
        step += self._first_step
        self._source.rollouts = step * self._per_step
        self._on_row(step, {name: float(value) for name, value in numbers.items() if isinstance(value, int | float)})


def _trainer_class() -> Any:
    from torch.utils.data import SequentialSampler
    from trl import SFTTrainer

    from toprope.training.trainer.base import after_step_of

    class Ordered(SFTTrainer):
        """Takes the rows as they come, and tells of every step."""

        def __init__(self, run: FineTuning, **arguments: Any) -> None:
            super().__init__(callbacks=[after_step_of(run)], **arguments)
            self._run = run

        def _get_train_sampler(self, *arguments: Any) -> Any:
            return SequentialSampler(self.train_dataset)

        def log(self, logs: dict[str, Any], *arguments: Any, **named: Any) -> None:
            if "loss" in logs:
                self._run.logged(self.state.global_step, logs)
                if self._run.after_step():
                    self.control.should_training_stop = True
            super().log(logs, *arguments, **named)

    return Ordered
