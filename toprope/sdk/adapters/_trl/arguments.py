"""The command line of a training script, as TRL's parser reads it into the script's dataclasses.

The configurations of TRL are placeholders, whose fields are not known here: they take each name that no dataclass of
the script has.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import logging
import re
from collections.abc import Sequence
from dataclasses import MISSING, Field, fields, is_dataclass, make_dataclass
from dataclasses import field as settable
from enum import Enum
from inspect import Parameter, Signature
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

__all__ = ["ArgumentsError", "Parser", "ScriptArguments", "Settings"]

_NAME = re.compile(r"--?[A-Za-z]")
_TRUE, _FALSE = ("yes", "true", "t", "y", "1"), ("no", "false", "f", "n", "0")


def _signature(kind: Any, *first: str) -> Signature:
    own = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in first]
    return Signature([*own, *(Parameter(one.name, Parameter.KEYWORD_ONLY, default=None) for one in fields(kind))])


class _Taking(type):
    """Makes objects that keep what their class has no field for, as a dataclass derived from `Settings` does."""

    @property
    def __signature__(cls) -> Signature:
        return _signature(cls)

    def __call__(cls, *positional: Any, **named: Any) -> Any:
        is_derived = any("__dataclass_fields__" in vars(kind) for kind in cls.__mro__ if kind is not _Named)
        known = {field.name for field in _fields_of(cls)} if is_derived else set(named)
        made = super().__call__(*positional, **{name: value for name, value in named.items() if name in known})
        made.__dict__.update({name: value for name, value in named.items() if name not in known})
        return made


_DEFAULTS: dict[str, Any] = {
    **{"output_dir": "trainer_output", "report_to": [], "seed": 42, "logging_steps": 10, "save_steps": 500},
    **{"eval_strategy": "no", "save_strategy": "steps", "logging_strategy": "steps", "lr_scheduler_type": "linear"},
    **{"optim": "adamw_torch_fused", "learning_rate": 1e-6, "weight_decay": 0.0, "warmup_steps": 0, "max_grad_norm": 1},
    **{"num_train_epochs": 3.0, "max_steps": -1, "gradient_accumulation_steps": 1, "gradient_checkpointing": True},
    **{"per_device_train_batch_size": 8, "per_device_eval_batch_size": 8, "dataloader_num_workers": 0},
    **dict.fromkeys(("do_train", "do_eval", "fp16", "push_to_hub", "use_vllm", "trust_remote_code"), False),
    **{"num_generations": 8, "num_iterations": 1, "max_prompt_length": 512, "max_completion_length": 512},
    **{"temperature": 1.0, "top_p": 1.0, "top_k": 0, "beta": 0.0, "epsilon": 0.2, "loss_type": "dapo"},
    **{"remove_unused_columns": False, "shuffle_dataset": True, "vllm_mode": "colocate", "vllm_server_port": 8000},
    **{"world_size": 1, "process_index": 0, "local_process_index": 0, "local_rank": -1, "n_gpu": 0, "device": "cpu"},
    **{"model_revision": "main", "use_peft": False, "load_in_4bit": False, "load_in_8bit": False},
    **{"lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05},
}
"""Settings of TRL with which scripts compute or that they compare, by the name, as they are if a script leaves them."""


_NAMES = (
    "output_dir per_device_train_batch_size num_train_epochs max_steps learning_rate lr_scheduler_type "
    "lr_scheduler_kwargs warmup_steps optim optim_args weight_decay adam_beta1 adam_beta2 adam_epsilon "
    "gradient_accumulation_steps max_grad_norm bf16 fp16 tf32 gradient_checkpointing "
    "gradient_checkpointing_kwargs torch_compile use_liger_kernel logging_strategy logging_steps "
    "logging_first_step log_level disable_tqdm report_to run_name project trackio_space_id eval_strategy "
    "eval_steps per_device_eval_batch_size save_only_model save_strategy save_steps save_total_limit push_to_hub "
    "hub_token hub_private_repo hub_model_id hub_strategy load_best_model_at_end metric_for_best_model "
    "greater_is_better full_determinism seed data_seed use_cpu dataloader_drop_last dataloader_num_workers "
    "dataloader_pin_memory remove_unused_columns ddp_find_unused_parameters ddp_timeout fsdp fsdp_config "
    "deepspeed do_train do_eval resume_from_checkpoint local_rank model_init_kwargs trust_remote_code "
    "disable_dropout num_generations num_generations_eval max_completion_length shuffle_dataset "
    "generation_batch_size steps_per_generation temperature top_p top_k min_p generation_kwargs "
    "chat_template_kwargs repetition_penalty use_vllm vllm_mode vllm_enable_sleep_mode "
    "vllm_structured_outputs_regex vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout "
    "vllm_group_port vllm_gpu_memory_utilization vllm_max_model_length vllm_tensor_parallel_size beta "
    "num_iterations epsilon delta epsilon_high importance_sampling_level reward_weights "
    "multi_objective_aggregation scale_rewards loss_type mask_truncated_completions sync_ref_model "
    "ref_model_mixup_alpha ref_model_sync_steps top_entropy_quantile max_tool_calling_iterations "
    "vllm_importance_sampling_correction log_completions num_completions_to_print log_unique_prompts "
).split()
"""The names of settings of TRL 1.16 that scripts commonly set, not all: scripts look which of theirs it has, and leave
the others out."""


class ArgumentsError(ValueError):
    """The command line of a script is wrong."""


_Named: Any = make_dataclass(
    "_Named", [(name, Any, settable(init=False)) for name in _NAMES], init=False, repr=False, eq=False
)


class Settings(_Named, metaclass=_Taking):  # type: ignore[misc]
    """A configuration: keeps what it is given; what it is not is as in TRL, or None."""

    def __init__(self, *positional: Any, **named: Any) -> None:
        self.__dict__.update(named)

    setattr(__init__, "__signature__", _signature(_Named, "self"))  # noqa: B010

    def __post_init__(self) -> None:
        """Do nothing, where TRL checks values."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in _DEFAULTS:
            setattr(self, name, copy.copy(_DEFAULTS[name]))  # which the script may change
            return self.__dict__[name]
        return None

    def get_process_log_level(self) -> int:
        """Return the level of the script's own messages."""
        return logging.WARNING

    def main_process_first(self, *positional: Any, **named: Any) -> contextlib.AbstractContextManager[None]:
        """Do nothing, where TRL has other processes wait."""
        return contextlib.nullcontext()

    def to_dict(self) -> dict[str, Any]:
        """Return what is known."""
        return _DEFAULTS | vars(self)


