"""Add this installation to the configuration of an MCP client.

The files belong to the clients and their users: only our entry changes, the old file is backed up, and the new one
replaces it atomically. A file that is not JSON is left alone. No key is written: clients keep such files readable and
share them; keys belong in the owner's settings.yaml.
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

CLIENTS = ("claude-desktop", "claude-code", "inspector")
NAME = "toprope"
_USERS = {
    "HF_TOKEN": "policy",
    "HUGGING_FACE_HUB_TOKEN": "policy",
    "WANDB_API_KEY": "trainer",
    "TINKER_API_KEY": "trainer",
    "OPENROUTER_API_KEY": "models",
}
"""The component that needs a well-known key. Other keys go to every component unless the owner names one."""
_PASSED_ON = ("TOPROPE_HOME", "TOPROPE_CONFIG")
"""Variables that locate the home and settings.yaml itself; not secrets."""


@dataclass(frozen=True)
class Plan:
    """An entry to write into a client's file."""

    client: str
    path: Path
    entry: dict[str, Any]
    """Our entry, below mcpServers."""
    after: str
    """The next step for the person."""


def server_command() -> list[str]:
    """The argv that starts this installation from any folder; absolute, because clients pass on hardly any PATH."""
    return [sys.executable, "-P", "-m", "toprope_server.cli", "serve"]


def client_lines() -> list[str]:
    """The configuration of each client for this installation."""
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
    """The file that lists a client's servers.

    Args:
        platform: As sys.platform; the present one if None.
        environ: Environment variables; this process's if None.
        project: For Claude Code: use .mcp.json in this folder.

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
        hint=f"Did you mean {near[0]}?" if near else f"The clients are: {', '.join(CLIENTS)}.",
    )


def plan(client: str, *, http: bool = False, project: Path | None = None, role: Role | None = None) -> Plan:
    """Plan an installation.

    Raises:
        InvalidValue: Unknown client; an option that it does not have; invalid settings of the owner.
    """
    if project is not None and client != "claude-code":
        raise InvalidValue("--project is for claude-code: other clients have one file for their user.")
    path = configuration_file(client, project=project)
    after = {
        "claude-desktop": "Restart Claude Desktop.",
        "claude-code": "Restart Claude Code; /mcp shows the server.",
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
            f"{client} would store the token itself in its configuration, so Toprope does not write it there.",
            hint="Install it without --http; or start 'toprope serve --http' and enter URL and token in the client.",
        )
    url = f"http://127.0.0.1:{Home.locate().settings().http.port}{PATH}"
    return {"type": "http", "url": url, "headers": {"Authorization": f"Bearer ${{{TOKEN_VARIABLE}}}"}}


def write(plan: Plan) -> tuple[bool, Path | None]:
    """Merge our entry into the client's file.

    Returns:
        True if the file changed, and the backup of the old file.

    Raises:
        InvalidValue: The file is not a client's configuration, or cannot be written; it is unchanged.
    """
    target = plan.path.resolve()
    try:
        old = target.read_text(encoding="utf-8") if target.exists() else None
        data = json.loads(old) if old and old.strip() else {}
    except (OSError, ValueError) as error:
        raise InvalidValue(
            f"{plan.path} cannot be read as JSON ({error}); it was left as it is.",
            hint=f"Fix it, or paste what 'toprope install {plan.client} --print' shows.",
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
    """Save a copy that is never overwritten, readable by the user only: such files hold other servers' keys."""
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
    """`toprope install`: install, and return the lines to print.

    Raises:
        InvalidValue: See `plan`, `write`; or a variable is not set or not valid.
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
            lines.append(f"{name} {'is now' if changed else 'was already'} in {file}, for {to}.")
    changed, backup = write(planned)
    if changed:
        lines.append(f"Added Toprope to {planned.path}.")
        if backup is not None:
            lines.append(f"Backup of the old file: {backup}")
        lines.append(planned.after)
    else:
        lines.append(f"{planned.path} already has this installation; nothing was written.")
    return lines


def _variable(given: str) -> tuple[str, str]:
    """Component and name of a variable that is set."""
    from toprope.settings.owner import RECIPIENTS

    component, colon, name = given.rpartition(":")
    if not colon:
        component = _USERS.get(name, "*")
    if component not in RECIPIENTS:
        raise InvalidValue(
            f"There is no component {component!r}.", hint=f"The components are: {', '.join(RECIPIENTS)}."
        )
    if "=" in name or not name.isidentifier():
        raise InvalidValue(
            f"--variable takes the name of a variable, not {'a value' if '=' in name else repr(name)}.",
            hint="Others can read values in a command line: export the variable, then give its name.",
        )
    if not os.environ.get(name):
        raise InvalidValue(f"{name} is not set in this shell; nothing was written.", hint=f"export {name}=... first.")
    return component, name
