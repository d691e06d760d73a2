"""A user's own objects in a worker: strategies for data and for search, scorers, generators.

They are loaded from a file as environments are, live in the worker, and are asked by method with arguments that JSON
can say. Coroutines are awaited.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from toprope.sdk.authoring.loading import attribute_of
from toprope.sdk.errors import InvalidRequest, LoadError

__all__ = ["Objects"]


class Objects:
    """The objects that were made in this worker, by handle."""

    def __init__(self) -> None:
        self._kept: dict[int, Any] = {}
        self.near = ""
        """Folder of the code that was loaded last, for error messages."""

    def make(self, file: str, attribute: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Loads `attribute` of a file; a class is called with `arguments`, anything else is taken as it is.

        Returns:
            `handle`, and `methods`: the names of its public methods; `call` where it can be called itself.

        Raises:
            LoadError: The file does not load, has no such attribute, or does not take the arguments.
        """
        path = Path(file).absolute()
        found, self.near = attribute_of(path, attribute), str(path.parent)
        if isinstance(found, type):
            try:
                found = found(**arguments)
            except TypeError as error:
                raise LoadError(f"{attribute} of {path.name} is not made with these arguments: {error}") from error
        elif arguments:
            raise LoadError(f"{attribute} of {path.name} is no class and takes no arguments.")
        handle = len(self._kept) + 1
        self._kept[handle] = found
        methods = [name for name in dir(found) if not name.startswith("_") and callable(getattr(found, name, None))]
        return {"handle": handle, "methods": (["call"] if callable(found) else []) + methods}

    def invoke(self, handle: int, method: str, calls: Sequence[Sequence[Any]]) -> list[Any]:
        """Calls a method (`call`: the object itself) once for each list of arguments, in order.

        Returns:
            What each returned, if JSON can say it.

        Raises:
            InvalidRequest: There is no such object or method, or a result cannot be said.
        """
        if handle not in self._kept:
            raise InvalidRequest(f"There is no object {handle!r}.")
        target = self._kept[handle]
        function = target if method == "call" else getattr(target, method, None)
        if method.startswith("_") or not callable(function):
            raise InvalidRequest(f"{type(target).__name__} has no method {method!r}.")
        results = []
        for arguments in calls:
            result = function(*arguments)
            if inspect.isawaitable(result):
                result = asyncio.run(_awaited(result))
            try:
                json.dumps(result)
            except (TypeError, ValueError) as error:
                raise InvalidRequest(f"{method} returned what JSON cannot say: {error}") from None
            results.append(result)
        return results


async def _awaited(value: Any) -> Any:
    return await value
