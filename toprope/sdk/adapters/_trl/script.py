"""Training scripts of TRL, run up to the trainer that they construct.

A script defines its rewards, environment and data set wherever it likes, often inside `main()`. Its trainer sees all of
them, so the script is run as `__main__` with a trainer that records its arguments and ends the script. What only
training needs (configurations, LoRA, loggers, vLLM) is replaced by placeholders, and need not be installed.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from toprope.sdk.adapters._shared.random_state import OwnRandom
from toprope.sdk.adapters._shared.user_files import prepare
from toprope.sdk.adapters._trl.arguments import ArgumentsError, Parser, ScriptArguments, Settings
from toprope.sdk.discovery import TRAINING_PACKAGES, script_requirements
from toprope.sdk.errors import EnvironmentMistake, Failure, LoadError

__all__ = ["OWN_SAMPLING", "TRAINERS", "Recorded", "run_script", "trainer_call"]

TRAINERS = ("GRPOTrainer", "RLOOTrainer", "AsyncGRPOTrainer")
OWN_SAMPLING = "rollout_worker"
"""Argument of a trainer whose rollouts are sampled by an agent program with TRL's own server."""
_ASYNC = "trl.experimental.async_grpo"
_PLACES = ("trl", "trl.trainer", "trl.scripts", "trl.scripts.utils")
"""Modules of TRL with names that scripts import and that are replaced."""
_TRAINING_MODULES = tuple(
    f"trl.trainer.{name}" for name in ("grpo_trainer", "grpo_config", "rloo_trainer", "rloo_config", "model_config")
)
"""Modules of TRL that are placeholders as a whole: they import PyTorch and Transformers."""
_FINISHED = "The script ended without constructing a trainer"


@dataclass(frozen=True)
class Recorded:
    """The arguments that a script passes to its trainer."""

    module: ModuleType
    reward_funcs: list[Any]
    weights: list[float] | None
    environment: Any
    """The `environment_factory`: None, a callable, or a dict of callables."""
    tools: list[Any]
    rows: Any
    max_turns: int | None


