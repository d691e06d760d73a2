"""Input of a forward pass: the rows of a batch as token sequences, with the positions whose next token is scored.

The answers to one task begin with the same prompt. In the shared layout a sequence holds that prompt once, followed by
all its answers; position ids let each answer begin where the prompt ends, and an attention mask lets it see the prompt
and itself alone. In the plain layout every row is a sequence of its own, padded on the right, for which a causal model
needs no mask. The last token of an answer predicts nothing that is scored, so both leave it out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from toprope.training.trainer.batch_source import TrainingRow

Sequences = list[list[int]]
"""The numbers of the rows in each sequence; rows of one sequence have the same prompt."""


@dataclass(frozen=True)
class Layout:
    """L sequences of T tokens with U scored positions, from which N tokens of the rows were chosen."""

    ids: torch.Tensor
    """L x T."""
    positions: torch.Tensor | None
    """L x T; None for 0, 1, 2, ..."""
    visible: torch.Tensor | None
    """L x 1 x T x T, true where a query (third axis) may see a key; None for a causal mask."""
    lengths: torch.Tensor
    """L, tokens of each sequence without padding."""
    places: torch.Tensor
    """U, the scored positions: sequence * T + position."""
    choice: torch.Tensor
    """N, for each scored token the index of its position in `places`."""
    targets: torch.Tensor
    """N token ids."""
    cells: torch.Tensor
    """N, where each scored token belongs in a table of the rows: row * columns + column."""


def plain_sequences(rows: Sequence[TrainingRow]) -> Sequences:
    """Each row with a scored token as a sequence of its own."""
    return [[number] for number, row in enumerate(rows) if any(row.trained)]


def shared_sequences(rows: Sequence[TrainingRow]) -> Sequences:
    """The rows with a scored token by their prompts."""
    by_prompt: dict[tuple[int, ...], list[int]] = {}
    for number, row in enumerate(rows):
        if any(row.trained):
            by_prompt.setdefault(tuple(row.prompt), []).append(number)
    return list(by_prompt.values())


def longest(rows: Sequence[TrainingRow], sequences: Sequences) -> int:
    """Tokens of the longest sequence."""
    return max(
        max(len(rows[members[0]].prompt), 1) + sum(len(rows[member].completion) - 1 for member in members)
        for members in sequences
    )


def lay_out(
    rows: Sequence[TrainingRow], sequences: Sequences, columns: int, pad: int, device: str | torch.device = "cpu"
) -> Layout:
    """The tensors of rows.

    Args:
        rows: All rows of a pass.
        sequences: From `plain_sequences` or `shared_sequences`, not empty.
        columns: Columns of the tables that results are put into, at least the longest completion.
        pad: Id of the padding token.
        device: Where to put the tensors.
    """
    width = longest(rows, sequences)
    ids, positions, answers, lengths = [], [], [], []
    places: dict[int, int] = {}
    choice, targets, cells = [], [], []
    for line, members in enumerate(sequences):
        own = list(rows[members[0]].prompt) or [pad]
        prompt = len(own)
        spots, answer = list(range(prompt)), [0] * prompt
        for number, member in enumerate(members, 1):
            row, start = rows[member], line * width + len(own) - 1
            first = line * width + prompt - 1
            for column, kept in enumerate(row.trained):
                if kept:
                    choice.append(places.setdefault(start + column if column else first, len(places)))
                    targets.append(row.completion[column])
                    cells.append(member * columns + column)
            own += row.completion[:-1]
            spots += range(prompt, prompt + len(row.completion) - 1)
            answer += [number] * (len(row.completion) - 1)
        missing = width - len(own)
        lengths.append(len(own))
        ids.append(own + [pad] * missing)
        positions.append(spots + [0] * missing)
        answers.append(answer + [-1] * missing)
    shares = any(len(members) > 1 for members in sequences)
    return Layout(
        ids=torch.tensor(ids, device=device),
        positions=torch.tensor(positions, device=device) if shares else None,
        visible=_visible(torch.tensor(answers, device=device)) if shares else None,
        lengths=torch.tensor(lengths, device=device),
        places=torch.tensor(list(places), device=device),
        choice=torch.tensor(choice, device=device),
        targets=torch.tensor(targets, device=device),
        cells=torch.tensor(cells, device=device),
    )


def _visible(answers: torch.Tensor) -> torch.Tensor:
    """Mask from the number of the answer that each of L x T tokens belongs to: 0 for the prompt, -1 for padding.

    Padding sees itself, because a softmax over nothing is not a number.
    """
    query, key = answers.unsqueeze(2), answers.unsqueeze(1)
    width = answers.size(1)
    before = torch.ones(width, width, dtype=torch.bool, device=answers.device).tril()
    return (((key == 0) | (key == query)) & before).unsqueeze(1)
