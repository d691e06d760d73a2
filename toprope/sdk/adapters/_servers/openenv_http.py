"""OpenEnv's protocol over HTTP: `POST /reset` and `POST /step`, for servers that have no WebSocket of OpenEnv.

Many published environments are web applications of their authors with these two endpoints. Their forms differ; what
differs is read from the server's description (`/openapi.json`): the parameters of reset, whether a step's body is the
action or has it as `action`, and the field that tells sessions apart. Without such a field the server has one episode
at a time.
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from toprope.sdk.adapters._servers.started import DIRECT
from toprope.sdk.errors import EnvironmentMistake

__all__ = ["Endpoints", "Episode", "Refused", "Turns", "details", "merged", "missing", "turns_at"]

_MESSAGE_S = 120.0
_LOOK_S = 0.005
_BUSY_S = 60.0
"""Longest time to wait for a server that limits requests."""
_SESSIONS = ("session_id", "episode_id", "env_id", "session")
_NAMED_BY_US = ("session_id", "episode_id")
_DONE = ("done", "terminated", "truncated", "is_done")
_TOTALS = ("total", "reward", "value", "score", "total_reward", "step_reward")
"""Names of the number in a reward with several components."""
_OF_SERVER = frozenset({401, 403, 405, 429, 502, 503, 504})
"""Statuses that no action causes."""
_NO_EPISODE = re.compile(
    r"(?i)^not found$|call .{0,8}reset|^not (initiali[sz]ed|started)|"
    r"\b(environment|env|episode|game) (is |was |has )?not( been)? (initiali[sz]ed|started)|"
    r"\b(no|unknown|invalid|expired|missing)( active)? session\b|\bsession\b.{0,60}\b(not|expired|invalid|unknown)\b"
)
_LACKS = re.compile(r"(?:ModuleNotFound|Import)Error: .*?'(?P<name>[^']+)'")
_DEEPEST = 8
_SEVERAL = ("anyOf", "oneOf", "allOf")
_turns: dict[str, Turns] = {}


class Turns:
    """Lets one episode at a time use a server, in the order of asking, whatever event loop each is in."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[object] = []

    @property
    def waiting(self) -> int:
        """Number of episodes that wait, with the one that has its turn."""
        return len(self._waiting)

    async def take(self, ticket: object) -> None:
        """Wait for this ticket's turn."""
        with self._lock:
            self._waiting.append(ticket)
        try:
            while self._waiting[0] is not ticket:
                await asyncio.sleep(_LOOK_S)
        except BaseException:
            self.give_back(ticket)
            raise

    def give_back(self, ticket: object) -> None:
        """Let the next one have its turn."""
        with self._lock:
            if ticket in self._waiting:
                self._waiting.remove(ticket)


def turns_at(url: str) -> Turns:
    """Return the turns of a server, which are the same for all who use it in this process."""
    return _turns.setdefault(url, Turns())


class Refused(Exception):
    """The environment does not accept an action; the text says why.

    Args:
        why: The reason.
        missing: Names of fields that the action lacks.
    """

    def __init__(self, why: str, missing: Sequence[str] = ()) -> None:
        super().__init__(why)
        self.missing = list(missing)


