"""`toprope demo`: the main job, end to end, as an agent would do it.

It starts the server over stdio with the official MCP client and uses only the tools. A tiny policy, made at the
first use, learns to spell words backward; a report shows held-out accuracy before and after. Exit status 0:
accuracy rose; 1: no rise is shown; 2: something failed.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mcp import Client, StdioServerParameters
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from toprope_server.cli.context import program
from toprope_server.cli.install import passed_on

ENVIRONMENT = "reasoning_gym/spell_backward"
PRESET = "cpu-embedded"
_WAIT_S = 45


class DemoFailed(Exception):
    """A tool refused, or a run did not complete; the text is the tool's."""


@dataclass
class DemoReport:
    """Outcome of the demo. `results` and `test` are structures of get_results."""

    run_id: str
    results: dict[str, Any]
    test: dict[str, Any]
    start_answer_seconds: float
    """Between the call of start_training and its answer."""
    seconds: float
    """The whole demo."""
    calls: dict[str, int] = field(default_factory=dict)


def server_parameters(variables: Mapping[str, str] | None = None) -> StdioServerParameters:
    """Parameters to start the server as a client's configuration would."""
    own_variables = {name: value for name, value in os.environ.items() if name.startswith("TOPROPE_")}
    return StdioServerParameters(
        command=sys.executable,
        args=["-P", "-m", "toprope_server.cli", "serve"],
        env={**passed_on(), **own_variables, **(variables or {})},
    )


class _Agent:
    """Call tools and show the calls to a person."""

    def __init__(self, client: Client, console: Console) -> None:
        self._client, self._console = client, console
        self.calls: dict[str, int] = {}

    async def call(self, tool: str, *, refused: bool = False, show: int = 4, **arguments: Any) -> dict[str, Any]:
        """Call a tool and return its structure; if it is expected to be `refused`, its text."""
        argument_text = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
        self._console.print(f"[bold cyan]{tool}[/]({escape(argument_text)})")
        answer = await self._call(tool, arguments)
        text = "\n".join(part.text for part in answer.content if part.type == "text")
        for line in text.splitlines()[:show]:
            self._console.print(f"  {escape(line)}", style="yellow" if answer.is_error else "dim", soft_wrap=True)
        if answer.is_error != refused:
            raise DemoFailed(text if answer.is_error else f"{tool} was expected to refuse, but did not: {text}")
        return answer.structured_content or {"text": text}

    async def follow(self, run_id: str) -> None:
        """Wait for a run's end with check_status; draw its progress from the notifications."""
        columns = (TextColumn("  {task.description}"), BarColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self._console, transient=True, refresh_per_second=4) as bar:
            task = bar.add_task("starting", total=None)

            async def show_progress(done: float, total: float | None, message: str | None) -> None:
                bar.update(task, completed=done, total=total, description=escape(message or ""))

            while True:
                answer = await self._call("check_status", {"run_ids": [run_id], "wait_s": _WAIT_S}, show_progress)
                if answer.is_error:
                    raise DemoFailed(answer.content[0].text)
                [run] = (answer.structured_content or {})["runs"]
                for line in evaluation_lines(run):
                    bar.console.print(f"  {escape(line)}", style="dim")
                if run["state"] == "completed":
                    return
                if run["state"] in ("failed", "stopped", "lost"):
                    raise DemoFailed(answer.content[0].text)

    async def _call(self, tool: str, arguments: dict[str, Any], progress: Any = None) -> Any:
        self.calls[tool] = self.calls.get(tool, 0) + 1
        return await self._client.call_tool(tool, arguments, progress_callback=progress, read_timeout_seconds=120)


async def run_demo(
    console: Console,
    *,
    changes: Mapping[str, Any] | None = None,
    variables: Mapping[str, str] | None = None,
) -> DemoReport:
    """Do the whole job.

    Args:
        console: Shows it.
        changes: Further fields to edit, for a control run or a shorter one.
        variables: Further environment variables for the server.

    Raises:
        DemoFailed: A tool refused or a run did not complete.
    """
    failed: DemoFailed | None = None
    async with Client(server_parameters(variables)) as client:
        try:
            return await _drive(_Agent(client, console), console, dict(changes or {}))
        except DemoFailed as error:  # the client would wrap it into exception groups
            failed = error
    raise failed


