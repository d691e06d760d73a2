"""Reads messages back out of rendered text: a policy's chat template is rendered with marks, and what stands around the
marks says where messages begin and end.

Why: a journal holds tokens, the truth about what a policy saw and said, and no messages. The mask says which tokens
the policy sampled, so only what lies between answers has to be taken apart. Where that cannot be done (the template
rewrites what it is given, or the words of a message look like its own marks) the answer is None.

The template comes with a model and is run in Jinja's sandbox.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

__all__ = ["ChatTemplate"]

_FIRST = (("user",), ("system", "user"), ("user", "assistant", "user"), ("system", "user", "assistant", "user"))
"""Roles of the messages before a first answer."""
_BETWEEN = (("user",), ("tool",), ("tool", "tool"), ("user", "user"), ("system",), ("tool", "user"))
_MARK = "zq{}qz"


class ChatTemplate:
    """One chat template.

    Args:
        source: Jinja, as `chat_template` of a tokenizer has it.
        special: The tokenizer's special tokens as text; no message holds one.
        variables: What else the template is given: `bos_token`, `eos_token`.
    """

    def __init__(self, source: str, special: Sequence[str], variables: dict[str, str]) -> None:
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        house = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        house.filters["tojson"] = _as_json
        house.globals |= {"raise_exception": _refuse, "strftime_now": lambda form: ""}
        self._template = house.from_string(source)
        self._special = [token for token in special if token]
        self._variables = variables
        self._first = self._patterns(_FIRST, ())
        self._between = self._patterns(_BETWEEN, ("user", "assistant"))

    def before(self, text: str) -> list[dict[str, str]] | None:
        """The messages that `text` renders, up to where an answer begins; None where they cannot be told."""
        return self._parsed(text, self._first)

    def between(self, text: str) -> list[dict[str, str]] | None:
        """The messages between two answers. `text` begins behind the answer, with or without its end token."""
        return self._parsed(text, self._between)

    def _parsed(self, text: str, patterns: list[tuple[tuple[str, ...], re.Pattern[str]]]) -> Any:
        for roles, pattern in patterns:
            found = pattern.fullmatch(text)
            if found is not None and not any(token in content for content in found.groups() for token in self._special):
                return [{"role": role, "content": content} for role, content in zip(roles, found.groups(), strict=True)]
        return None

    def _patterns(self, candidates: Any, lead: tuple[str, ...]) -> list[tuple[tuple[str, ...], re.Pattern[str]]]:
        found = []
        for roles in candidates:
            marks = [_MARK.format(chr(97 + place)) for place in range(len(lead) + len(roles))]
            said = [{"role": role, "content": mark} for role, mark in zip((*lead, *roles), marks, strict=True)]
            text = self._rendered(said)
            if text is None:
                continue
            pieces = re.split("|".join(map(re.escape, marks)), text)
            if len(pieces) != len(marks) + 1 or re.findall("|".join(map(re.escape, marks)), text) != marks:
                continue
            pieces = pieces[len(lead) :]
            opening = re.escape(pieces[0])
            for token in self._special if lead else ():  # the end of the answer was sampled, so it may be gone already
                if pieces[0].startswith(token):
                    opening = f"(?:{re.escape(token)})?" + re.escape(pieces[0][len(token) :])
                    break
            body = "".join("(.*?)" + re.escape(piece) for piece in pieces[1:])
            found.append((roles, re.compile(opening + body, re.DOTALL)))
        return found

    def _rendered(self, messages: list[dict[str, str]]) -> str | None:
        try:
            return self._template.render(messages=messages, add_generation_prompt=True, tools=None, **self._variables)
        except Exception:  # whatever a model's template raises: it does not take such messages
            return None


def _as_json(value: Any, **options: Any) -> str:
    options.setdefault("ensure_ascii", False)
    return json.dumps(value, **options)


def _refuse(message: str) -> None:
    from jinja2.exceptions import TemplateError

    raise TemplateError(message)
