"""Serve an OpenEnv app: `python openenv_serve.py MODULE:APP PORT ROOT [FURTHER...]`.

Modules are imported from ROOT first, and from the further folders last, so that those hide no installed package. A
server answers an exception with its text alone; here it names the cause as well. It works in a new folder with links
to what is in the given one, because authors write beside their code, which a wall closes.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
from pathlib import Path
from typing import Any


def main() -> None:
    """Serve until a signal."""
    app, port, root, *further = sys.argv[1:]
    sys.path[:0] = [root]
    sys.path += further
    place = Path(tempfile.mkdtemp(prefix="openenv-"))
    for one in Path.cwd().iterdir():
        (place / one.name).symlink_to(one)
    os.chdir(place)
    import uvicorn  # type: ignore[import-not-found,unused-ignore]

    errors = _errors()
    _tell_failures(errors)
    try:
        # Without pings: an environment that computes does not answer them in time.
        uvicorn.run(app, host="127.0.0.1", port=int(port), log_level="warning", ws_ping_interval=None)
    except Exception as error:
        raise SystemExit(f"{type(error).__name__}: {errors.Failure.of(error).message}") from error


def _errors() -> Any:
    """Return the module that names the hosts of failed requests; the package around it cannot be imported here."""
    spec = importlib.util.spec_from_file_location("toprope_errors", Path(__file__).parents[2] / "errors.py")
    assert spec is not None and spec.loader is not None  # the file is there
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.note_unreachable_hosts()
    return module


def _tell_failures(errors: Any) -> None:
    try:
        from openenv.core.env_server import http_server

        plain = http_server.WSErrorResponse
    except (ImportError, AttributeError):  # an older version
        return

    def telling(data: dict[str, Any]) -> Any:
        error = sys.exc_info()[1]
        if error is not None and data.get("message") == str(error):
            data = {**data, "message": errors.Failure.of(error).message}
        return plain(data=data)

    http_server.WSErrorResponse = telling


if __name__ == "__main__":
    main()
