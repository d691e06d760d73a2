"""Placeholders for what only training needs: trainers, configurations, LoRA, loggers, vLLM, and the policy."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import sys
from abc import ABCMeta
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Protocol, runtime_checkable

from toprope.sdk.adapters._shared.chatml import tokenizer_of_bytes
from toprope.sdk.adapters._trl.arguments import Parser, ScriptArguments, Settings
from toprope.sdk.discovery import TRAINING_PACKAGES
from toprope.sdk.errors import EnvironmentMistake

__all__ = ["GENERATE", "PRESENT", "Asking", "Constructed", "Policy", "placeholders"]

GENERATE = "generate_rollout_completions"
"""The function of TRL with which a rollout function asks the policy."""
PRESENT: ContextVar[Asking | None] = ContextVar("present", default=None)
"""The trainer of the rollout in which the script's code runs."""
_OF_BYTES: ContextVar[bool] = ContextVar("of_bytes", default=False)
"""True where tokenizers are of bytes."""
_ASYNC = "trl.experimental.async_grpo"
_OPENENV = ("trl.experimental.openenv", "trl.experimental.openenv.utils")
_GENERATING = ("generate", "fast_generate", "forward")
"""Methods of a policy that only its answers come from."""
_PLACES = ("trl", "trl.trainer", "trl.scripts", "trl.scripts.utils")
"""Modules of TRL with names that scripts import and that are replaced."""
_TRAINING_MODULES = tuple(
    f"trl.trainer.{name}" for name in ("grpo_trainer", "grpo_config", "rloo_trainer", "rloo_config", "model_config")
)
"""Modules of TRL that are placeholders as a whole: they import PyTorch and Transformers."""
_OWN = ("_generate", "_generate_single_turn", "_generate_and_score_completions", "_calculate_rewards")
"""Methods of TRL's trainer that sample or score."""
_SIZES = (
    *("parameters", "named_parameters", "num_parameters", "get_nb_trainable_parameters", "get_memory_footprint"),
    *("device", "dtype", "get_input_embeddings"),
)
"""Members of a policy that scripts read in order to log it, or to fit it to its tokenizer."""
_TOKENIZING = ("apply_chat_template", "encode", "decode", "batch_decode", "tokenize", "vocab_size")
"""Members of a tokenizer that prompts and rewards need."""
_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


@runtime_checkable
class Asking(Protocol):
    """A trainer of a rollout, which asks the policy."""

    def completions(self, prompts: Any, overrides: Any = None) -> list[dict[str, Any]]:
        """Return what `generate_rollout_completions` does."""

    def fail(self, error: Exception) -> None:
        """Note that the script got no answer."""


class Constructed(BaseException):
    """Ends a script at its trainer. Not an Exception, so that no handler of the script keeps it.

    Args:
        arguments: What the trainer gets.
        own: A method of TRL's trainer that a class of the script replaces; empty for none.
    """

    def __init__(self, arguments: dict[str, Any], own: str) -> None:
        super().__init__()
        self.arguments, self.own = arguments, own


class _AnyName(ABCMeta):  # scripts mix in abstract classes
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls._other()

    def __call__(cls, *positional: Any, **named: Any) -> Any:
        for passed in positional[:1]:
            if cls is _Anything and _is_passed_on(passed):  # with LoRA; with another template
                return passed
        return super().__call__(*positional, **named)


class _Anything(metaclass=_AnyName):
    """A class or function that only training uses."""

    _name: Any = None
    """The model, if this is the result of a call that loads one."""

    def __init__(self, *positional: Any, **named: Any) -> None:
        pass

    @staticmethod
    def _other() -> _Anything:
        return _Anything()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Size() if name in _SIZES else self._other()

    def __call__(self, *positional: Any, **named: Any) -> Any:
        for passed in positional[:1]:
            if _is_passed_on(passed):
                return passed
        made = self._other()
        made._name = next(iter(positional), named.get("model_name"))
        return made

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def __iter__(self) -> Iterator[Any]:
        """Yield two: the model and the tokenizer that Unsloth loads."""
        return iter((Policy(), tokenizer_of_bytes() if _OF_BYTES.get() else _Tokenizer(self._name)))


class _Size(_Anything):
    """Something of the policy that has no part in its answers, such as a number of parameters, to add up and print."""

    @staticmethod
    def _other() -> _Anything:
        return _Size()

    def __iter__(self) -> Iterator[Any]:
        return iter((_Size(), _Size()))

    def __next__(self) -> Any:
        return _Size()

    def __format__(self, form: str) -> str:
        return format(1, form)

    def __float__(self) -> float:
        return 1.0

    def __index__(self) -> int:
        return 1

    def _computed(self, *operands: Any) -> Any:
        return _Size()

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _computed
    __floordiv__ = __rfloordiv__ = __pow__ = __getitem__ = __lt__ = __le__ = __gt__ = __ge__ = _computed
    __round__ = __neg__ = __mod__ = _computed


