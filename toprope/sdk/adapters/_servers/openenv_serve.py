"""Serve an OpenEnv app: `python openenv_serve.py MODULE:APP PORT ROOT [FURTHER...]`.

Modules are imported from ROOT first, and from the further folders last, so that those hide no installed package. A
server answers an exception with its text alone; here it names the cause as well, and an exception that no action causes
(a missing module, a host that was not reached, an answer that is no observation) has the code `FAILED` and, as `lacks`,
the module. It works in a new folder with links to what is in the given one, because authors write beside their code,
which a wall closes. A reset draws from the global generators of Python and NumPy as its seed says, because many
environments leave the seed aside.
"""

from __future__ import annotations

import functools
import os
import random
import runpy
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Any

FAILED = "ENVIRONMENT_FAILED"
"""Code of an error whose cause is the environment, not the action."""
_ALONE_S = 10.0
"""A reset waits so long for the end of another one, so that neither draws the other's numbers."""
_seed: ContextVar[Any] = ContextVar("seed", default=None)
"""The seed of the reset that a connection asks for."""
_drawing = threading.Lock()
_SERIALIZES = "serialize_observation"
"""The function of OpenEnv that prepares an observation for its answer."""
_UNREACHED, _BESIDES = "could not be reached", "; besides, "


def main() -> None:
    """Serve until a signal."""
    app, port, root, *further = sys.argv[1:]
    sys.path[:0] = [root]
    sys.path += further
    place = Path(tempfile.mkdtemp(prefix="openenv-"))
    for one in Path.cwd().iterdir():
        (place / one.name).symlink_to(one)
    os.chdir(place)
    with runpy.run_path(str(Path(__file__).with_name("ors_serve.py")))["telling"]() as errors:
        import uvicorn  # type: ignore[import-not-found,unused-ignore]

        _tell_failures(errors)
        _seed_resets()
        # Without pings: an environment that computes does not answer them in time.
        uvicorn.run(app, host="127.0.0.1", port=int(port), log_level="warning", ws_ping_interval=None)


def _tell_failures(errors: Any) -> None:
    try:
        from openenv.core.env_server import http_server

        plain = http_server.WSErrorResponse
    except (ImportError, AttributeError):  # an older version
        return

    def telling(data: dict[str, Any]) -> Any:
        error = sys.exc_info()[1]
        if error is not None and data.get("message") == str(error):
            why = errors.Failure.of(error)
            data = {**data, "message": why.message}
            unreached = _UNREACHED in why.message and _BESIDES not in why.message  # else it was not asked by this call
            if isinstance(error, ImportError | ConnectionError) or unreached or _is_of_serialization(error):
                data |= {"message": why.line(), "code": FAILED, "lacks": getattr(error, "name", None) or ""}
        return plain(data=data)

    http_server.WSErrorResponse = telling


def _is_of_serialization(error: BaseException) -> bool:
    """Return True if an environment's answer could not be sent: the action was carried out before."""
    return any(frame.f_code.co_name == _SERIALIZES for frame, _ in traceback.walk_tb(error.__traceback__))


def _seed_resets() -> None:
    try:
        from openenv.core.env_server.http_server import HTTPEnvServer

        plain, run = HTTPEnvServer._get_valid_kwargs, HTTPEnvServer._run_in_session_executor
    except (ImportError, AttributeError):  # another version
        return

    @functools.wraps(plain)
    def noting(self: Any, signature: Any, given: Any, *more: Any, **further: Any) -> Any:
        _seed.set(given.get("seed"))
        return plain(self, signature, given, *more, **further)

    @functools.wraps(run)
    async def seeded(self: Any, session: Any, call: Any, /, *given: Any, **named: Any) -> Any:
        if getattr(call, "__name__", "") == "reset" and isinstance(_seed.get(), int):
            call = functools.partial(_drawn, _seed.get(), call)
        return await run(self, session, call, *given, **named)

    HTTPEnvServer._get_valid_kwargs, HTTPEnvServer._run_in_session_executor = noting, seeded


def _drawn(seed: int, call: Callable[..., Any], /, *given: Any, **named: Any) -> Any:
    """Call a function with the global generators seeded."""
    alone = _drawing.acquire(timeout=_ALONE_S)
    try:
        random.seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed % 2**32)
        return call(*given, **named)
    finally:
        if alone:
            _drawing.release()


if __name__ == "__main__":
    main()
