"""Key-value caches whose buffers grow by blocks.

The layers of transformers' `DynamicCache` copy all keys and values for every new token, so an answer of n tokens costs
n^2 copies. The layers here write a token into a buffer with room to spare and hand views of it to the model's own
attention; a full buffer is copied into one that is a quarter longer, so n tokens cost about 5 n copies. A row leaves
the batch when the last row is written over it, which copies one row instead of all.

`grow_by_blocks` replaces the layers of a filled cache. Other layers (recurrent states, quantized ones) stay as they
are and take part through their own methods. MiniMax keeps states of its linear attention beside `layers`, which its
cache does not reorder; that is done here.

`KeptPrompts` keeps keys and values between batches.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

_BLOCK = 64
"""Least number of tokens by which a buffer grows."""
_LEAST_KEPT = 256
"""Tokens of a prompt that is worth keeping: shorter ones are read as fast in one pass with others."""
_MOST_KEPT = 1024
"""Prompts that are remembered at most."""


class RowMoves:
    """A new, shorter order of the rows of a batch: the last rows take the places of those that leave.

    Args:
        rows: Number of rows.
        leaving: Places of the rows that leave, in ascending order.
    """

    def __init__(self, rows: int, leaving: list[int], device: torch.device) -> None:
        leaving_places = set(leaving)
        self.count = rows - len(leaving_places)
        holes = [place for place in leaving if place < self.count]
        movers = [place for place in range(self.count, rows) if place not in leaving_places]
        self.order = list(range(self.count))
        for hole, mover in zip(holes, movers, strict=True):
            self.order[hole] = mover
        self.index: Any = torch.tensor(self.order, device=device)
        """(count,): the former place of each remaining row."""
        self.holes = torch.tensor(holes, device=device, dtype=torch.long)
        self.movers = torch.tensor(movers, device=device, dtype=torch.long)

    def apply(self, buffer: torch.Tensor, start: int, end: int) -> None:
        """Move rows within a buffer (rows, ..., positions, width), for the positions from start to end."""
        if len(self.holes):
            buffer[self.holes, :, start:end] = buffer[self.movers, :, start:end]


class GrowingLayer(DynamicLayer):
    """A layer of full attention. `keys` and `values` are views of buffers (rows, heads, room, width)."""

    _buffers: tuple[torch.Tensor, ...] = ()
    _end = 0
    """Position after the last token in the buffers."""
    _view: torch.Tensor | None = None
    """`keys` as this class left it; another tensor there means that a method of the library replaced it."""
    _longest = sys.maxsize
    """Tokens for which a buffer needs room at most."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append keys and values (rows, heads, tokens, width); return all of them."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        keys, values = self._append(key_states, value_states)
        self._hold(keys, values)
        return keys, values

    def keep_rows(self, moves: RowMoves) -> None:
        """Drop the rows that leave."""
        if self.keys is not self._view or not self._buffers:
            self.reorder_cache(moves.index)
            return
        start = self._end - self._length()
        for buffer in self._buffers:
            moves.apply(buffer, start, self._end)
        keys, values = (buffer[: moves.count, :, start : self._end] for buffer in self._buffers)
        self._hold(keys, values)

    def _length(self) -> int:
        keys = self.keys  # an empty layer holds a tensor of one dimension
        return keys.shape[-2] if keys is not None and keys.dim() == 4 else 0

    def _hold(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.keys, self.values = keys, values
        self._view = keys

    def _append(self, *added: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows, tokens, length = added[0].shape[0], added[0].shape[-2], self._length()
        if self.keys is not self._view or not self._buffers or self._end + tokens > self._buffers[0].shape[-2]:
            room = length + tokens + max(_BLOCK, (length + tokens) // 4)
            room = max(min(room, self._longest), length + tokens)  # unused room spreads rows over more memory pages
            former: tuple[Any, Any] = self.keys, self.values
            self._buffers = tuple(new.new_empty(rows, new.shape[1], room, new.shape[-1]) for new in added)
            if length:
                for buffer, old in zip(self._buffers, former, strict=True):
                    buffer[:, :, :length] = old
            self._end = length
        end = self._end + tokens
        for buffer, new in zip(self._buffers, added, strict=True):
            buffer[:rows, :, self._end : end] = new
        start, self._end = self._end - length, end
        keys, values = (buffer[:rows, :, start:end] for buffer in self._buffers)
        return keys, values


class GrowingSlidingLayer(GrowingLayer, DynamicSlidingWindowLayer):
    """A layer whose attention reaches back `sliding_window` tokens; older ones are left out when a buffer is full."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append keys and values (rows, heads, tokens, width); return those that the new tokens may look at."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.cumulative_length += key_states.shape[-2]
        keys, values = self._append(key_states, value_states)
        window = slice(max(0, keys.shape[-2] - self.sliding_window + 1), None)
        self._hold(keys[:, :, window], values[:, :, window])
        return keys, values


_GROWING: dict[type, type[GrowingLayer]] = {
    DynamicLayer: GrowingLayer,
    DynamicSlidingWindowLayer: GrowingSlidingLayer,
}


def grow_by_blocks(cache: Any, source: torch.Tensor | None = None, longest: int = sys.maxsize) -> None:
    """Let the buffers of a cache that a model filled grow by blocks from now on.

    Args:
        cache: A cache of transformers, changed in place.
        longest: Most tokens that a row will hold, if that is known.
        source: (rows,): the present row of each new row, to repeat or reorder rows; None keeps them.
    """
    if source is not None:
        cache.reorder_cache(source)
        _reorder_states(cache, source)
    layers: list[Any] = getattr(cache, "layers", [])
    for place, layer in enumerate(layers):
        if (kind := _GROWING.get(type(layer))) is not None and layer.is_initialized:
            growing = kind.__new__(kind)
            growing.__dict__.update(layer.__dict__, _longest=longest)
            layers[place] = growing


def keep_rows(cache: Any, moves: RowMoves) -> None:
    """Drop the rows of a cache that leave its batch."""
    _reorder_states(cache, moves.index)
    layers = getattr(cache, "layers", None)
    if layers is None:
        cache.reorder_cache(moves.index)
        return
    for layer in layers:
        if isinstance(layer, GrowingLayer):
            layer.keep_rows(moves)
        else:
            layer.reorder_cache(moves.index)


def _reorder_states(cache: Any, rows: torch.Tensor) -> None:
    states: list[Any] = getattr(cache, "linear_cache", [])
    states[:] = [state[rows] if isinstance(state, torch.Tensor) else state for state in states]


class KeptPrompts:
    """Keys and values of the prompts that were read last. The next turn of a conversation begins with one of them, so
    the oldest, whose conversations have gone on, go first.

    Until a prompt came that begins so, only the ids of tokens are remembered: answers to single questions cost no
    memory.

    Args:
        room: Most bytes of keys and values; 0 to keep none.
    """

    def __init__(self, room: int) -> None:
        self._room, self._bytes, self.has_continued = room, 0, False
        self._kept: dict[bytes, tuple[torch.Tensor, ...]] = {}
        """By the ids of a prompt, in the order in which they were read; no tensors if they were not kept."""

    def clear(self) -> None:
        """Forget all keys and values, as those of former weights."""
        self._kept, self._bytes = dict.fromkeys(self._kept, ()), 0

    def beginning(self, prompt: Sequence[int]) -> tuple[torch.Tensor, ...]:
        """Return keys and values, (heads, tokens, width) in turn layer by layer, of the longest kept prompt that this
        one continues; nothing without such a prompt."""
        if not self._room or len(prompt) <= _LEAST_KEPT:
            return ()
        ids, found = _bytes_of(prompt), b""
        for kept in self._kept:
            if len(found) < len(kept) < len(ids) and ids.startswith(kept):
                self.has_continued = True
                found = kept if self._kept[kept] else found
        return self._kept.get(found, ())

    def keep(self, prompts: Sequence[Sequence[int]], cache: Any) -> None:
        """Keep prompts that were read.

        Args:
            prompts: Their ids.
            cache: In its rows they lie at the right; None to remember the ids alone.
        """
        for row, prompt in enumerate(prompts if self._room else ()):
            if len(prompt) < _LEAST_KEPT:
                continue
            ids, tensors = _bytes_of(prompt), ()
            self._bytes -= _size(self._kept.pop(ids, ()))
            if self.has_continued and cache is not None:
                filled = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
                read = [tensor[row, :, -len(prompt) :] for tensor in filled]
                if _size(read) <= self._room:  # else the copy alone would take more, and all others' places
                    tensors = tuple(tensor.clone() for tensor in read)
            self._kept[ids] = tensors
            self._bytes += _size(tensors)
            while self._bytes > self._room or len(self._kept) > _MOST_KEPT:
                self._bytes -= _size(self._kept.pop(next(iter(self._kept))))


def _bytes_of(prompt: Sequence[int]) -> bytes:
    return array("q", prompt).tobytes()


def _size(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
