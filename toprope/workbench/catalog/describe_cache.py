"""Descriptions that need no worker, because one was asked before: for environments that come with the installation.

A worker takes some hundred milliseconds of a processor, and many agents ask about the same few environments. What ships
with Toprope, or with reasoning-gym, says the same to the same question until its file or the installation changes, so
its answer is kept, and those who ask at the same moment share one worker. An owner's environments and data sets are
asked anew each time: somebody is writing them.
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Generic, TypeVar

__all__ = ["Described", "question"]

_T = TypeVar("_T")
_MOST = 64


def question(source: Mapping[str, Any], shipped: Path, **asked: Any) -> Hashable | None:
    """What tells one question from another, with what its answer rests on; None where the answer is not to be kept.

    Args:
        source: `file`, `adapter`, `target`, ... of the environment.
        shipped: The folder whose files come with the installation.
        asked: The rest of the question, as JSON values.
    """
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
    return json.dumps([dict(source), asked], sort_keys=True, default=str), rests_on


def _files(folder: Path) -> list[tuple[str, Any]]:
    return [(path.name, path.stat()) for path in sorted(folder.glob("*.py"))]


class Described(Generic[_T]):
    """Answers by question, the least recently asked for forgotten first. Only what was answered is kept."""

    def __init__(self) -> None:
        self._known: OrderedDict[Hashable, _T] = OrderedDict()
        self._asking: dict[tuple[asyncio.AbstractEventLoop, Hashable], asyncio.Lock] = {}

    async def get(self, asked: Hashable | None, ask: Callable[[], Awaitable[_T]]) -> _T:
        """The answer to `asked`, from before or from `ask`; None is always asked anew."""
        if asked is None:
            return await ask()
        place = asyncio.get_running_loop(), asked
        lock = self._asking.setdefault(place, asyncio.Lock())
        try:
            async with lock:
                if asked in self._known:
                    self._known.move_to_end(asked)
                else:
                    self._known[asked] = await ask()
                    if len(self._known) > _MOST:
                        self._known.popitem(last=False)
                return self._known[asked]
        finally:
            if not lock.locked():
                self._asking.pop(place, None)
