"""Read the prompts of verifiers' rows and tasks, and leave out those with images or sound."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from toprope.sdk.authoring.environment import Messages
from toprope.sdk.errors import EnvironmentMistake, InvalidRequest

__all__ = ["messages_of_row", "messages_of_task", "plain_messages", "with_texts"]

_PATIENCE = 100
"""After this many prompts without one of text alone, the environment counts as one of images."""


class _NotText(InvalidRequest):
    """A prompt has content other than text."""


def with_texts(rows: Iterable[Any], read: Callable[[Any], Messages]) -> Iterator[tuple[Messages, Any]]:
    """Yield the rows that have prompts of text alone, with their messages; say on stderr how many are left out.

    Args:
        rows: Rows or tasks, perhaps endless.
        read: `messages_of_row` or `messages_of_task`.

    Raises:
        InvalidRequest: There is none among the first rows.
    """
    kept = left_out = 0
    for row in rows:
        try:
            messages = read(row)
        except _NotText as error:
            left_out += 1
            if not kept and left_out >= _PATIENCE:
                raise
            if left_out & (left_out - 1) == 0:  # 1, 2, 4, 8 ...
                print(f"{left_out} of {kept + left_out} tasks so far are left out. {error}", file=sys.stderr)
            last = error
            continue
        kept += 1
        yield messages, row
    if left_out and not kept:
        raise last


def messages_of_task(task: Any) -> Messages:
    """Return the prompt of a task of verifiers 0.4. Raises: InvalidRequest for content other than text."""
    data = task.data
    messages = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    if isinstance(data.prompt, str):
        return [*messages, {"role": "user", "content": data.prompt}]
    from verifiers.v1.types import content_text

    for message in data.prompt or ():
        parts = message.content if isinstance(message.content, list) else ()
        _require_text(getattr(part, "type", "text") for part in parts)
    opening = [{"role": message.role, "content": content_text(message.content) or ""} for message in data.prompt or ()]
    if not opening:  # the environment opens the conversation
        opening = [{"role": "user", "content": data.description or data.name or f"task {data.id or data.idx}"}]
    return [*messages, *opening]


def messages_of_row(row: dict[str, Any]) -> Messages:
    """Return the prompt of a row of verifiers before 0.2.

    Raises:
        InvalidRequest: It has content other than text.
        EnvironmentMistake: It is empty.
    """
    prompt = row.get("prompt")
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    messages = []
    for message in plain_messages(prompt):
        content = message.get("content")
        if isinstance(content, list):
            _require_text(part.get("type") for part in content if isinstance(part, dict))
            content = "".join(str(part.get("text", "")) for part in content)
        messages.append({"role": str(message.get("role", "user")), "content": str(content or "")})
    if not messages:
        raise EnvironmentMistake(f"Row {row.get('example_id')} of the data has no prompt.")
    return messages


def plain_messages(messages: Any) -> list[Any]:
    """Return messages as plain objects; a text becomes an answer."""
    if isinstance(messages, str):
        return [{"role": "assistant", "content": messages}]
    return [
        message.model_dump(exclude_none=True) if hasattr(message, "model_dump") else dict(message)
        for message in messages or ()
    ]


def _require_text(kinds: Iterable[Any]) -> None:
    others = {str(kind) for kind in kinds} - {"text"}
    if others:
        raise _NotText(
            f"Prompts have content of type {', '.join(sorted(others))}. Policies here read text alone: choose an "
            "environment without images or sound."
        )