class Policy(_Anything):
    """The policy, and what it computes, which a script must not take for numbers."""

    device = "cpu"

    @staticmethod
    def _other() -> _Anything:
        return Policy()

    def __getattr__(self, name: str) -> Any:
        if name in _GENERATING and PRESENT.get() is not None:
            return self._refuse
        return _Size() if name == "config" else super().__getattr__(name)  # that of a logger has a script's settings

    def __repr__(self) -> str:
        return "AutoModelForCausalLM, which is not loaded"

    def _refuse(self, *operands: Any, **named: Any) -> Any:
        message = "The model is the policy here and is not loaded: "
        if (trainer := PRESENT.get()) is None:
            message += "neither a reward nor what comes before the trainer can use its answers."
        else:
            message += f"a rollout function gets its answers from {GENERATE}(trainer, prompts) of {_OPENENV[0]}."
        error = EnvironmentMistake(message)
        if trainer is not None:
            trainer.fail(error)  # because scripts handle exceptions of their models
        raise error

    __float__ = __int__ = __getitem__ = __neg__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse


class _Tokenizer(_Anything):
    """The tokenizer that Unsloth loads with a model: that of Transformers, once a prompt or a reward needs it."""

    def __init__(self, name: Any) -> None:
        self._name = name

    def _loaded(self) -> Any:
        tokenizer = self.__dict__.get("_own")
        if tokenizer is None:
            tokenizer = self._own = importlib.import_module("transformers").AutoTokenizer.from_pretrained(self._name)
        if template := self.__dict__.get("chat_template"):  # which the script may set
            tokenizer.chat_template = template
        return tokenizer

    def __getattr__(self, name: str) -> Any:
        if name in _TOKENS:
            return _Token(self, name)
        return getattr(self._loaded(), name) if name in _TOKENIZING else super().__getattr__(name)

    def __call__(self, *positional: Any, **named: Any) -> Any:
        return self._loaded()(*positional, **named)

    def __len__(self) -> int:
        return len(self._loaded())

    def __bool__(self) -> bool:
        return True


def _is_passed_on(value: Any) -> bool:
    """Return True for a policy and a tokenizer, of which functions return another form."""
    if isinstance(value, _Anything):
        return isinstance(value, Policy | _Tokenizer)
    return hasattr(type(value), "apply_chat_template")


class _OfBytes:
    """Loads the tokenizer of bytes by whatever name."""

    @staticmethod
    def from_pretrained(*positional: Any, **named: Any) -> Any:
        return tokenizer_of_bytes()


class _Processor(_OfBytes):
    """Loads it as the processor of a model that also sees images."""

    @staticmethod
    def from_pretrained(*positional: Any, **named: Any) -> Any:
        processor = tokenizer_of_bytes()
        processor.tokenizer = processor
        return processor


class _Token(_Anything):
    """A special token, which needs its tokenizer only in a text: scripts pass it on to settings of training."""

    def __init__(self, tokenizer: _Tokenizer, name: str) -> None:
        self._tokenizer, self._kind = tokenizer, name

    def __str__(self) -> str:
        return str(getattr(self._tokenizer._loaded(), self._kind))

    def __format__(self, form: str) -> str:
        return format(str(self), form)

    def __add__(self, text: str) -> str:
        return str(self) + text

    def __radd__(self, text: str) -> str:
        return text + str(self)


class _Trainer(metaclass=_AnyName):
    def __init__(self, model: Any = None, reward_funcs: Any = None, args: Any = None, train_dataset: Any = None,
                 eval_dataset: Any = None, processing_class: Any = None, reward_processing_classes: Any = None,
                 callbacks: Any = None, optimizers: Any = None, quantization_config: Any = None,
                 peft_config: Any = None, tools: Any = None, rollout_func: Any = None, environment_factory: Any = None,
                 **named: Any) -> None:  # fmt: skip
        given = {"reward_funcs": reward_funcs, "args": args, "train_dataset": train_dataset, "tools": tools}
        given |= {"rollout_func": rollout_func, "environment_factory": environment_factory}
        given |= {"processing_class": processing_class}
        own = {name: inspect.unwrap(getattr(type(self), name)) for name in _OWN}
        codes = {name: method.__code__ for name, method in own.items() if hasattr(method, "__code__")}
        replaced = [name for name, code in codes.items() if not {"super", name} & set(code.co_names)]
        raise Constructed({**named, **given}, replaced[0] if replaced else "")

    @staticmethod
    def _other() -> _Anything:
        return _Anything()


_OTHER_TRAINERS = ("SFTTrainer", "DPOTrainer", "RewardTrainer", "PPOTrainer", "KTOTrainer", "ORPOTrainer")
_REPLACED: dict[str, Any] = {
    **dict.fromkeys(("GRPOTrainer", "RLOOTrainer"), _Trainer),
    **dict.fromkeys(("GRPOConfig", "RLOOConfig", "ModelConfig", "SFTConfig", "DPOConfig"), Settings),
    **dict.fromkeys(_OTHER_TRAINERS, _Anything),
    "ScriptArguments": ScriptArguments,
    **dict.fromkeys(("get_peft_config", "get_quantization_config", "get_kbit_device_map"), _Anything()),
    "TrlParser": Parser,
    "RichProgressCallback": _Anything,
}
_OF_TRANSFORMERS: dict[str, Any] = {
    "HfArgumentParser": Parser,
    "AutoModelForCausalLM": Policy,
    "BitsAndBytesConfig": _Anything,
}
_TOKENIZERS: dict[str, Any] = {"AutoTokenizer": _OfBytes, "AutoProcessor": _Processor}