@dataclass(frozen=True)
class Endpoints:
    """The two endpoints of a server, as its description tells them.

    Attributes:
        prefix: What comes before `/reset` and `/step`.
        official: The description is that of OpenEnv's own server, which may have a WebSocket.
        resets: Names of reset's parameters that are told.
        takes_any: Reset's body may have others.
        queries: Names that go into the address, by endpoint.
        wrapped: A step's body has the action as `action`.
        session: The field that tells sessions apart; empty without one.
        again: Names of reset's parameters that each step has to repeat.
        action: JSON schema of an action; empty if the description does not tell it.
    """

    prefix: str = ""
    official: bool = False
    resets: frozenset[str] = frozenset()
    takes_any: bool = True
    queries: Mapping[str, frozenset[str]] = field(default_factory=dict)
    wrapped: bool = True
    session: str = ""
    again: frozenset[str] = frozenset()
    action: Mapping[str, Any] = field(default_factory=dict)

    @property
    def names_sessions(self) -> bool:
        """True if reset takes the name of a new session."""
        return self.session in _NAMED_BY_US and self.session in self.resets

    @classmethod
    def of(cls, url: str) -> Endpoints | None:
        """Ask a server; None if its description has no such endpoints."""
        try:
            with DIRECT.open(f"{url}/openapi.json", timeout=10) as answer:
                return cls.described(json.loads(answer.read()))
        except (OSError, ValueError, AttributeError, TypeError):  # it may describe itself in another way
            return None

    @classmethod
    def described(cls, description: Any) -> Endpoints | None:
        """Read a description in the form of OpenAPI 3."""
        paths = description.get("paths") or {}
        posts = [path for path, one in paths.items() if "post" in one]
        prefixes = [path.removesuffix("/reset") for path in posts if path.endswith("/reset")]
        prefix = min((one for one in prefixes if f"{one}/step" in posts), key=len, default=None)
        if prefix is None:
            return None
        parts = (description.get("components") or {}).get("schemas") or {}
        reset, step = (_Operation(paths[f"{prefix}/{word}"]["post"], parts) for word in ("reset", "step"))
        again = reset.names & step.names - {"action", *_SESSIONS}
        action = merged(step.fields.get("action"), parts)
        wrapped = bool(action) and not action.get("enum") and action.get("type", "object") == "object"
        if not step.fields:
            wrapped = step.title != "Action"  # the body of a parameter called so
        elif not wrapped:
            own = {name: one for name, one in step.fields.items() if name not in _SESSIONS and name not in again}
            action = {**step.body, "properties": own, "required": [one for one in step.required if one in own]}
        return cls(
            prefix,
            "/schema" in paths,
            reset.names,
            reset.takes_any,
            {"reset": reset.query, "step": step.query},
            wrapped,
            next((name for name in _SESSIONS if name in step.names), ""),
            again,
            {**action, "$defs": parts} if action.get("properties") else {},
        )


class _Operation:
    """The parameters of an endpoint: the fields of its body, or else those of its address."""

    def __init__(self, given: Mapping[str, Any], parts: Mapping[str, Any]) -> None:
        content = (given.get("requestBody") or {}).get("content") or {}
        schema = (content.get("application/json") or {}).get("schema") or {}
        self.body = merged(schema, parts)
        self.fields: dict[str, Any] = dict(self.body.get("properties") or {})
        self.required = list(self.body.get("required") or ())
        self.title = str(self.body.get("title") or "")
        listed = [one for one in given.get("parameters") or () if one.get("in") == "query"]
        self.query = frozenset(str(one.get("name")) for one in listed)
        self.takes_any = not self.fields and (bool(schema) or not self.query)
        if not schema:
            self.fields |= {str(one.get("name")): one.get("schema") or {} for one in listed}
            self.required += [str(one.get("name")) for one in listed if one.get("required")]
        self.names = frozenset(self.fields) | self.query


