"""A dashboard in a process of its own, and what its page would ask."""

from __future__ import annotations

import http.client
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

STARTS_WITHIN_S = 60.0
PROGRAM = """
import sys
from pathlib import Path
from toprope_tools.workshop import Workshop
from toprope_server.dashboard.serve import serve_dashboard
say = lambda address: print(address, flush=True)
serve_dashboard(Workshop.open(), read_only="--read-only" in sys.argv, show=say, bundle=Path(sys.argv[1]))
"""


def make_bundle(folder: Path) -> Path:
    """Files in the place of the built page."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in (
        ("index.html", "<!doctype html><script type=module src=page.js></script>"),
        ("page.js", "0"),
        ("page.css", ""),
        ("LICENSES.txt", "MIT"),
    ):
        (folder / name).write_text(text)
    return folder


class DashboardProcess:
    """`toprope dashboard` on a home, until `close`."""

    def __init__(self, home: Path, config: Path, bundle: Path, *options: str) -> None:
        variables = {**os.environ, "TOPROPE_HOME": str(home), "TOPROPE_CONFIG": str(config)}
        command = [sys.executable, "-P", "-c", PROGRAM, str(bundle), *options]
        self._process = subprocess.Popen(
            command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert self._process.stdout is not None
        found = re.match(r"http://127\.0\.0\.1:(\d+)/#key=(\S+)", self._process.stdout.readline())
        assert found is not None
        self.port, self.key = int(found[1]), found[2]
        self.pid = self._process.pid
        self.token = ""

    def ask(
        self, method: str, path: str, body: Any = None, *, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """Send a request as the page does, with other headers if given; an empty value leaves a header out."""
        sent = {"Host": f"127.0.0.1:{self.port}"}
        if self.token:
            sent["Authorization"] = f"Bearer {self.token}"
        if method == "POST":
            sent |= {"X-Toprope": "1", "Content-Type": "application/json", "Origin": f"http://127.0.0.1:{self.port}"}
        sent = {name: value for name, value in {**sent, **(headers or {})}.items() if value}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.putrequest(method, path, skip_host=True)
            data = json.dumps(body).encode() if method == "POST" else None
            if data is not None:
                sent["Content-Length"] = str(len(data))
            for name, value in sent.items():
                connection.putheader(name, value)
            connection.endheaders(data)
            answer = connection.getresponse()
            return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
        finally:
            connection.close()

    def enter(self) -> None:
        """Exchange the key for a token."""
        status, _, body = self.ask("POST", "/api/enter", {"key": self.key})
        assert status == 200, body
        self.token = json.loads(body)["token"]

    def get(self, path: str) -> Any:
        """The answer to a question."""
        status, _, body = self.ask("GET", path)
        assert status == 200, (path, body)
        return json.loads(body)

    def post(self, path: str, body: Any) -> tuple[int, Any]:
        """The status and the answer of an action."""
        status, _, answer = self.ask("POST", path, body)
        return status, json.loads(answer)

    def events(self, after: int | None = None) -> tuple[http.client.HTTPConnection, Any]:
        """An open event stream; read its lines."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        path = "/api/events" if after is None else f"/api/events?after={after}"
        connection.request("GET", path, headers={"Authorization": f"Bearer {self.token}"})
        return connection, connection.getresponse()

    def close(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.wait(10)
        if self._process.stdout is not None:
            self._process.stdout.close()


def next_change(stream: Any) -> dict[str, Any]:
    """The next change that an event stream tells."""
    while True:
        line = stream.readline()
        assert line, "the stream ended"
        if line.startswith(b"event: change"):
            return json.loads(stream.readline().removeprefix(b"data: "))
