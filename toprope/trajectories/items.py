"""Trajectory items: one rollout as state, action, reward and metadata.

The state is the question and the action the answer: lists of chat messages, like prompt and completion in TRL, or plain
texts, which stand for one user message and one assistant message. A multi-turn action includes the environment's
messages between the answers.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import msgspec

from toprope.errors import InvalidValue, shown

Message = dict[str, Any]
"""A chat message: `role`, `content`, and further fields of its dialect (tool calls)."""

SEALED = "heldout"
"""The split that no data set may contain."""

_ROLES = ("system", "developer", "user", "assistant", "tool")
_ALPACA = ("input", "output")
_PAIRS = (("state", "action"), ("prompt", "completion"), _ALPACA)
_SHARED_ROLES = {"human": "user", "gpt": "assistant", "observation": "tool", "function_response": "tool"}
"""ShareGPT's names of roles."""
_MOST_CHARACTERS = 2_000_000


class TrajectoryItem(msgspec.Struct):
    """One rollout.

    `metadata` of a run's rollout: `run`, `environment`, `task`, `group`, `rollout`, `version` (policy version of
    its oldest sampled token), `split`, `success`, `turns`, `truncated`, `error`, `parts`, `tokens` (sampled), and
    `text` (source of the words, see `toprope.trajectories.capture.texts`). If its judge failed, `success` is None and
    `unscored` True. Items from outside may have `tools`: those that the assistant could call, in OpenAI's form.
    """

    state: str | list[Message]
    action: str | list[Message]
    reward: float
    metadata: dict[str, Any] = {}

    @property
    def messages(self) -> list[Message]:
        """The whole conversation."""
        return [*as_messages(self.state, "user"), *as_messages(self.action, "assistant")]

    @property
    def success(self) -> bool:
        """True if solved: the environment's own verdict, otherwise a reward of at least 1."""
        verdict = self.metadata.get("success")
        if isinstance(verdict, bool | int | float) and verdict in (0, 1):  # tables have no booleans
            return bool(verdict)
        return self.reward >= 1.0 and not self.metadata.get("unscored")

    @property
    def id(self) -> str:
        """16 hexadecimal digits that depend on question and answer only."""
        text = json.dumps([_plain(self.state, "user"), _plain(self.action, "assistant")], ensure_ascii=False)
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]

    @property
    def first_id(self) -> str:
        """Id of the item that this one was made from, possibly its own; items of one first item belong in one split."""
        return str(self.metadata.get("made_from", self.id))


def as_messages(content: str | list[Message], role: str) -> list[Message]:
    """Return the messages of a state (role `user`) or an action (`assistant`).

    A text becomes one message, an empty text no message.
    """
    if isinstance(content, str):
        return [{"role": role, "content": content}] if content else []
    return content


def text_of(content: str | list[Message]) -> str:
    """Return the text of a state or an action."""
    if isinstance(content, str):
        return content
    return "\n".join(_words(message.get("content")) for message in content)


def _words(content: Any) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return "" if content is None else str(content)


def _plain(content: str | list[Message], role: str) -> list[list[Any]]:
    return [
        [str(message.get("role", "")), _words(message.get("content")), *filter(None, [message.get("tool_calls")])]
        for message in as_messages(content, role)
    ]


def item_from(data: Any, source: str) -> TrajectoryItem:
    """Parse an item from outside.

    Accepted forms are ours (`state`, `action`), TRL's (`prompt`, `completion`), Alpaca's (`input`, `output`; an
    `instruction` comes before the input, which may then be missing), OpenAI's (`messages`; all from the first answer on
    are the action) and ShareGPT's (`conversations`, with `from` and `value`).
    `reward`, or `score`, `tools` and `metadata` are optional. Tools, a list or its JSON text, are kept in the metadata.

    Args:
        data: A JSON object.
        source: Name of the item in error messages: `line 3`.

    Raises:
        InvalidValue: The object has none of these forms; the message says what is missing.
    """
    if not isinstance(data, Mapping):
        raise InvalidValue(f"{source} is not a JSON object.", hint=_SHAPES)
    metadata = data.get("metadata") or {}
    if not isinstance(metadata, Mapping):
        raise InvalidValue(f"{source}: metadata must be an object.", hint=_SHAPES)
    metadata = {str(key): value for key, value in metadata.items()}
    if SEALED in (metadata.get("split"), data.get("split")):
        raise InvalidValue(f"{source} is of the held-out split, which is sealed.", hint="Leave such items out.")
    if data.get("tools") and (tools := _tools(data["tools"], source)):
        metadata["tools"] = tools
    paired = any(data.keys() >= set(pair) for pair in _PAIRS)
    field = next((name for name in ("messages", "conversations")[: 1 if paired else 2] if data.get(name)), None)
    if field is not None:
        messages = _messages(data[field], f"{source}, {field}")
        if field == "conversations" and isinstance(told := data.get("system"), str) and told.strip():
            messages = [{"role": "system", "content": told}, *messages]
        first_answer = next((place for place, message in enumerate(messages) if message["role"] == "assistant"), None)
        if not first_answer:
            raise InvalidValue(f"{source}: {field} need a question and an answer of the assistant.", hint=_SHAPES)
        state: Any = messages[:first_answer]
        action: Any = messages[first_answer:]
    else:
        names = next((pair for pair in _PAIRS if data.keys() & pair), ("prompt", "completion"))
        if names == _ALPACA:
            data = _with_instruction(data, source)
        missing = [name for name in names if name not in data]
        if missing:
            raise InvalidValue(f"{source} has no {' and no '.join(missing)}.", hint=_SHAPES)
        state, action = (_messages_or_text(data[name], f"{source}, {name}") for name in names)
    reward = data.get("reward", data.get("score"))
    if reward is None:
        reward = 0.0
        metadata.setdefault("unscored", True)
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not abs(reward) <= sys.float_info.max:
        raise InvalidValue(f"{source}: reward must be a number, not {shown(reward)}.", hint=_SHAPES)
    return TrajectoryItem(state, action, float(reward), metadata)