def merged(schema: Any, parts: Mapping[str, Any], depth: int = 0) -> dict[str, Any]:
    """Return a schema of an object without references; of alternatives, one with the fields of all of them."""
    if not isinstance(schema, Mapping) or depth > _DEEPEST:
        return {}
    if isinstance(reference := schema.get("$ref"), str):
        return merged(parts.get(reference.rpartition("/")[2]), parts, depth + 1)
    several = [one for kind in _SEVERAL for one in schema.get(kind) or ()]
    own = {name: value for name, value in schema.items() if name not in _SEVERAL}
    if not several:
        return own
    found = [one for each in several if (one := merged(each, parts, depth + 1)).get("type") != "null"]
    others = [one for one in found if one.get("properties")]
    objects = [*others, own] if own.get("properties") else others
    if len(objects) < 2:
        return {**own, **(objects or found or [{}])[0]}
    fields: dict[str, list[Any]] = {}
    for one in objects:
        for name, given in one["properties"].items():
            fields.setdefault(name, []).append(given)
    required = set.intersection(*(set(one.get("required") or ()) for one in others)) | set(own.get("required") or ())
    required |= {(schema.get("discriminator") or {}).get("propertyName")}
    if schema.get("allOf"):
        required = set().union(*(one.get("required") or () for one in objects))
    told = {name: {"anyOf": given, "description": _said(given)} for name, given in fields.items()}
    return {"type": "object", "properties": told, "required": [name for name in told if name in required]}


def _said(given: Iterable[Any]) -> str:
    return next((str(one["description"]) for one in given if isinstance(one, Mapping) and "description" in one), "")


