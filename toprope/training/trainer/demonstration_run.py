"""Training for runs of kind `sft`: demonstrations in, weights and checkpoints out, wherever the weights are.

Metrics, checkpoints, published weights, a full disk and a stop are handled by `TrainingRun`, as in every run.
"""

from __future__ import annotations

import math
import random
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from toprope.errors import InvalidValue, first_line
from toprope.records.journal.demonstrations import Trace, read_traces
from toprope.records.messages import Finished, Ready, Warned
from toprope.settings.schema import Config
from toprope.training.component.member import CrewMember
from toprope.training.component.time_limit import TemplateTooSlow, render_limit
from toprope.training.inference.dialect import BadRequest
from toprope.training.inference.tool_calls import MessageRenderer
from toprope.training.policy.turn_end import turn_end_ids
from toprope.training.trainer.base import Learner, TrainingRun
from toprope.training.trainer.batch_source import EndOfTraining
from toprope.training.trainer.checkpoints.checkpoint_folder import CheckpointState

IGNORED = -100
"""Label of a token that is not learned."""

_LOOK_EVERY_S = 0.5
_BEHIND = 3
"""Most last tokens of a rendered conversation among which the end of its answer is sought."""
_TEMPLATE = (
    "Set policy.chat_template_kwargs so that prompts and answers are rendered alike (such as enable_thinking: false), "
    "or choose a model whose template does."
)

_OTHERS = "Collect or choose others."

_Tools = list[dict[str, Any]] | None
TokenizedRow = dict[str, list[int]]
"""`input_ids` and `labels` of one sequence, both (tokens,)."""


@dataclass
class TokenizedTraces:
    """Demonstrations as token sequences whose labels are the tokens of the answers."""

    rows: list[TokenizedRow] = field(default_factory=list)
    too_long: int = 0
    """Sequences left out because they are longer than the limit."""
    rewritten: int = 0
    """Answers left out because the chat template renders the prompt otherwise once they follow it, so that their tokens
    cannot be told apart."""
    refused: int = 0
    """Demonstrations left out because the chat template refuses them."""
    refusal: str = ""
    """Its first reason."""


class _Refused(Exception):
    """The chat template refuses messages."""


def tokenize_traces(
    tokenizer: Any, traces: Sequence[Trace], max_length: int, beat: Callable[[], None] = lambda: None
) -> TokenizedTraces:
    """Tokenizes demonstrations.

    Turns that extend the rendered conversation before them share a sequence. If the chat template rewrites earlier
    turns (some drop old thoughts), an answer gets a sequence of its own, as the policy will see it. Messages that the
    template does not show become the user's, and calls get its form, as inference sends them.

    Args:
        max_length: Most tokens of a sequence.
        beat: Called between demonstrations.
    """
    tokenized, ends = TokenizedTraces(), (turn_end_ids(tokenizer), frozenset([tokenizer.eos_token_id]))
    special = {id_ for id_, token in tokenizer.added_tokens_decoder.items() if token.special}
    renderer = MessageRenderer(tokenizer.chat_template, (), partial(_text, tokenizer, prompt=True))
    for trace in traces:
        beat()
        try:
            sequences, rewritten = _sequences(tokenizer, trace, ends, special, renderer)
        except _Refused as refusal:
            tokenized.refused += 1
            tokenized.refusal = tokenized.refusal or str(refusal)
            continue
        tokenized.rewritten += rewritten
        for ids, labels in sequences:
            if len(ids) > max_length:
                tokenized.too_long += 1
            elif any(label != IGNORED for label in labels):
                tokenized.rows.append({"input_ids": ids, "labels": labels})
    return tokenized


