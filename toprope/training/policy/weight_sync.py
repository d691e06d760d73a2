"""Weights from the trainer to inference on one machine: a memory-mapped file (`records.weight_file`).

The trainer writes a version into the slot that is not in use, then advances the version number. Inference checks the
number between decode batches, at no cost, and copies the slot if it has advanced. No messages, no pauses, no torn
reads: a slot is rewritten only by the next version but one, which the reader notices and then reads again.

`weights.json` beside the file names the tensors. Only trained parameters are published; with LoRA, only the adapters.
On several nodes, `toprope.supervisor.spread.weights` copies the file to the node of inference. For vLLM see
`publishing.WeightFolder` and `publishing.WeightHandles`.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toprope.atomic import allocate, write_json
from toprope.records.weight_file import ALIGN, HEADER

if TYPE_CHECKING:
    import torch


class WeightFile:
    """The trainer's side.

    Args:
        folder: Folder of the two files. A file of an earlier trainer is replaced, not overwritten: inference may be
            reading it.
        parameters: The live tensors to publish, by name; shapes and dtypes do not change.
        version: The version that inference holds already: 0, or that of a checkpoint.
    """

    def __init__(self, folder: Path, parameters: Mapping[str, torch.Tensor], version: int = 0) -> None:
        import torch

        self.version = version
        layout, offset = [], 0
        for name, tensor in parameters.items():
            size = tensor.numel() * tensor.element_size()
            dtype = str(tensor.dtype).removeprefix("torch.")
            layout.append({"name": name, "shape": list(tensor.shape), "dtype": dtype, "offset": offset})
            offset += -(-size // ALIGN) * ALIGN
        path, aside = folder / "weights.bin", folder / ".weights.bin"
        aside.unlink(missing_ok=True)
        descriptor = os.open(aside, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            size = ALIGN + 2 * max(offset, ALIGN)
            allocate(descriptor, size)  # writing to a mapped file on a full disk would kill the trainer
            self._map = mmap.mmap(descriptor, 0)
        finally:
            os.close(descriptor)
        self._slots = [_views(self._map, layout, ALIGN + slot * offset) for slot in (0, 1)]
        self._parameters = [(name, tensor.detach()) for name, tensor in parameters.items()]
        self._no_grad = torch.no_grad
        HEADER.pack_into(self._map, 0, version, version)
        self._began_at = version
        # The layout comes first: a reader that finds the new file must read its layout.
        write_json(folder / "weights.json", {"version": 1, "slot_bytes": offset, "tensors": layout})
        os.replace(aside, path)

    def publish(self) -> int:
        """Copy every parameter into the free slot, then advance the version number; returns it."""
        version = self.version + 1
        slot = self._slots[version % 2]
        with self._no_grad():
            for name, tensor in self._parameters:
                slot[name].copy_(tensor)
        HEADER.pack_into(self._map, 0, self._began_at, version)
        self.version = version
        return version


class WeightReader:
    """The side of inference. Until the trainer has created the file, `version` stays 0."""

    def __init__(self, folder: Path, parameters: dict[str, torch.Tensor]) -> None:
        self.version = 0
        self._folder = folder
        self._parameters = parameters
        self._map: mmap.mmap | None = None
        self._file = self._seen = 0
        self._slots: list[dict[str, torch.Tensor]] = []

    def refresh(self) -> int:
        """Copy newer weights into the parameters, if there are any; returns the version of the parameters.

        Raises:
            KeyError: The trainer publishes a parameter that this model does not have.
        """
        import torch

        if not self._open():
            return self.version
        assert self._map is not None
        # A restarted trainer may continue from a lower version, so any other number means new weights.
        while (version := HEADER.unpack_from(self._map, 0)[1]) != self._seen:
            with torch.no_grad():
                for name, tensor in self._slots[version % 2].items():
                    self._parameters[name].copy_(tensor)
            # The trainer may have begun to rewrite the slot if the number has advanced; the loop then reads the other
            # slot. It ends only if the number is unchanged, and with it the slot.
            self.version = self._seen = version
        return self.version

    def _open(self) -> bool:
        """Map the trainer's file, again if a later trainer has replaced it; False without one."""
        path = self._folder / "weights.bin"
        try:
            if os.stat(path).st_ino == self._file:
                return True
            descriptor = os.open(path, os.O_RDWR)
            layout = json.loads((self._folder / "weights.json").read_bytes())
        except FileNotFoundError:
            return self._map is not None
        try:
            self._file = os.fstat(descriptor).st_ino
            self._map = mmap.mmap(descriptor, 0)
        finally:
            os.close(descriptor)
        self._seen = HEADER.unpack_from(self._map, 0)[0]
        tensors, slot_bytes = layout["tensors"], layout["slot_bytes"]
        if missing := [entry["name"] for entry in tensors if entry["name"] not in self._parameters]:
            raise KeyError(f"the trainer publishes parameters that inference does not have: {missing[:3]}")
        self._slots = [_views(self._map, tensors, ALIGN + slot * slot_bytes) for slot in (0, 1)]
        return True


def _views(buffer: mmap.mmap, layout: list[dict[str, Any]], base: int) -> dict[str, torch.Tensor]:
    import torch

    views = {}
    for entry in layout:
        dtype = getattr(torch, entry["dtype"])
        count = 1
        for side in entry["shape"]:
            count *= side
        flat = torch.frombuffer(buffer, dtype=dtype, count=count, offset=base + entry["offset"])
        views[entry["name"]] = flat.view(entry["shape"])
    return views
