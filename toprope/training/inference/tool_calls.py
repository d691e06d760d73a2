"""Tool calls in the OpenAI dialect: parsed from the policy's text, and put back unchanged.

Open models write a call as text, in the form that their template taught them:

    Hermes, Qwen    <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>
    Qwen3-Coder     <tool_call><function=add><parameter=a>1</parameter></function></tool_call>
    GLM             <tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>
    Llama 3         {"name": "add", "parameters": {"a": 1}}, several with semicolons between them
    Mistral         [TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}], or [TOOL_CALLS]add[ARGS]{"a": 1}
    Granite, Phi-4  <|tool_call|>[{"name": "add", "arguments": {"a": 1}}]; SmolLM2 in <tool_call>
    DeepSeek        <｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>
    gpt-oss         to=functions.add<|channel|>commentary json<|message|>{"a": 1}<|call|>

Clients expect `message.tool_calls`, and send them back in the next turn. The next prompt must contain the sampled text
unchanged, else its tokens would differ from those of the turn before. So a call's id names the sampled answer it came
from, and an assistant message with such a call is rendered from the text of that answer.
"""

from __future__ import annotations

import hashlib
import json
import re
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from toprope.training.inference.decode_batch import cut_text
from toprope.training.inference.dialect import BadRequest
from toprope.training.inference.sessions import Turn
from toprope.training.inference.template_probe import Render, as_user, probe_template

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>|<tool_call>(.*)", re.DOTALL)
_FUNCTION = re.compile(r"<function=([^<>\s]+)>")
_PARAMETER = re.compile(r"\s*<parameter=([^<>\s]+)>\n?")
_END = re.compile(r"\s*</function>")
_KEYED = re.compile(r"\s*<arg_key>([^<]*)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL)
_WORDS = {"True": True, "False": False, "None": None}
"""Python's, which templates of Qwen3-Coder write."""
_MISTRAL = "[TOOL_CALLS]"
_LISTED = re.compile(r"<\|tool_call\|>\s*")
_THOUGHT_END = "</think>"
_CHANNEL_END = re.compile(r"<\|(?:start|end|return|call)\|>")
_RECIPIENT = re.compile(r"\bto=functions\.([\w.-]+)")
_JSON = re.compile(r"\s*(?:\{|\[\s*\{)")
_MARK = re.compile(r"<tool_call>|<\|tool_call\|>|<function=|\[TOOL_CALLS\]|<｜tool▁calls?▁begin｜>")
_CALL_NAME = re.compile(
    r"\[TOOL_CALLS\]\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\]\s*)?(?=\{)"
    r"|(?:<｜tool▁calls▁begin｜>)?<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?([\w.-]+)(?:<｜tool▁sep｜>|\s*```json)\s*(?=\{)"
)
"""The name of a call whose arguments follow, of Mistral and of DeepSeek."""
_DECODER = json.JSONDecoder()
_CALLS = 'tool_calls must be a list of {"id", "type": "function", "function": {"name", "arguments"}}'
_INTRODUCTION = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n{tools}\n</tools>\n\n"
    "For each function call, return a json object with function name and arguments within <tool_call></tool_call> "
    'XML tags:\n<tool_call>\n{{"name": <function-name>, "arguments": <args-json-object>}}\n</tool_call>'
)
"""Introduces tools as the templates of Qwen and Hermes do, for templates that do not."""


def parse_tool_calls(
    text: str, tools: Sequence[Mapping[str, Any]] = (), raw: str = ""
) -> tuple[str, list[dict[str, Any]]]:
    """Split an answer into the text before its first call and its calls, {"name", "arguments": JSON text}.

    The first mark behind the thoughts says its form, as arguments may contain the marks of others. If a call cannot be
    parsed, the whole answer is text.

    Args:
        text: The answer without special tokens.
        tools: Those that were offered, in OpenAI's form: JSON and `<function=` without `<tool_call>` are calls only if
            they name these.
        raw: The answer with special tokens, if it is known.
    """
    offered = {
        str(tool["function"].get("name")): tool["function"] for tool in tools if isinstance(tool.get("function"), dict)
    }
    thoughts, thought_end, said = text.partition(_THOUGHT_END)
    if not thoughts.lstrip().startswith("<think>"):
        content, calls = _parse(text, offered, raw or text)
        if sum(call["arguments"].count(_THOUGHT_END) for call in calls) == text.count(_THOUGHT_END):
            return content, calls  # arguments mention it
    if not thought_end:  # unfinished thoughts
        return text, []
    content, calls = _parse(said, offered, raw.partition(_THOUGHT_END)[2] or said)
    return (f"{thoughts}{thought_end}\n\n{content}".strip(), calls) if calls else (text, [])


