"""Environments behind OpenEnv's protocol: reset, step and state over a WebSocket.

The target is a server's URL; a user's file with its `app` (`/path/server.py:app`), served by this interpreter's uvicorn
for the life of the worker; or a JSON object with `url`, or with `command` (a list of words; `{port}` is filled in) and
`folder`. A task is a seed of `reset`. The fields of observations and actions differ between environments: knobs name
the ones that the policy reads and writes if the schema does not determine them.
"""

from __future__ import annotations

import ast
import asyncio
import itertools
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from toprope.sdk.adapters._servers.openenv import Connection, Full, Server
from toprope.sdk.adapters._shared.listing import Listed
from toprope.sdk.authoring.env_managed import OwnLoop, Played, Session
from toprope.sdk.authoring.environment import Messages, Part, Task
from toprope.sdk.authoring.knobs import knob
from toprope.sdk.authoring.policy_client import PolicyRefused, ask
from toprope.sdk.discovery import first_line
from toprope.sdk.errors import EnvironmentMistake, InvalidRequest, LoadError

__all__ = ["PACKAGE", "REQUIREMENTS", "OpenEnv", "declared", "installed", "make"]

REQUIREMENTS = ("openenv==0.10.*",)
PACKAGE = "openenv"
_LOOK_AT = 4
"""Number of first observations compared to see if seeds make a difference."""
_NOT_SHOWN = ("done", "reward", "metadata")


@dataclass
class OpenEnvKnobs:
    """Knobs of an OpenEnv environment."""

    observation: str = knob("", help="observation field that the policy reads, dotted; empty: by the schema")
    action: str = knob("", help="action field for the answer; empty: by the schema")
    action_json: bool = knob(False, help="the answer is the whole action, as a JSON object")
    action_fields: dict[str, Any] = knob({}, help="further fields of every action")
    reset: dict[str, Any] = knob({}, help="parameters of reset besides the seed")
    system: str = knob("", help="system message before the first observation")
    turns: int = knob(16, ge=1, le=10_000, help="most actions in an episode")
    reward: Literal["sum", "last"] = knob("sum", help="how to combine the steps' rewards")
    reward_low: float = knob(0.0, help="smallest reward of an episode")
    reward_high: float = knob(1.0, help="largest reward of an episode")
    success_reward: float | None = knob(None, help="reward that counts as solved; null: reward_high")
    tasks: int = knob(0, ge=0, help="seeds; 0: endless")
    by_seed: bool | None = knob(None, help="tasks differ by seed although observations do not; null: find out")
    sessions: int = knob(16, ge=1, le=1000, help="concurrent episodes; a server may allow fewer")


