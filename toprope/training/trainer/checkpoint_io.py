"""Checkpoints of the trainer: written aside, renamed into place, the cursor inside; safetensors and JSON only.

    checkpoints/step-000120/
      model/               what `from_pretrained` loads: weights (or adapters), configuration, tokenizer
      NAME.safetensors     a module that is trained beside the model (PPO's value_head)
      optimizer.safetensors   moments by parameter name
      random.safetensors      states of torch's generators
      state.json              step, cursor, policy version, counts, optimizer's and scheduler's numbers,
                              Python's random state
      manifest.json           size and SHA-256 of every other file

A folder of that name is complete: it appears by a rename after everything in it was synced. See
`toprope.records.run.checkpoints` for the manifest, by which damage is found before a checkpoint is used.
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

from toprope.atomic import fsync
from toprope.errors import Corrupt
from toprope.records.run.checkpoints import STATE_VERSION, problem_of, seal, set_aside
from toprope.records.run.folder import checkpoints_in
from toprope.records.run.lines import NO_ROOM

__all__ = ["CheckpointState", "keep_checkpoint", "latest", "load", "load_moments", "load_weights", "save"]


_HASH_BYTES = 1 << 26


@dataclass(frozen=True)
class CheckpointState:
    """What a checkpoint knows besides tensors: `cursor` is behind the last group that it was trained on, `rollouts` and
    `dropped` count what was delivered until then and what of it was passed over, by reason."""

    step: int
    cursor: int
    policy_version: int
    train_seconds: float
    rollouts: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    version: int = STATE_VERSION


def save(
    folder: Path,
    state: CheckpointState,
    *,
    model: Any,
    tokenizer: Any,
    optimizer: torch.optim.Optimizer,
    scheduler: Any,
    keep: int,
    beside: Mapping[str, torch.nn.Module] | None = None,
) -> Path:
    """Writes checkpoint `step-N` into `folder` and removes all but the newest `keep`.

    Args:
        folder: Where checkpoints lie.
        state: What it knows besides tensors.
        model, tokenizer, optimizer, scheduler: What is kept.
        keep: Checkpoints that stay.
        beside: Modules that are trained beside the model, by the name of their file.

    Returns:
        Its path.

    Raises:
        OSError: See `keep_checkpoint`.
    """
    beside = beside or {}
    write = lambda aside: _write(aside, state, model, tokenizer, optimizer, scheduler, beside)  # noqa: E731
    return keep_checkpoint(folder, state.step, write, keep)


def keep_checkpoint(folder: Path, step: int, write: Callable[[Path], None], keep: int) -> Path:
    """Has a checkpoint written aside, seals it, puts it into its place, and removes all but the newest `keep`.

    Args:
        folder: Where checkpoints lie.
        step: Its number.
        write: Writes everything of it into the folder that it is given, and makes that.
        keep: Checkpoints that stay.

    Returns:
        Its path. If it was there already and is sound it is left as it is; a damaged one gets another name.

    Raises:
        OSError: It could not be written, for lack of room perhaps. What was written of it is gone again, and the
            checkpoints before it stand.
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
        os.rename(aside, final)
    except Exception as error:
        shutil.rmtree(aside, ignore_errors=True)
        said = _no_room_in(str(error))
        if said is not None and not isinstance(error, OSError):
            raise OSError(said, os.strerror(said)) from error
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
    optimizer: Any,
    scheduler: Any,
    beside: Mapping[str, torch.nn.Module],
) -> None:
    (aside / "model").mkdir(parents=True, mode=0o700)
    # TRL keeps a copy of the starting adapters beside those that it trains; the policy is the trained ones.
    adapters = {"selected_adapters": ["default"]} if hasattr(model, "peft_config") else {}
    model.save_pretrained(aside / "model", safe_serialization=True, **adapters)
    tokenizer.save_pretrained(aside / "model")
    for name, module in beside.items():
        tensors = {key: value.detach().cpu().contiguous() for key, value in module.state_dict().items()}
        save_file(tensors, aside / f"{name}.safetensors")
    names = _names(model, optimizer, beside)
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
    document = asdict(state) | {
        "optimizer": numbers,
        "learning_rates": [group["lr"] for group in optimizer.param_groups],
        "scheduler": {key: value for key, value in scheduler.state_dict().items() if _plain(value)},
        "python_random": random.getstate(),
    }
    (aside / "state.json").write_text(json.dumps(document))


def _no_room_in(text: str) -> int | None:
    """The system's error number: the libraries that write tensors and tokenizers say it only in words."""
    return next((number for number in NO_ROOM if f"(os error {number})" in text), None)


def latest(folder: Path) -> Path | None:
    """The newest complete checkpoint, None where there is none."""
    found = checkpoints_in(folder)
    return found[-1] if found else None


