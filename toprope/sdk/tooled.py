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
                name: Name of the article.
            \"\"\"
            return self.task.data["prices"][name]

        def score(self):
            return self.said == self.task.reference

The policy calls tools in the form of the chat templates of Hermes and Qwen models, `<tool_call>{"name": ...,
"arguments": {...}}</tool_call>`, one or several per answer. Each result comes back as a message of role `tool`. An
answer without a call ends the rollout. A failure of a tool is an observation that describes it. Every rollout records
calls, failures, seconds and money as reward parts of weight 0, which a configuration can weigh.
"""

from __future__ import annotations

import atexit
import functools
import inspect
import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from toprope.sdk.authoring.environment import TOOL_MARK, Environment, Messages, Part, Task, as_messages
from toprope.sdk.authoring.event_loop import BackgroundLoop
from toprope.sdk.errors import EnvironmentMistake, InvalidRequest
from toprope.sdk.orchestration.dialogue import ONE_INPUT, split_thoughts
from toprope.sdk.orchestration.mcp_tools import McpServer
from toprope.sdk.orchestration.tool_schema import signature_of
from toprope.sdk.orchestration.tools import LONGEST_RESULT, Price, Tool, Toolbox

__all__ = [
    "TOOLS_PROMPT",
    "TOOL_PARTS",
    "Call",
    "Called",
    "Server",
    "ToolEnvironment",
    "calls_in",
    "split_thoughts",
    "tool",
    "tool_prompt",
]

_MANY = 1e9
_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|(?=<tool_call>)|$)", re.DOTALL)

TOOL_PARTS = {
    "tool_calls": Part(0.0, 0.0, _MANY, "tools called, failures included; shown"),
    "tool_errors": Part(0.0, 0.0, _MANY, "calls that failed: unknown, malformed, raised, too slow; shown"),
    "tool_seconds": Part(0.0, 0.0, _MANY, "seconds spent in tools, as measured or declared; shown"),
    "tool_usd": Part(0.0, 0.0, _MANY, "what the tools' declared prices come to, in USD; shown"),
}
"""Reward parts that every rollout with tools records."""

TOOLS_PROMPT = """\
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
"""Introduces tools as the templates of Qwen and Hermes do, which models were trained on."""


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
    """Mark a method of a ToolEnvironment as a tool, or set the price and time limit of a function.

    Args:
        function: The method or function, if the decorator is used without parentheses.
        usd: Price per call.
        seconds: Time to record per call instead of the measured time.
        timeout_s: Time limit per call in seconds; the environment's `tool_timeout_s` by default.
    """

    def mark(target: Callable[..., Any]) -> Callable[..., Any]:
        setattr(target, TOOL_MARK, _Declared(Price(usd=usd, seconds=seconds), timeout_s))
        return target

    return mark if function is None else mark(function)


@dataclass(frozen=True)
class Server:
    """An MCP server that provides tools, started by a command or reached at a URL."""

    command: Sequence[str] = ()
    """Command line that starts it over stdio."""
    url: str = ""
    """Its address over HTTP."""
    only: Sequence[str] = ()
    """Names of the tools to take; all by default."""
    prefix: str = ""
    """Put before each name, to tell apart the tools of two servers."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables for a server started by `command`."""
    timeout_s: float | None = None
    """Time limit per call in seconds; the environment's `tool_timeout_s` by default."""
    usd: float = 0.0
    """Price per call."""


@dataclass(frozen=True)
class Call:
    """A tool call in an answer; `problem` says why it is malformed."""

    name: str = ""
    arguments: Any = None
    problem: str = ""


@dataclass(frozen=True)
class Called:
    """A tool call with its result."""

    name: str
    arguments: Any
    content: str
    seconds: float
    usd: float
    failed: bool


def calls_in(text: str) -> list[Call]:
    """The tool calls in an answer, in order, without those in its thoughts."""
    calls = []
    for match in _CALL.finditer(split_thoughts(text)[1]):
        try:
            value = json.loads(match[1].strip())
        except (ValueError, RecursionError):
            value = None
        listed = value if isinstance(value, list) and value else [value]  # SmolLM2 lists its calls in one tag
        calls += [_call(entry) for entry in listed]
    return calls


