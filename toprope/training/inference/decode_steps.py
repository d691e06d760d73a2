"""Decode steps: one token for every row of a batch whose prompts have been read.

`PlainSteps` calls the model. `CapturedSteps` does so on a GPU without the time that starting kernels takes, which for
models of a few billion parameters is most of a step: a step is captured as a CUDA graph once, and replayed. A graph
reads and writes fixed addresses, so keys, values, masks and lengths are buffers that stay, and rows and columns are
rounded up, so that few graphs serve all steps.
"""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from toprope.training.inference.growing_cache import RowMoves, grow_by_blocks, keep_rows
from toprope.training.policy.short_forward import ShortForward

_ROWS, _COLUMNS = 8, 64
"""Least numbers of rows and columns of a graph; fewer take as long. Numbers in between are rounded up generously, rows
to powers of two: to capture a graph takes as long as many steps."""
_GRAPHS = 128
"""Graphs that are kept; each takes a few megabytes."""
_FREE_SHARE = 0.5
"""Most of the free memory that buffers take: they are made for the longest answers, which few batches have."""

_CAPTURING = threading.Lock()
"""One capture at a time in a process; the engine of an opponent has a thread of its own."""

Compute = Callable[[], torch.Tensor]
Capture = Callable[[Compute], Compute]
"""Returns what repeats a computation, with the present contents of the tensors it uses, into the same result."""


@dataclass
class Prompts:
    """A batch whose prompts have been read, each different one once."""

    logits: torch.Tensor
    """(prompts, vocabulary): of the first tokens of answers."""
    cache: Any
    """Of transformers, filled, with a row for each prompt."""
    source: torch.Tensor
    """(rows,): the prompt of each row."""
    mask: torch.Tensor | None
    """(rows, end), or (rows, 1, 1, end) for a model that takes such masks: false before a prompt that is shorter than
    the longest; None if all are equally long."""
    lengths: torch.Tensor
    """(rows, 1): tokens of each row's prompt."""
    longest: int
    """Tokens of the longest prompt."""
    end: int
    """Tokens that a row will hold at most."""


class Steps(Protocol):
    """The steps of one batch."""

    def keep(self, moves: RowMoves) -> None:
        """Drop the rows that leave the batch."""
        ...

    def after(self, token: torch.Tensor) -> torch.Tensor:
        """Append a token to each row, (rows,); return the logits of the next ones, (rows, vocabulary), which the next
        call may overwrite."""
        ...


class PlainSteps:
    """See `Steps`.

    Args:
        run: Computes the logits after tokens (rows, 1) at places (rows, 1) with a mask and a cache, which it extends.
        prompts: The batch; its cache is changed in place.
    """

    def __init__(self, run: Callable[..., torch.Tensor], prompts: Prompts) -> None:
        self._run, self._cache, self._mask = run, prompts.cache, prompts.mask
        self._lengths, self._width = prompts.lengths, prompts.longest
        in_order = torch.arange(len(prompts.source), device=prompts.source.device)
        repeated = not torch.equal(prompts.source, in_order)
        grow_by_blocks(self._cache, prompts.source if repeated else None, prompts.end)

    def keep(self, moves: RowMoves) -> None:
        keep_rows(self._cache, moves)
        self._lengths = self._lengths[moves.index]
        self._mask = None if self._mask is None else self._mask[moves.index]

    def after(self, token: torch.Tensor) -> torch.Tensor:
        self._width += 1
        mask = None if self._mask is None else self._mask[..., : self._width]
        logits = self._run(token.unsqueeze(1), self._lengths, mask, self._cache)
        self._lengths = self._lengths + 1
        return logits


