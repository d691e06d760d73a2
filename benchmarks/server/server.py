"""Measure the idle server: `make bench-server`.

Process start to answered tools/list, and resident memory after it, against a bare `mcp` server with as many trivial
tools, in turn, as the ratio of medians; then the time of a call over stdio and of its line in the audit trail.
`tools_list_tokens` is the whole result of tools/list as compact JSON, bytes / 4, of a server whose owner allows every
tool. Control: the bare server with torch, and a list that has each tool twice, must miss every goal. Takes about a
minute; needs Linux.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.report import is_met, refuse, report
from benchmarks.scratch import scratch
from toprope.records.audit import AuditTrail, shorten

ROUNDS = 15
CALLS = 400
_LEAVES_WITHIN_S = 60
GOALS = {"list_ratio": "<= 1.2", "rss_ratio": "<= 1.2", "torch_loaded": "== 0", "tools_list_tokens": "<= 7000"}
ALLOWS = "installs: allow\nsaves: allow\n"
"""Settings with which a server offers every tool."""

BARE = '''
from mcp.server import MCPServer

server = MCPServer("bare")


def make(number):
    def tool(a: str, b: int = 0) -> str:
        """Does something trivial with a text and a number, and says so."""
        return f"{a} {b}"

    tool.__name__ = f"tool_{number}"
    return tool


for number in range(int(__import__("sys").argv[1])):
    server.tool()(make(number))
server.run()
'''


class Session:
    """A server over stdio, called with raw lines: the client's own start-up is not measured."""

    def __init__(self, command: list[str], home: str) -> None:
        kept = {name: os.environ[name] for name in ("HOME", "PATH", "LANG") if name in os.environ}
        self.began = time.perf_counter()
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=kept | {"TOPROPE_HOME": home, "TOPROPE_CONFIG": f"{home}/config"},
        )
        self._number = 0

    def ask(self, method: str, params: dict[str, Any] | None = None) -> dict[str, Any]:
        """Send one request and return its result."""
        self._number += 1
        self._send({"jsonrpc": "2.0", "id": self._number, "method": method, "params": params or {}})
        assert self.process.stdout is not None
        while True:
            line = self.process.stdout.readline()
            if not line:
                raise RuntimeError(f"the server ended before it answered {method}")
            message = json.loads(line)
            if message.get("id") == self._number:
                return message["result"]

    def list_tools(self) -> dict[str, Any]:
        """Make the handshake, then list the tools; return the whole result."""
        client = {"name": "bench", "version": "1"}
        self.ask("initialize", {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": client})
        self._send({"jsonrpc": "2.0", "method": "notifications/initialized"})
        return self.ask("tools/list")

    def call(self, tool: str, arguments: dict[str, Any]) -> float:
        """Call a tool; return milliseconds."""
        began = time.perf_counter()
        result = self.ask("tools/call", {"name": tool, "arguments": arguments})
        if result.get("isError"):
            raise RuntimeError(f"{tool}: {result['content']}")
        return (time.perf_counter() - began) * 1e3

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(_LEAVES_WITHIN_S)
        self.process.stdout.close()

    def _send(self, message: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message).encode() + b"\n")
        self.process.stdin.flush()


def start(command: list[str], home: Path) -> tuple[float, float, int, dict[str, Any]]:
    """Return the seconds to the answered list, resident MB after it, mapped torch libraries, and the list."""
    session = Session(command, str(home))
    listed = session.list_tools()
    seconds = time.perf_counter() - session.began
    process = psutil.Process(session.process.pid)
    memory = process.memory_info().rss / 2**20
    torch = sum("torch" in mapping.path for mapping in process.memory_maps())
    session.close()
    return seconds, memory, torch, listed


def audit_ms(home: Path) -> list[float]:
    """Return sorted milliseconds of lines of the audit trail, which each call waits for."""
    trail, times = AuditTrail(home), []
    for number in range(CALLS * 3):
        began = time.perf_counter()
        arguments = shorten({"draft_id": "draft-7f3k", "changes": {"optimizer.learning_rate": number}}, ["a-secret"])
        trail.append({"by": {"client": "bench"}, "did": "edit_config", "outcome": "done", "arguments": arguments})
        times.append((time.perf_counter() - began) * 1e3)
    if trail.verify().problems:
        raise RuntimeError("the trail is not whole")
    return sorted(times)


def main() -> int:
    """Print the table and the figures."""
    if not hasattr(psutil.Process, "memory_maps"):
        return refuse("the libraries that a process has mapped cannot be listed on this system, as on Linux")
    ours = [sys.executable, "-P", "-m", "toprope_server.cli", "serve"]
    with scratch("server") as home:
        bare_file = home / "bare.py"
        bare_file.write_text(BARE)
        generous = home / "generous"
        (generous / "config").mkdir(parents=True)
        (generous / "config" / "settings.yaml").write_text(ALLOWS)
        listed = start(ours, generous)[3]
        tools = start(ours, home)[3]["tools"]
        bare = [sys.executable, "-P", str(bare_file), str(len(tools))]
        start(bare, home)
        planted = start(with_torch(home, len(tools)), home)
        measured = [(start(ours, home), start(bare, home)) for _ in range(ROUNDS)]
        session = Session(ours, str(home))
        session.list_tools()
        draft = session.ask("tools/call", {"name": "select_environment", "arguments": {"name": "sort_letters"}})
        draft_id = draft["structuredContent"]["draft_id"]
        calls = []
        for number in range(CALLS):
            calls.append(session.call("get_config", {"draft_id": draft_id, "section": "optimizer"}))
            calls.append(session.call("list_runs", {}))
            rate = {"optimizer.learning_rate": 1e-5 * (1 + number)}
            calls.append(session.call("edit_config", {"draft_id": draft_id, "changes": rate}))
        torch_loaded = sum("torch" in mapping.path for mapping in psutil.Process(session.process.pid).memory_maps())
        session.close()
        audit = audit_ms(home)
    calls.sort()
    seconds = [statistics.median(row[side][0] for row in measured) for side in (0, 1)]
    memory = [statistics.median(row[side][1] for row in measured) for side in (0, 1)]
    figures = {
        "tools": len(tools),
        "list_seconds": seconds[0],
        "bare_list_seconds": seconds[1],
        "list_ratio": statistics.median(ours[0] / bare[0] for ours, bare in measured),
        "rss_mb": memory[0],
        "bare_rss_mb": memory[1],
        "rss_ratio": memory[0] / memory[1],
        "torch_loaded": torch_loaded + sum(row[0][2] for row in measured),
        "tools_list_tokens": tokens(listed),
        "call_ms_p50": calls[len(calls) // 2],
        "call_ms_p99": calls[int(len(calls) * 0.99)],
        "audit_ms_p50": audit[len(audit) // 2],
        "audit_ms_p99": audit[int(len(audit) * 0.99)],
    }
    return report(
        "The server",
        figures,
        goals=GOALS,
        control="a bare server that imports torch, and a list that has each tool twice, must miss every goal.",
        control_failed=control_failed(planted, seconds[1], memory[1], listed),
    )


def with_torch(folder: Path, tools: int) -> list[str]:
    """Return the argv of the control: a bare server that imports torch, written to the folder."""
    file = folder / "torch_server.py"
    file.write_text("import torch\n" + BARE)
    return [sys.executable, "-P", str(file), str(tools)]


def tokens(listed: dict[str, Any]) -> int:
    """Return about as many tokens as the result of tools/list costs an agent."""
    return len(json.dumps(listed, separators=(",", ":"), ensure_ascii=False).encode()) // 4


def control_failed(
    planted: tuple[float, float, int, Any], bare_seconds: float, bare_mb: float, listed: dict[str, Any]
) -> str:
    """Name the goals that the control meets; empty if it meets none.

    Args:
        planted: What `start` returns of the server with torch.
        bare_seconds, bare_mb: Of the bare server.
        listed: The result of tools/list that is counted.
    """
    found = {
        "list_ratio": planted[0] / bare_seconds,
        "rss_ratio": planted[1] / bare_mb,
        "torch_loaded": planted[2],
        "tools_list_tokens": tokens({**listed, "tools": [*listed["tools"], *listed["tools"]]}),
    }
    won = [f"{name} {found[name]:.3g}" for name, goal in GOALS.items() if is_met(found[name], goal)]
    return f"the control meets {', '.join(won)}" if won else ""


if __name__ == "__main__":
    sys.exit(main())