def _sequences(
    tokenizer: Any,
    trace: Trace,
    ends: tuple[frozenset[int], ...],
    special: set[int],
    renderer: MessageRenderer,
) -> tuple[list[tuple[list[int], list[int]]], int]:
    """Token ids and labels of each sequence of a demonstration, and the number of answers left out.

    Raises:
        _Refused: The chat template refuses the messages.
    """
    ids: list[int] = []
    labels: list[int] = []
    sequences: list[tuple[list[int], list[int]]] = []
    rewritten, tools = 0, trace.tools or None
    for place, message in enumerate(trace.messages):
        if message["role"] != "assistant" or place < trace.first_messages:
            continue
        prompt, answered = (_prepare(renderer, trace.messages[:end], tools) for end in (place, place + 1))
        prompt_text, prompt_ids = _render(tokenizer, prompt, tools, prompt=True)
        text, answered_ids = _render(tokenizer, answered, tools, prompt=False)
        if answered_ids[: len(prompt_ids)] != prompt_ids:
            if not text.startswith(prompt_text):
                rewritten += 1
                continue
            # A token would span both, such as the newlines behind Qwen3.5's <think>: inference ends the prompt between.
            answered_ids = prompt_ids + _token_ids(tokenizer, text[len(prompt_text) :])
        answered_ids = _cut_at_end(answered_ids, max(len(prompt_ids), len(answered_ids) - _BEHIND), ends)
        if tokenizer.eos_token_id is not None and special.isdisjoint(answered_ids[-1:]):
            answered_ids.append(tokenizer.eos_token_id)  # GLM's template ends an answer with the next message alone
        if ids and prompt_ids[: len(ids)] != ids:
            sequences.append((ids, labels))
            ids, labels = [], []
        labels = [*labels, *[IGNORED] * (len(prompt_ids) - len(ids)), *answered_ids[len(prompt_ids) :]]
        ids = answered_ids
    return [*sequences, (ids, labels)] if ids else sequences, rewritten


def _prepare(renderer: MessageRenderer, messages: list[dict[str, Any]], tools: _Tools) -> list[dict[str, Any]]:
    """Messages as inference sends them; what it refuses, such as images, is left to the template."""
    try:
        return renderer.prepare(messages, tools, ())
    except BadRequest:
        return messages


def _render(tokenizer: Any, messages: list[dict[str, Any]], tools: _Tools, *, prompt: bool) -> tuple[str, list[int]]:
    """The text and token ids of a prompt, or of a conversation."""
    try:
        text = _text(tokenizer, messages, tools, prompt=prompt)
    except TemplateTooSlow:
        raise
    except Exception as error:  # a template is a program from the model and may raise anything
        raise _Refused(first_line(error)) from error
    return text, _token_ids(tokenizer, text)


def _token_ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _text(tokenizer: Any, messages: list[dict[str, Any]], tools: _Tools, *, prompt: bool) -> str:
    with render_limit():
        return str(tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=prompt))


def _cut_at_end(ids: list[int], start: int, ends: tuple[frozenset[int], ...]) -> list[int]:
    """The ids up to the first end at `start` or later, of the first kind of `ends` that is there.

    Templates put a newline or the end of the document (Phi-3's does) behind the last message; the policy never samples
    past its end token.
    """
    for kind in ends:
        for place in range(start, len(ids)):
            if ids[place] in kind:
                return ids[: place + 1]
    return ids


def row_order(rows: int, batch: int, epochs: int, seed: int) -> list[int]:
    """Row numbers in training order: every epoch a new permutation; the last batch is filled up from the beginning,
    again and again if there are few rows.

    It depends on the seed alone, so that a resumed run continues where it was.
    """
    chooser = random.Random(seed)
    order: list[int] = []
    for _ in range(epochs):
        order += chooser.sample(range(rows), rows)
    return order + list(islice(cycle(order), -len(order) % batch))


def training_config(config: Config, steps: int, per_epoch: int) -> Config:
    """The configuration with optimizer, budget and logging taken from section `sft`.

    Args:
        steps: Optimizer steps of the whole run.
        per_epoch: Optimizer steps of one epoch.
    """
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


