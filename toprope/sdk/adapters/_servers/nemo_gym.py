"""NeMo Gym's rows and OpenAI's Responses form, as messages of a rollout and back."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from toprope.sdk.adapters._shared.rows import text_of
from toprope.sdk.authoring.environment import Messages
from toprope.sdk.errors import EnvironmentMistake
from toprope.sdk.tooled import calls_in, split_thoughts

__all__ = ["messages_of", "response_of"]

_ROLES = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant"}


def response_of(
    messages: Sequence[Mapping[str, Any]], parameters: Mapping[str, Any], task: str, cut: bool
) -> dict[str, Any]:
    """Return a conversation in the form of OpenAI's Responses, as NeMo Gym's agents send it.

    Args:
        messages: Messages of the policy and of tools.
        parameters: The row's `responses_create_params`.
        task: Id of the task.
        cut: Whether the newest answer was cut off.
    """
    output: list[dict[str, Any]] = []
    waiting: list[str] = []
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            output += _items_of(message["content"], number, cut, waiting)
        elif message["role"] == "tool" and waiting:
            called = {"call_id": waiting.pop(0), "output": message["content"]}
            output.append({"type": "function_call_output", **called})
    return {
        "id": f"resp_{task}",
        "created_at": time.time(),
        "object": "response",
        "model": "policy",
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": output,
        "parallel_tool_calls": parameters.get("parallel_tool_calls", True),
        "tool_choice": parameters.get("tool_choice", "auto"),
        "tools": parameters.get("tools") or [],
    }


def messages_of(parameters: Mapping[str, Any], number: int) -> Messages:
    """Return the input of a row as messages."""
    items, messages = parameters["input"], []
    if parameters.get("instructions"):
        messages.append({"role": "system", "content": str(parameters["instructions"])})
    if isinstance(items, str):
        return [*messages, {"role": "user", "content": items}]
    for item in items:
        kind = item.get("type") or "message"
        if kind == "function_call":
            called = f'{{"name": {json.dumps(item.get("name"))}, "arguments": {item.get("arguments") or "{}"}}}'
            messages.append({"role": "assistant", "content": f"<tool_call>\n{called}\n</tool_call>"})
        elif kind == "function_call_output":
            messages.append({"role": "tool", "content": str(item.get("output", ""))})
        elif kind == "message" and item.get("role") in _ROLES:
            messages.append(
                {"role": _ROLES[item["role"]], "content": text_of(item.get("content") or "", f"Row {number}")}
            )
        elif kind != "reasoning":
            raise EnvironmentMistake(f"Row {number} has an input of the type {kind!r}, which cannot be shown as text.")
    return messages


def _items_of(text: str, number: int, cut: bool, waiting: list[str]) -> list[dict[str, Any]]:
    """Convert an answer of the policy into response items; append the ids of its calls to `waiting`."""
    calls = calls_in(text)
    thoughts, answer = split_thoughts(text)
    plain = answer.split("<tool_call>", 1)[0].strip() if calls else answer
    items: list[dict[str, Any]] = []
    if thoughts:
        summary = [{"type": "summary_text", "text": thought} for thought in thoughts]
        items.append({"id": f"rs_{number}", "type": "reasoning", "summary": summary})
    if plain or not calls and not thoughts:
        content = [{"type": "output_text", "text": plain, "annotations": []}]
        status = "incomplete" if cut else "completed"
        items.append({"id": f"msg_{number}", "type": "message", "role": "assistant", "status": status,
                      "content": content})  # fmt: skip
    for place, call in enumerate(calls):
        waiting.append(f"call_{number}_{place}")
        function = {"name": call.name or "unreadable", "arguments": json.dumps(call.arguments or {})}
        items.append({"type": "function_call", "id": f"fc_{number}_{place}", "call_id": waiting[-1],
                      "status": "completed", **function})  # fmt: skip
    return items