def load_weights(path: Path, model: Any) -> None:
    """Puts a checkpoint's weights, or its adapters, into a model that was loaded from the starting policy.

    The model stays the object that it was, so that what was made of the starting policy before (TRL's reference for the
    KL term, a frozen copy of the first adapters) stays that.

    Raises:
        Corrupt: They are damaged, or those of another model.
    """
    _check(path)
    folder = path / "model"
    try:
        if hasattr(model, "peft_config"):
            from peft import load_peft_weights, set_peft_model_state_dict

            result = set_peft_model_state_dict(model, load_peft_weights(str(folder), device="cpu"), "default")
            missing = [name for name in result.missing_keys if ".default." in name]
            if missing or result.unexpected_keys:
                raise ValueError(f"adapters do not fit: {(missing or result.unexpected_keys)[:3]}")
            return
        from transformers import AutoModelForCausalLM

        # float32 holds every other format; what is trained keeps its own.
        saved = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, use_safetensors=True)
        model.load_state_dict(saved.state_dict())
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise _unusable(path, error) from error


def load(
    path: Path,
    *,
    model: Any,
    optimizer: torch.optim.Optimizer,
    scheduler: Any,
    beside: Mapping[str, torch.nn.Module] | None = None,
) -> CheckpointState:
    """Puts optimizer, scheduler and random states back, and what was trained beside the model; the model's weights come
    before, by `load_weights` or from `path / "model"`.

    Raises:
        Corrupt: Something is missing, damaged, or does not fit the model.
    """
    _check(path)
    try:
        document = json.loads((path / "state.json").read_text())
        moments = load_file(path / "optimizer.safetensors")
        generators = load_file(path / "random.safetensors")
        for name, module in (beside or {}).items():
            module.load_state_dict(load_file(path / f"{name}.safetensors"))
        state = _state_of(_names(model, optimizer, beside or {}), moments, document["optimizer"])
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
    known = CheckpointState.__dataclass_fields__
    return CheckpointState(**{key: value for key, value in document.items() if key in known})


def load_moments(
    path: Path,
    *,
    model: Any,
    optimizer: torch.optim.Optimizer,
    beside: Mapping[str, torch.nn.Module] | None = None,
) -> int:
    """Gives an optimizer the moments that another run's had, for a run that goes on with its weights under settings of
    its own: rates, schedule, step and random states are not taken over.

    Args:
        path: The other run's checkpoint.
        model: Whose parameters the optimizer has; those that the checkpoint does not know, or with another shape, begin
            without moments.
        optimizer: Of this run.
        beside: What is trained beside the model: its weights are taken over as well, where the checkpoint has them.

    Returns:
        How many parameters have moments now.

    Raises:
        Corrupt: The checkpoint is damaged.
    """
    _check(path)
    try:
        numbers = json.loads((path / "state.json").read_text())["optimizer"]
        moments = load_file(path / "optimizer.safetensors")
        for name, module in (beside or {}).items():
            if (path / f"{name}.safetensors").is_file():
                module.load_state_dict(load_file(path / f"{name}.safetensors"))
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise _unusable(path, error) from error
    names = _names(model, optimizer, beside or {})
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
    state = _state_of({index: name for index, name in names.items() if name in known}, fits, kept)
    optimizer.load_state_dict(optimizer.state_dict() | {"state": state})
    return len(state)


def _state_of(
    names: dict[int, str], moments: dict[str, torch.Tensor], numbers: dict[str, Any]
) -> dict[int, dict[str, Any]]:
    """An optimizer's state by parameter index, from what a checkpoint has by parameter name."""
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
    """What costs little: whoever resumes has compared all of it (`records.checkpoints.newest_sound`)."""
    if (problem := problem_of(path, hash_bytes=_HASH_BYTES)) is not None:
        raise _unusable(path, problem)


def _unusable(path: Path, error: Exception | str) -> Corrupt:
    return Corrupt(
        f"The checkpoint {path} cannot be used: {error}.",
        hint="It was left as it is. Move the folder away to resume from the checkpoint before it.",
    )


def _names(model: Any, optimizer: torch.optim.Optimizer, beside: Mapping[str, torch.nn.Module]) -> dict[int, str]:
    """Names of the optimizer's parameters by the index that its state_dict gives them."""
    by_id = {id(parameter): name for name, parameter in model.named_parameters()}
    for above, module in beside.items():
        by_id |= {id(parameter): f"{above}.{name}" for name, parameter in module.named_parameters()}
    ordered = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {index: by_id[id(parameter)] for index, parameter in enumerate(ordered)}


def _plain(value: Any) -> bool:
    return isinstance(value, (int, float, str, bool, list, type(None)))
