"""OpenEnv servers: started by the worker if needed, and used over their WebSocket.

Their HTTP endpoints create a new environment for each request, which breaks stateful environments; over the WebSocket,
a connection is an episode. https://github.com/meta-pytorch/OpenEnv (types.py, http_server.py, 0.10)
"""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

from toprope.sdk.errors import EnvironmentMistake, LoadError

__all__ = ["Connection", "Full", "Server"]

_WAIT_S = 60.0
_MESSAGE_S = 120.0
_LARGEST = 100 * 2**20


class Full(Exception):
    """The server is at its limit of episodes."""


class Server:
    """An OpenEnv server by address or start command.

    Args:
        url: Address; empty with a command.
        command: Words of a command; `{port}` and `{python}` are filled in.
        folder: Working folder of the command.

    Raises:
        LoadError: The server does not start or answer.
    """

    def __init__(self, url: str, command: Sequence[str] = (), folder: str = "") -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self.url = url.rstrip("/")
        if command:
            self._start(command, folder)
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
        return Connection("ws" + self.url.removeprefix("http") + "/ws")

    def close(self) -> None:
        """End the server if it was started here."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(2)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def _start(self, command: Sequence[str], folder: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        words = [word.replace("{port}", str(port)).replace("{python}", sys.executable) for word in command]
        surroundings = os.environ | {"ENABLE_WEB_INTERFACE": "false"}
        try:
            # It runs in the worker's process group, which ends as a whole.
            self._process = subprocess.Popen(
                words, cwd=folder or None, env=surroundings, stdin=subprocess.DEVNULL, stdout=2, stderr=2
            )
        except OSError as error:
            raise LoadError(f"The OpenEnv server cannot be started ({' '.join(words)}): {error}") from error
        atexit.register(self.close)

    def _wait(self) -> None:
        deadline, why = time.monotonic() + _WAIT_S, ""
        while time.monotonic() < deadline:
            if self._process is not None and (code := self._process.poll()) is not None:
                raise LoadError(f"The OpenEnv server ended with exit code {code} before it was ready; see the log.")
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
    """An episode; use it with `async with`."""

    def __init__(self, url: str) -> None:
        self._url, self._socket = url, None

    async def __aenter__(self) -> Connection:
        from websockets.asyncio.client import connect

        self._socket = await connect(self._url, open_timeout=30, max_size=_LARGEST, proxy=None, close_timeout=1)
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
        """Take an action; return {observation, reward, done}."""
        return await self._say("step", action)

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
            raise EnvironmentMistake(f"OpenEnv refuses {kind}: {said.get('message', raw)} ({said.get('code', '?')})")
        if not isinstance(found, dict):
            raise EnvironmentMistake(f"OpenEnv answered {kind} with {str(raw)[:200]}")
        return found
