"""Servers of OpenEnv: started as a program of the worker's, and spoken to over their WebSocket.

Their HTTP endpoints make a new environment at every request, so that a step fails where the environment has a state;
over the WebSocket a connection is an episode. https://github.com/meta-pytorch/OpenEnv (types.py, http_server.py, 0.10)
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
    """The server plays as many episodes as it can."""


class Server:
    """An OpenEnv server, by its address or by the command that starts it.

    Args:
        url: Its address; empty where a command starts it.
        command: Words of a command; `{port}` and `{python}` in them are filled in.
        folder: Where it is started.

    Raises:
        LoadError: It does not start, or does not answer.
    """

    def __init__(self, url: str, command: Sequence[str] = (), folder: str = "") -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self.url = url.rstrip("/")
        if command:
            self._start(command, folder)
        self._wait()

    def schema(self) -> dict[str, Any]:
        """JSON schemas of `action` and `observation`; empty where the server does not tell."""
        try:
            with urllib.request.urlopen(f"{self.url}/schema", timeout=10) as answer:
                found = json.loads(answer.read())
            return found if isinstance(found, dict) else {}
        except (OSError, ValueError):
            return {}

    def connect(self) -> Connection:
        return Connection("ws" + self.url.removeprefix("http") + "/ws")

    def close(self) -> None:
        """Ends the server, if it was started here."""
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
            # In the worker's process group, which ends as a whole.
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
                raise LoadError(f"The OpenEnv server ended with exit code {code} before it served; see the log.")
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return
            except urllib.error.HTTPError:
                return  # it answers
            except (OSError, ValueError) as error:
                why = str(error)
                if self._process is None and "refused" not in why:
                    break
            time.sleep(0.05)
        self.close()
        raise LoadError(f"The OpenEnv server at {self.url} does not answer: {why}. Is it running, and is that its URL?")


class Connection:
    """One episode. `async with` it."""

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
            pass  # it has gone first

    async def reset(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Begins the episode: {observation, reward, done}."""
        return await self._say("reset", parameters)

    async def step(self, action: Mapping[str, Any]) -> dict[str, Any]:
        """Takes an action: {observation, reward, done}."""
        return await self._say("step", action)

    async def state(self) -> dict[str, Any]:
        """The environment's own account of the episode."""
        return await self._say("state", None)

    async def _say(self, kind: str, data: Mapping[str, Any] | None) -> dict[str, Any]:
        from websockets.exceptions import ConnectionClosed

        message = {"type": kind} if data is None else {"type": kind, "data": dict(data)}
        try:
            try:
                await self._socket.send(json.dumps(message))  # type: ignore[attr-defined]
            except ConnectionClosed:
                pass  # it may have said why before
            raw = await asyncio.wait_for(self._socket.recv(), _MESSAGE_S)  # type: ignore[attr-defined]
        except ConnectionClosed as error:
            raise ConnectionError(f"the OpenEnv server hung up at {kind}: {error}") from error
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
