"""Serve an OpenEnv app: `python openenv_serve.py MODULE:APP PORT ROOT [FURTHER...]`.

Modules are imported from ROOT first, and from the further folders last, so that those hide no installed package. A
server answers that an environment could not be created without saying why; this prints the reason.
"""

from __future__ import annotations

import sys
from typing import Any


def main() -> None:
    """Serve until a signal."""
    app, port, root, *further = sys.argv[1:]
    sys.path[:0] = [root]
    sys.path += further
    import uvicorn  # type: ignore[import-not-found,unused-ignore]

    _tell_failures()
    # Without pings: an environment that computes does not answer them in time.
    uvicorn.run(app, host="127.0.0.1", port=int(port), log_level="warning", ws_ping_interval=None)


def _tell_failures() -> None:
    try:
        from openenv.core.env_server.exceptions import EnvironmentFactoryError as Failed
    except ImportError:  # an older version
        return
    plain = Failed.__init__

    def telling(self: Any, *arguments: Any, **named: Any) -> None:
        plain(self, *arguments, **named)
        cause = sys.exc_info()[1]
        if cause is not None:
            print(f"{type(cause).__name__}: {' '.join(str(cause).split())}", file=sys.stderr, flush=True)

    Failed.__init__ = telling


if __name__ == "__main__":
    main()
