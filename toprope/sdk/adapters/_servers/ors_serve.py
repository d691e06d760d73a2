"""Serve the ORS environments of a file: `python ors_serve.py FILE PORT`.

The other programs that serve environments end with an error as this one does: `runpy.run_path(THIS)["telling"]`. They
run in the environment's interpreter, where the package around this file cannot be imported.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def main() -> None:
    """Serve until a signal."""
    with telling():
        _serve(Path(sys.argv[1]), int(sys.argv[2]))


@contextlib.contextmanager
def telling() -> Iterator[Any]:
    """Ends the program with the text of an exception, its cause, and a host that was not reached.

    Behind a wall, multiprocessing is adapted to that. Yields the module of errors, which notes from now on the hosts
    that this process cannot resolve.
    """
    errors = _of_sdk("errors.py")
    errors.note_unreachable_hosts()
    _of_sdk("wall/local_sockets.py").avoid_local_sockets()
    try:
        yield errors
    except Exception as error:
        raise SystemExit(f"{type(error).__name__}: {errors.Failure.of(error).message}") from error


def _of_sdk(file: str) -> Any:
    """Import a file of the SDK, whose package is not found here."""
    name = f"toprope_{Path(file).stem}"
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[2] / file)
    assert spec is not None and spec.loader is not None  # the file is there
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _serve(file: Path, port: int) -> None:
    sys.path.insert(0, str(file.parent))
    module = importlib.import_module(file.stem)
    kinds = [value for value in vars(module).values() if inspect.isclass(value) and value.__module__ == module.__name__]
    names = ("ors", "openreward.environments")  # those that the file has imported
    package = importlib.import_module(next(name for name in names if name.partition(".")[0] in sys.modules))
    environments = [kind for kind in kinds if issubclass(kind, package.Environment) and not inspect.isabstract(kind)]
    package.Server(environments).run(host="127.0.0.1", port=port)


if __name__ == "__main__":
    main()
