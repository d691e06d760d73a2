"""Entering this installation into the configuration of an MCP client, beside what the client has there.

The files belong to the clients and their users, so they are read before they are changed, changed in one entry only,
backed up, and replaced in one step. One that is no JSON is left alone. No key is written into them: clients keep such
files readable and share them; the owner's settings.yaml is where keys lie.
"""

from __future__ import annotations

import difflib
import json
import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toprope.atomic import write_text
from toprope.errors import InvalidValue

if TYPE_CHECKING:
    from toprope_server.mcp.roles import Role

__all__ = ["CLIENTS", "Plan", "client_lines", "configuration_file", "main", "plan", "server_command", "write"]

CLIENTS = ("claude-desktop", "claude-code", "inspector")
NAME = "toprope"
_USERS = {
    "HF_TOKEN": "policy",
    "HUGGING_FACE_HUB_TOKEN": "policy",
    "WANDB_API_KEY": "trainer",
    "TINKER_API_KEY": "trainer",
    "OPENROUTER_API_KEY": "models",
}
"""Who needs a well-known key; the owner says for others, or every component gets them."""
_PASSED_ON = ("TOPROPE_HOME", "TOPROPE_CONFIG")
"""Variables that say where everything lies: no secrets, and needed before settings.yaml can be found."""


@dataclass(frozen=True)
class Plan:
    """What is to be written where."""

    client: str
    path: Path
    entry: dict[str, Any]
    """Ours, below mcpServers."""
    after: str
    """What the person does next."""


def server_command() -> list[str]:
    """The argv by which a client starts this installation: absolute, because clients pass on hardly any PATH."""
    return [sys.executable, "-P", "-m", "toprope_server.cli", "serve"]


def client_lines() -> list[str]:
    """Lines to paste into clients, for this installation."""
    command, *arguments = server_command()
    configuration = {"mcpServers": {NAME: {"command": command, "args": arguments}}}
    shell = shlex.join([command, *arguments])
    return [
        "Claude Desktop (claude_desktop_config.json):",
        json.dumps(configuration, indent=2),
        "",
        "Claude Code:",
        f"claude mcp add toprope -- {shell}",
        "",
        "MCP Inspector:",
        f"npx @modelcontextprotocol/inspector {shell}",
    ]


def configuration_file(
    client: str, *, platform: str | None = None, environ: Mapping[str, str] | None = None, project: Path | None = None
) -> Path:
    """Where a client reads its servers from.

    Args:
        client: One of CLIENTS.
        platform: As sys.platform; this one's when None.
        environ: This process's when None.
        project: Claude Code: a folder whose .mcp.json is meant.

    Raises:
        InvalidValue: There is no such client.
    """
    platform = platform or sys.platform
    environ = os.environ if environ is None else environ
    user = Path(environ.get("USERPROFILE" if platform == "win32" else "HOME") or Path.home())
    if client == "claude-desktop":
        if platform == "darwin":
            folder = user / "Library" / "Application Support"
        elif platform == "win32":
            folder = Path(environ.get("APPDATA") or user / "AppData" / "Roaming")
        else:
            folder = Path(environ.get("XDG_CONFIG_HOME") or user / ".config")
        return folder / "Claude" / "claude_desktop_config.json"
    if client == "claude-code":
        if project is not None:
            return project / ".mcp.json"
        return Path(environ.get("CLAUDE_CONFIG_DIR") or user) / ".claude.json"
    if client == "inspector":
        named = environ.get("MCP_CATALOG_PATH")
        return Path(named) if named else user / ".mcp-inspector" / "mcp.json"
    near = difflib.get_close_matches(client, CLIENTS, n=1, cutoff=0.4)
    raise InvalidValue(
        f"There is no client {client!r}.",
        hint=f"Did you mean {near[0]}?" if near else f"There are: {', '.join(CLIENTS)}.",
    )


def plan(client: str, *, http: bool = False, project: Path | None = None, role: Role | None = None) -> Plan:
    """What `install` would do.

    Raises:
        InvalidValue: There is no such client; the option does not go with it; the owner's settings cannot be read.
    """
    if project is not None and client != "claude-code":
        raise InvalidValue("--project is for claude-code: other clients have one file for their user.")
    path = configuration_file(client, project=project)
    after = {
        "claude-desktop": "Quit Claude Desktop and start it again.",
        "claude-code": "Start Claude Code again; /mcp shows the server.",
        "inspector": f"Run: npx @modelcontextprotocol/inspector --catalog {shlex.quote(str(path))} --server {NAME}",
    }[client]
    wanted = role.arguments if role is not None else []
    if http:
        serve = " ".join(["toprope serve --http", *wanted])
        return Plan(client, path, _http_entry(client), f"Start '{serve}'. {after}")
    command, *arguments = [*server_command(), *wanted]
    entry: dict[str, Any] = {"command": command, "args": arguments}
    if client == "claude-code":
        entry = {"type": "stdio", **entry}
    if places := {name: os.environ[name] for name in _PASSED_ON if os.environ.get(name)}:
        entry["env"] = places
    return Plan(client, path, entry, after)