class _Constructed(BaseException):
    """Ends a script at its trainer. Not an Exception, so that no handler of the script keeps it."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        super().__init__()
        self.arguments = arguments


class _Trainer:
    def __init__(self, model: Any = None, reward_funcs: Any = None, args: Any = None, train_dataset: Any = None,
                 *more: Any, **named: Any) -> None:  # fmt: skip
        raise _Constructed({**named, "reward_funcs": reward_funcs, "args": args, "train_dataset": train_dataset})


class _AnyName(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls._other()


class _Anything(metaclass=_AnyName):
    """A class or function that only training uses."""

    def __init__(self, *positional: Any, **named: Any) -> None:
        pass

    @staticmethod
    def _other() -> _Anything:
        return _Anything()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._other()

    def __call__(self, *positional: Any, **named: Any) -> Any:
        return self._other()

    def __iter__(self) -> Iterator[Any]:
        """Yield two, such as the model and the tokenizer that Unsloth loads."""
        return iter((self._other(), self._other()))


class _Policy(_Anything):
    """The policy, and what it computes, which a reward must not take for numbers."""

    @staticmethod
    def _other() -> _Anything:
        return _Policy()

    def __repr__(self) -> str:
        return "AutoModelForCausalLM, which is not loaded"

    def _refuse(self, *operands: Any) -> Any:
        raise EnvironmentMistake("AutoModelForCausalLM is the policy here and is not loaded: a reward cannot use it.")

    __float__ = __int__ = __getitem__ = __neg__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse


_REPLACED = {
    **dict.fromkeys(("GRPOTrainer", "RLOOTrainer"), _Trainer),
    **dict.fromkeys(("GRPOConfig", "RLOOConfig", "ModelConfig"), Settings),
    "ScriptArguments": ScriptArguments,
    **dict.fromkeys(("get_peft_config", "get_quantization_config", "get_kbit_device_map"), _Anything()),
    "TrlParser": Parser,
    "RichProgressCallback": _Anything,
}
_OF_TRANSFORMERS: dict[str, object] = {
    "HfArgumentParser": Parser,
    "AutoModelForCausalLM": _Policy,
    "BitsAndBytesConfig": _Anything,
}


def run_script(path: Path, arguments: Sequence[str]) -> Recorded:
    """Run a script up to its trainer.

    Args:
        path: The script.
        arguments: Its arguments on the command line.

    Raises:
        LoadError: It fails, constructs no trainer, or its trainer gets something that an environment cannot have.
    """
    module = ModuleType("__main__")
    module.__file__ = str(path)
    folder = str(path.parent)
    try:
        source = path.read_bytes()
        code = compile(source, str(path), "exec")
        prepare(path)
        with _placeholders(module, source), OwnRandom(0), contextlib.redirect_stdout(sys.stderr):
            sys.argv, sys.path = [str(path), *arguments], [folder, *sys.path]
            exec(code, module.__dict__)
    except _Constructed as constructed:
        return _recorded(module, path, constructed.arguments)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a script may raise anything, SystemExit of argparse too
        failure = Failure.of(error, folder)
        message = f"{path.name} fails before its trainer: {failure.type}: {failure.message}"
        if not message.endswith("could not be reached"):  # what helps then is added where the HOME is known
            message = ". ".join(filter(None, (message, _cure(error, path))))
        raise LoadError(message, failure.where) from error
    raise LoadError(f"{_FINISHED} of {', '.join(TRAINERS)}: {path.name} is not a training script of TRL.")


def trainer_call(tree: ast.Module) -> ast.Call | None:
    """The call that constructs a trainer with rewards or an environment, at any depth of a file that gets there."""
    for node in _run_by(tree):
        if isinstance(node, ast.Call):
            name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            passed = {keyword.arg for keyword in node.keywords}
            if name in TRAINERS and passed & {"reward_funcs", "environment_factory", OWN_SAMPLING}:
                return node
    return None


def _run_by(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield what running a file may run: all but functions and classes that only importers of the file call."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    definitions = {node.name: node for node in tree.body if isinstance(node, kinds) and not node.decorator_list}
    running: list[ast.stmt] = [node for node in tree.body if definitions.get(getattr(node, "name", "")) is not node]
    for part in running:  # grows
        for node in ast.walk(part):
            yield node
            if isinstance(node, ast.Name) and node.id in definitions:
                running.append(definitions.pop(node.id))


def _cure(error: BaseException, path: Path) -> str:
    if isinstance(error, ImportError):
        requirements = script_requirements(path.read_text("utf-8", "replace"))
        install = f"toprope env add {path}" if requirements else f"{sys.executable} -m pip install ..."
        says = f" (it names {', '.join(requirements)})" if requirements else ""
        return f"Install what it imports{says}: {install}"
    if isinstance(error, SystemExit):
        return "The knob `arguments` sets the arguments of its command line; its own message is in the log."
    if re.search("Hub|HF_HUB", str(error)):
        return "It needs that data set in the cache of the Hugging Face Hub, or environment.network: allow."
    if isinstance(error, ArgumentsError | OSError):
        return "The knob `arguments` sets the arguments of its command line, such as the address of a server."
    return ""


def _recorded(module: ModuleType, path: Path, arguments: dict[str, Any]) -> Recorded:
    args = arguments["args"]
    rewards = arguments["reward_funcs"]
    rewards = [] if rewards is None else list(rewards) if isinstance(rewards, list | tuple) else [rewards]
    if arguments.get("rollout_func") is not None or arguments.get(OWN_SAMPLING) is not None:
        raise LoadError(
            f"{path.name} gives its trainer a rollout function, which samples with TRL's own model. Environments "
            "with reset() and tools, and reward functions, run here."
        )
    turns = getattr(args, "max_tool_calling_iterations", None)
    weights = getattr(args, "reward_weights", None)
    weights = [weights] if isinstance(weights, int | float | str) else weights
    return Recorded(
        module=module,
        reward_funcs=rewards,
        weights=None if weights is None else [float(weight) for weight in weights],
        environment=arguments.get("environment_factory"),
        tools=list(arguments.get("tools") or ()),
        rows=arguments["train_dataset"],
        max_turns=None if turns is None else int(turns) + 1,  # each round of tools comes before an answer
    )


@contextlib.contextmanager
def _placeholders(main: ModuleType, source: bytes) -> Iterator[None]:
    """Put placeholders in place of what only training needs, and `main` in place of this program.

    Args:
        source: Of the script. An import of Transformers takes seconds, so others do without.
    """
    kept_modules, argv, path = dict(sys.modules), sys.argv, sys.path
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
    changes = [(place, _REPLACED | (modules if place.__name__ == "trl.trainer" else {})) for place in places]
    if b"transformers" in source:
        with contextlib.suppress(ImportError):  # the script's own import says so
            changes.append((importlib.import_module("transformers"), _OF_TRANSFORMERS))
    before = [{name: place.__dict__[name] for name in new if name in place.__dict__} for place, new in changes]
    for place, new in changes:
        place.__dict__.update(new)
    added[_ASYNC] = _module(_ASYNC)
    added[_ASYNC].__dict__.update(AsyncGRPOTrainer=_Trainer, AsyncGRPOConfig=Settings)
    sys.modules.update({**added, "__main__": main})
    try:
        yield
    finally:
        sys.argv, sys.path = argv, path
        for name in (*added, "__main__"):
            if name in kept_modules:
                sys.modules[name] = kept_modules[name]
            else:
                sys.modules.pop(name, None)
        for (place, new), old in zip(changes, before, strict=True):
            for name in new:
                del place.__dict__[name]
            place.__dict__.update(old)


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
