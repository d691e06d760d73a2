"""A cache of descriptions for environments that come with the installation.

A worker costs some hundred milliseconds of CPU, and many agents ask about the same few environments. A description of a
shipped or reasoning-gym environment is valid until its file or the installation changes, so it is cached, and
concurrent requests share one worker. The owner's environments are described anew each time, because they are being
edited.
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Generic, TypeVar

_T = TypeVar("_T")
_MOST = 64


def question(source: Mapping[str, Any], shipped: Path, **parameters: Any) -> Hashable | None:
    """Return the cache key of a request, inputs of its answer included; None if the answer must not be cached.

    Args:
        source: `file`, `adapter`, `target`, ... of the environment.
        shipped: Folder of the shipped environments.
        parameters: Further parameters of the request, as JSON values.
    """
    rests_on: tuple[Hashable, ...]
    file, adapter = source.get("file"), str(source.get("adapter") or "")
    if file is not None and Path(file).parent == shipped:
        try:
            rests_on = tuple((name, stat.st_mtime_ns, stat.st_size) for name, stat in _files(shipped))
        except OSError:
            return None
    elif adapter.rpartition(".")[2] == "reasoning_gym" and not source.get("interpreter"):
        try:
            rests_on = (metadata.version("reasoning_gym"),)
        except metadata.PackageNotFoundError:
            return None
    else:
        return None
    return json.dumps([dict(source), parameters], sort_keys=True, default=str), rests_on


def _files(folder: Path) -> list[tuple[str, Any]]:
    return [(path.name, path.stat()) for path in sorted(folder.glob("*.py"))]


class Described(Generic[_T]):
    """A least-recently-used cache of successful answers."""

    def __init__(self) -> None:
        self._answers: OrderedDict[Hashable, _T] = OrderedDict()
        self._locks: dict[tuple[asyncio.AbstractEventLoop, Hashable], asyncio.Lock] = {}

    async def get(self, key: Hashable | None, ask: Callable[[], Awaitable[_T]]) -> _T:
        """Return the cached answer of a key, or that of `ask`; the key None is never cached."""
        if key is None:
            return await ask()
        place = asyncio.get_running_loop(), key
        lock = self._locks.setdefault(place, asyncio.Lock())
        try:
            async with lock:
                if key in self._answers:
                    self._answers.move_to_end(key)
                else:
                    self._answers[key] = await ask()
                    if len(self._answers) > _MOST:
                        self._answers.popitem(last=False)
                return self._answers[key]
        finally:
            if not lock.locked():
                self._locks.pop(place, None)
