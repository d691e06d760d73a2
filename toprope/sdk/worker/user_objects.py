"""Objects of a user's own classes in a worker: strategies for data and search, scorers, generators.

They are loaded from a file like environments, live in the worker, and are called by method name with JSON arguments.
Coroutines are awaited.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from toprope.sdk.authoring.definitions import defined_object
from toprope.sdk.errors import InvalidRequest, LoadError

__all__ = ["UserObjects"]


class UserObjects:
    """The objects created in this worker, by handle."""

    def __init__(self) -> None:
        self._objects: dict[int, Any] = {}
        self._runner = asyncio.Runner()
        """One event loop for all calls: clients that objects keep belong to the loop on which they were first used."""
        self.near = ""
        """Folder of the code loaded last, for error messages."""

    def make(self, file: str, attribute: str, arguments: Mapping[str, Any], wanted: Sequence[str]) -> dict[str, Any]:
        """Load `attribute` of a file; a class is called with `arguments`, anything else is used as it is.

        Nothing is called unless the file itself defines the object and it has one of the `wanted` methods (see
        `defined_object`).

        Returns:
            `handle` and `methods`: the names of its public methods, and `call` if the object itself is callable.

        Raises:
            LoadError: The file does not load, has no such definition, or rejects the arguments.
        """
        path = Path(file).absolute()
        target, self.near = defined_object(path, attribute, wanted), str(path.parent)
        if isinstance(target, type):
            try:
                target = target(**arguments)
            except TypeError as error:
                raise LoadError(f"{attribute} of {path.name} is not made with these arguments: {error}") from error
        elif arguments:
            raise LoadError(f"{attribute} of {path.name} is not a class and takes no arguments.")
        handle = len(self._objects) + 1
        self._objects[handle] = target
        methods = [name for name in dir(target) if not name.startswith("_") and callable(getattr(target, name, None))]
        return {"handle": handle, "methods": (["call"] if callable(target) else []) + methods}

    def invoke(self, handle: int, method: str, calls: Sequence[Sequence[Any]]) -> list[Any]:
        """Call a method (`call`: the object itself) once per list of arguments, in order.

        Returns:
            One JSON value per call.

        Raises:
            InvalidRequest: No such object or method, or a result that JSON cannot represent.
        """
        if handle not in self._objects:
            raise InvalidRequest(f"There is no object {handle!r}.")
        target = self._objects[handle]
        function = target if method == "call" else getattr(target, method, None)
        if method.startswith("_") or not callable(function):
            raise InvalidRequest(f"{type(target).__name__} has no method {method!r}.")
        results = []
        for arguments in calls:
            result = function(*arguments)
            if inspect.isawaitable(result):
                result = self._runner.run(_await_value(result))
            try:
                json.dumps(result)
            except (TypeError, ValueError) as error:
                raise InvalidRequest(f"{method} returned a value that JSON cannot represent: {error}") from None
            results.append(result)
        return results


async def _await_value(value: Any) -> Any:
    return await value