async def _drive(agent: _Agent, console: Console, changes: dict[str, Any]) -> DemoReport:
    began = time.monotonic()
    await agent.call("list_environments", query="spell backward")
    draft = await agent.call("select_environment", name=ENVIRONMENT, preset=PRESET)
    draft_id = draft["draft_id"]
    await agent.call("get_config", draft_id=draft_id, section="optimizer", show=6)
    console.print("\n[bold]A locked field is refused, with the owner's reason:[/]")
    await agent.call("edit_config", refused=True, draft_id=draft_id, changes={"optimizer.learning_rate": 0.5})
    console.print("\n[bold]Other fields can be edited, all or none, converted to the field's type:[/]")
    edits = {"algorithm.seed": "1", "evaluation.examples": 6} | changes
    await agent.call("edit_config", draft_id=draft_id, changes=edits)

    console.print("\n[bold]Before training: what can the policy do?[/] (the first use makes it)")
    test = await agent.call("test_inference", draft_id=draft_id, tasks=64, group_size=8)
    await agent.follow(test["run_id"])
    tested = await agent.call("get_results", run_id=test["run_id"], show=3)

    console.print("\n[bold]Training[/]")
    asked_at = time.monotonic()
    started = await agent.call("start_training", draft_id=draft_id)
    answer_s = time.monotonic() - asked_at
    await agent.follow(started["run_id"])
    results = await agent.call("get_results", run_id=started["run_id"], detail="detailed", show=0)
    return DemoReport(
        run_id=started["run_id"],
        results=results["results"],
        test=tested["results"],
        start_answer_seconds=answer_s,
        seconds=time.monotonic() - began,
        calls=agent.calls,
    )


def show(console: Console, report: DemoReport) -> None:
    """Print the report."""
    results = report.results
    console.print()
    console.print(
        "The embedded policy had seen the format of an answer and letters in random order, but never a word reversed. "
        "The gain comes from reward alone, on words that share no content with training.\n"
    )
    evaluations = results["evaluations"]
    tasks = evaluations["after"]["sampled"]["tasks"]
    title = f"Accuracy on {tasks} held-out tasks of {results['environment']}, with 95 % intervals"
    table = Table(title=title, title_justify="left")
    for column in ("", "before", "after"):
        table.add_column(column, justify="left" if not column else "right")
    for kind, label in (("sampled", "sampled as in training"), ("greedy", "greedy")):
        table.add_row(label, *(_accuracy(evaluations[when].get(kind)) for when in ("before", "after")))
    console.print(table)
    console.print()
    answers = Table(title="Answers to validation tasks, greedy", title_justify="left")
    for column in ("task", "base policy", "checkpoint"):
        answers.add_column(column)
    examples = results["examples"][:6]
    shared = len(os.path.commonprefix([example["prompt"] for example in examples]))
    for example in examples:
        answers.add_row(
            escape(f"… {example['prompt'][shared:]}" if len(examples) > 1 else example["prompt"]),
            _judged(example["before"], example["before_success"]),
            _judged(example["after"], example["after_success"]),
        )
    console.print(answers)
    console.print()
    seconds = results["seconds"]
    console.print(f"training     {seconds['training']:.1f} s, {results['steps']} steps, {results['rollouts']} rollouts")
    console.print(f"first step   {seconds['to_first_step']:.1f} s after the request")
    console.print(f"whole demo   {report.seconds:.0f} s")
    console.print(f"checkpoint   {results['checkpoint']}", soft_wrap=True)
    console.print(f"plot         {results['plot']}", soft_wrap=True)


def _accuracy(measured: dict[str, Any] | None) -> str:
    if not measured:
        return "-"
    return f"{measured['accuracy']:.3f} [{measured['low']:.3f}, {measured['high']:.3f}]"


def _judged(answer: str | None, success: bool | None) -> str:
    return f"[{'green' if success else 'red'}]{escape(answer or '')}[/] {'✓' if success else '✗'}"


def evaluation_lines(run: dict[str, Any]) -> list[str]:
    """Return a line for each new evaluation of a run, as check_status tells of them."""
    evaluations = [event["data"] for event in run.get("events", ()) if event["kind"] == "evaluation"]
    return [
        f"evaluation {evaluation['label']}: accuracy {evaluation['accuracy']:.3f}"
        for evaluation in evaluations
        if "accuracy" in evaluation
    ]


def main(report_file: str | None = None, changes: Mapping[str, Any] | None = None) -> int:
    """Run the demo in this terminal; return the exit status.

    Args:
        report_file: The file for the report as JSON.
        changes: See `run_demo`.
    """
    console = Console(highlight=False)
    try:
        report = asyncio.run(run_demo(console, changes=changes))
    except DemoFailed as error:
        console.print(f"\nThe demo failed: {error}", style="red", markup=False, soft_wrap=True)
        return 2
    except KeyboardInterrupt:
        console.print(
            f"\nInterrupted. A run that was started continues; `{program()} runs` lists it, `stop` stops it.",
            markup=False,
            soft_wrap=True,
        )
        return 130
    if report_file is not None:
        Path(report_file).write_text(json.dumps(asdict(report)))
    show(console, report)
    from toprope_server.cli.install import client_lines

    console.print("\n[bold]To see runs in the browser:[/]")
    console.print(f"{program()} dashboard", markup=False, soft_wrap=True)
    console.print("\n[bold]To give these tools to an agent:[/]")
    for line in client_lines():
        console.print(line, markup=False, soft_wrap=True)
    if report.results["rose"]:
        console.print("\n[bold green]Accuracy rose.[/]")
        return 0
    console.print("\n[bold red]A rise of accuracy is not shown.[/]")
    return 1


if __name__ == "__main__":
    # Used by benchmarks: a file for the report, and fields to change as JSON.
    given = sys.argv[1:] + [None, None]
    sys.exit(main(given[0], json.loads(given[1]) if given[1] else None))
