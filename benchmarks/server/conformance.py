"""Run the official conformance suite against the server: `make bench-conformance`.

The suite runs against the real HTTP server, for both eras of the protocol: every scenario without fixtures. The others
ask for tools, prompts and resources with fixed names and answers (`test_image_content`), which a server with a purpose
of its own does not have. Estimated time: a minute; needs the suite (`make tools-node`).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.report import refuse, report
from benchmarks.scratch import end_process, scratch

__all__ = ["NODE_TOOLS_MISSING", "measure", "node_tool", "node_variables", "run_suite", "served"]

NODE_TOOLS = Path(os.environ.get("NODE_TOOLS") or Path.home() / ".cache" / "toprope" / "inspector")
"""`make tools-node` installs MCP Inspector and the conformance suite here."""
NODE_TOOLS_MISSING = "'make tools-node' installs MCP Inspector and the conformance suite (needs npm and a network)."
LIMIT_S = 120
BOTH = (
    "completion-complete",
    "dns-rebinding-protection",
    "prompts-list",
    "resources-list",
    "server-sse-multiple-streams",
    "tools-call-error",
    "tools-list",
)
SCENARIOS = {
    "2026-07-28": (*BOTH, "caching", "http-header-validation", "sep-2164-resource-not-found"),
    "2025-11-25": (*BOTH, "ping", "server-initialize", "server-session-lifecycle"),
}
"""Scenarios without fixtures, by the revision of the protocol that requires them."""


def node_tool(name: str) -> list[str] | None:
    """Return the argv of a tool, with the Node that was installed beside it; None if it is not installed."""
    programs = NODE_TOOLS / "node_modules" / ".bin"
    node, tool = programs / "node", programs / name
    return [str(node), str(tool.resolve())] if node.exists() and tool.exists() else None


def node_variables() -> dict[str, str]:
    """Return this process's environment with that Node first on PATH: the tools start others by name."""
    return {**os.environ, "PATH": f"{NODE_TOOLS / 'node_modules' / '.bin'}{os.pathsep}{os.environ.get('PATH', '')}"}


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Start a server with its home in `folder` and return its URL."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "benchmarks.server.conformance_server", str(folder / "config")],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=Path(__file__).resolve().parents[2],
        env=node_variables() | {"TOPROPE_HOME": str(folder / "home"), "TOPROPE_CONFIG": str(folder / "config")},
    )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        if not url:
            raise RuntimeError("the server did not start")
        yield url
    finally:
        end_process(process)
        if process.stdout is not None:
            process.stdout.close()


def run_suite(url: str, revision: str, results: Path) -> dict[str, tuple[int, list[str]]]:
    """Return the checks that passed and the texts of those that failed, by scenario, of a whole revision's
    requirements.
    """
    tool = node_tool("conformance")
    if tool is None:
        raise RuntimeError(f"The conformance suite is not installed. {NODE_TOOLS_MISSING}")
    subprocess.run(
        [*tool, "server", "--url", url, "--requirements", revision, "--output-dir", str(results)],
        capture_output=True,
        timeout=LIMIT_S,
        env=node_variables(),
        check=False,  # scenarios with fixtures fail by design
    )
    found = {}
    for file in sorted(results.glob("server-*/checks.json")):
        name = re.sub(r"-\d{4}-\d\d-\d\dT[\d-]+Z$", "", file.parent.name).removeprefix("server-")
        checks = json.loads(file.read_text())
        failed = [f"{check['id']}: {check.get('errorMessage')}" for check in checks if check["status"] == "FAILURE"]
        found[name] = (sum(check["status"] == "SUCCESS" for check in checks), failed)
    return found


def measure() -> tuple[list[tuple[str, str, int, list[str]]], int]:
    """Return revision, scenario, checks passed and failures, for every scenario without fixtures; and how many of the
    others failed, as they have to."""
    with (
        scratch("conformance") as name,
        served(name) as url,
        ThreadPoolExecutor() as threads,
    ):
        suites = {
            revision: threads.submit(run_suite, url, revision, name / revision)  # waits more than it works
            for revision in SCENARIOS
        }
        rows, others = [], 0
        for revision, scenarios in SCENARIOS.items():
            found = suites[revision].result()
            others += sum(bool(failed) for name, (_, failed) in found.items() if name not in scenarios)
            for scenario in scenarios:
                passed, failed = found.get(scenario, (0, ["the suite did not run it"]))
                rows.append((revision, scenario, passed, failed if passed or failed else ["no check was made"]))
    return rows, others


def main() -> int:
    """Print the table and the figures; exit with 1 if a scenario fails, with 2 if the control failed."""
    if node_tool("conformance") is None:
        return refuse(f"the conformance suite is not installed: {NODE_TOOLS_MISSING}")
    rows, others = measure()
    table = Table(title="MCP conformance, scenarios without fixtures")
    for column in ("revision", "scenario", "checks passed", "failed"):
        table.add_column(column)
    for revision, scenario, passed, failed in rows:
        table.add_row(revision, scenario, str(passed), "\n".join(failed))
    Console().print(table)
    failing = sum(bool(failed) for *_, failed in rows)
    return report(
        "Conformance",
        {"scenarios": len(rows), "passed": len(rows) - failing, "failed": failing, "with_fixtures_failed": others},
        goals={"failed": "== 0"},
        control="scenarios whose fixtures the server does not have must fail.",
        control_failed="" if others else "all of them passed",
    )


if __name__ == "__main__":
    sys.exit(main())
