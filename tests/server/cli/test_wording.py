"""Messages of the command line name its commands, not an agent's tools."""

from __future__ import annotations

import shlex
from typing import Any

import pytest
import typer.main
from toprope_server.cli.app import build
from toprope_server.cli.call import parse
from toprope_server.cli.wording import CALLED, COMMANDS, in_commands
from toprope_server.mcp.tool_registry import ALL_TOOLS
from typer.testing import CliRunner

from toprope.next_steps import Step, split
from toprope.text_format import call

ARGUMENTS = {
    "run_id": "sort-1", "run_ids": ["sort-1", "sort-2"], "component": "trainer", "lines": 20, "steps": 40,
    "seconds": 60, "order": "best", "task": "a b", "part": "exact", "failed": True, "name": "sort_letters",
    "knobs": {"level": 3}, "full": True, "form": "gguf", "hub": "me/model", "detail": "detailed", "cursor": "best:1/2",
    "what": "textarena", "group": 9, "sources": ["sort-1"], "tasks": "inspect_evals/gsm8k", "limit": 7,
}  # fmt: skip
CLI = typer.main.get_command(build())


def parsed(line: str) -> dict[str, object]:
    """Parse a command line as the program does, without running it."""
    words: list[str] = shlex.split(line)
    command: Any = CLI
    context: Any = None
    assert words.pop(0) == "toprope"
    while hasattr(command, "get_command"):
        context = command.context_class(command, parent=context)
        command = command.get_command(context, words.pop(0))
        assert command is not None, line
    return command.make_context("x", words, parent=context).params


def test_every_tool_is_a_command_or_the_agents():
    assert {spec.name for spec in ALL_TOOLS} <= set(COMMANDS) | CALLED
    assert not set(COMMANDS) & CALLED


@pytest.mark.parametrize("tool", COMMANDS)
def test_steps_become_commands_that_the_program_takes(tool):
    command = COMMANDS[tool]
    given = {name: ARGUMENTS[name] for name in (*command.arguments, *command.options)}
    found = parsed(command.line(given))
    for name, value in given.items():
        if isinstance(command.options.get(name), dict):
            value = True
        if isinstance(value, dict):
            value = [f"{key}={part}" for key, part in value.items()]
        assert value in found.values() or [value] in found.values() or str(value) in map(str, found.values()), name
    schema = next((spec.build().parameters["properties"] for spec in ALL_TOOLS if spec.name == tool), None)
    assert schema is None or set(given) <= set(schema)


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("list_runs names the runs there are.", "`toprope runs` names the runs there are."),
        (
            f"{call('read_logs', run_id='a', component='trainer', before=7)} shows more.",
            "`toprope logs a trainer` shows more.",
        ),
        ("resume_training continues it.", "`toprope resume RUN` continues it."),
        ('check_status(run_ids=["a", "b"], wait_s=45, until=["end"])', "`toprope watch a b`"),
        ("read_logs(component='environment') has it (all).", "`toprope logs RUN environment` has it (all)."),
        ("stop_training, then edit_config x", "`toprope stop RUN`, then `toprope call edit_config` x"),
        ('fork_config(run_id="a (b)") makes one.', "`toprope call fork_config 'run_id=a (b)'` makes one."),
        (
            'edit_config(draft_id=..., changes={"budget.steps": 9}) helps.',
            "`toprope call edit_config draft_id=... 'changes={\"budget.steps\": 9}'` helps.",
        ),
        ("`toprope runs` and list_runs_of and /list_runs", "`toprope runs` and list_runs_of and /list_runs"),
    ],
)
def test_messages_are_worded_for_the_terminal(message, said):
    # A step without its run names the placeholder, or the run that the message is about.
    assert in_commands(message) == said
    assert in_commands(message, "x-1") == said.replace("RUN", "x-1")


def test_other_steps_become_calls_that_the_program_takes():
    given = {"draft_id": "d", "changes": {"sft.epochs": 2, "run.name": "it's"}, "seeds": 3}
    said = in_commands(call("edit_config", **given)).strip("`")
    words = parsed(said)
    schema = next(spec.build().parameters for spec in ALL_TOOLS if spec.name == "edit_config")
    assert words["tool"] == "edit_config" and parse(words["arguments"], schema) == {**given}


def test_split_keeps_every_character_and_reads_arguments():
    message = 'First read_logs(run_id="a)", lines=5, x=null), then stop_training (or read_logs).'
    parts = split(message, ["read_logs", "stop_training"])
    assert "".join(part if isinstance(part, str) else part.written for part in parts) == message
    steps = [part for part in parts if isinstance(part, Step)]
    assert [step.tool for step in steps] == ["read_logs", "stop_training", "read_logs"]
    assert dict(steps[0].arguments) == {"run_id": "a)", "lines": 5, "x": None}


def test_texts_with_quotes_and_backslashes_come_back_from_a_proposed_call():
    given = {"run_id": "sort-1", "task": 'say "a\\b")\nä', "failed": True}
    message = f"More: {call('browse_rollouts', **given)}"
    [_, step] = split(message, ["browse_rollouts"])
    assert isinstance(step, Step) and dict(step.arguments) == given


@pytest.mark.parametrize(
    "arguments",
    [
        ["status", "nobody"], ["watch", "nobody"], ["logs", "nobody"], ["results", "nobody"], ["rollouts", "nobody"],
        ["chat", "nobody"], ["report", "nobody"], ["stop", "nobody"], ["resume", "nobody"], ["env", "try", "nobody"],
        ["env", "check", "nobody"], ["data", "export", "nobody"], ["data", "show", "nobody"],
    ],
)  # fmt: skip
def test_errors_of_commands_name_no_tool(arguments, tmp_path, monkeypatch):
    monkeypatch.setenv("TOPROPE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TOPROPE_CONFIG", str(tmp_path / "config"))
    done = CliRunner().invoke(build(), arguments)
    assert done.exit_code in (1, 2) and done.stderr.startswith("toprope: ")
    named = [part.tool for part in split(done.stderr, [*COMMANDS, *CALLED]) if isinstance(part, Step)]
    assert all(f"toprope call {name}" in done.stderr for name in named)