def _call(value: Any) -> Call:
    try:
        name, arguments = value["name"], value.get("arguments", {})
        if isinstance(arguments, str):  # the form of the OpenAI API
            arguments = json.loads(arguments or "{}")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        name, arguments = "", None
    if isinstance(name, str) and name and isinstance(arguments, Mapping):
        return Call(name, dict(arguments))
    return Call(problem='within <tool_call> is no {"name": ..., "arguments": {...}} in JSON')


def tool_prompt(tools: Sequence[Tool]) -> str:
    """Description of the tools for the policy, in the wording of Qwen's chat template."""
    lines = []
    for listed_tool in tools:
        function = {
            "name": listed_tool.name,
            "description": listed_tool.description,
            "parameters": listed_tool.parameters or ONE_INPUT,
        }
        lines.append(json.dumps({"type": "function", "function": function}, ensure_ascii=False))
    return TOOLS_PROMPT.format(tools="\n".join(lines))


class ToolEnvironment(Environment):
    """Base class of environments with tools; see the module's docstring."""

    tools: ClassVar[Sequence[Callable[..., Any] | Tool]] = ()
    """Functions, sync or async, with type hints and a docstring, or `Tool` objects."""
    servers: ClassVar[Sequence[Server]] = ()
    """MCP servers, connected once for all rollouts."""
    tool_timeout_s: float = 30.0
    """Default time limit per call in seconds. A call that hangs is abandoned."""
    longest_result: int = LONGEST_RESULT
    """Longest result of a call in characters; the rest is cut."""
    most_calls: int = 8
    """Most calls per answer; further calls fail."""
    max_turns = 10
    parts: dict[str, Part] = {"score": Part(), **TOOL_PARTS}  # noqa: RUF012 - as in Environment
    calls: list[Called]
    """In a rollout: the calls so far."""

    _of_a_rollout = ("random", "_toolbox", "calls")
    _loop = BackgroundLoop()
    _shared: dict[str, list[Tool]]
    """Tools of all rollouts, filled on first use; rollouts are shallow copies and share this dict."""

    def __new__(cls, *arguments: Any, **keywords: Any) -> Any:
        environment = super().__new__(cls)
        environment._shared = {}
        return environment

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        if "parts" in cls.__dict__:
            cls.parts = {**cls.parts, **{name: part for name, part in TOOL_PARTS.items() if name not in cls.parts}}

    def setup(self) -> None:
        """Connect the servers, so that a failure shows before the first rollout. Call it from your own `setup`; else
        the first rollout connects them."""
        self._shared_tools()

    def reset(self, task: Task) -> str | Messages:
        """The task, behind a description of the tools. Your own `reset` can pass its messages through `with_tools`."""
        return self.with_tools(task.prompt)

    def with_tools(self, prompt: str | Messages) -> Messages:
        """The messages with a description of the tools in the system message, which is added if missing."""
        messages, description = as_messages(prompt, "the prompt"), tool_prompt(list(self.toolbox.tools.values()))
        if not self.toolbox.tools:
            return messages
        if messages and messages[0]["role"] == "system":
            system_message = {**messages[0], "content": f"{messages[0]['content']}\n\n{description}"}
            return [system_message, *messages[1:]]
        return [{"role": "system", "content": description}, *messages]

    def step(self, text: str) -> tuple[Messages | None, bool]:
        """Carry out the calls in an answer; an answer without a call ends the rollout."""
        calls = calls_in(text)
        if not calls or self.truncated:
            return None, True
        return [self._carry_out(call, place) for place, call in enumerate(calls)], False

    def score(self) -> dict[str, float]:
        raise NotImplementedError(f"{type(self).__name__} does not score: define score(self).")

    def tool_limits(self) -> tuple[float, int]:
        marked = (getattr(getattr(type(self), name, None), TOOL_MARK, None) for name in dir(type(self)))
        listed = (entry if isinstance(entry, Tool) else getattr(entry, TOOL_MARK, None) for entry in self.tools)
        limits = [source.timeout_s or 0.0 for source in (*self.servers, *listed, *marked) if source is not None]
        return max([self.tool_timeout_s, *limits]), self.most_calls

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
        return _CALL.sub("", split_thoughts(self.answer)[1]).strip()

    @property
    def toolbox(self) -> Toolbox:
        """The tools of this rollout."""
        toolbox = self.__dict__.get("_toolbox")
        if toolbox is None:
            toolbox = self._toolbox = Toolbox([*self._shared_tools(), *self.own_tools()], longest=self.longest_result)
            self.calls = []
        return toolbox

    def own_tools(self) -> list[Tool]:
        """Tools of this rollout alone: its methods marked with `tool`."""
        marked = [name for name in dir(type(self)) if hasattr(getattr(type(self), name, None), TOOL_MARK)]
        return [self.as_tool(getattr(self, name)) for name in marked]

    def as_tool(self, function: Callable[..., Any], name: str = "") -> Tool:
        """Convert a function or a bound method to a tool of this environment."""
        declared: _Declared = getattr(function, TOOL_MARK, _Declared(Price(), None))
        signature = signature_of(function, name)
        limit = declared.timeout_s if declared.timeout_s is not None else self.tool_timeout_s

        def run(arguments: str) -> str:
            returned = function(**signature.check(json.loads(arguments)))
            if inspect.iscoroutine(returned):
                try:
                    returned = self._loop.run(returned, limit)
                except TimeoutError as error:  # the same message as for a synchronous function
                    raise TimeoutError(f"{signature.name} did not answer within {limit:g} s.") from error
            return self.tell(returned)

        return Tool(signature.name, signature.description, run, signature.parameters, declared.price, limit)

    def tell(self, value: Any) -> str:
        """The text of a tool's result for the policy: a string unchanged, anything else as JSON."""
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)

    def tell_failure(self, why: str) -> str:
        """The text of a failed call for the policy."""
        return f"Error: {why}"

    def _carry_out(self, call: Call, place: int) -> dict[str, Any]:
        toolbox = self.toolbox
        if call.problem or place >= self.most_calls:
            why = call.problem or f"at most {self.most_calls} calls in one answer"
            called = Called(call.name, call.arguments, self.tell_failure(why), 0.0, 0.0, True)
        else:
            called_tool = toolbox.tools.get(call.name)
            plain = called_tool is not None and called_tool.parameters is None
            arguments = str(call.arguments.get("input", "")) if plain else json.dumps(call.arguments)
            result = toolbox.call(call.name, arguments)
            content = result.content
            if result.failed:
                content = self.tell_failure(content.removeprefix("Error: "))
            called = Called(call.name, call.arguments, content, result.latency_seconds, result.cost_usd, result.failed)
        self.calls.append(called)
        return {"role": "tool", "name": called.name, "content": called.content}

    def _shared_tools(self) -> list[Tool]:
        if "tools" not in self._shared:
            functions = [
                entry if isinstance(entry, Tool) else self.as_tool(_check_function(entry)) for entry in self.tools
            ]
            connected = [_Connected(server, self.tool_timeout_s) for server in self.servers]
            self._shared["tools"] = [*functions, *(server_tool for server in connected for server_tool in server.tools)]
        return self._shared["tools"]


