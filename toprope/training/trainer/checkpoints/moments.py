"""An optimizer's moments in a checkpoint: by parameter name, in one file, or in one per rank that trained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from toprope.training.trainer.ranks import from_rows, own_rows


class Moments:
    """The moments of a checkpoint, read by parts: those of a large model do not fit into every rank's memory."""

    def __init__(self, files: list[Any]) -> None:
        self._files = files
        self._keys: dict[str, list[str]] = {}
        for key in files[0].keys() if files else ():  # noqa: SIM118 - no mapping
            self._keys.setdefault(key.partition("/")[0], []).append(key)

    def fit(self, name: str, shape: tuple[int, ...], *, nested: bool) -> bool:
        """True if there are moments of a parameter, for this shape.

        Args:
            nested: The optimizer nests its state. It then has tensors of other shapes beside the moments, and other
                optimizers cannot use them.
        """
        outer_shapes, inner_shapes = set[tuple[int, ...]](), set[tuple[int, ...]]()
        for key in self._keys.get(name, ()):
            (inner_shapes if "/" in key.partition("/")[2] else outer_shapes).add(self._shape(key))
        if nested:
            return shape in inner_shapes
        return not inner_shapes and any(outer_shapes) and outer_shapes <= {(), shape}

    def _shape(self, key: str) -> tuple[int, ...]:
        """The whole shape; () for a number."""
        parts = [tuple(file.get_slice(key).get_shape()) for file in self._files]
        return (sum(part[0] for part in parts), *parts[0][1:]) if parts[0] else ()

    def read(self, name: str, like: torch.Tensor) -> dict[str, torch.Tensor]:
        """A parameter's moments by KEY or KEY/INNER, split as the parameter is."""
        rows = own_rows(like)
        return {key.partition("/")[2]: self._read(key, rows, like) for key in self._keys.get(name, ())}

    def _read(self, key: str, rows: slice, like: torch.Tensor) -> torch.Tensor:
        first = self._files[0].get_slice(key)
        if not first.get_shape():
            number: torch.Tensor = self._files[0].get_tensor(key)
            return number
        parts, start = [], 0
        for file in self._files:
            part = file.get_slice(key)
            size = part.get_shape()[0]
            stop = size if rows.stop is None else min(rows.stop - start, size)
            parts.append(part[max((rows.start or 0) - start, 0) : max(stop, 0)])
            start += size
        return from_rows(torch.cat(parts), like)


@contextmanager
def open_moments(path: Path) -> Iterator[Moments]:
    """The moments of the checkpoint in a folder.

    Raises:
        ValueError: There are none.
        SafetensorError: A file is damaged.
    """
    files = sorted(path.glob("optimizer*.safetensors"))
    if not files:
        raise ValueError("optimizer.safetensors is missing")
    with ExitStack() as stack:
        yield Moments([stack.enter_context(safe_open(file, framework="pt")) for file in files])


def read_optimizer_state(
    path: Path, parameters: Mapping[int, tuple[str, torch.Tensor]], numbers: Mapping[str, Any]
) -> dict[int, dict[str, Any]]:
    """An optimizer's state by parameter index, from a checkpoint's by parameter name."""
    with open_moments(path) as moments:
        moments_by_index = {index: moments.read(name, parameter) for index, (name, parameter) in parameters.items()}
    state: dict[int, dict[str, Any]] = {index: dict(entry) for index, entry in moments_by_index.items() if entry}
    places = {name: index for index, (name, _) in parameters.items()}
    for key, value in numbers.items():
        name, _, field = key.partition("/")
        state.setdefault(places[name], {})[field] = value
    return {index: _nest(entry) for index, entry in state.items()}


def flat_state(entry: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """A parameter's state by KEY, or by KEY/INNER where it nests, as that of bitsandbytes does."""
    for key, value in entry.items():
        if isinstance(value, Mapping):
            yield from ((f"{key}/{inner}", inner_value) for inner, inner_value in value.items())
        else:
            yield key, value


def nests_state(optimizer: torch.optim.Optimizer) -> bool:
    """True for the optimizers of bitsandbytes with state in 8 bits."""
    return hasattr(optimizer, "non_castable_tensor_keys")


def _nest(entry: Mapping[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for key, value in entry.items():
        outer, _, inner = key.partition("/")
        if inner:
            nested.setdefault(outer, {})[inner] = value
        else:
            nested[key] = value
    return nested


def named_parameters(
    model: Any, optimizer: torch.optim.Optimizer, extra_modules: Mapping[str, torch.nn.Module]
) -> dict[int, tuple[str, torch.Tensor]]:
    """The optimizer's parameters with their names by their index in its state_dict."""
    by_id = {id(parameter): name for name, parameter in model.named_parameters()}
    for prefix, module in extra_modules.items():
        by_id |= {id(parameter): f"{prefix}.{name}" for name, parameter in module.named_parameters()}
    ordered = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {index: (by_id[id(parameter)], parameter) for index, parameter in enumerate(ordered)}