class Episode:
    """An episode over HTTP; use it with `async with`. It has the server to itself until it knows its session.

    Args:
        url: Address of the server.
        endpoints: What it understands.
        turns: Of the server.
        raised: Returns the last exception that the server printed.
    """

    def __init__(self, url: str, endpoints: Endpoints, turns: Turns, raised: Callable[[], str] = str) -> None:
        self._url, self._endpoints, self._turns, self._raised = url + endpoints.prefix, endpoints, turns, raised
        self._session: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._asking = self._left = False

    async def __aenter__(self) -> Episode:
        if not self._endpoints.names_sessions:
            await self._turns.take(self)
        return self

    async def __aexit__(self, *exception: object) -> None:
        with self._lock:
            self._left = True
            if self._asking:
                return  # a step that was given up would change the next episode
        self._turns.give_back(self)

    async def reset(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Begin the episode; return {observation, reward, done}."""
        known, name = self._endpoints, self._endpoints.session
        asked = {
            key: value for key, value in parameters.items() if known.takes_any or key in known.resets or key != "seed"
        }
        if known.names_sessions:
            asked.setdefault(name, uuid.uuid4().hex)
            self._session = {name: asked[name]}
        found = await self._say("reset", dict(asked))
        if name and (given := _session_in(found, name)) is not None:
            self._session = {name: given}
            self._turns.give_back(self)
        self._session |= {key: asked[key] for key in known.again if key in asked}
        return _answer(found)

    async def step(self, action: Mapping[str, Any]) -> dict[str, Any]:
        """Take an action; return {observation, reward, done}.

        Raises:
            Refused: The environment does not accept the action.
        """
        body = {"action": dict(action)} if self._endpoints.wrapped else dict(action)
        return _answer(await self._say("step", {**body, **self._session}))

    async def tools(self) -> list[dict[str, Any]]:
        """Return no tools: this protocol has none."""
        return []

    async def required_fields(self) -> list[str]:
        """Return the fields without which the server refuses an action."""
        try:
            await self.step({})
        except Refused as refusal:
            return [name for name in refusal.missing if name not in ("action", "body")]
        except EnvironmentMistake:  # its code expects an action
            pass
        return []

    async def _say(self, kind: str, body: dict[str, Any]) -> dict[str, Any]:
        query = {name: body[name] for name in self._endpoints.queries.get(kind, ()) if name in body}
        if kind != "reset" or not self._endpoints.takes_any:  # else it may read only one of the two
            body = {name: value for name, value in body.items() if name not in query}
        address = f"{self._url}/{kind}" + (f"?{urllib.parse.urlencode(query)}" if query else "")
        code, text = await asyncio.to_thread(self._ask, address, body)
        try:
            found = json.loads(text)
        except ValueError:
            found = None
        if code < 400 and isinstance(found, Mapping):
            return dict(found)
        said = found.get("detail", found.get("error", found)) if isinstance(found, Mapping) else found
        printed = self._raised() if code >= 500 and found is None else ""
        why = printed or (f"HTTP {code}{details(said)}" if isinstance(said, list) else str(said or text[:400]))
        lacks = _LACKS.search(printed)
        own = lacks is not None and lacks["name"] not in json.dumps(body)  # else code that the policy wrote
        if kind == "step" and code >= 400 and code not in _OF_SERVER and not own and not _NO_EPISODE.search(why):
            raise Refused(why or f"HTTP {code}", missing(said))
        raise EnvironmentMistake(f"The server answers {kind} with HTTP {code}: {why[:400]}")

    def _ask(self, address: str, body: Mapping[str, Any]) -> tuple[int, str]:
        with self._lock:
            self._asking = True
        try:
            return _post(address, body)
        finally:
            with self._lock:
                self._asking = False
                left = self._left
            if left:
                self._turns.give_back(self)


def _post(address: str, body: Mapping[str, Any]) -> tuple[int, str]:
    """Send JSON; return the answer's status and text, waiting while the server limits requests."""
    deadline, pause = time.monotonic() + _BUSY_S, 0.1
    while True:
        asked = urllib.request.Request(
            address, json.dumps(body).encode(), {"Content-Type": "application/json"}, method="POST"
        )
        try:
            with DIRECT.open(asked, timeout=_MESSAGE_S) as answer:
                return int(answer.status), answer.read().decode(errors="replace")
        except urllib.error.HTTPError as error:
            if error.code != 429 or time.monotonic() > deadline:
                return error.code, error.read().decode(errors="replace")
        except TimeoutError:
            raise TimeoutError(f"the server did not answer {address} within {_MESSAGE_S:g} s") from None
        except OSError as error:
            raise ConnectionError(f"the server does not answer {address}: {error}") from error
        time.sleep(pause)
        pause = min(2 * pause, 5.0)


def _session_in(found: Mapping[str, Any], name: str) -> Any:
    """Return the session that an answer names, at its top or one level below."""
    levels = [found, *(one for one in found.values() if isinstance(one, Mapping))]
    return next((one[name] for one in levels if one.get(name) is not None), None)


def _answer(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return an answer in OpenEnv's form. Some have the observation itself, or a reward with its components."""
    if "observation" in found:
        seen = found["observation"]
        observation = dict(seen) if isinstance(seen, Mapping) else {"observation": seen}
    else:
        observation = {name: one for name, one in found.items() if name not in ("reward", "info", *_DONE)}
    info = found.get("info")
    if isinstance(info, Mapping) and isinstance(info.get("error"), str) and info["error"]:
        observation.setdefault("error", info["error"])
    given = found.get("reward")
    given = observation.get("reward") if given is None else given
    if isinstance(given, Mapping):
        numbers = [given[name] for name in _TOTALS if isinstance(given.get(name), int | float)]
        below = observation.get("reward")
        given = numbers[0] if numbers else below if isinstance(below, int | float) else given
    if not (names := [name for name in _DONE if name in found]):
        # An observation that was cut off is called truncated, too.
        found, names = observation, [name for name in _DONE if name != "truncated"]
    return {"observation": observation, "reward": given, "done": any(bool(found.get(name)) for name in names)}


def missing(errors: Any) -> list[str]:
    """Return the names of fields that a server finds missing."""
    found = [one for one in errors or () if isinstance(one, Mapping)] if isinstance(errors, list) else []
    return [str(one["loc"][-1]) for one in found if one.get("type") == "missing" and one.get("loc")]


def details(errors: Any) -> str:
    """Return the fields that a server finds invalid, and why."""
    found = [one for one in errors or () if isinstance(one, Mapping)] if isinstance(errors, list) else []
    told = [f"{'.'.join(map(str, one.get('loc') or ()))}: {one.get('msg', '')}" for one in found[:4]]
    return f": {'; '.join(told)}" if told else ""