def _sampled_by(trainer: Any, prompts: Any, *, generation_overrides: Any = None, as_chat: Any = None) -> Any:
    """Stand in for TRL's `generate_rollout_completions`; functions of TRL 0.24 have no trainer to pass."""
    asking = trainer if isinstance(trainer, Asking) else PRESENT.get()
    if asking is None:
        raise EnvironmentMistake(f"{GENERATE} is called outside a rollout, or without its trainer in another thread")
    return asking.completions(prompts, generation_overrides)


class _Finder:
    """Finds submodules of training packages as placeholders, and replaces names of Transformers as it is imported.

    Its import takes seconds, so scripts that do without are not made to wait.
    """

    def __init__(self, changes: _Changes, of_transformers: Mapping[str, Any]) -> None:
        self._changes, self._new = changes, of_transformers

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name == "transformers":
            return self._of_transformers()
        return ModuleSpec(name, self, is_package=True) if "." in name and _is_training(name) else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: the module is made."""

    def _of_transformers(self) -> ModuleSpec | None:
        finders = sys.meta_path
        sys.meta_path = [finder for finder in finders if finder is not self]
        try:
            spec = importlib.util.find_spec("transformers")
        finally:
            sys.meta_path = finders
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_change(module: ModuleType) -> None:
            execute(module)
            self._changes.make(sys.modules["transformers"], self._new)  # which it has put in its own place

        spec.loader.exec_module = execute_and_change  # type: ignore[method-assign]
        return spec


class _Changes:
    """Names of modules that are replaced while a script runs."""

    def __init__(self) -> None:
        self._made: list[tuple[ModuleType, Mapping[str, Any], dict[str, Any]]] = []

    def make(self, place: ModuleType, new: Mapping[str, Any]) -> None:
        self._made.append((place, new, {name: place.__dict__[name] for name in new if name in place.__dict__}))
        place.__dict__.update(new)

    def undo(self) -> None:
        for place, new, old in reversed(self._made):
            for name in new:
                place.__dict__.pop(name, None)
            place.__dict__.update(old)


@contextlib.contextmanager
def placeholders(main: ModuleType, words: Sequence[str], of_bytes: bool = False) -> Iterator[None]:
    """Put placeholders in place of what only training needs, and `main` in place of this program.

    Args:
        words: The command line of `main`.
        of_bytes: True for tokenizers of bytes.
    """
    of_transformers = _OF_TRANSFORMERS | (_TOKENIZERS if of_bytes else {})
    kept, argv = dict(sys.modules), sys.argv
    added = {name: _module(name) for name in (*TRAINING_PACKAGES, *_TRAINING_MODULES)}
    places = [added[name] for name in _TRAINING_MODULES]
    for name in _PLACES:
        try:
            place = importlib.import_module(name)
        except ImportError:
            place = added[name] = _module(name)
        places.append(place)
    # A submodule that was imported before is an attribute, too.
    modules = {name.rpartition(".")[2]: added[name] for name in _TRAINING_MODULES}
    changes = _Changes()
    for place in places:
        changes.make(place, _REPLACED | (modules if place.__name__ == "trl.trainer" else {}))
    finder = _Finder(changes, of_transformers)
    if "transformers" in sys.modules:
        changes.make(sys.modules["transformers"], of_transformers)
    sys.meta_path.insert(0, finder)
    added[_ASYNC] = _module(_ASYNC)
    added[_ASYNC].__dict__.update(AsyncGRPOTrainer=_Trainer, AsyncGRPOConfig=Settings)
    for name in _OPENENV:
        added[name] = _module(name)
        added[name].__dict__[GENERATE] = _sampled_by
    sys.modules.update({**added, "__main__": main})
    sys.argv = [str(main.__file__), *words]
    before = _OF_BYTES.set(of_bytes)
    try:
        yield
    finally:
        _OF_BYTES.reset(before)
        sys.argv = argv
        with contextlib.suppress(ValueError):
            sys.meta_path.remove(finder)
        for name in (*added, "__main__", *filter(_is_training, list(sys.modules))):
            if name in kept:
                sys.modules[name] = kept[name]
            else:
                sys.modules.pop(name, None)
        changes.undo()


def _is_training(name: str) -> bool:
    return name.partition(".")[0] in TRAINING_PACKAGES


def _module(name: str) -> ModuleType:
    """A module in which every public name is a placeholder; its submodules are those that are placeholders too."""

    def attribute(attribute_name: str) -> Any:
        if attribute_name.startswith("__"):
            raise AttributeError(attribute_name)
        return sys.modules.get(f"{name}.{attribute_name}") or _Anything

    module = ModuleType(name)
    spec = ModuleSpec(name, None, is_package=True)  # without one, a search for the package fails
    module.__dict__.update(__getattr__=attribute, __path__=[], __spec__=spec)
    return module
