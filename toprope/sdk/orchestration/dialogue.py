"""System prompts for a policy with tools, and parsing of its answers: structured text, or native tool calls.

Structured:

    THOUGHT: why                      or      FINAL_ANSWER: the answer
    TOOL: calculator
    INPUT: 12 * 34

Native: `<tool_call>{"name": "calculator", "arguments": {"input": "12 * 34"}}</tool_call>`, the form of the chat
templates of Qwen and Hermes models; a text without a call is the final answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from toprope.sdk.orchestration.episode import Action, State
from toprope.sdk.orchestration.tools import BUILT_IN, WEB_SEARCH

__all__ = [
    "ONE_INPUT",
    "Mode",
    "build_system_prompt",
    "parse_action",
    "render_observation",
    "render_state",
    "split_thoughts",
]

Mode = Literal["structured", "native"]

_FIELD = re.compile(r"^[ \t]*(THOUGHT|TOOL|INPUT|FINAL[_ ]ANSWER)[ \t]*:[ \t]*", re.IGNORECASE | re.MULTILINE)
_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)
_THINKING = re.compile(r"<think>.*?(?:</think>|$)", re.DOTALL)

_STRUCTURED = """\
Solve the task with as few tools as it needs. Tools:
{tools}

Answer in one of these two forms:
THOUGHT: <why>
TOOL: <name of a tool>
INPUT: <its input>

FINAL_ANSWER: <the answer>"""

_NATIVE = """\
Solve the task with as few tools as it needs.

# Tools

You may call one function at a time to assist with the task. Its signature is within <tools></tools>:
<tools>
{tools}
</tools>

For a call, answer with a JSON object within <tool_call></tool_call>:
<tool_call>
{{"name": <function's name>, "arguments": <its arguments as JSON>}}
</tool_call>

When you know it, answer with the final answer alone."""


def build_system_prompt(
    tools: Sequence[Any] | Sequence[str], *, mode: Mode = "structured", descriptions: bool = True
) -> str:
    """The system prompt: the tools and the form of an answer.

    Args:
        tools: Tools (`toprope.sdk.orchestration.tools.Tool`), or names; names of built-in tools are described, too.
        mode: The form of answers.
        descriptions: False to list names only.
    """
    if mode == "native":
        lines = [json.dumps({"type": "function", "function": _signature(tool)}, ensure_ascii=False) for tool in tools]
        return _NATIVE.format(tools="\n".join(lines))
    lines = []
    for tool in tools:
        signature = _signature(tool)
        text = signature["name"]
        if descriptions and "description" in signature:
            text += f": {signature['description']}"
            if not isinstance(tool, str) and not tool.takes_input:
                text += " It takes no input: leave out the line INPUT."
            elif not isinstance(tool, str) and tool.parameters:
                text += f" Input as JSON: {json.dumps(tool.parameters, ensure_ascii=False)}"
        lines.append(f"- {text}")
    return _STRUCTURED.format(tools="\n".join(lines))


def _signature(tool: Any) -> dict[str, Any]:
    if isinstance(tool, str):
        descriptions = {"web_search": WEB_SEARCH} | {name: make().description for name, make in BUILT_IN.items()}
        described = {"description": descriptions[tool]} if tool in descriptions else {}
        return {"name": tool, **described, "parameters": ONE_INPUT}
    return {"name": tool.name, "description": tool.description, "parameters": tool.parameters or ONE_INPUT}


ONE_INPUT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
"""Schema of a tool that takes one text."""


def split_thoughts(text: str) -> tuple[list[str], str]:
    """Return the thoughts in an answer, and the rest, which is the answer as it is if it has no thoughts.

    A chat template may have opened them, and an answer that was cut off may not close them.
    """
    before, closed, _ = text.partition("</think>")
    whole = f"<think>{text}" if closed and "<think>" not in before else text
    if not (blocks := _THINKING.findall(whole)):
        return [], text
    thoughts = (block.removeprefix("<think>").removesuffix("</think>").strip() for block in blocks)
    return [thought for thought in thoughts if thought], _THINKING.sub("", whole).strip()


def parse_action(text: str, mode: Mode = "structured", tools: Sequence[Any] | Sequence[str] = ()) -> Action:
    """Parse a policy's answer. If it holds no action, `problem` says what is missing.

    Args:
        tools: As in `build_system_prompt`; a call of a tool without arguments needs no line INPUT.
    """
    if mode == "native":
        return _parse_native(text)
    return _parse_structured(text, [tool.name for tool in tools if not isinstance(tool, str) and not tool.takes_input])


def _parse_structured(text: str, without_input: Sequence[str]) -> Action:
    plain = split_thoughts(text)[1]
    places = list(_FIELD.finditer(plain))
    fields: dict[str, str] = {}
    for place, following in zip(places, [*places[1:], None], strict=False):
        name = place[1].upper().replace(" ", "_")
        end = following.start() if following else len(plain)
        if name in fields:
            break  # the policy went on to invent a second turn
        fields[name] = plain[place.end() : end].strip()
        if name == "FINAL_ANSWER":
            break
    thought = fields.get("THOUGHT", "")
    if tool := fields.get("TOOL", "").strip("`*\"' "):
        problem = "" if "INPUT" in fields or tool in without_input else "the line `INPUT: ...` is missing"
        return Action(thought, tool, fields.get("INPUT", ""), raw_text=text, problem=problem)
    if fields.get("FINAL_ANSWER"):
        return Action(thought, "", fields["FINAL_ANSWER"], True, text)
    missing = "`FINAL_ANSWER:` is empty" if "FINAL_ANSWER" in fields else "neither `TOOL:` nor `FINAL_ANSWER:` is in it"
    return Action(thought, raw_text=text, problem=missing)


def _parse_native(text: str) -> Action:
    plain = split_thoughts(text)[1]
    call = _CALL.search(plain)
    if call is None:
        answer = plain.strip()
        if answer.upper().startswith("FINAL_ANSWER:"):
            answer = answer.split(":", 1)[1].strip()
        problem = "" if answer else "the answer is empty"
        return Action("", "", answer, not problem, text, problem=problem)
    thought = plain[: call.start()].strip()
    try:
        value = json.loads(call[1].strip())
        name, arguments = value["name"], value.get("arguments", {})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return Action(thought, raw_text=text, problem='within <tool_call> is no {"name": ..., "arguments": {...}}')
    if isinstance(arguments, Mapping) and set(arguments) == {"input"} and isinstance(arguments["input"], str):
        tool_input = arguments["input"]
    else:
        tool_input = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return Action(thought, str(name), tool_input, raw_text=text)


def render_observation(content: str, mode: Mode = "structured") -> dict[str, str]:
    """The message with a tool's answer for the policy."""
    if mode == "native":
        return {"role": "tool", "content": content}
    return {"role": "user", "content": f"OBSERVATION: {content}"}


def render_state(state: State, tools: Sequence[Any] | Sequence[str]) -> str:
    """A state as one text, for policies that are prompted turn by turn without a conversation."""
    lines = [build_system_prompt(tools), "", f"TASK: {state.initial_prompt}"]
    for step in state.history:
        lines += [
            "",
            f"Turn {step.turn}",
            f"THOUGHT: {step.action.thought}",
            f"TOOL: {step.action.tool_name}",
            f"INPUT: {step.action.tool_input}",
            f"OBSERVATION: {step.observation.content}",
        ]
    return "\n".join([*lines, "", "What next?"])