def _parse(text: str, offered: Mapping[str, Mapping[str, Any]], answer: str) -> tuple[str, list[dict[str, Any]]]:
    mark = _MARK.search(answer)
    form, start = (mark[0], mark.start()) if mark else ("", len(answer))
    if _JSON.match(text) and answer.find(opening := text.lstrip()[0]) < start:
        content, calls = _parse_form("{", text, offered, answer, 0)
        if calls or opening == "{":
            return content, calls
    return _parse_form(form, text, offered, answer, start)


def _parse_form(
    form: str, text: str, offered: Mapping[str, Mapping[str, Any]], answer: str, start: int
) -> tuple[str, list[dict[str, Any]]]:
    calls: list[tuple[str, Any]] = []
    try:
        if form == "{":
            remainder = text.strip()
            while remainder:
                call, end = _DECODER.raw_decode(remainder)
                calls += _parse_objects(call)
                remainder = remainder[end:].lstrip("; \n")
        elif form == "<tool_call>":
            answer, start = text, text.find(form)
            for closed, left_open in _CALL.findall(text):
                body = (closed or left_open).strip()
                calls += (
                    _parse_xml(body, offered)
                    or _parse_keyed(closed.strip(), offered)
                    or _parse_objects(json.loads(body))
                )
        elif form == "<function=":
            answer, start = text, text.find(form)
            calls = _parse_xml(text[start:], offered)
        elif form == _MISTRAL and not _CALL_NAME.match(answer, start):
            calls = _parse_objects(_DECODER.raw_decode(answer[start:].removeprefix(_MISTRAL).lstrip())[0])
        elif form == "<|tool_call|>":
            at = start
            while mark := _LISTED.search(answer, at):
                listed, at = _DECODER.raw_decode(answer, mark.end())
                calls += _parse_objects(listed)
        elif form:
            at = start
            while name_match := _CALL_NAME.search(answer, at):
                arguments, at = _DECODER.raw_decode(answer, name_match.end())
                calls.append((name_match[1] or name_match[2], arguments))
        if not calls or (form in ("{", "<function=") and any(name not in offered for name, _ in calls)):
            return text, []
        encoded_calls = [
            {"name": name, "arguments": value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}
            for name, value in calls
        ]
        "".join(part for call in encoded_calls for part in call.values()).encode()  # lone surrogates fit into no answer
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return text, []
    return answer[:start].strip(), encoded_calls


def _parse_objects(value: Any) -> list[tuple[str, Any]]:
    return [_parse_object(call) for call in (value if isinstance(value, list) else [value])]


def _parse_object(call: Any) -> tuple[str, Any]:
    name, arguments = call["name"], call.get("arguments", call.get("parameters", {}))
    if not isinstance(name, str):
        raise TypeError("a tool's name is a text")
    return name, arguments


def _parse_xml(body: str, offered: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, Any]]:
    """Names and arguments of Qwen3-Coder's form; nothing if it is another.

    Raises:
        ValueError: A call or a parameter is not closed.
    """
    calls: list[tuple[str, Any]] = []
    function = _FUNCTION.match(body)
    while function:
        schemas = _schemas(function[1], offered)
        arguments: dict[str, Any] = {}
        at = function.end()
        while parameter := _PARAMETER.match(body, at):
            end = body.index("</parameter>", parameter.end())
            name, value = parameter[1], body[parameter.end() : end].removesuffix("\n")
            arguments[name] = _value(value, schemas.get(name))
            at = end + len("</parameter>")
        if (closing := _END.match(body, at)) is None:
            raise ValueError("a call is not closed")
        calls.append((function[1], arguments))
        function = _FUNCTION.search(body, closing.end())
    return calls


def _parse_keyed(body: str, offered: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, Any]]:
    """Name and arguments of GLM's form; nothing if it is another, or does not name an offered tool."""
    name, opening, _ = body.partition("<arg_key>")
    if name.strip() not in offered:
        return []
    name, at, arguments = name.strip(), len(name), {}
    schemas = _schemas(name, offered)
    while opening and (pair := _KEYED.match(body, at)):
        key, at = pair[1].strip(), pair.end()
        arguments[key] = _value(pair[2], schemas.get(key))
    return [(name, arguments)] if not opening or at == len(body) else []