class OpenEnv(OwnLoop):
    """An environment behind an OpenEnv server."""

    packages = ("openenv",)
    tags = ("openenv",)
    Knobs = OpenEnvKnobs  # type: ignore[assignment]

    def __init__(self, name: str, url: str, command: tuple[str, ...], folder: str) -> None:
        self.name = f"openenv/{name}"  # type: ignore[misc]
        self.__doc__ = f"An OpenEnv environment: {name}"
        self._place = url, command, folder
        self._server: Server | None = None
        self._read = self._write = ""
        self._by_seed = False
        self._gate: list[asyncio.Semaphore] = []

    def setup(self) -> None:
        knobs = self.knobs
        if knobs.reward_low >= knobs.reward_high:
            raise InvalidRequest(
                f"reward_low ({knobs.reward_low:g}) must be below reward_high ({knobs.reward_high:g})."
            )
        self.max_turns = knobs.turns
        what = "sum of" if knobs.reward == "sum" else "last of"
        self.parts = {"reward": Part(1.0, knobs.reward_low, knobs.reward_high, f"{what} the steps' rewards")}
        if self._server is None:
            self._server = Server(*self._place)
        schema = self._server.schema()
        self._read = knobs.observation or _only_text(schema.get("observation"), all_of=True)
        self._write = "" if knobs.action_json else knobs.action or _only_text(schema.get("action"), all_of=False)
        if not self._write and not knobs.action_json:
            fields = ", ".join((schema.get("action") or {}).get("properties") or {}) or "not told"
            raise InvalidRequest(
                f"Set the knob `action` to the field that takes the answer (fields: {fields}), or action_json."
            )
        self._gate = []

    def tasks(self) -> Iterator[Task]:
        seeds: Iterator[int] = iter(range(self.knobs.tasks)) if self.knobs.tasks else itertools.count()
        first = [(seed, _alone(self._first(seed))) for seed in itertools.islice(seeds, _LOOK_AT)]
        by_seed = self.knobs.by_seed
        if by_seed is None:
            by_seed = len({text for _, text in first}) < len(first)
        later = ((seed, _alone(self._first(seed))) for seed in seeds)
        for seed, text in itertools.chain(first, later):
            yield Task(self._messages(text), data={"seed": seed}, key=f"{text}\nseed {seed}" if by_seed else None)

    def success(self, parts: dict[str, float], reward: float) -> bool:
        wanted = self.knobs.success_reward
        return bool(parts["reward"] >= (self.knobs.reward_high if wanted is None else wanted) - 1e-9)

    async def rollout(self, session: Session) -> Played:
        if not self._gate:  # shared by all copies, which run on one event loop
            self._gate.append(asyncio.Semaphore(self.knobs.sessions))
        async with self._gate[0]:
            return await self._episode(session)

    async def _episode(self, session: Session) -> Played:
        async with _Opened(self._server) as episode:
            found = await episode.reset({**self.knobs.reset, "seed": self.task.data["seed"]})
            messages = self._messages(self._said(found))
            rewards, turns, truncated = [], 0, False
            while not found.get("done") and turns < self.max_turns:
                try:
                    said = await ask(session, messages)
                except PolicyRefused as refusal:
                    if turns and "no room for an answer" in str(refusal):  # the conversation exceeds the context
                        truncated = True
                        break
                    raise
                turns += 1
                truncated = said.pop("finish_reason") == "length"
                messages.append({"role": "assistant", "content": said.get("content") or ""})
                found = await episode.step(self._action(messages[-1]["content"]))
                rewards.append(_number(found.get("reward")))
                messages.append({"role": "user", "content": self._said(found)})
        total = sum(rewards) if self.knobs.reward == "sum" else rewards[-1] if rewards else 0.0
        if not self.knobs.reward_low <= total <= self.knobs.reward_high:
            raise EnvironmentMistake(
                f"The episode's reward is {total:g}, outside {self.knobs.reward_low:g} to {self.knobs.reward_high:g}: "
                "set the knobs reward_low and reward_high."
            )
        return Played({"reward": total}, messages=messages, turns=turns, truncated=truncated)

    async def _first(self, seed: int) -> str:
        async with _Opened(self._server) as episode:
            return self._said(await episode.reset({**self.knobs.reset, "seed": seed}))

    def _messages(self, text: str) -> Messages:
        system = [{"role": "system", "content": self.knobs.system}] if self.knobs.system else []
        return [*system, {"role": "user", "content": text}]

    def _said(self, found: Mapping[str, Any]) -> str:
        observation: Any = found.get("observation", {})
        if not self._read:
            shown = {name: value for name, value in observation.items() if name not in _NOT_SHOWN}
            return json.dumps(shown, ensure_ascii=False, sort_keys=True)
        for name in self._read.split("."):
            if not isinstance(observation, Mapping) or name not in observation:
                fields = ", ".join(found.get("observation", {})) or "none"
                raise EnvironmentMistake(f"The observation has no field {self._read!r}. Fields: {fields}.")
            observation = observation[name]
        return observation if isinstance(observation, str) else json.dumps(observation, ensure_ascii=False)

    def _action(self, text: str) -> dict[str, Any]:
        if not self.knobs.action_json:
            return {**self.knobs.action_fields, self._write: text}
        try:
            action = json.loads(text)
        except ValueError as error:
            raise ValueError(f"the answer is not JSON: {error}") from None
        if not isinstance(action, dict):
            raise ValueError("the answer is not a JSON object")
        return {**self.knobs.action_fields, **action}


