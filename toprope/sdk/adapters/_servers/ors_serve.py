"""Serve the ORS environments of a file: `python ors_serve.py FILE PORT`."""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path


def main() -> None:
    """Serve until a signal."""
    file, port = Path(sys.argv[1]), int(sys.argv[2])
    sys.path.insert(0, str(file.parent))
    module = importlib.import_module(file.stem)
    kinds = [one for one in vars(module).values() if inspect.isclass(one) and one.__module__ == module.__name__]
    names = ("ors", "openreward.environments")  # those that the file has imported
    package = importlib.import_module(next(name for name in names if name.partition(".")[0] in sys.modules))
    found = [one for one in kinds if issubclass(one, package.Environment) and not inspect.isabstract(one)]
    package.Server(found).run(host="127.0.0.1", port=port)


if __name__ == "__main__":
    main()
