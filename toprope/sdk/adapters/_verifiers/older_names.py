"""Names of verifiers before 0.1.14 that packages import, and that 0.1.14 has moved or dropped."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.abc
import importlib.util
import inspect
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["adopt_functions", "provide_older_names"]

_PACKAGE = "verifiers"
_TYPES = ("ChatCompletionMessageToolCall", "ChatMessage", "ModelResponse")
"""Types that serve for annotations alone."""


def provide_older_names() -> None:
    """Have imports of moved modules lead to their new place, and give dropped names a stand-in."""
    if any(isinstance(one, _Moved) for one in sys.meta_path):
        return
    sys.meta_path.append(_Moved())
    import verifiers

    for name in _TYPES:
        with contextlib.suppress(ModuleNotFoundError):  # tasksets alone
            types = importlib.import_module("verifiers.types")
            setattr(types, name, getattr(types, name, Any))
    rubric: Any = getattr(verifiers, "Rubric", None)
    if rubric is not None and not hasattr(verifiers, "ToolRubric"):

        class ToolRubric(rubric):  # type: ignore[misc]
            """Its functions counted calls of tools; environments with tools count them themselves now."""

            def __init__(self, *given: Any, tools: Any = None, **named: Any) -> None:
                super().__init__(*given, **named)

        verifiers.ToolRubric = ToolRubric
    if (judges := getattr(verifiers, "JudgeRubric", None)) is not None:
        judges.judge = _lenient(judges.judge)


def adopt_functions(rubric: Any) -> None:
    """Take over the functions that an author set as `reward_funcs` and `reward_weights`, as a rubric called them."""
    for member in getattr(rubric, "rubrics", None) or ():
        adopt_functions(member)
    functions = vars(rubric).get("reward_funcs") or ()
    weights = vars(rubric).get("reward_weights") or [1.0] * len(functions)
    for function, weight in zip(functions, weights, strict=False):
        if function not in rubric.funcs:
            rubric.add_reward_func(function, weight)


class _Moved(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a module of verifiers that is gone by the only file of its name elsewhere in the package."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        parts = name.split(".")
        if parts[0] != _PACKAGE or len(parts) < 2:
            return None
        root = Path(getattr(sys.modules[_PACKAGE], "__file__", None) or "/nowhere/__init__.py").parent
        found = [one for one in root.rglob(f"{parts[-1]}.py") if one.parent != root]
        if len(found) != 1:
            return None
        place = ".".join((_PACKAGE, *found[0].relative_to(root).with_suffix("").parts))
        return None if place == name else importlib.util.spec_from_loader(name, self, origin=place)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(str(spec.origin))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """The module has been executed at its place, whose description it keeps."""
        if module.__spec__ is not None:
            module.__spec__ = module.__spec__.loader_state


def _lenient(judge: Any) -> Any:
    """A method that takes further arguments, as it did, and leaves them out."""
    known = inspect.signature(judge).parameters
    if any(one.kind is one.VAR_KEYWORD for one in known.values()):
        return judge

    @functools.wraps(judge)
    async def lenient(self: Any, *given: Any, **more: Any) -> Any:
        return await judge(self, *given, **{name: one for name, one in more.items() if name in known})

    return lenient