class CapturedSteps:
    """See `Steps`. Serves one batch after the other: `begin` starts each.

    The first step is computed, which lets libraries set themselves up; after it each shape is captured when it comes.

    Args:
        short: The model's short pass.
        capture: `GraphCapture` of the GPU.
        free: Returns the bytes of free memory.
    """

    def __init__(self, short: ShortForward, capture: Capture, free: Callable[[], float] = lambda: math.inf) -> None:
        self._short, self._capture, self._free = short, capture, free
        self._is_warm = self._is_checked = self._is_broken = False
        self._room = self._width = 0
        self.release()

    def begin(self, prompts: Prompts) -> CapturedSteps | None:
        """Take over a batch, if the one before has ended; return None if another way has to serve it."""
        if self._is_broken:
            self.release()
            return None
        rows, longest = len(prompts.source), prompts.longest
        room = _round_up(prompts.end, _COLUMNS, 3)
        if not self._reserve(prompts, _round_up(rows, _ROWS, 1), room):
            return None
        self._room, self._width = room, longest
        for buffers, layer in zip(self._layers, prompts.cache.layers, strict=True):
            for flat, filled in ((buffers.keys, layer.keys), (buffers.values, layer.values)):
                flat.zero_()  # what lies there may be no number, which no mask hides
                buffers.rows(flat, room)[:rows, :, :longest] = filled[prompts.source]
        self._mask.zero_()
        mask = _rows(self._mask, 1, 1, room)[:rows, ..., :longest]
        mask.copy_(torch.ones_like(mask) if prompts.mask is None else prompts.mask[..., :longest])
        self._lengths.zero_()
        self._lengths[:rows] = prompts.lengths
        self._slot.fill_(longest)
        return self

    def release(self) -> None:
        """Let go of buffers and of the graphs that use them."""
        self._graphs: dict[tuple[int, int, int], Compute] = {}
        self._layers: list[_Buffers] = []
        self._mask = self._tokens = self._lengths = self._slot = self._logits = torch.empty(0)
        self._tables: list[torch.Tensor] = []

    def _reserve(self, prompts: Prompts, rows: int, room: int) -> bool:
        """Make buffers for so many rows and columns, unless those of former batches have room for them; False if there
        is too little memory."""
        table = self._short.angles(room)
        if len(self._tokens) < rows or len(self._mask) < rows * room:
            places, rows = max(len(self._mask), rows * room), max(len(self._tokens), rows)
            layers = prompts.cache.layers
            needed = sum(
                tensor.numel() // tensor.shape[0] // tensor.shape[2] * tensor.element_size()
                for tensor in _tensors_of(layers)
            )
            if places * needed > _FREE_SHARE * (self._free() + len(self._mask) * needed):
                return False
            self.release()
            try:
                self._layers = [_Buffers.like(layer, places) for layer in layers]
                self._logits = prompts.logits.new_empty(rows, prompts.logits.shape[1])
            except torch.OutOfMemoryError:
                self.release()
                return False
            self._mask = torch.empty(places, dtype=torch.bool, device=table.device)
            self._tokens, self._lengths = torch.zeros(2, rows, 1, dtype=torch.long, device=table.device).unbind()
            self._slot = torch.zeros(1, dtype=torch.long, device=table.device)
        if not any(table is former for former in self._tables):
            self._tables.append(table)  # graphs read the former ones
        return True

    def keep(self, moves: RowMoves) -> None:
        if not len(moves.holes):
            return
        for layer in self._layers:
            for flat in (layer.keys, layer.values):
                moves.apply(layer.rows(flat, self._room), 0, self._width)
        moves.apply(_rows(self._mask, 1, self._room, 1), 0, self._width)
        self._lengths[moves.holes] = self._lengths[moves.movers]

    def after(self, token: torch.Tensor) -> torch.Tensor:
        rows = len(token)
        self._tokens[:rows, 0] = token
        self._width += 1
        shape = (_round_up(rows, _ROWS, 1), min(_round_up(self._width, _COLUMNS, 2), self._room), self._room)
        replay = self._graphs.pop(shape, None)
        if replay is None and self._is_warm and not self._is_broken:
            replay = self._capture_shape(shape)
        self._is_warm = True
        if replay is None:
            return self._compute(*shape)[:rows]
        self._graphs[shape] = replay  # the last one used is the last to go
        return replay()[:rows]

    def _capture_shape(self, shape: tuple[int, int, int]) -> Compute | None:
        """The graph of a shape; None if this model's steps cannot be captured."""
        try:
            replay = self._capture(lambda: self._compute(*shape))
        except torch.OutOfMemoryError:  # perhaps the trainer's peak
            return None
        except RuntimeError as error:  # a module waits for the device
            self._give_up(str(error))
            return None
        if not self._is_checked:
            expected = self._compute(*shape).clone()
            self._step_back()
            replayed = replay()
            self._step_back()
            limit = 0.02 * float(expected.abs().max())
            if math.isfinite(limit):  # else the weights are at fault
                if not torch.allclose(replayed, expected, rtol=0.0, atol=limit):
                    self._give_up("the logits of a graph differ")
                    return None
                self._is_checked = True
        if len(self._graphs) >= _GRAPHS:
            del self._graphs[next(iter(self._graphs))]
        return replay

    def _give_up(self, reason: str) -> None:
        self._is_broken = True
        warnings.warn(f"Decode steps are not captured as CUDA graphs: {reason}", stacklevel=2)

    def _step_back(self) -> None:
        """Let the next computation write over the last token."""
        self._slot.sub_(1)
        self._lengths.sub_(1)

    def _compute(self, rows: int, columns: int, room: int) -> torch.Tensor:
        mask = _rows(self._mask, 1, 1, room)[:rows]
        mask.index_fill_(3, self._slot, True)
        cache = _FixedCache([_FixedLayer(layer, rows, columns, room, self._slot) for layer in self._layers], room)
        states = self._short.states(self._tokens[:rows], self._lengths[:rows], mask[..., :columns], cache)
        logits = self._logits[:rows]
        logits.copy_(self._short.head(states[:, -1]))  # one place for all graphs, which each would keep its own
        self._slot.add_(1)
        self._lengths.add_(1)
        return logits


