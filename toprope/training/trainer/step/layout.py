"""Input of a forward pass: the rows of a batch as token sequences, with the positions whose next token is scored.

The answers to one task begin with the same prompt, and often with the same tokens. In the shared layout a sequence
holds the tree of its rows: every token that follows the same tokens stands there once, so equal answers cost as much as
one. Position ids give each token its depth, and an attention mask lets it see its ancestors and itself alone. In the
plain layout every row is a sequence of its own, padded on the right, for which a causal model needs no mask. The last
token of an answer predicts nothing that is scored, so both leave it out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy
import torch

from toprope.training.trainer.batch_source import TrainingRow


@dataclass(frozen=True)
class Tree:
    """T tokens of the rows that share a sequence; each token comes after its parent. Trees side by side are one too."""

    tokens: list[int]
    parents: list[int]
    """-1 for a token with nothing before it."""
    paths: dict[int, list[int]]
    """By the number of each row, the places of the tokens after which its completion's tokens come."""

    def __len__(self) -> int:
        return len(self.tokens)

    def beside(self, other: Tree) -> Tree:
        """Both in one sequence; neither sees the other."""
        first = len(self)
        return Tree(
            [*self.tokens, *other.tokens],
            [*self.parents, *(-1 if parent < 0 else parent + first for parent in other.parents)],
            {**self.paths, **{row: [place + first for place in path] for row, path in other.paths.items()}},
        )


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


def plain_trees(rows: Sequence[TrainingRow], pad: int) -> list[Tree]:
    """Each row with a scored token by itself; `pad` stands for a prompt without tokens."""
    return [_grow(rows, [number], pad) for number, row in enumerate(rows) if any(row.trained)]


def shared_trees(rows: Sequence[TrainingRow], pad: int) -> list[Tree]:
    """The rows with a scored token by their prompts; small trees side by side, in as many tokens as the largest has."""
    by_prompt: dict[tuple[int, ...], list[int]] = {}
    for number, row in enumerate(rows):
        if any(row.trained):
            by_prompt.setdefault(tuple(row.prompt), []).append(number)
    trees = sorted((_grow(rows, members, pad) for members in by_prompt.values()), key=len, reverse=True)
    packed: list[Tree] = []
    for tree in trees:
        place = next((place for place, other in enumerate(packed) if len(other) + len(tree) <= len(trees[0])), None)
        if place is None:
            packed.append(tree)
        else:
            packed[place] = packed[place].beside(tree)
    return packed


def _grow(rows: Sequence[TrainingRow], members: Sequence[int], pad: int) -> Tree:
    tokens = list(rows[members[0]].prompt) or [pad]
    last = len(tokens) - 1
    parents, paths = list(range(-1, last)), dict[int, list[int]]()
    known: dict[tuple[int, int], int] = {}
    """Places of tokens by their parents and ids."""
    for member in members:
        place, path = last, [last]
        for token in rows[member].completion[:-1]:
            parent, place = place, known.setdefault((place, token), len(tokens))
            if place == len(tokens):
                tokens.append(token)
                parents.append(parent)
            path.append(place)
        paths[member] = path
    return Tree(tokens, parents, paths)


def lay_out(
    rows: Sequence[TrainingRow], trees: Sequence[Tree], columns: int, pad: int, device: str | torch.device = "cpu"
) -> Layout:
    """The tensors of rows.

    Args:
        rows: All rows of a pass.
        trees: From `plain_trees` or `shared_trees`, not empty.
        columns: Columns of the tables that results are put into, at least the longest completion.
        pad: Id of the padding token.
        device: Where to put the tensors.
    """
    width = max(map(len, trees))
    places: dict[int, int] = {}
    choice, targets, cells = [], [], []
    for line, tree in enumerate(trees):
        for member, path in tree.paths.items():
            row = rows[member]
            scored = zip(path, row.completion, row.trained, strict=True)
            for cell, (place, token, is_trained) in enumerate(scored, member * columns):
                if is_trained:
                    choice.append(places.setdefault(line * width + place, len(places)))
                    targets.append(token)
                    cells.append(cell)

    def tensor(values: Sequence[int] | Sequence[list[int]]) -> torch.Tensor:
        return torch.from_numpy(numpy.array(values, numpy.int64)).to(device)  # a fifth of the time of torch.tensor

    shares = any(len(tree.paths) > 1 for tree in trees)
    return Layout(
        ids=tensor([tree.tokens + [pad] * (width - len(tree)) for tree in trees]),
        positions=tensor([_depths(tree, width) for tree in trees]) if shares else None,
        visible=_visible(trees, width).to(device) if shares else None,
        lengths=tensor([len(tree) for tree in trees]),
        places=tensor(list(places)),
        choice=tensor(choice),
        targets=tensor(targets),
        cells=tensor(cells),
    )


def _depths(tree: Tree, width: int) -> list[int]:
    depths = [0] * width
    for place, parent in enumerate(tree.parents):
        depths[place] = 0 if parent < 0 else depths[parent] + 1
    return depths


def _visible(trees: Sequence[Tree], width: int) -> torch.Tensor:
    """The mask of L trees: L x 1 x width x width. Padding sees itself, because a softmax over nothing is not a number.

    The sets of places that tokens see are the bits of integers, since one operation of torch costs as much as some
    fifty of these.
    """
    size, rows = -(-width // 8), []
    for tree in trees:
        visible: list[int] = []
        for place, parent in enumerate(tree.parents):
            visible.append((0 if parent < 0 else visible[parent]) | 1 << place)
        rows += [
            row_bits.to_bytes(size, "little")
            for row_bits in (*visible, *(1 << place for place in range(len(tree), width)))
        ]
    packed = numpy.frombuffer(b"".join(rows), numpy.uint8).reshape(-1, size)
    bits = numpy.unpackbits(packed, axis=1, count=width, bitorder="little")
    return torch.from_numpy(bits).view(torch.bool).view(len(trees), 1, width, width)
