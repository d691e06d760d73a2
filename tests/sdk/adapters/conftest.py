"""Shared by the tests of adapters: stand-ins for the packages that they adapt."""

from __future__ import annotations

import json
import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from openai import AsyncAzureOpenAI, AsyncOpenAI, AzureOpenAI, OpenAI


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A function that installs a stand-in module with these members, and its parent packages, in `sys.modules`."""
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])  # which an adapter may add to

    def install(name: str, **members: Any) -> None:
        words = name.split(".")
        for end in range(1, len(words) + 1):
            known = ".".join(words[:end])
            if known not in sys.modules:
                made = types.ModuleType(known)
                made.__path__ = []  # type: ignore[attr-defined]
                monkeypatch.setitem(sys.modules, known, made)
        for key, value in members.items():
            monkeypatch.setattr(sys.modules[name], key, value, raising=False)

    return install


@pytest.fixture
def unled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients of OpenAI are as they were after the test, although an adapter leads them to a judge."""
    for kind in (OpenAI, AsyncOpenAI, AzureOpenAI, AsyncAzureOpenAI):
        monkeypatch.setattr(kind, "_prepare_options", kind._prepare_options)
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    monkeypatch.delenv("OPENAI_API_KEY")
    monkeypatch.setattr(OpenAI, "_toprope_led", True, raising=False)
    monkeypatch.delattr(OpenAI, "_toprope_led")


@contextmanager
def asked_of(answer: str) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """The address of a model that always answers the same, and the key and model of each request."""
    asked: list[tuple[str, str]] = []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *arguments: Any) -> None:
            pass

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append((str(self.headers["Authorization"]), body["model"]))
            message = {"role": "assistant", "content": answer}
            choice = {"index": 0, "finish_reason": "stop", "message": message}
            said = {"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(said).encode())

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/v1", asked
        server.shutdown()