def items_of(
    lines: Iterable[bytes], source: str, unreadable: Callable[[str], None] | None = None
) -> Iterator[TrajectoryItem]:
    """Yield the items of JSON lines; empty lines are skipped.

    Args:
        source: Name of the lines' source in error messages.
        unreadable: Called with the name of each line that is not JSON; without, such a line is an error.

    Raises:
        InvalidValue: A line is not an item; the message names it.
    """
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        line_name = f"{source}, line {number}"
        try:
            data = msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            if unreadable is None:
                raise InvalidValue(f"{line_name} is not JSON.", hint="Write one JSON object per line.") from None
            unreadable(line_name)
            continue
        yield item_from(data, line_name)


_SHAPES = (
    'An item is {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}], '
    '"reward": 1.0}, or has state and action, prompt and completion, or input and output, as texts or messages, or '
    "instruction and output (input is optional) as texts, or conversations with from and value."
)


def _with_instruction(data: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    """Return an item of Alpaca's form with its whole question as `input`."""
    question = data.get("input")
    if data.get("instruction"):
        parts = [data["instruction"], question or ""]
        if not all(isinstance(part, str) for part in parts):
            raise InvalidValue(f"{source}: instruction and input must be texts.", hint=_SHAPES)
        question = "\n\n".join(part for part in parts if part.strip())
    if isinstance(question, str) and not question.strip():
        raise InvalidValue(f"{source} has no question: its input is empty.", hint=_SHAPES)
    return data if question is None else {**data, "input": question}


def _tools(value: Any, source: str) -> list[dict[str, Any]]:
    """Return tools in OpenAI's form; ShareGPT's are functions alone, and tables have JSON text, `null` for none."""
    try:
        found = (msgspec.json.decode(value) or []) if isinstance(value, str) else value
    except (msgspec.DecodeError, UnicodeError, RecursionError):  # lone surrogates, or nesting that is too deep
        found = None
    tools = [
        {"type": "function", "function": dict(tool)} if "function" not in tool else dict(tool)
        for tool in (found if isinstance(found, list) else ())
        if isinstance(tool, Mapping)
    ]
    named = [isinstance(tool["function"], Mapping) and isinstance(tool["function"].get("name"), str) for tool in tools]
    if not isinstance(found, list) or len(tools) != len(found) or not all(named):
        raise InvalidValue(
            f"{source}: tools must be a list of functions with a name, or its JSON text.",
            hint='A tool is {"type": "function", "function": {"name": "add", "parameters": {...}}}.',
        )
    return tools


def _shared_calls(value: Any, source: str) -> list[dict[str, Any]]:
    """Return the calls of ShareGPT's JSON text, one or a list of `name` and `arguments`, in OpenAI's form."""
    try:
        found = msgspec.json.decode(value) if isinstance(value, str) else value
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        found = None
    calls = found if isinstance(found, list) else [found]
    if not all(isinstance(call, Mapping) and isinstance(call.get("name"), str) for call in calls):
        raise InvalidValue(f"{source}: function_call needs the JSON text of name and arguments.", hint=_SHAPES)
    functions = [{"name": call["name"], "arguments": call.get("arguments") or {}} for call in calls]
    return [{"type": "function", "function": function} for function in functions]


def _messages_or_text(value: Any, source: str) -> str | list[Message]:
    if isinstance(value, str):
        if len(value) > _MOST_CHARACTERS:
            raise InvalidValue(f"{source} has {len(value)} characters, more than {_MOST_CHARACTERS}.", hint=_SHAPES)
        return value
    return _messages(value, source)


def _messages(values: Any, source: str) -> list[Message]:
    if not isinstance(values, list) or not values:
        raise InvalidValue(f"{source} must be a text or a list of messages.", hint=_SHAPES)
    messages = []
    for number, message in enumerate(values):
        if isinstance(message, Mapping) and "from" in message and "role" not in message:
            rest = {name: value for name, value in message.items() if name not in ("from", "value")}
            role, content = _SHARED_ROLES.get(str(message["from"]), message["from"]), message.get("value")
            if message["from"] == "function_call":
                role, content, rest["tool_calls"] = "assistant", "", _shared_calls(content, f"{source}[{number}]")
            message = rest | {"role": role, "content": content}
        if not isinstance(message, Mapping) or message.get("role") not in _ROLES:
            raise InvalidValue(f"{source}[{number}] needs a role of {', '.join(_ROLES)}.", hint=_SHAPES)
        content = message.get("content")
        if not isinstance(content, str | list | None) or (content is None and message["role"] != "assistant"):
            raise InvalidValue(f"{source}[{number}] needs a content that is a text.", hint=_SHAPES)
        messages.append({**message, "content": "" if content is None else content})
    return messages
