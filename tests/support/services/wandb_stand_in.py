"""A local endpoint for the `wandb` client: GraphQL and the file stream, as far as the client needs them.

It keeps what it was told, by run: configuration, summary, history and the calls that it did not know.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread
from typing import Any

KEY = "k" * 40
_OPERATION = re.compile(r"\b(?:query|mutation)\s+(\w+)")
_STREAM = re.compile(r"^/files/([^/]+)/([^/]+)/([^/]+)/file_stream$")


class Remembered:
    """One run there."""

    def __init__(self, project: str) -> None:
        self.project = project
        self.upserts: list[dict[str, Any]] = []
        """Variables of each creation or change, the oldest first."""
        self.history: list[dict[str, Any]] = []
        self.summary: dict[str, Any] = {}
        self.exit_code: int | None = None

    def column(self, name: str) -> list[Any]:
        """The values of one metric in the order in which they came."""
        return [row[name] for row in self.history if name in row]


class WandbStandIn:
    """The state of the endpoint. `url` is its address."""

    def __init__(self) -> None:
        self.runs: dict[str, Remembered] = {}
        self.keys: set[str] = set()
        """Keys that clients showed."""
        self.unknown: list[str] = []
        self.url = ""
        self.lock = Lock()

    def answer(self, query: str, variables: dict[str, Any]) -> dict[str, Any]:
        """The `data` of a GraphQL answer."""
        found = _OPERATION.search(query)
        operation = found[1] if found else ""
        if operation == "UpsertBucket":
            name, project = variables["name"], variables["project"]
            is_new = name not in self.runs
            run = self.runs.setdefault(name, Remembered(project))
            run.upserts.append(variables)
            entity = {"name": "somebody"}
            bucket = {
                "id": f"id-{name}", "name": name, "displayName": variables.get("displayName") or name, "config": "{}",
                "sweepName": None, "project": {"id": "p", "name": project, "entity": entity | {"id": "e"}},
                "historyLineCount": len(run.history),
            }  # fmt: skip
            return {"upsertBucket": {"bucket": bucket, "inserted": is_new}}
        if operation in ("RunResumeStatus", "RunStatus"):
            run = self.runs.get(variables["name"])
            if run is None:
                return {
                    "model": {
                        "id": "p",
                        "name": variables["project"],
                        "entity": {"name": "e", "id": "e"},
                        "bucket": None,
                    }
                }
            bucket = {
                "id": f"id-{variables['name']}", "name": variables["name"], "summaryMetrics": json.dumps(run.summary),
                "displayName": variables["name"], "logLineCount": 0, "historyLineCount": len(run.history),
                "eventsLineCount": 0, "historyTail": json.dumps([json.dumps(row) for row in run.history[-1:]]),
                "eventsTail": "[]", "config": "{}", "tags": [], "wandbConfig": '{"t": 1}',
            }  # fmt: skip
            return {"model": {"id": "p", "name": run.project, "entity": {"name": "e", "id": "e"}, "bucket": bucket}}
        if operation == "CreateRunFiles":
            return {"createRunFiles": {"runID": "r", "uploadHeaders": [], "files": []}}
        if operation == "Viewer":
            viewer = {"id": "v", "entity": "somebody", "username": "somebody", "flags": "{}", "teams": {"edges": []}}
            return {"viewer": viewer, "serverInfo": None}
        self.unknown.append(f"{operation}: {query}")
        return {}

    def stream(self, run_id: str, body: dict[str, Any]) -> None:
        """Takes rows of history, the summary and the end of a run."""
        run = self.runs[run_id]
        for name, part in (body.get("files") or {}).items():
            lines = [json.loads(line) for line in part["content"]]
            if name == "wandb-history.jsonl":
                run.history[part["offset"] :] = lines
            elif name == "wandb-summary.json":
                run.summary = lines[-1]
        if body.get("complete"):
            run.exit_code = body.get("exitcode")


@contextmanager
def serve() -> Iterator[WandbStandIn]:
    """Serves on loopback until the block ends."""
    state = WandbStandIn()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            state.keys.add(self.headers.get("Authorization", ""))
            found = _STREAM.match(self.path)
            with state.lock:
                if self.path == "/graphql":
                    asked = json.loads(body)
                    self._send({"data": state.answer(asked["query"], asked.get("variables") or {})})
                elif found:
                    state.stream(found[3], json.loads(body))
                    self._send({})
                else:
                    state.unknown.append(self.path)
                    self._send({}, 404)

        def do_GET(self) -> None:
            state.unknown.append(f"GET {self.path}")
            self._send({}, 404)

        do_PUT = do_POST

        def _send(self, value: Any, status: int = 200) -> None:
            data = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    state.url = f"http://127.0.0.1:{server.server_port}"
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