def _schemas(name: str, offered: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
    return (offered.get(name, {}).get("parameters") or {}).get("properties") or {}


def _value(text: str, schema: Any) -> Any:
    """The value that a text means by its parameter's schema: the text itself if that allows texts."""
    kinds = _kinds(schema)
    if "string" in kinds and not ("null" in kinds and text in ("null", "None")):
        return text
    if text in _WORDS:
        return _WORDS[text]
    try:
        return json.loads(text)
    except ValueError:
        return text


def _kinds(schema: Any) -> list[Any]:
    if not isinstance(schema, Mapping):
        return ["string"]
    if choices := schema.get("anyOf") or schema.get("oneOf") or schema.get("allOf"):
        return [kind for choice in choices for kind in _kinds(choice)]
    kind = schema.get("type", "object" if "$ref" in schema else "string")
    return kind if isinstance(kind, list) else [kind]


def spell_channels(text: str, raw: str, stop: Sequence[str] = ()) -> str:
    """Convert the channels of gpt-oss into the form of other models: `<think>`, the final text, `<tool_call>`.

    Thoughts without an answer stay open, as where other models are cut off.

    Args:
        text: The answer without special tokens, returned if it has no channels.
        raw: The answer with special tokens, but for the one that ends it.
        stop: Texts that end it where they stand within a channel.
    """
    if "<|message|>" not in raw:
        return text
    thoughts, said, calls = [], "", []
    for part in _CHANNEL_END.split(raw):
        header, _, whole = part.partition("<|message|>")
        content = cut_text(whole, stop)
        if recipient := _RECIPIENT.search(header):
            function = f'{{"name": "{recipient[1]}", "arguments": {content.strip() or "{}"}}}'
            calls.append(f"<tool_call>\n{function}\n</tool_call>")
        elif header.partition("<|channel|>")[2].startswith("final"):
            said = content.strip()
        elif content.strip():
            thoughts.append(content.strip())
        if content != whole:
            break
    answer = "\n".join(filter(None, [said, *calls]))
    if not thoughts:
        return answer
    thought = "<think>\n" + "\n\n".join(thoughts)
    return f"{thought}\n{_THOUGHT_END}\n\n{answer}" if answer else thought


def answer_id(prompt_ids: list[int], completion_ids: list[int]) -> str:
    """An id for a sampled answer, from its tokens and its prompt: `call_` and 20 hexadecimal digits."""
    ids = array("q", prompt_ids)
    ids.extend(completion_ids)
    return "call_" + hashlib.blake2b(ids.tobytes(), digest_size=10).hexdigest()


def attach_tool_calls(
    entry: dict[str, Any], text: str, answer: str, tools: Sequence[Mapping[str, Any]], raw: str
) -> None:
    """Replace the message of a choice by one with tool calls, if its text contains any.

    Args:
        entry: One of `choices`.
        text: The sampled text.
        answer: Its `answer_id`.
        tools: The tools that were offered.
        raw: The text with special tokens.
    """
    content, calls = parse_tool_calls(text, tools, raw)
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


class MessageRenderer:
    """Prepares messages for a policy's chat template.

    Args:
        template: The template, or several by name.
        end_texts: Texts that end an answer; the template writes them.
        render: Renders messages and tools with the template.
    """

    def __init__(self, template: str | dict[str, str], end_texts: Iterable[str], render: Render) -> None:
        source = str(template)
        self._plain, self._tooled = probe_template(render, source)
        self.has_channels = "<|channel|>final" in source
        """Answers need `spell_channels`."""
        self._short_ids = "length != 9" in source  # Mistral's refuse others
        self._end_texts = tuple(filter(None, end_texts))

    def prepare(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, turns: Sequence[Turn]
    ) -> list[dict[str, Any]]:
        """Convert messages into a form that any template accepts.

        Content becomes text, tool calls the text of the policy, and tools are introduced if the template does not.
        Messages that it does not show become the user's.

        Args:
            messages: Messages from a client.
            tools: Tools that the policy may call.
            turns: Earlier turns of their session.

        Raises:
            BadRequest: A message contains something other than text.
        """
        if self.has_channels:  # its sampled text is refused within a message
            turns = ()
        shown = self._tooled if tools else self._plain
        called: set[str] = set()
        if any(_needs_conversion(message) for message in messages):
            converted = [self._convert(message, turns, shown.calls) for message in messages]
            called = {
                str(self._id(call.get("id")))
                for message, sent in zip(messages, converted, strict=True)
                if "tool_calls" in sent or shown.text_results
                for call in message.get("tool_calls") or ()
                if isinstance(call, dict)
            }
            messages = converted
        if self.has_channels:
            messages = [_with_thinking(message) for message in messages]
        if tools and not shown.tools:
            introduction = _INTRODUCTION.format(tools="\n".join(json.dumps(tool) for tool in tools))
            if messages and messages[0].get("role") == "system":
                system = messages[0]
                messages = [{**system, "content": f"{system.get('content') or ''}\n\n{introduction}"}, *messages[1:]]
            else:
                messages = [{"role": "system", "content": introduction}, *messages]
        return as_user(messages, shown, called)

    def _convert(self, message: dict[str, Any], turns: Sequence[Turn], shows_calls: bool) -> dict[str, Any]:
        message = {**message, "content": _text(message.get("content"))}
        if message.get("role") == "developer":
            message["role"] = "system"
        if "tool_call_id" in message:
            message["tool_call_id"] = self._id(message["tool_call_id"])
        calls = message.get("tool_calls")
        if not calls:
            message.pop("tool_calls", None)
            return message
        if not isinstance(calls, list):
            raise BadRequest(_CALLS)
        text = _sampled_text(calls, turns)
        if text is not None:
            end = next((end for end in self._end_texts if text.endswith(end)), "")
            return {"role": "assistant", "content": text[: len(text) - len(end)]}
        functions = [_function(call) for call in calls]
        if shows_calls:
            message["tool_calls"] = [
                {**call, "id": self._id(call.get("id")), "function": function}
                for call, function in zip(calls, functions, strict=True)
            ]
            return message
        call_texts = (f"<tool_call>\n{json.dumps(function)}\n</tool_call>" for function in functions)
        return {"role": "assistant", "content": "\n".join(filter(None, [message["content"], *call_texts]))}

    def _id(self, call_id: Any) -> Any:
        return hashlib.blake2b(str(call_id).encode(), digest_size=5).hexdigest()[:9] if self._short_ids else call_id


def _with_thinking(message: dict[str, Any]) -> dict[str, Any]:
    """A message of gpt-oss whose thoughts and call are apart: its template writes those thoughts if they are learned.

    Before a call it writes the content as thoughts; it writes one call.
    """
    if message.get("role") != "assistant":
        return message
    text = spell_channels(message["content"], message["content"])  # as data sets of its own answers have them
    said, calls = parse_tool_calls(text)
    if len(calls) == 1 and not message.get("tool_calls"):
        call = {"type": "function", "function": _function({"function": calls[0]})}
        text, message = said, {**message, "tool_calls": [call]}
    thoughts, closed, said = text.partition(_THOUGHT_END)
    if not (closed or text.startswith("<think>")):
        return {**message, "content": text}
    thinking, content = thoughts.removeprefix("<think>").strip(), said.strip()
    if message.get("tool_calls"):
        return {**message, "content": content or thinking}
    return {**message, "content": content, "thinking": thinking}


def _needs_conversion(message: dict[str, Any]) -> bool:
    special = "tool_calls" in message or "tool_call_id" in message or message.get("role") == "developer"
    return special or type(message.get("content")) is not str


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list):
        if all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
            return "\n".join(part["text"] for part in content)
        kinds = sorted({str(part.get("type")) for part in content if isinstance(part, dict) and "text" not in part})
        raise BadRequest(
            f"the policy accepts only text, not {', '.join(kinds) or 'the content of a message'}: choose an "
            "environment without images or sound"
        )
    raise BadRequest(f"a message's content must be a text or a list of text parts, not {type(content).__name__}")


def _sampled_text(calls: Iterable[Any], turns: Sequence[Turn]) -> str | None:
    """The text of the sampled answer that these calls came from; None if it is not among the turns."""
    names = {str(call.get("id", "")).rpartition("_")[0] for call in calls if isinstance(call, dict)}
    for turn in reversed(turns):
        if answer_id(turn.prompt_ids, turn.completion_ids) in names:
            return turn.completion_text
    return None


def _function(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRequest(_CALLS)
    arguments = function.get("arguments", "{}")
    if isinstance(arguments, str):  # templates encode objects as JSON themselves
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError:
            pass
    return {"name": function["name"], "arguments": arguments}
