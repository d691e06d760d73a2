"""Environments that give the policy tools: Python functions, methods of the rollout, and any MCP server.

    class Shop(ToolEnvironment):
        \"\"\"Find the price.\"\"\"

        tools = (convert,)                                             # plain functions
        servers = (Server(command=("python", "-m", "prices")),)        # MCP, by command or by URL

        def tasks(self): ...

        @tool(usd=0.001, timeout_s=5)
        def look_up(self, name: str) -> str:
            \"\"\"Looks up a price.

            Args:
                name: What it is called in the shop.
            \"\"\"
            return self.task.data["prices"][name]

        def score(self):
            return self.said == self.task.reference

The policy calls a tool as the chat templates of Hermes and Qwen models teach it, `<tool_call>{"name": ..., "arguments":
{...}}</tool_call>`, several in one answer if it likes; each result comes back as a message of role `tool`. An answer
without a call ends the rollout. What goes wrong in a tool is an observation that says so. Calls, failures, seconds and
money are recorded with every rollout as parts of weight 0, which can be given a weight.
"""

from __future__ import annotations

import atexit
import inspect
import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from toprope.sdk.authoring.environment import Environment, Messages, Part, Task, as_messages
from toprope.sdk.authoring.event_loop import BackgroundLoop
from toprope.sdk.errors import EnvironmentMistake, InvalidRequest
from toprope.sdk.orchestration.mcp_tools import McpServer
from toprope.sdk.orchestration.tool_schema import signature_of
from toprope.sdk.orchestration.tools import Price, Tool, Toolbox

__all__ = ["TOOL_PARTS", "Call", "Called", "Server", "ToolEnvironment", "calls_in", "tool", "tool_prompt"]

_MANY = 1e9
_CALL = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|(?=<tool_call>)|$)", re.DOTALL)
_THINKING = re.compile(r"<think>.*?(?:</think>|$)", re.DOTALL)
_MARK = "_toprope_tool"

TOOL_PARTS = {
    "tool_calls": Part(0.0, 0.0, _MANY, "tools called, failures included; shown"),
    "tool_errors": Part(0.0, 0.0, _MANY, "calls that failed: unknown, malformed, raised, too slow; shown"),
    "tool_seconds": Part(0.0, 0.0, _MANY, "seconds spent in tools, as measured or declared; shown"),
    "tool_usd": Part(0.0, 0.0, _MANY, "what the tools' declared prices come to, in USD; shown"),
}
"""What is recorded of every rollout with tools."""

_PROMPT = """\
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


@dataclass(frozen=True)
class _Declared:
    price: Price
    timeout_s: float | None


def tool(
    function: Callable[..., Any] | None = None,
    *,
    usd: float = 0.0,
    seconds: float | None = None,
    timeout_s: float | None = None,
) -> Any:
    """Marks a method of a ToolEnvironment as a tool, or says what a call of a function costs.

    Args:
        function: The method or function, where it is used without parentheses.
        usd: Price of a call.
        seconds: Recorded for a call instead of the measured time.
        timeout_s: Seconds that a call may take; the environment's `tool_timeout_s` by default.
    """

    def marked(one: Callable[..., Any]) -> Callable[..., Any]:
        setattr(one, _MARK, _Declared(Price(usd=usd, seconds=seconds), timeout_s))
        return one

    return marked if function is None else marked(function)


@dataclass(frozen=True)
class Server:
    """An MCP server whose tools the policy gets: started by a command, or reached at a URL."""

    command: Sequence[str] = ()
    """What starts it over stdio, with its arguments."""
    url: str = ""
    """Where it is, over HTTP."""
    only: Sequence[str] = ()
    """Names of the tools that are wanted; all by default."""
    prefix: str = ""
    """Put before each name, to keep those of two servers apart."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables for one that is started."""
    timeout_s: float | None = None
    """Seconds that a call may take; the environment's `tool_timeout_s` by default."""
    usd: float = 0.0
    """Price of a call."""


@dataclass(frozen=True)
class Call:
    """A call as an answer has it; `problem` says why it is none."""

    name: str = ""
    arguments: Any = None
    problem: str = ""


@dataclass(frozen=True)
class Called:
    """A call and what came of it."""

    name: str
    arguments: Any
    content: str
    seconds: float
    usd: float
    failed: bool