class _Connected:
    """An MCP server that is connected again after it has ended."""

    def __init__(self, server: Server, timeout_s: float) -> None:
        self._server = server
        self._limit = server.timeout_s if server.timeout_s is not None else timeout_s
        self._lock = threading.Lock()
        self._link = self._connect()
        atexit.register(lambda: self._link.close())
        self.tools = [
            replace(
                server_tool,
                call=functools.partial(self._call, server_tool.name.removeprefix(server.prefix)),
                price=Price(usd=server.usd),
            )
            for server_tool in self._link.tools(server.only, server.prefix)
        ]

    def _connect(self) -> McpServer:
        server = self._server
        return McpServer(tuple(server.command), server.url, dict(server.variables), self._limit)

    def _call(self, name: str, arguments: str) -> str:
        with self._lock:
            if not self._link.alive:
                self._link = self._connect()
            link = self._link
        try:
            return link.call(name, arguments)
        except InvalidRequest:
            raise
        except Exception as error:  # a failure of the connection, not of the tool
            link.close()
            raise InvalidRequest(f"the MCP server has ended ({error}); the next call connects again") from error


def _check_function(entry: object) -> Callable[..., Any]:
    if isinstance(entry, type):
        raise InvalidRequest(f"tools holds the class {entry.__name__}: give functions, or mark methods with @tool.")
    if not callable(entry):
        raise EnvironmentMistake(f"tools holds {entry!r:.60}, which is neither a function nor a Tool.")
    return entry