class ScriptArguments(Settings):
    """TRL's arguments of its scripts, with those defaults that are not None."""

    dataset_train_split, dataset_test_split, dataset_streaming = "train", "test", False


class Parser(argparse.ArgumentParser):
    """TRL's parser of arguments."""

    def __init__(self, dataclass_types: Any = (), **named: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **named})
        kinds = dataclass_types if isinstance(dataclass_types, list | tuple) else [dataclass_types]
        self._kinds = [kind if _is_arguments(kind) else Settings for kind in kinds]
        for kind in self._kinds:
            hints = get_type_hints(kind) if is_dataclass(kind) else {}
            for field in _fields_of(kind):
                self._add_field(field, hints[field.name])

    def error(self, message: str) -> NoReturn:
        """Raise what is wrong with the arguments, which argparse would print.

        Raises:
            ArgumentsError: Always.
        """
        raise ArgumentsError(message)

    def parse_args_and_config(
        self, args: Sequence[str] | None = None, return_remaining_strings: bool = False, **named: Any
    ) -> tuple[Any, ...]:
        """Return an object of each type, and what the script added beside them.

        Raises:
            ArgumentsError: An argument is unknown or has another type, or a file has the values.
        """
        given, rest = self.parse_known_args(args)
        if any(word.partition("=")[0] == "--config" for word in rest):
            self.error("the file of --config is not read here: give what it sets as arguments")
        values, made = vars(given), []
        for kind in self._kinds:
            names = [field.name for field in _fields_of(kind) if field.name in values]
            made.append(kind(**{name: values[name] for name in names}))
        taking = [settings for settings in made if isinstance(settings, Settings)]
        for settings in taking:
            for name, value in self._loose(rest).items():
                setattr(settings, name, value)
        known = {field.name for kind in self._kinds for field in _fields_of(kind)}
        if added := {name: value for name, value in values.items() if name not in known}:
            made.append(argparse.Namespace(**added))
        if return_remaining_strings:
            return (*made, [] if taking else rest)
        if rest and not taking:
            self.error(f"the script has no arguments {' '.join(rest)}")
        return tuple(made)

    parse_args_into_dataclasses = parse_args_and_config

    def _add_field(self, field: Field[Any], hint: Any) -> None:
        spelt = dict.fromkeys((f"--{field.name}", f"--{field.name.replace('_', '-')}"))
        options = _options(hint)
        has_none = field.default is MISSING and field.default_factory is MISSING
        # The dataclass itself has the defaults; a flag that it requires is false.
        default = False if has_none and hint is bool else argparse.SUPPRESS
        self.add_argument(*spelt, dest=field.name, default=default, **options)
        if field.default is True and "const" in options:
            spelt = dict.fromkeys((f"--no_{field.name}", f"--no-{field.name.replace('_', '-')}"))
            self.add_argument(*spelt, dest=field.name, action="store_false", default=argparse.SUPPRESS)

    def _loose(self, words: Sequence[str]) -> dict[str, Any]:
        """Return arguments by name whose types are not known; one without a value is true."""
        given: dict[str, list[Any]] = {}
        values: list[Any] | None = None
        for word in words:
            if _NAME.match(word):
                name, has_value, value = word.lstrip("-").partition("=")
                values = given[name.replace("-", "_")] = [_plain(value)] if has_value else []
            elif values is None:
                self.error(f"no name stands before {word}")
            else:
                values.append(_plain(word))
        return {name: found if len(found) > 1 else found[0] if found else True for name, found in given.items()}