class GraphCapture:
    """A `Capture` by CUDA graphs, which share the memory of their results."""

    def __init__(self) -> None:
        self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        place = torch.zeros(1, device="cuda")
        self._anchor = self(lambda: place.add_(1))
        """A pool whose last graph has gone cannot be used again."""

    def __call__(self, compute: Compute) -> Compute:
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the GPU meanwhile. A capture that fails would leave its stream the current one.
        with (
            _CAPTURING,
            torch.cuda.stream(self._stream),
            torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"),
        ):
            result = compute()

        def replay() -> torch.Tensor:
            graph.replay()
            return result

        return replay


def make_captured_steps(short: ShortForward | None, model: Any) -> CapturedSteps | None:
    """Steps for a model; None on a CPU, without a short pass, where equal runs must be equal (the memory that is free
    decides), and with quantized weights, whose modules wait for the GPU: a capture that fails costs memory."""
    if short is None or model.device.type != "cuda" or getattr(model, "is_quantized", False):
        return None
    if torch.are_deterministic_algorithms_enabled():
        return None
    try:
        return CapturedSteps(short, GraphCapture(), _free_memory)
    except RuntimeError as error:
        warnings.warn(f"Decode steps are not captured as CUDA graphs: {error}", stacklevel=2)
        return None


def _free_memory() -> float:
    """Bytes that the GPU has, or that PyTorch holds without use."""
    return torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()


@dataclass(frozen=True)
class _Buffers:
    """Keys and values of a layer, flat: the room of a row differs from batch to batch."""

    keys: torch.Tensor
    values: torch.Tensor
    heads: int
    width: int

    @classmethod
    def like(cls, layer: Any, places: int) -> _Buffers:
        """Empty ones for so many tokens, in the format of a layer of a filled cache."""
        heads, width = layer.keys.shape[1], layer.keys.shape[3]
        keys, values = (tensor.new_empty(places * heads * width) for tensor in (layer.keys, layer.values))
        return cls(keys, values, heads, width)

    def rows(self, flat: torch.Tensor, room: int) -> torch.Tensor:
        """(rows, heads, room, width)."""
        return _rows(flat, self.heads, room, self.width)


def _tensors_of(layers: list[Any]) -> list[torch.Tensor]:
    return [tensor for layer in layers for tensor in (layer.keys, layer.values)]


class _FixedLayer:
    """Writes the keys and values of a token to the same column of all rows."""

    def __init__(self, buffers: _Buffers, rows: int, columns: int, room: int, slot: torch.Tensor) -> None:
        self._buffers = [buffers.rows(flat, room)[:rows] for flat in (buffers.keys, buffers.values)]
        self._columns, self._slot = columns, slot

    def update(self, *added: torch.Tensor) -> tuple[torch.Tensor, ...]:
        for buffer, new in zip(self._buffers, added, strict=True):
            buffer.index_copy_(2, self._slot, new)
        return tuple(buffer[:, :, : self._columns] for buffer in self._buffers)


@dataclass(frozen=True)
class _FixedCache:
    layers: list[_FixedLayer]
    room: int

    def get_seq_length(self) -> int:
        return self.room - 1


def _rows(flat: torch.Tensor, *shape: int) -> torch.Tensor:
    """As many rows of a shape as a buffer holds."""
    size = math.prod(shape)
    return flat[: len(flat) // size * size].view(-1, *shape)


def _round_up(count: int, least: int, bits: int) -> int:
    """A number rounded up to a multiple of `least`, and to so many leading bits, so that few numbers are left."""
    step = max(least, 1 << max(0, (count - 1).bit_length() - bits))
    return -(-count // step) * step
