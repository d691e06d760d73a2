"""multiprocessing behind a wall, which refuses local sockets: managers listen on loopback, and no server forks.

Programs that serve environments load this file by its path, since they cannot import the package around it.
"""

from __future__ import annotations

import importlib.machinery
import os
import sys
from typing import Any

__all__ = ["avoid_local_sockets"]


def avoid_local_sockets() -> None:
    """Adapt multiprocessing if this process is behind a wall; call it before multiprocessing is imported."""
    if os.environ.get("TOPROPE_WALLED"):
        sys.meta_path.insert(0, _WithoutLocalSockets())


class _WithoutLocalSockets:
    """Finds the modules of multiprocessing, and changes their defaults when they have been imported."""

    _MODULES = ("multiprocessing.connection", "multiprocess.connection", "multiprocessing.context")

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in self._MODULES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def adapted(module: Any) -> None:
            execute(module)
            if hasattr(module, "default_family"):
                module.default_family = "AF_INET"
            chosen = getattr(module, "_default_context", None)
            if chosen is not None and chosen.get_start_method(allow_none=True) == "forkserver":
                chosen._default_context = module._concrete_contexts["fork"]

        spec.loader.exec_module = adapted  # type: ignore[method-assign]
        return spec
