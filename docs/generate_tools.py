"""Writes docs/tools.md: every tool as clients see it, with an answer from a real session.

    python -P docs/generate_tools.py            plays a session (about three minutes) and writes the page
    python -P docs/generate_tools.py --schemas  keeps the answers that stand there and renews the rest

The page would be wrong the day after somebody changes a parameter; tests/test_docs.py holds it to the schemas.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import anyio

PAGE = Path(__file__).with_name("tools.md")
_HEAD = """# The tools, one by one

What an agent can call, as clients see it. `python -P docs/generate_tools.py` makes this page out of the schemas,
with the answers of one session on two CPU cores. Each answer is a short text, shown here, and the same as a typed
structure, whose fields are named below it. A wrong call is refused with the cause, the valid values and the next step,
and says whether anything was changed.
"""
_LONGEST_LINES = 16
_LONGEST_LINE = 320


def main() -> int:
    """Writes the page."""
    tools = anyio.run(_tools)
    if "--schemas" in sys.argv[1:]:
        examples = examples_of(PAGE.read_text(encoding="utf-8"))
    else:
        with tempfile.TemporaryDirectory(prefix="toprope-docs-") as home:
            examples = anyio.run(_session, Path(home))
    PAGE.write_text(render(tools, examples), encoding="utf-8")
    print(f"wrote {PAGE}: {len(tools)} tools, {len(examples)} answers")
    return 0


def render(tools: Iterable[Any], examples: Mapping[str, tuple[str, str]]) -> str:
    """The page.

    Args:
        tools: As a client lists them.
        examples: By tool: the call and the text of its answer.
    """
    parts = [_HEAD]
    for tool in tools:
        parts.append(f"## {tool.name}\n\n{_prose(tool.description or '')}\n")
        parameters = tool.input_schema.get("properties", {})
        if parameters:
            needed = tool.input_schema.get("required", [])
            rows = [
                f"| `{name}`{'' if name in needed else ' (optional)'} | {_type(schema)} | {_meaning(schema)} |"
                for name, schema in parameters.items()
            ]
            parts.append("\n".join(["| parameter | type | meaning |", "| --- | --- | --- |", *rows]) + "\n")
        else:
            parts.append("It takes no parameters.\n")
        if tool.name in examples:
            call, answer = examples[tool.name]
            parts.append(f"```text\n> {call}\n{answer}\n```\n")
        fields = (tool.output_schema or {}).get("properties", {})
        parts.append("Structure: " + ", ".join(f"`{name}`" for name in fields) + ".\n")
    return "\n".join(parts)


def examples_of(page: str) -> dict[str, tuple[str, str]]:
    """The calls and answers that stand in a page."""
    found = {}
    for section in re.split(r"^## ", page, flags=re.MULTILINE)[1:]:
        shown = re.search(r"```text\n> (.*)\n([\s\S]*?)\n```", section)
        if shown:
            found[section.split("\n", 1)[0].strip()] = (shown.group(1), shown.group(2))
    return found


def _prose(text: str) -> str:
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))


def _type(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return "one of " + ", ".join(f"`{one}`" for one in schema["enum"])
    kind = str(schema.get("type", "any"))
    if kind == "array":
        kind = f"array of {schema.get('items', {}).get('type', 'anything')}"
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is not None and high is not None:
        kind += f", {low:g} to {high:g}"
    if "maxLength" in schema:
        kind += f", at most {schema['maxLength']} characters"
    if schema.get("default") is not None:
        kind += f", default `{json.dumps(schema['default'])}`"
    return kind


def _meaning(schema: Mapping[str, Any]) -> str:
    return str(schema.get("description", "")).replace("|", "\\|")


async def _tools() -> list[Any]:
    from mcp.client import Client

    from server.app import create_server

    async with Client(create_server()) as client:
        return list((await client.list_tools()).tools)


async def _session(home: Path) -> dict[str, tuple[str, str]]:
    """Plays a session against a real server and takes down its answers."""
    import os

    from mcp.client import Client
    from mcp.client.stdio import StdioServerParameters

    variables = {name: os.environ[name] for name in ("PATH", "HOME", "PYTHONPATH") if name in os.environ}
    variables |= {"TOPROPE_HOME": str(home / "home"), "TOPROPE_CONFIG": str(home / "config")}
    server = StdioServerParameters(command=sys.executable, args=["-P", "-m", "server.cli", "serve"], env=variables)
    shown: dict[str, tuple[str, str]] = {}

    async with Client(server) as client:

        async def call(tool: str, /, **arguments: Any) -> dict[str, Any]:
            result = await client.call_tool(tool, arguments)
            text = result.content[0].text
            if result.is_error:
                raise RuntimeError(text)
            said = ", ".join(f"{name}={json.dumps(value)}" for name, value in arguments.items())
            shown[tool] = (_clean(f"{tool}({said})", home), _clean(text, home))
            return dict(result.structured_content or {})

        async def until_ended(run_id: str) -> None:
            while (await call("check_status", run_ids=[run_id], wait_s=45))["runs"][0]["state"] not in _ENDED:
                pass

        await call("list_environments", query="backward")
        name = "reasoning_gym/spell_backward"
        await call("describe_environment", name=name)
        draft_id = (await call("select_environment", name=name))["draft_id"]
        changes = {"budget.steps": 600, "budget.max_train_seconds": 30, "evaluation.heldout_tasks": 100}
        await call("edit_config", draft_id=draft_id, changes=changes)
        await call("get_config", draft_id=draft_id, section="budget")
        test_id = (await call("test_inference", draft_id=draft_id, tasks=32, group_size=8))["run_id"]
        await until_ended(test_id)
        run_id = (await call("start_training", draft_id=draft_id))["run_id"]
        state = ""
        while state not in ("training", *_ENDED):
            state = (await call("check_status", run_ids=[run_id], wait_s=2))["runs"][0]["state"]
        during = shown["check_status"]
        await call("stop_training", run_id=run_id)
        if "resume_training" in {tool.name for tool in (await client.list_tools()).tools}:
            await call("resume_training", run_id=run_id)
            await until_ended(run_id)
        shown["check_status"] = during
        await call("get_results", run_id=run_id)
        if "ask_checkpoint" in {tool.name for tool in (await client.list_tools()).tools}:
            question = "Spell this word backward (example: sun -> nus): rope"
            asked = await call("ask_checkpoint", run_id=run_id, prompts=[question])
            await until_ended(asked.get("run_id", run_id))
            shown["check_status"] = during
        await call("list_runs")
        await call("read_logs", run_id=run_id, component="keeper", lines=5)
        await call("browse_rollouts", run_id=run_id, order="most_changed")
        forked = (await call("fork_config", run_id=run_id))["draft_id"]
        edited = dict(shown)
        await call("edit_config", draft_id=forked, changes={"optimizer.learning_rate": 0.0005})
        shown["edit_config"] = edited["edit_config"]
        await call("diff_config", a=forked, b=run_id)
        await call("undo_edit", draft_id=forked, revision=1)
        hypothesis = "600 steps of exact match as the reward are enough to spell short words backward"
        await call(
            "note_experiment",
            hypothesis=hypothesis,
            run_ids=[run_id],
            outcome="Accuracy rose and was still rising at the end.",
            decision="repeat",
            goal="Half of the held-out words, spelled backward.",
        )
        again = (await call("reproduce_run", run_id=run_id))["run_id"]
        await call("stop_training", run_id=again)
        shown["stop_training"] = edited["stop_training"]
        await call("get_handoff")
    return shown


_ENDED = ("completed", "stopped", "failed", "lost")


def _clean(text: str, home: Path) -> str:
    """An answer as a page shows it: long lines and answers cut, and no path of the machine that played the session."""
    text = text.replace(str(home / "home"), "~/.local/share/toprope").replace(str(home / "config"), "~/.config/toprope")
    lines = [line if len(line) <= _LONGEST_LINE else line[:_LONGEST_LINE] + " …" for line in text.splitlines()]
    if len(lines) > _LONGEST_LINES:
        lines = [*lines[: _LONGEST_LINES - 1], "…", lines[-1]]
    return "\n".join(lines).replace("```", "'''")


if __name__ == "__main__":
    raise SystemExit(main())