class _Opened:
    """Yield a connection, waiting while the server is at its limit of episodes.

    A full server says so in answer to the first message and closes the connection.
    """

    def __init__(self, server: Server | None) -> None:
        assert server is not None  # setup has made it
        self._server = server
        self._held: Connection | None = None

    async def __aenter__(self) -> _Opened:
        return self

    async def __aexit__(self, *exception: object) -> None:
        if self._held is not None:
            await self._held.__aexit__(*exception)

    async def reset(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        pause = 0.01
        while True:
            self._held = await self._server.connect().__aenter__()
            try:
                return await self._held.reset(parameters)
            except Full:
                await self._held.__aexit__()
                self._held = None
                await asyncio.sleep(pause)
                pause = min(2 * pause, 0.5)

    async def step(self, action: Mapping[str, Any]) -> dict[str, Any]:
        assert self._held is not None  # it was reset
        return await self._held.step(action)


def make(target: str) -> OpenEnv:
    """Make the environment behind a server. See the module.

    Raises:
        LoadError: Not a valid target, or this interpreter has no `websockets`.
    """
    try:
        import websockets  # noqa: F401
    except ModuleNotFoundError as error:
        raise LoadError(
            f"OpenEnv needs a WebSocket, and {sys.executable} has no `websockets`. "
            f"Make it an interpreter of its own with {', '.join(REQUIREMENTS)}."
        ) from error
    if target.startswith(("http://", "https://")):
        return OpenEnv(target.split("://", 1)[1].rstrip("/"), target, (), "")
    if target.startswith("{"):
        try:
            given = json.loads(target)
        except ValueError as error:
            raise LoadError(f"The target is not JSON: {error}") from None
        command: Sequence[Any] = given.get("command") or ()
        if isinstance(command, str) or bool(command) == bool(given.get("url")):
            raise LoadError('The target needs either "url", or "command" as a list of words.')
        name = given.get("name") or given.get("url") or Path(command[0]).name
        return OpenEnv(str(name), given.get("url") or "", tuple(map(str, command)), str(given.get("folder") or ""))
    file, _, attribute = target.rpartition(":")
    path = Path(file)
    if path.suffix != ".py" or not path.is_file():
        raise LoadError(
            f"{target!r} is not an OpenEnv server: give a URL, /path/server.py:app, or JSON with url or command."
        )
    environment = OpenEnv(path.stem, "", _uvicorn(f"{path.stem}:{attribute}"), str(path.parent))
    environment.files = (str(path),)
    return environment


def _uvicorn(app: str) -> tuple[str, ...]:
    return ("{python}", "-m", "uvicorn", app, "--host", "127.0.0.1", "--port", "{port}", "--log-level", "warning")


def installed(site_packages: Path) -> list[Listed]:
    """List packages with an `openenv.yaml`, which names their server's app."""
    found = []
    for file in sorted(site_packages.glob("*/openenv.yaml")):
        try:
            lines = [line.partition(":") for line in file.read_text(errors="replace").splitlines() if line[:1].strip()]
        except OSError:
            continue
        said = {name.strip(): value.strip().strip("\"'") for name, _, value in lines}
        package = file.parent.name
        if app := said.get("app"):
            module, _, attribute = app.partition(":")
            command = list(_uvicorn(f"{package}.{module}:{attribute or 'app'}"))
            name = said.get("name") or package
            target = json.dumps({"command": command, "name": name})
            found.append(Listed(name, target, said.get("description", ""), tags=("openenv",)))
    return found


def declared(file: Path, tree: ast.Module) -> list[Listed]:
    """List apps that a user's file creates with OpenEnv's `create_app` or `create_fastapi_app`."""
    makers = {
        one.asname or one.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("openenv", "openenv_core")
        for one in node.names
        if one.name in ("create_app", "create_fastapi_app")
    }
    found = []
    for node in tree.body:
        call = node.value if isinstance(node, ast.Assign) else None
        if not isinstance(call, ast.Call) or not isinstance(node, ast.Assign):
            continue
        if isinstance(call.func, ast.Name) and call.func.id in makers and isinstance(node.targets[0], ast.Name):
            target = f"{file}:{node.targets[0].id}"
            found.append(Listed(file.stem, target, first_line(ast.get_docstring(tree)), tags=("openenv",)))
    return found


def _only_text(schema: Any, *, all_of: bool) -> str:
    """Return the only text field of a schema; unless `all_of`, the only required one."""
    if not isinstance(schema, Mapping):
        return ""
    fields = {name: field for name, field in (schema.get("properties") or {}).items() if name not in _NOT_SHOWN}
    if all_of and len(fields) > 1:
        return ""  # The policy cannot use what it does not see.
    required = [name for name in schema.get("required") or fields if name in fields]
    texts = [name for name in required if isinstance(fields[name], Mapping) and fields[name].get("type") == "string"]
    return texts[0] if len(texts) == 1 else ""


def _number(value: Any) -> float:
    if isinstance(value, bool | int | float):
        return float(value)
    if value is None:
        return 0.0
    raise EnvironmentMistake(f"A step's reward is {value!r:.80}, which is not a number.")


def _alone(playing: Any) -> Any:
    """Run a coroutine without a running event loop."""
    return asyncio.run(playing)
