"""Tool calls in the OpenAI dialect: read out of what the policy said, and put back as it said it.

Open models write a call as text, `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` (the Hermes and Qwen form);
clients want `message.tool_calls`, and send them back in the next turn. What was sampled must stand in that next prompt
as it was sampled, else its tokens would not be those of the turn before: so a call's id names the sampled answer that
it came from, and an assistant message with such a call is rendered from that answer's own text.
"""

from __future__ import annotations

import hashlib
import json
import re
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

from toprope.training.inference.dialect import BadRequest
from toprope.training.inference.sessions import Turn

__all__ = ["Templates", "answer_id", "parse", "with_calls"]

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>|<tool_call>(.*)", re.DOTALL)
_INTRODUCTION = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n{tools}\n</tools>\n\n"
    "For each function call, return a json object with function name and arguments within <tool_call></tool_call> "
    'XML tags:\n<tool_call>\n{{"name": <function-name>, "arguments": <args-json-object>}}\n</tool_call>'
)
"""As the templates of Qwen and Hermes introduce tools; for those that do not."""


def parse(text: str) -> tuple[str, list[dict[str, Any]]]:
    """What an answer says before its first call, and its calls as (name, arguments as JSON text).

    An answer with a call that cannot be read has none: it is text.
    """
    start = text.find("<tool_call>")
    if start < 0:
        return text, []
    calls = []
    for closed, left_open in _CALL.findall(text):
        try:
            call = json.loads(closed or left_open)
            name, arguments = call["name"], call.get("arguments", {})
        except (ValueError, TypeError, KeyError, AttributeError):
            return text, []
        if not isinstance(name, str):
            return text, []
        calls.append({"name": name, "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments)})
    return text[:start].strip(), calls


def answer_id(prompt_ids: list[int], completion_ids: list[int]) -> str:
    """Names a sampled answer by its tokens and those before it: `call_` and 20 hexadecimal digits."""
    ids = array("q", prompt_ids)
    ids.extend(completion_ids)
    return "call_" + hashlib.blake2b(ids.tobytes(), digest_size=10).hexdigest()


def with_calls(entry: dict[str, Any], text: str, answer: str) -> None:
    """Turns a choice's message into one with tool calls, where its text holds some.

    Args:
        entry: One of `choices`.
        text: What was sampled.
        answer: Its `answer_id`.
    """
    content, calls = parse(text)
    if not calls:
        return
    entry["message"] = {
        "role": "assistant",
        "content": content or None,
        "tool_calls": [
            {"id": f"{answer}_{number}", "type": "function", "function": call} for number, call in enumerate(calls)
        ],
    }
    if entry["finish_reason"] == "stop":
        entry["finish_reason"] = "tool_calls"


class Templates:
    """Prepares messages for a policy's chat template.

    Args:
        template: The template, or several by name.
        endings: Texts that end an answer; the template writes them.
    """

    def __init__(self, template: Any, endings: Iterable[str]) -> None:
        words = str(template)
        self._tools, self._calls = "tools" in words, "tool_calls" in words
        self._endings = tuple(filter(None, endings))

    def prepared(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, turns: Sequence[Turn]
    ) -> list[dict[str, Any]]:
        """Messages that any template takes: content as text, calls as the policy said them, tools introduced where
        the template does not.

        Args:
            messages: As a client sent them.
            tools: What the policy may call.
            turns: What was sampled in their session.

        Raises:
            BadRequest: A message holds something else than text.
        """
        if any(_special(message) for message in messages):
            messages = [self._prepared(message, turns) for message in messages]
        if tools and not self._tools:
            said = _INTRODUCTION.format(tools="\n".join(json.dumps(tool) for tool in tools))
            if messages and messages[0].get("role") == "system":
                first = messages[0]
                messages = [{**first, "content": f"{first.get('content') or ''}\n\n{said}"}, *messages[1:]]
            else:
                messages = [{"role": "system", "content": said}, *messages]
        return messages

    def _prepared(self, message: dict[str, Any], turns: Sequence[Turn]) -> dict[str, Any]:
        message = {**message, "content": _text(message.get("content"))}
        if message.get("role") == "developer":
            message["role"] = "system"
        calls = message.get("tool_calls")
        if not calls:
            message.pop("tool_calls", None)
            return message
        said = _said(calls, turns)
        if said is not None:
            ending = next((one for one in self._endings if said.endswith(one)), "")
            return {"role": "assistant", "content": said[: len(said) - len(ending)]}
        functions = [_function(call) for call in calls]
        if self._calls:
            message["tool_calls"] = [{**call, "function": one} for call, one in zip(calls, functions, strict=True)]
            return message
        written = (f"<tool_call>\n{json.dumps(function)}\n</tool_call>" for function in functions)
        return {"role": "assistant", "content": "\n".join(filter(None, [message["content"], *written]))}


def _special(message: dict[str, Any]) -> bool:
    return type(message.get("content")) is not str or "tool_calls" in message or message.get("role") == "developer"


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list):
        if all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
            return "\n".join(part["text"] for part in content)
        kinds = sorted({str(part.get("type")) for part in content if isinstance(part, dict) and "text" not in part})
        raise BadRequest(f"the policy takes text alone, not {', '.join(kinds) or 'what a message holds'}")
    raise BadRequest(f"a message's content must be a text or a list of text parts, not {type(content).__name__}")


def _said(calls: Iterable[Any], turns: Sequence[Turn]) -> str | None:
    """The text of the sampled answer that calls came from; None where it is not among the turns."""
    names = {str(call.get("id", "")).rpartition("_")[0] for call in calls if isinstance(call, dict)}
    for turn in reversed(turns):
        if answer_id(turn.prompt_ids, turn.completion_ids) in names:
            return turn.completion_text
    return None


def _function(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRequest('tool_calls are a list of {"id", "type": "function", "function": {"name", "arguments"}}')
    arguments = function.get("arguments", "{}")
    if isinstance(arguments, str):  # templates write objects as JSON themselves
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError:
            pass
    return {"name": function["name"], "arguments": arguments}