def calls_in(text: str) -> list[Call]:
    """The tool calls of an answer, in order; those within <think> do not count."""
    found = []
    for match in _CALL.finditer(_THINKING.sub("", text)):
        try:
            value = json.loads(match[1])
            name, arguments = value["name"], value.get("arguments", {})
            if isinstance(arguments, str):  # as OpenAI's own form has them
                arguments = json.loads(arguments or "{}")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            name, arguments = "", None
        if isinstance(name, str) and name and isinstance(arguments, Mapping):
            found.append(Call(name, dict(arguments)))
        else:
            found.append(Call(problem='within <tool_call> is no {"name": ..., "arguments": {...}} in JSON'))
    return found


def tool_prompt(tools: Sequence[Tool]) -> str:
    """What a policy is told of its tools, in the words of Qwen's chat template."""
    lines = []
    for one in tools:
        parameters = one.parameters or {
            "type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]
        }  # fmt: skip
        told = {"name": one.name, "description": one.description, "parameters": parameters}
        lines.append(json.dumps({"type": "function", "function": told}, ensure_ascii=False))
    return _PROMPT.format(tools="\n".join(lines))


class ToolEnvironment(Environment):
    """Base class of environments with tools. See the module."""

    tools: ClassVar[Sequence[Callable[..., Any] | Tool]] = ()
    """Functions, sync or async, with type hints and a docstring; or finished `Tool`s."""
    servers: ClassVar[Sequence[Server]] = ()
    """MCP servers; they are connected once and serve all rollouts."""
    tool_timeout_s: float = 30.0
    """Seconds that a call may take where it does not say otherwise. What hangs is left behind."""
    most_calls: int = 8
    """Calls of one answer that are carried out; the others fail."""
    max_turns = 10
    parts: dict[str, Part] = {"score": Part(), **TOOL_PARTS}  # noqa: RUF012 - as in Environment
    calls: list[Called]
    """In a rollout: what was called so far."""

    _loop = BackgroundLoop()
    _shared: dict[str, list[Tool]]
    """Tools of all rollouts, once they are made; rollouts are shallow copies and have the same dict."""

    def __new__(cls, *arguments: Any, **named: Any) -> Any:
        made = super().__new__(cls)
        made._shared = {}
        return made

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        if "parts" in cls.__dict__:
            cls.parts = {**cls.parts, **{name: part for name, part in TOOL_PARTS.items() if name not in cls.parts}}

    def setup(self) -> None:
        """Connects the servers, so that one that does not come up is known before the first rollout. An own `setup`
        calls this one, or they are connected by the first rollout."""
        self._shared_tools()

    def reset(self, task: Task) -> str | Messages:
        """The task with the tools described before it. An own `reset` returns what this one does, or passes its own
        messages through `with_tools`."""
        return self.with_tools(task.prompt)

    def with_tools(self, prompt: str | Messages) -> Messages:
        """Messages with the tools described in the system message, which is made where there is none."""
        messages, told = as_messages(prompt, "the prompt"), tool_prompt(list(self.toolbox.tools.values()))
        if not self.toolbox.tools:
            return messages
        if messages and messages[0]["role"] == "system":
            first = {**messages[0], "content": f"{messages[0]['content']}\n\n{told}"}
            return [first, *messages[1:]]
        return [{"role": "system", "content": told}, *messages]

    def step(self, text: str) -> tuple[Messages | None, bool]:
        """Carries out the calls of an answer; one without a call is the last."""
        asked = calls_in(text)
        if not asked or self.truncated:
            return None, True
        return [self._answered(call, place) for place, call in enumerate(asked)], False

    def score(self) -> dict[str, float]:
        raise NotImplementedError(f"{type(self).__name__} does not score: write score(self).")

    def measured(self) -> dict[str, float]:
        calls = self.__dict__.get("calls", ())
        values = {
            "tool_calls": len(calls),
            "tool_errors": sum(call.failed for call in calls),
            "tool_seconds": sum(call.seconds for call in calls),
            "tool_usd": sum(call.usd for call in calls),
        }
        return {name: min(float(value), _MANY) for name, value in values.items() if name in self.parts}

    @property
    def said(self) -> str:
        """The newest answer without thoughts and calls."""
        return _CALL.sub("", _THINKING.sub("", self.answer)).strip()

    @property
    def toolbox(self) -> Toolbox:
        """The rollout's tools."""
        made = self.__dict__.get("_toolbox")
        if made is None:
            made = self._toolbox = Toolbox([*self._shared_tools(), *self.own_tools()])
            self.calls = []
        return made

    def own_tools(self) -> list[Tool]:
        """Tools of this rollout alone: the methods marked with `tool`."""
        marked = [name for name in dir(type(self)) if hasattr(getattr(type(self), name, None), _MARK)]
        return [self.as_tool(getattr(self, name)) for name in marked]

    def as_tool(self, function: Callable[..., Any], name: str = "") -> Tool:
        """A function, or a bound method, as a tool of this environment."""
        declared: _Declared = getattr(function, _MARK, _Declared(Price(), None))
        signature = signature_of(function, name)
        limit = declared.timeout_s if declared.timeout_s is not None else self.tool_timeout_s

        def run(given: str) -> str:
            returned = function(**signature.check(json.loads(given)))
            if inspect.iscoroutine(returned):
                try:
                    returned = self._loop.run(returned, limit)
                except TimeoutError as error:  # said as of a function that is no coroutine, whichever clock was first
                    raise TimeoutError(f"{signature.name} did not answer within {limit:g} s.") from error
            return self.tell(returned)

        return Tool(signature.name, signature.description, run, signature.parameters, declared.price, limit)

    def tell(self, value: Any) -> str:
        """What a policy sees of what a tool returned: a text as it is, anything else as JSON."""
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)

    def tell_failure(self, why: str) -> str:
        """What a policy sees of a call that failed."""
        return f"Error: {why}"

    def _answered(self, call: Call, place: int) -> dict[str, Any]:
        toolbox = self.toolbox
        if call.problem or place >= self.most_calls:
            why = call.problem or f"at most {self.most_calls} calls in one answer"
            done = Called(call.name, call.arguments, self.tell_failure(why), 0.0, 0.0, True)
        else:
            known = toolbox.tools.get(call.name)
            plain = known is not None and known.parameters is None
            given = str(call.arguments.get("input", "")) if plain else json.dumps(call.arguments)
            seen = toolbox.call(call.name, given)
            content = seen.content
            if seen.failed:
                content = self.tell_failure(content.removeprefix("Error: "))
            done = Called(call.name, call.arguments, content, seen.latency_seconds, seen.cost_usd, seen.failed)
        self.calls.append(done)
        return {"role": "tool", "name": done.name, "content": done.content}

    def _shared_tools(self) -> list[Tool]:
        if "tools" not in self._shared:
            functions = [one if isinstance(one, Tool) else self.as_tool(_function(one)) for one in self.tools]
            connected = [_Connected(server, self.tool_timeout_s) for server in self.servers]
            self._shared["tools"] = [*functions, *(one for server in connected for one in server.tools)]
        return self._shared["tools"]