def _is_arguments(kind: Any) -> bool:
    return isinstance(kind, type) and (is_dataclass(kind) or issubclass(kind, Settings))


def _fields_of(kind: Any) -> list[Field[Any]]:
    return [field for field in fields(kind) if field.init] if is_dataclass(kind) else []


def _options(hint: Any) -> dict[str, Any]:
    """Return the options of argparse for a type, which are those of transformers' HfArgumentParser."""
    inner = [kind for kind in get_args(hint) if kind is not NoneType]
    if get_origin(hint) in (Union, UnionType):
        return _options(inner[0]) if len(inner) == 1 else {}
    if hint is list or get_origin(hint) is list:
        return {**(_options(inner[0]) if inner else {}), "nargs": "+"}
    if isinstance(hint, type) and issubclass(hint, Enum):
        inner = [member.value for member in hint]
    if inner and (get_origin(hint) is Literal or isinstance(hint, type)):
        by_text = {str(value): value for value in inner}
        return {"type": lambda word: by_text.get(word, word), "choices": inner}
    if hint is bool:
        return {"type": _truth, "nargs": "?", "const": True}
    return {"type": hint if hint in (int, float) else str}


def _truth(word: str) -> bool:
    if word.lower() not in (*_TRUE, *_FALSE):
        raise argparse.ArgumentTypeError(f"true or false is expected, not {word}")
    return word.lower() in _TRUE


def _plain(word: str) -> Any:
    """Return the number or the truth that a word says, or else the word."""
    if word.lower() in ("true", "false"):
        return word.lower() == "true"
    if number := re.fullmatch(r"-?(0|[1-9]\d*)(\.\d*)?(e[-+]?\d+)?", word, re.IGNORECASE):
        return float(word) if number[2] or number[3] else int(word)
    return word
