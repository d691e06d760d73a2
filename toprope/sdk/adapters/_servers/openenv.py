"""OpenEnv servers: started by the worker if needed, and used over their WebSocket.

Their HTTP endpoints create a new environment for each request, which breaks stateful environments; over the WebSocket,
a connection is an episode. https://github.com/meta-pytorch/OpenEnv (types.py, http_server.py, 0.10)
"""

from __future__ import annotations

import asyncio
import atexit
import collections
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from toprope.sdk.errors import EnvironmentMistake, LoadError

__all__ = ["Connection", "Full", "Refused", "Server"]

_WAIT_S = 60.0
_START_S = 900.0
"""Limit of a server that is started here; opening an environment has a limit of its own, which the owner sets."""
_MESSAGE_S = 120.0
_PRINTED_S = 0.2
"""The server's standard error may arrive after its answer."""
_LARGEST = 100 * 2**20
_RAISED = re.compile(r"[\w.]*(Error|Exception|Exit)\b")


class Full(Exception):
    """The server is at its limit of episodes."""


class Refused(Exception):
    """The environment does not accept an action; the text says why."""


class Server:
    """An OpenEnv server by address or start command.

    Args:
        url: Address; empty with a command.
        command: Words of a command; `{port}` and `{python}` are filled in.
        folder: Working folder of the command.
        variables: Environment variables of the command.

    Raises:
        LoadError: The server does not start or answer.
    """

    def __init__(
        self,
        url: str,
        command: Sequence[str] = (),
        folder: str = "",
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lines: collections.deque[str] = collections.deque(maxlen=60)
        self._silent = threading.Event()
        self.url = url.rstrip("/")
        if command:
            self._start(command, folder, variables or {})
        self._wait()

    def schema(self) -> dict[str, Any]:
        """JSON schemas of `action` and `observation`; empty if the server gives none."""
        try:
            with urllib.request.urlopen(f"{self.url}/schema", timeout=10) as answer:
                found = json.loads(answer.read())
            return found if isinstance(found, dict) else {}
        except (OSError, ValueError):
            return {}

    def connect(self) -> Connection:
        return Connection("ws" + self.url.removeprefix("http") + "/ws", self._raised)

    def close(self) -> None:
        """End the server if it was started here."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(2)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def _start(self, command: Sequence[str], folder: str, variables: Mapping[str, str]) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        words = [word.replace("{port}", str(port)).replace("{python}", sys.executable) for word in command]
        surroundings = os.environ | {"ENABLE_WEB_INTERFACE": "false"} | dict(variables)
        try:
            # It runs in the worker's process group, which ends as a whole.
            self._process = subprocess.Popen(
                words, cwd=folder or None, env=surroundings, stdin=subprocess.DEVNULL, stdout=2, stderr=subprocess.PIPE
            )
        except OSError as error:
            raise LoadError(f"The OpenEnv server cannot be started ({' '.join(words)}): {error}") from error
        threading.Thread(target=self._listen, args=(self._process.stderr,), daemon=True, name="openenv").start()
        atexit.register(self.close)

    def _listen(self, errors: Any) -> None:
        """Pass the server's standard error on, and keep the last lines."""
        for line in errors:
            self._lines.append(line.decode(errors="replace").strip())
            sys.stderr.buffer.write(line)
            sys.stderr.flush()
        self._silent.set()

    def _last_words(self) -> str:
        """Return what a server that ended has said last."""
        self._silent.wait(2)
        return self._raised() or next((line for line in reversed(self._lines) if line), "it printed nothing")[:400]

    def _raised(self) -> str:
        """Return the last exception that a server started here has printed; empty if it printed no exception."""
        said = [line for line in list(self._lines) if line.strip("*-= ")]
        raised = [place for place, line in enumerate(said) if _RAISED.match(line)]
        return " ".join(said[raised[-1] :])[:400] if raised else ""

    def _wait(self) -> None:
        deadline, why = time.monotonic() + (_WAIT_S if self._process is None else _START_S), ""
        while time.monotonic() < deadline:
            if self._process is not None and (code := self._process.poll()) is not None:
                raise LoadError(
                    f"The OpenEnv server ended with exit code {code} before it was ready: {self._last_words()}"
                )
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return
            except urllib.error.HTTPError:
                return  # the server answers
            except (OSError, ValueError) as error:
                why = str(error)
                if self._process is None and "refused" not in why:
                    break
            time.sleep(0.05)
        self.close()
        raise LoadError(f"The OpenEnv server at {self.url} does not answer: {why}. Check that it runs at this URL.")


class Connection:
    """An episode; use it with `async with`.

    Args:
        url: Address of the WebSocket.
        raised: Returns what the server has raised; empty if unknown.
    """

    def __init__(self, url: str, raised: Callable[[], str] = str) -> None:
        self._url, self._socket, self._raised = url, None, raised

    async def __aenter__(self) -> Connection:
        from websockets.asyncio.client import connect

        self._socket = await connect(  # Without pings, which a server that computes does not answer in time.
            self._url, open_timeout=30, max_size=_LARGEST, proxy=None, close_timeout=1, ping_interval=None
        )
        return self

    async def __aexit__(self, *exception: object) -> None:
        from websockets.exceptions import WebSocketException

        try:
            await self._socket.send('{"type": "close"}')  # type: ignore[attr-defined]
            await self._socket.close()  # type: ignore[attr-defined]
        except (OSError, WebSocketException):
            pass  # the server closed first

    async def reset(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Begin the episode; return {observation, reward, done}."""
        return await self._say("reset", parameters)

    async def step(self, action: Mapping[str, Any]) -> dict[str, Any]:
        """Take an action; return {observation, reward, done}.

        Raises:
            Refused: The environment does not accept the action.
        """
        return await self._say("step", action)

    async def tools(self) -> list[dict[str, Any]]:
        """Return the environment's tools as MCP lists them; none if it has none."""
        asked = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}
        try:
            found = await self._say("mcp", asked)
        except EnvironmentMistake:  # an older server
            return []
        tools = (found.get("result") or {}).get("tools") or ()
        return [dict(one) for one in tools if isinstance(one, Mapping) and isinstance(one.get("name"), str)]

    async def state(self) -> dict[str, Any]:
        """Return the environment's state of the episode."""
        return await self._say("state", None)

    async def _say(self, kind: str, data: Mapping[str, Any] | None) -> dict[str, Any]:
        from websockets.exceptions import ConnectionClosed

        message = {"type": kind} if data is None else {"type": kind, "data": dict(data)}
        try:
            try:
                await self._socket.send(json.dumps(message))  # type: ignore[attr-defined]
            except ConnectionClosed:
                pass  # it may have sent a reason before
            raw = await asyncio.wait_for(self._socket.recv(), _MESSAGE_S)  # type: ignore[attr-defined]
        except ConnectionClosed as error:
            raise ConnectionError(f"the OpenEnv server closed the connection at {kind}: {error}") from error
        except TimeoutError:
            raise TimeoutError(f"the OpenEnv server did not answer {kind} within {_MESSAGE_S:g} s") from None
        answer = json.loads(raw)
        found = answer.get("data")
        if answer.get("type") == "error":
            said = found if isinstance(found, dict) else {}
            if said.get("code") == "CAPACITY_REACHED":
                raise Full(said.get("message", ""))
            why = f"{said.get('message') or raw}{_details(said.get('errors'))}"
            if kind == "step" and said.get("code") in ("VALIDATION_ERROR", "EXECUTION_ERROR"):
                raise Refused(why)
            if said.get("code") == "FACTORY_ERROR":
                await asyncio.sleep(_PRINTED_S)
                why = f"{why} {self._raised()}".strip()
            raise EnvironmentMistake(f"OpenEnv refuses {kind}: {why} ({said.get('code', '?')})")
        if not isinstance(found, dict):
            raise EnvironmentMistake(f"OpenEnv answered {kind} with {str(raw)[:200]}")
        return found


def _details(errors: Any) -> str:
    """Return the fields that a server finds invalid, and why."""
    found = [one for one in errors or () if isinstance(one, Mapping)] if isinstance(errors, list) else []
    told = [f"{'.'.join(map(str, one.get('loc') or ()))}: {one.get('msg', '')}" for one in found[:4]]
    return f": {'; '.join(told)}" if told else ""
