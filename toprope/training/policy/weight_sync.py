"""Weights from the trainer to inference on one machine: a memory-mapped file (`records.weight_file`).

The trainer writes a version into the slot that is not in use, then advances the version number. Inference checks the
number between decode batches, at no cost, and copies the slot if it has advanced. No messages, no pauses, no torn
reads: a slot is rewritten only by the next version but one, which the reader notices and then reads again.

`weights.json` beside the file names the tensors. Only trained parameters are published; with LoRA, only the adapters.
The first version of a file, and every CHECK_EVERY-th after it, carries the trainer's log-probabilities of a few tokens,
which the reader's model must give too. It copies the weights once more if not, and then refuses to go on.

On several nodes, `toprope.supervisor.spread.weights` copies the file to the node of inference. For vLLM see
`publishing.WeightFolder` and `publishing.WeightHandles`.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from toprope.atomic import allocate, write_json
from toprope.errors import ComponentFailed
from toprope.records.weight_file import ALIGN, HEADER

if TYPE_CHECKING:
    import torch

CHECK_EVERY = 16
"""Publications; a check of each would cost a small policy more than 1 % of a step."""
CHECKED = 24
"""Tokens of a check."""
TOLERANCE = {"float32": 2e-3, "bfloat16": 0.5, "float16": 0.1}
"""Largest difference from the trainer's log-probabilities that number formats explain. Random tokens have values around
-12, of which bfloat16 keeps two or three digits."""
_ATTEMPTS = 2
_TOKENS, _LOGPROBS = "check.tokens", "check.logprobs"


class WeightCheck(msgspec.Struct, frozen=True):
    """Log-probabilities that the published weights give to a few tokens."""

    tokens: list[int]
    logprobs: list[float]
    """Of all tokens but the first, each after those before it."""

    def largest_error(self, logprobs: list[float]) -> float:
        """The largest difference from other log-probabilities of these tokens; infinite if their number differs."""
        if len(logprobs) != len(self.logprobs):
            return float("inf")
        differences = [abs(ours - theirs) for ours, theirs in zip(self.logprobs, logprobs, strict=True)]
        return float("inf") if any(map(math.isnan, differences)) else max(differences)


def check_weights(model: Any) -> WeightCheck:
    """The log-probabilities of fixed tokens under the present weights."""
    import torch

    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(int(model.get_input_embeddings().weight.shape[0]), (1, CHECKED), generator=generator)
    training, attention = model.training, str(getattr(getattr(model, "config", None), "_attn_implementation", ""))
    forward = getattr(model, "_original_forward", model)  # accelerate's own rounds to its mixed precision
    model.eval()
    if attention.startswith("paged|"):  # as continuous batching leaves it, which needs pages
        model.set_attn_implementation(attention.removeprefix("paged|"))
    try:
        with torch.no_grad():
            logits = forward(input_ids=tokens.to(model.device), use_cache=False).logits[0, :-1].float()
    finally:
        model.train(training)
        if attention.startswith("paged|"):
            model.set_attn_implementation(attention)
    logprobs = logits.log_softmax(-1).cpu().gather(1, tokens[0, 1:, None])[:, 0]
    return WeightCheck(tokens[0].tolist(), logprobs.tolist())


class WeightsDiffer(ComponentFailed):
    """Inference could not take over the trainer's weights as they are."""


class WeightFile:
    """The trainer's side.

    Args:
        folder: Folder of the two files. A file of an earlier trainer is replaced, not overwritten: inference may be
            reading it.
        parameters: The live tensors to publish, by name; shapes and dtypes do not change.
        version: The version that inference holds already: 0, or that of a checkpoint.
        check: Returns the check of the present weights, or None if this version needs none; see `every`.
    """

    def __init__(
        self,
        folder: Path,
        parameters: Mapping[str, torch.Tensor],
        version: int = 0,
        check: Callable[[], WeightCheck | None] | None = None,
    ) -> None:
        import torch

        self.version, self._check = version, check
        if check is not None:
            self._checked = {
                _TOKENS: torch.zeros(CHECKED, dtype=torch.int64),
                _LOGPROBS: torch.full((CHECKED - 1,), torch.nan),
            }
            parameters = {**parameters, **self._checked}
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
        if self._check is not None:
            self._fill_check(self._check())
        with self._no_grad():
            for name, tensor in self._parameters:
                slot[name].copy_(tensor)
        HEADER.pack_into(self._map, 0, self._began_at, version)
        self.version = version
        return version

    def _fill_check(self, check: WeightCheck | None) -> None:
        tokens, logprobs = self._checked[_TOKENS], self._checked[_LOGPROBS]
        logprobs.fill_(math.nan)
        if check is not None:
            tokens.copy_(tokens.new_tensor(check.tokens))
            logprobs.copy_(logprobs.new_tensor(check.logprobs))


class WeightReader:
    """The side of inference. Until the trainer has created the file, `version` stays 0.

    Args:
        folder: Folder of the two files.
        parameters: The tensors to copy to, by name.
        model: The model that they are of; without it, nothing is checked.
    """

    def __init__(self, folder: Path, parameters: dict[str, torch.Tensor], model: Any = None) -> None:
        self.version = 0
        self._model = model
        self._folder = folder
        self._parameters = parameters
        self._map: mmap.mmap | None = None
        self._file = self._seen_version = 0
        self._slots: list[dict[str, torch.Tensor]] = []

    def refresh(self) -> int:
        """Copy newer weights into the parameters, if there are any; returns the version of the parameters.

        Raises:
            KeyError: The trainer publishes a parameter that this model does not have.
            WeightsDiffer: The model does not give the trainer's log-probabilities with them.
        """
        import torch

        if not self._open():
            return self.version
        assert self._map is not None
        attempts = 0
        # A restarted trainer may continue from a lower version, so any other number means new weights.
        while (version := HEADER.unpack_from(self._map, 0)[1]) != self._seen_version:
            with torch.no_grad():
                for name, tensor in self._slots[version % 2].items():
                    if name in self._parameters:
                        self._parameters[name].copy_(tensor)
            error = self._error(self._slots[version % 2])
            if HEADER.unpack_from(self._map, 0)[1] != version:
                continue
            if error > 0:
                attempts += 1
                if attempts < _ATTEMPTS:
                    continue
                raise WeightsDiffer(
                    f"Inference did not take over version {version} of the weights: its log-probabilities of the "
                    f"same tokens differ from the trainer's by {error:.2g}.",
                    hint="It is started again. If that repeats, inference and trainer load different models.",
                )
            # The trainer may have begun to rewrite the slot if the number has advanced; the loop then reads the other
            # slot. It ends only if the number is unchanged, and with it the slot.
            self.version = self._seen_version = version
        return self.version

    def _error(self, slot: Mapping[str, torch.Tensor]) -> float:
        """The difference from the check that came with weights; 0 if it is tolerable or there is no check."""
        if self._model is None or _LOGPROBS not in slot or slot[_LOGPROBS].isnan().any():
            return 0.0
        error = WeightCheck(slot[_TOKENS].tolist(), slot[_LOGPROBS].tolist()).largest_error(
            check_weights(self._model).logprobs
        )
        return error if error > TOLERANCE.get(str(self._model.dtype).removeprefix("torch."), 0.5) else 0.0

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
        self._seen_version = HEADER.unpack_from(self._map, 0)[0]
        tensors, slot_bytes = layout["tensors"], layout["slot_bytes"]
        names = {*self._parameters, _TOKENS, _LOGPROBS}
        if missing := [entry["name"] for entry in tensors if entry["name"] not in names]:
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