def _http_entry(client: str) -> dict[str, Any]:
    from toprope.settings.owner import Home
    from toprope_server.http.app import PATH, TOKEN_VARIABLE

    if client != "claude-code":
        raise InvalidValue(
            f"{client} would keep the token itself in its configuration, so it is not written there.",
            hint="Install it without --http; or start 'toprope serve --http' and enter URL and token in the client.",
        )
    url = f"http://127.0.0.1:{Home.locate().settings().http.port}{PATH}"
    return {"type": "http", "url": url, "headers": {"Authorization": f"Bearer ${{{TOKEN_VARIABLE}}}"}}


def write(plan: Plan) -> tuple[bool, Path | None]:
    """Merges our entry into the client's file.

    Returns:
        Whether the file changed, and the backup of what was there.

    Raises:
        InvalidValue: The file is no JSON of that kind, or cannot be written; it was left as it is.
    """
    target = plan.path.resolve()
    try:
        old = target.read_text(encoding="utf-8") if target.exists() else None
        data = json.loads(old) if old and old.strip() else {}
    except (OSError, ValueError) as error:
        raise InvalidValue(
            f"{plan.path} cannot be read as JSON ({error}); it was left as it is.",
            hint=f"Mend it, or paste what 'toprope install {plan.client} --print' shows.",
        ) from None
    if not isinstance(data, dict) or not isinstance(data.get("mcpServers", {}), dict):
        raise InvalidValue(f"{plan.path} is not a client's configuration; it was left as it is.")
    servers = data.setdefault("mcpServers", {})
    if servers.get(NAME) == plan.entry:
        return False, None
    servers[NAME] = plan.entry
    text = json.dumps(data, indent=2, ensure_ascii=False) + "\n"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        backup = _back_up(target, old) if old is not None else None
        mode = target.stat().st_mode & 0o777 if old is not None else 0o600
        write_text(target, text, mode=mode)
    except OSError as error:
        raise InvalidValue(f"{plan.path} cannot be written: {error.strerror or error}.") from None
    return True, backup


def _back_up(path: Path, text: str) -> Path:
    """A copy that is never overwritten, readable by the user only: such files hold other servers' keys."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    for number in range(1000):
        backup = path.with_name(f"{path.name}.{stamp}{f'-{number}' if number else ''}.bak")
        try:
            descriptor = os.open(backup, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            continue
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        return backup
    raise OSError("there are too many backups")


def main(
    client: str,
    *,
    show: bool,
    http: bool,
    project: Path | None,
    variables: Sequence[str],
    role: Role | None = None,
) -> list[str]:
    """`toprope install`: the lines to print.

    Raises:
        InvalidValue: See `plan`, `write`; or a variable is not set or cannot be kept.
    """
    planned = plan(client, http=http, project=project, role=role)
    kept = [_variable(one) for one in variables]
    if show:
        return [f"# {planned.path}", json.dumps({"mcpServers": {NAME: planned.entry}}, indent=2)]
    lines = []
    if kept:
        from toprope.settings.owner import Home, set_variable

        file = Home.locate().settings_file
        for component, name in kept:
            changed = set_variable(file, component, name, os.environ[name])
            to = "every component" if component == "*" else component
            lines.append(f"{name} {'is kept' if changed else 'was kept already'} in {file}, for {to}.")
    changed, backup = write(planned)
    if changed:
        lines.append(f"Toprope is entered in {planned.path}.")
        if backup is not None:
            lines.append(f"What was there before: {backup}")
        lines.append(planned.after)
    else:
        lines.append(f"{planned.path} has this installation already; nothing was written.")
    return lines


def _variable(given: str) -> tuple[str, str]:
    """Component and name; the value stays where it is until it is written."""
    from toprope.settings.owner import RECIPIENTS

    component, colon, name = given.rpartition(":")
    if not colon:
        component = _USERS.get(name, "*")
    if component not in RECIPIENTS:
        raise InvalidValue(f"There is no component {component!r}.", hint=f"There are: {', '.join(RECIPIENTS)}.")
    if "=" in name or not name.isidentifier():
        raise InvalidValue(
            f"--variable takes the name of a variable, not {'a value' if '=' in name else repr(name)}.",
            hint="A value in a command line can be read by others: export it first, then give its name.",
        )
    if not os.environ.get(name):
        raise InvalidValue(f"{name} is not set in this shell; nothing was written.", hint=f"export {name}=... first.")
    return component, name
