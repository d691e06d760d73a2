"""Checkpoints of the trainer: written aside, renamed into place, the cursor inside; safetensors and JSON only.

    checkpoints/step-000120/
      model/               loaded by `from_pretrained`: weights (or adapters), configuration, tokenizer
      NAME.safetensors     a module that is trained beside the model (PPO's value_head)
      optimizer.safetensors   moments by parameter name
      random.safetensors      states of torch's generators
      state.json              step, cursor, policy version, counts, the optimizer's and the scheduler's numbers,
                              Python's random state
      manifest.json           size and SHA-256 of every other file

A folder of that name is complete: it appears by a rename after everything in it was synced.
`toprope.records.run.checkpoints` describes the manifest, by which damage is found before a checkpoint is used.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.optim.lr_scheduler import LRScheduler

from toprope.atomic import fsync
from toprope.errors import Corrupt
from toprope.records.run.checkpoints import STATE_VERSION, problem_of, seal, set_aside
from toprope.records.run.folder import checkpoints_in
from toprope.records.run.full_disk import NO_ROOM
from toprope.records.trained_tasks import sync_trained

_HASH_BYTES = 1 << 26


@dataclass(frozen=True)
class CheckpointState:
    """The numbers of a checkpoint. `cursor` is the position after the last group trained on; `rollouts` counts the
    rollouts delivered until then, `dropped` the dropped groups by reason."""

    step: int
    cursor: int
    policy_version: int
    train_seconds: float
    rollouts: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    version: int = STATE_VERSION


def save_checkpoint(
    folder: Path,
    state: CheckpointState,
    *,
    model: Any,
    tokenizer: Any,
    optimizer: torch.optim.Optimizer,
    scheduler: LRScheduler,
    keep: int,
    extra_modules: Mapping[str, torch.nn.Module] | None = None,
) -> Path:
    """Writes checkpoint `step-N` into `folder` and removes all but the newest `keep`.

    Args:
        folder: Folder of the checkpoints.
        state: The numbers to store.
        model, tokenizer, optimizer, scheduler: Their states are stored.
        keep: Number of checkpoints to keep.
        extra_modules: Modules trained beside the model, by the name of their file.

    Returns:
        The checkpoint's path.

    Raises:
        OSError: See `commit_checkpoint`.
    """

    def write(aside: Path) -> None:
        _write(aside, state, model, tokenizer, optimizer, scheduler, extra_modules or {})

    return commit_checkpoint(folder, state.step, write, keep)


def commit_checkpoint(folder: Path, step: int, write: Callable[[Path], None], keep: int) -> Path:
    """Writes a checkpoint aside, seals it, renames it into place, and removes all but the newest `keep`.

    Args:
        folder: Folder of the checkpoints, in the run's folder.
        step: Number of the checkpoint.
        write: Creates the folder that it is given and writes all files into it.
        keep: Number of checkpoints to keep.

    Returns:
        The checkpoint's path. A sound checkpoint of that step is left as it is; a damaged one is renamed.

    Raises:
        OSError: It could not be written, for example because the disk is full. Partial files are removed, and earlier
            checkpoints stay.
    """
    final = folder / f"step-{step:06d}"
    if final.exists():
        if problem_of(final) is None:
            return final
        set_aside(final)
    aside = folder / f".writing-{final.name}"
    shutil.rmtree(aside, ignore_errors=True)
    try:
        write(aside)
        seal(aside)
        sync_trained(folder.parent)
        os.rename(aside, final)
    except Exception as error:
        shutil.rmtree(aside, ignore_errors=True)
        number = _disk_full_errno(str(error))
        if number is not None and not isinstance(error, OSError):
            raise OSError(number, os.strerror(number)) from error
        raise
    fsync(folder)
    for old in checkpoints_in(folder)[: -max(keep, 1)]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def _write(
    aside: Path,
    state: CheckpointState,
    model: Any,
    tokenizer: Any,
    optimizer: torch.optim.Optimizer,
    scheduler: LRScheduler,
    extra_modules: Mapping[str, torch.nn.Module],
) -> None:
    (aside / "model").mkdir(parents=True, mode=0o700)
    # TRL keeps a copy of the starting adapters beside the trained ones; only the latter are the policy.
    adapters = {"selected_adapters": ["default"]} if hasattr(model, "peft_config") else {}
    model.save_pretrained(aside / "model", safe_serialization=True, **adapters)
    tokenizer.save_pretrained(aside / "model")
    for name, module in extra_modules.items():
        tensors = {key: value.detach().cpu().contiguous() for key, value in module.state_dict().items()}
        save_file(tensors, aside / f"{name}.safetensors")
    names = _names(model, optimizer, extra_modules)
    moments, numbers = {}, {}
    for index, entry in optimizer.state_dict()["state"].items():
        for key, value in entry.items():
            if torch.is_tensor(value):
                moments[f"{names[index]}/{key}"] = value.detach().cpu().contiguous()
            else:
                numbers[f"{names[index]}/{key}"] = value
    save_file(moments, aside / "optimizer.safetensors")
    generators = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        generators["cuda"] = torch.cuda.get_rng_state()
    save_file(generators, aside / "random.safetensors")
    plain = (int, float, str, bool, list, type(None))
    document = asdict(state) | {
        "optimizer": numbers,
        "learning_rates": [group["lr"] for group in optimizer.param_groups],
        "scheduler": {key: value for key, value in scheduler.state_dict().items() if isinstance(value, plain)},
        "python_random": random.getstate(),
    }
    (aside / "state.json").write_text(json.dumps(document))


def _disk_full_errno(text: str) -> int | None:
    """Error number of a full disk, if the text names one; safetensors and tokenizers raise no OSError."""
    return next((number for number in NO_ROOM if f"(os error {number})" in text), None)


def load_weights(path: Path, model: Any) -> None:
    """Loads a checkpoint's weights, or its adapters, into a model that was loaded from the starting policy.

    The model object is kept, so that copies of the starting policy made before (TRL's reference for the KL term, the
    frozen first adapters) stay valid.

    Raises:
        Corrupt: The weights are damaged or belong to another model.
    """
    _check(path)
    folder = path / "model"
    try:
        if hasattr(model, "peft_config"):
            from peft import load_peft_weights, set_peft_model_state_dict

            result: Any = set_peft_model_state_dict(model, load_peft_weights(str(folder), device="cpu"), "default")
            missing = [name for name in result.missing_keys if ".default." in name]
            if missing or result.unexpected_keys:
                raise ValueError(f"adapters do not fit: {(missing or result.unexpected_keys)[:3]}")
            return
        from transformers import AutoModelForCausalLM

        # float32 represents every other format exactly; the trained parameters keep their own.
        saved = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, use_safetensors=True)
        model.load_state_dict(saved.state_dict())
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise _unusable(path, error) from error


def load_checkpoint(
    path: Path,
    *,
    model: Any,
    optimizer: torch.optim.Optimizer,
    scheduler: LRScheduler,
    extra_modules: Mapping[str, torch.nn.Module] | None = None,
) -> CheckpointState:
    """Restores optimizer, scheduler, random states and extra modules.

    Load the model's weights before, with `load_weights` or from `path / "model"`.

    Raises:
        Corrupt: Something is missing, damaged, or does not fit the model.
    """
    _check(path)
    try:
        document = json.loads((path / "state.json").read_text())
        moments = load_file(path / "optimizer.safetensors")
        generators = load_file(path / "random.safetensors")
        for name, module in (extra_modules or {}).items():
            module.load_state_dict(load_file(path / f"{name}.safetensors"))
        state = _optimizer_state(_names(model, optimizer, extra_modules or {}), moments, document["optimizer"])
        optimizer.load_state_dict(optimizer.state_dict() | {"state": state})
        for group, rate in zip(optimizer.param_groups, document["learning_rates"], strict=True):
            group["lr"] = rate
        scheduler.load_state_dict(scheduler.state_dict() | document["scheduler"])
        torch.set_rng_state(generators["cpu"])
        if "cuda" in generators and torch.cuda.is_available():
            torch.cuda.set_rng_state(generators["cuda"])
        kind, numbers, gauss = document["python_random"]
        random.setstate((kind, tuple(numbers), gauss))
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise _unusable(path, error) from error
    return _state_of(document)


def read_state(path: Path) -> CheckpointState:
    """The numbers of a checkpoint.

    Raises:
        Corrupt: state.json is missing or damaged.
    """
    try:
        return _state_of(json.loads((path / "state.json").read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise _unusable(path, error) from error


def _state_of(document: Mapping[str, Any]) -> CheckpointState:
    known = CheckpointState.__dataclass_fields__
    return CheckpointState(**{key: value for key, value in document.items() if key in known})


def load_moments(
    path: Path,
    *,
    model: Any,
    optimizer: torch.optim.Optimizer,
    extra_modules: Mapping[str, torch.nn.Module] | None = None,
) -> int:
    """Loads the moments of another run's optimizer, for a run that continues from its weights under its own settings.

    Learning rates, schedule, step and random states are not loaded.

    Args:
        path: The other run's checkpoint.
        model: The model that the optimizer trains. Parameters that the checkpoint lacks, or has in another shape, begin
            without moments.
        optimizer: This run's optimizer.
        extra_modules: Modules trained beside the model; their weights are loaded if the checkpoint has them.

    Returns:
        Number of parameters that have moments now.

    Raises:
        Corrupt: The checkpoint is damaged.
    """
    _check(path)
    try:
        numbers = json.loads((path / "state.json").read_text())["optimizer"]
        moments = load_file(path / "optimizer.safetensors")
        for name, module in (extra_modules or {}).items():
            if (path / f"{name}.safetensors").is_file():
                module.load_state_dict(load_file(path / f"{name}.safetensors"))
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise _unusable(path, error) from error
    names = _names(model, optimizer, extra_modules or {})
    ordered = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    shapes = {name: ordered[index].shape for index, name in names.items()}
    fits = {
        key: value
        for key, value in moments.items()
        if (name := key.rpartition("/")[0]) in shapes and (not value.dim() or value.shape == shapes[name])
    }
    known = {key.rpartition("/")[0] for key, value in fits.items() if value.dim()}
    fits = {key: value for key, value in fits.items() if key.rpartition("/")[0] in known}
    kept = {key: value for key, value in numbers.items() if key.rpartition("/")[0] in known}
    state = _optimizer_state({index: name for index, name in names.items() if name in known}, fits, kept)
    optimizer.load_state_dict(optimizer.state_dict() | {"state": state})
    return len(state)


def _optimizer_state(
    names: dict[int, str], moments: dict[str, torch.Tensor], numbers: dict[str, Any]
) -> dict[int, dict[str, Any]]:
    """An optimizer's state by parameter index, from a checkpoint's by parameter name."""
    state: dict[int, dict[str, Any]] = {}
    for index, name in names.items():
        entry = {key.rpartition("/")[2]: value for key, value in moments.items() if key.rpartition("/")[0] == name}
        if entry:
            state[index] = entry
    places = {name: index for index, name in names.items()}
    for key, value in numbers.items():
        name, _, field = key.rpartition("/")
        state.setdefault(places[name], {})[field] = value
    return state


def _check(path: Path) -> None:
    """Checks what is cheap to check; a resume has compared all hashes before (`newest_sound`)."""
    if (problem := problem_of(path, hash_bytes=_HASH_BYTES)) is not None:
        raise _unusable(path, problem)


def _unusable(path: Path, error: Exception | str) -> Corrupt:
    return Corrupt(
        f"The checkpoint {path} cannot be used: {error}.",
        hint="It was left as it is. Move the folder away to resume from the checkpoint before it.",
    )


def _names(
    model: Any, optimizer: torch.optim.Optimizer, extra_modules: Mapping[str, torch.nn.Module]
) -> dict[int, str]:
    """Names of the optimizer's parameters by their index in its state_dict."""
    by_id = {id(parameter): name for name, parameter in model.named_parameters()}
    for prefix, module in extra_modules.items():
        by_id |= {id(parameter): f"{prefix}.{name}" for name, parameter in module.named_parameters()}
    ordered = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {index: by_id[id(parameter)] for index, parameter in enumerate(ordered)}