class _Connected:
    """A server that is started again when it has gone."""

    def __init__(self, server: Server, timeout_s: float) -> None:
        self._server = server
        self._limit = server.timeout_s if server.timeout_s is not None else timeout_s
        self._lock = threading.Lock()
        self._link = self._connect()
        price = Price(usd=server.usd)
        listed = self._link.tools(server.only, server.prefix, price)
        self._calls = {one.name: one.call for one in listed}
        self.tools = [
            Tool(one.name, one.description, lambda given, name=one.name: self._call(name, given), one.parameters, price,
                 one.timeout_s)
            for one in listed
        ]  # fmt: skip

    def _connect(self) -> McpServer:
        server = self._server
        link = McpServer(tuple(server.command), server.url, dict(server.variables), self._limit)
        atexit.register(link.close)
        return link

    def _call(self, name: str, given: str) -> str:
        with self._lock:
            if not self._link.alive:
                self._link = self._connect()
                server = self._server
                self._calls = {one.name: one.call for one in self._link.tools(server.only, server.prefix)}
            link, call = self._link, self._calls[name]
        try:
            return call(given)
        except InvalidRequest:
            raise
        except Exception as error:  # the connection's own trouble, not the tool's
            link.close()
            raise InvalidRequest(f"the MCP server has gone ({error}); it is connected anew at the next call") from error


def _function(one: Any) -> Callable[..., Any]:
    if not callable(one):
        raise EnvironmentMistake(f"tools holds {one!r:.60}, which is no function and no Tool.")
    if isinstance(one, type):
        raise InvalidRequest(f"tools holds the class {one.__name__}: give functions, or mark methods with @tool.")
    return one