class DemonstrationRun(TrainingRun):
    """One attempt of supervised fine-tuning."""

    _tokenizer: Any

    def __init__(self, member: CrewMember) -> None:
        super().__init__(member)
        self._first_step, self._batch_size = 0, self._config.sft.batch_size

    def run(self, checkpoint: Path | None = None) -> None:
        """Trains for `sft.epochs` or until a stop is requested; leaves a checkpoint in both cases.

        Raises:
            TopropeError: The training cannot continue.
        """
        member, section = self._member, self._config.sft
        policy = Path(member.address("policy"))
        self._resumes = checkpoint is not None
        self._load(policy)
        member.report(Ready())
        traces = list(read_traces(Path(self._await_demonstrations())))
        tokenized = tokenize_traces(self._tokenizer, traces, section.max_length, self.beat)
        rows = tokenized.rows
        self._require_rows(tokenized)
        order = row_order(len(rows), section.batch_size, section.epochs, self._config.algorithm.seed)
        steps = len(order) // section.batch_size
        self._config = training_config(self._config, steps, math.ceil(len(rows) / section.batch_size))
        self._start_optimizer()
        if checkpoint is None:
            state = CheckpointState(0, 0, 0, 0.0)
            self._begin(policy)
        else:
            state = self._restore(self._newest_sound(checkpoint))
        self._publish_restored(state)
        self._first_step = state.step
        if state.step < steps and not self._out_of_time():
            with suppress(EndOfTraining):
                self._train(rows, order[state.step * section.batch_size :])
        self._save_final()
        member.report(Finished())

    def _await_demonstrations(self) -> str:
        """The file of demonstrations: the driver's address, which comes when they are collected.

        Raises:
            ComponentFailed: The run is ending.
        """
        while self._member.peer("environment") is None and not self._member.ending.wait(_LOOK_EVERY_S):
            self.beat()
        return self._member.address("environment")

    def _require_rows(self, tokenized: TokenizedTraces) -> None:
        """Warns of demonstrations that are not learned.

        Raises:
            InvalidValue: Nothing can be learned.
        """
        too_long = f"{tokenized.too_long} are longer than sft.max_length ({self._config.sft.max_length} tokens)"
        shorten = "Raise sft.max_length, or shorten the environment's prompts."
        rewritten = (
            f"the chat template renders the prompt of {tokenized.rewritten} answers otherwise once they follow it "
            "(some drop or add thoughts), so their tokens cannot be told apart"
        )
        refused = f"the chat template refuses {tokenized.refused} of the demonstrations ({tokenized.refusal})"
        if tokenized.rows and tokenized.refused:
            self._member.report(Warned(f"{refused[0].upper()}{refused[1:]}: they are not learned. {_OTHERS}"))
        if tokenized.rows and tokenized.too_long:
            self._member.report(Warned(f"Of the demonstrations, {too_long}: they are not learned. {shorten}"))
        if tokenized.rows and tokenized.rewritten:
            self._member.report(Warned(f"{rewritten[0].upper()}{rewritten[1:]}: they are not learned. {_TEMPLATE}"))
        if not tokenized.rows:
            causes = [too_long] if tokenized.too_long else []
            causes += [rewritten] if tokenized.rewritten else []
            causes += [refused] if tokenized.refused else []
            cures = [shorten] if tokenized.too_long else []
            cures += [_TEMPLATE] if tokenized.rewritten else []
            cures += [_OTHERS] if tokenized.refused else []
            raise InvalidValue(
                f"None of the demonstrations can be learned from: {'; '.join(causes) or 'none has an answer'}.",
                hint=" ".join(cures) or _OTHERS,
            )

    @abstractmethod
    def _train(self, rows: list[TokenizedRow], order: list[int]) -> None:
        """Trains on rows in an order of whole batches, until they are used or the run should stop."""

    def _make_learner(self, policy: Path) -> Learner:
        raise NotImplementedError("demonstrations are not delivered in batches")

    def _commit(self, cursor: int) -> None:
        pass  # no groups, so no API

    def _position(self) -> tuple[int, int, dict[str, int]]:
        return 0, self._step * self._batch_size, {}
