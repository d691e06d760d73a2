"""A policy whose answers are given, to score fixed answers in environments that own their loop.

Such an environment can only be scored by running it against a server: this one speaks enough of the OpenAI API on the
loopback interface for one rollout, with the standard library only.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from toprope.sdk.authoring.env_managed import Session

__all__ = ["scripted_session"]

_MODEL = "scripted"


@contextmanager
def scripted_session(answer: str | Callable[[Mapping[str, Any]], str]) -> Iterator[Session]:
    """Yield a session whose policy always answers `answer`, or what that makes of a request; the server stops with the
    block.
    """

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *arguments: Any) -> None:
            pass

        def do_GET(self) -> None:
            self._send({"object": "list", "data": [{"id": _MODEL, "object": "model", "owned_by": "toprope"}]})

        def do_POST(self) -> None:
            if not self.path.endswith("/completions"):
                self.send_error(404)
                return
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
            chat = self.path.endswith("/chat/completions")
            words = answer if isinstance(answer, str) else answer(body)
            message: dict[str, Any] = {"message": {"role": "assistant", "content": words}} if chat else {"text": words}
            choices = [
                {"index": index, "finish_reason": "stop", "logprobs": None, **message}
                for index in range(int(body.get("n") or 1))
            ]
            usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
            kind = "chat.completion" if chat else "text_completion"
            head = {"id": "scripted", "object": kind, "created": 0, "model": _MODEL}
            if not body.get("stream"):
                self._send(head | {"choices": choices, "usage": usage})
                return
            if chat:
                head["object"] = "chat.completion.chunk"
                choices = [{"delta": choice.pop("message"), **choice} for choice in choices]
            pieces = [json.dumps(head | {"choices": choices}), json.dumps(head | {"choices": [], "usage": usage})]
            self._data("".join(f"data: {piece}\n\n" for piece in [*pieces, "[DONE]"]).encode(), "text/event-stream")

        def _send(self, value: dict[str, Any]) -> None:
            self._data(json.dumps(value).encode(), "application/json")

        def _data(self, data: bytes, kind: str) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True, name="scripted")
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.server_address[1]}/v1"
        yield Session(url, "scripted", _MODEL, "scripted", 0.0, 1.0, 256, (), None, 60.0)
    finally:
        server.shutdown()
        server.server_close()
        thread.join(2.0)
