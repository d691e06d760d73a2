"""Resources servers of NeMo Gym by address: `/seed_session`, the server's tools, `/verify`.

The owner starts the server in its own interpreter. The target is a JSON object:

    {"url": "http://127.0.0.1:8000",    the resources server
     "rows": "/path/train.jsonl",       NeMo Gym's rows: each with `responses_create_params` and what `/verify` needs
     "range": [0, 1], "clip": false,    bounds of the reward; a value outside is an error of its rollout, or clipped
     "success": 1.0,                    reward from which a rollout counts as solved; the highest by default
     "shown": ["score"],                further numbers of `/verify`, recorded with each rollout
     "reference": "expected_answer",    column of the right answer, for people and checks
     "max_turns": 10, "timeout_s": 60, "name": "...", "description": "..."}

A short form is an address with the rows: `http://127.0.0.1:8000#/path/train.jsonl`.

The adapter acts as NeMo Gym's simple agent: `/seed_session` with the row, the row's messages and tools to the policy,
each tool call as `POST /<tool>`, and at the end `/verify` with the row and the whole response in OpenAI's Responses
form. Cookies hold a rollout's session. The verifications of a group run concurrently.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import quote

from toprope.sdk.adapters._shared import rows as _rows
from toprope.sdk.adapters._shared.json_http import JsonServer, Unreachable
from toprope.sdk.adapters._shared.user_files import Bounds, parsed
from toprope.sdk.authoring.environment import Environment, Messages, Part, Task
from toprope.sdk.errors import EnvironmentMistake, LoadError
from toprope.sdk.orchestration.tools import Tool
from toprope.sdk.tooled import TOOL_PARTS, ToolEnvironment, calls_in

__all__ = ["KEYS", "NemoGym", "make"]

KEYS = ("url", "rows", "range", "clip", "success", "shown", "reference", "max_turns", "timeout_s", "name",
         "description")  # fmt: skip
"""Keys of a target, and of an owner's YAML file."""
_PARAMETERS = "responses_create_params"
_REFERENCES = ("expected_answer", "answer", "reference", "ground_truth")
_ROLES = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant"}
_BESIDE = 16
_MANY = 1e9


class NemoGym(ToolEnvironment):
    """A resources server of NeMo Gym."""

    tags = ("nemo-gym", "server")

    def __init__(self, target: Mapping[str, Any]) -> None:
        timeout = target.get("timeout_s", 60)
        if not isinstance(timeout, int | float) or isinstance(timeout, bool) or timeout <= 0:
            raise LoadError(f"timeout_s must be a number of seconds, not {timeout!r}.")
        self._server = JsonServer(str(target.get("url") or ""), float(timeout))
        self._rows = Path(str(target.get("rows") or "")).expanduser().absolute()
        if not self._rows.is_file():
            raise LoadError(f"rows: no file {str(target.get('rows') or '')!r}; give NeMo Gym's JSON lines file.")
        self.files = (str(self._rows),)
        self.name = str(target.get("name") or "nemo_gym")  # type: ignore[misc]
        self.__doc__ = str(target.get("description") or f"NeMo Gym's server at {self._server.url}: {self._rows.name}")
        self._bounds = Bounds(target.get("range"), bool(target.get("clip")), "`range`")
        self._solved = float(target.get("success", self._bounds.high))
        self._shown = [str(name) for name in target.get("shown") or ()]
        self._reference = str(target.get("reference") or "")
        self.max_turns = int(target.get("max_turns") or 10)
        self.tool_timeout_s = float(timeout) + 5
        shown = {name: Part(0.0, -_MANY, _MANY, "from /verify; shown") for name in self._shown}
        self.parts = {"reward": self._bounds.part(1.0, "the reward of /verify"), **shown, **TOOL_PARTS}

    def setup(self) -> None:
        try:
            self._server.check()
        except Unreachable as error:
            raise LoadError(f"{error} Start the resources server first, or fix `url` in the target.") from None

    def tasks(self) -> Iterator[Task]:
        rows = _rows.rows_of(str(self._rows), [self._rows.parent], [self._rows], "", "train")
        for number, row in enumerate(rows, 1):
            parameters = row.get(_PARAMETERS)
            if not isinstance(parameters, Mapping) or not parameters.get("input"):
                raise EnvironmentMistake(
                    f"Row {number} of {self._rows.name} has no {_PARAMETERS} with an input; it has {', '.join(row)}."
                )
            column = self._reference or next((name for name in _REFERENCES if name in row), "")
            yield Task(_messages(parameters, number), reference=row.get(column), data={"row": row})

    def reset(self, task: Task) -> Messages:
        self._cookies: dict[str, str] = {}
        answer = self._server.post("seed_session", task.data["row"], self._cookies)
        if answer.status != 404:  # a stateless server may lack it
            answer.value("/seed_session")
        first = self.with_tools(task.prompt)
        self._first = len(first)
        return first

    def own_tools(self) -> list[Tool]:
        return [self._tool(given) for given in self.task.data["row"][_PARAMETERS].get("tools") or ()]

    def score_group(self, rollouts: Sequence[Environment]) -> list[Any]:
        """Verify rollouts concurrently; a failed verification is an error of its rollout alone."""
        played = [one for one in rollouts if isinstance(one, NemoGym)]
        with ThreadPoolExecutor(min(_BESIDE, len(played)), thread_name_prefix="verify") as threads:
            return list(threads.map(_verified, played))

    def success(self, parts: dict[str, float], reward: float) -> bool:
        return parts["reward"] >= self._solved - 1e-9

    def _tool(self, given: Mapping[str, Any]) -> Tool:
        name = given.get("name")
        if given.get("type") != "function" or not isinstance(name, str):
            raise EnvironmentMistake(f"The row has a tool that the server does not provide: {str(given)[:120]}.")

        def call(arguments: str) -> str:
            return self._server.post(quote(name), json.loads(arguments), self._cookies).text

        schema = given.get("parameters") or {"type": "object", "properties": {}}
        return Tool(name, str(given.get("description") or ""), call, schema, timeout_s=self.tool_timeout_s)

    def verify(self) -> dict[str, float]:
        """Request the reward of this rollout.

        Raises:
            EnvironmentMistake: The server does not answer, or gives no reward.
        """
        row = self.task.data["row"]
        found = self._server.post("verify", {**row, "response": self._response()}, self._cookies).value("/verify")
        if not isinstance(found, Mapping) or found.get("reward") is None:
            raise EnvironmentMistake(f"/verify returned no reward: {str(found)[:200]}")
        if found.get("mask_sample"):
            why = found.get("failure_reason") or found.get("failure_kind") or "no reason given"
            raise EnvironmentMistake(f"/verify rejected this rollout: {why}")
        values = {"reward": self._bounds.value(found["reward"], "/verify")}
        for name in self._shown:
            value = found.get(name)
            values[name] = float(value) if isinstance(value, int | float) else 0.0
        return values

    def _response(self) -> dict[str, Any]:
        """Return the conversation in the form of OpenAI's Responses, as NeMo Gym's agents send it."""
        parameters = self.task.data["row"][_PARAMETERS]
        output: list[dict[str, Any]] = []
        waiting: list[str] = []
        for number, message in enumerate(self.messages[self._first :]):
            if message["role"] == "assistant":
                output += _said(message["content"], number, self.truncated, waiting)
            elif message["role"] == "tool" and waiting:
                called = {"call_id": waiting.pop(0), "output": message["content"]}
                output.append({"type": "function_call_output", **called})
        return {
            "id": f"resp_{self.task.id}",
            "created_at": time.time(),
            "object": "response",
            "model": "policy",
            "status": "incomplete" if self.truncated else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if self.truncated else None,
            "output": output,
            "parallel_tool_calls": parameters.get("parallel_tool_calls", True),
            "tool_choice": parameters.get("tool_choice", "auto"),
            "tools": parameters.get("tools") or [],
        }


def make(target: str) -> NemoGym:
    """Make the environment of a target. See the module.

    Raises:
        LoadError: Not a valid target.
    """
    if not target.lstrip().startswith("{"):
        url, _, rows = target.partition("#")
        if not rows:
            raise LoadError(
                f"{target!r} gives only the server; give its rows as well: {url or 'http://...'}#/path/rows.jsonl"
            )
        return NemoGym({"url": url, "rows": rows})
    return NemoGym(parsed(target, "nemo_gym", KEYS))


def _verified(rollout: NemoGym) -> Any:
    try:
        return rollout.verify()
    except Exception as error:  # is the rollout's own
        return error


def _messages(parameters: Mapping[str, Any], number: int) -> Messages:
    """Return the input of a row as messages."""
    given, messages = parameters["input"], []
    if parameters.get("instructions"):
        messages.append({"role": "system", "content": str(parameters["instructions"])})
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    for item in given:
        kind = item.get("type") or "message"
        if kind == "function_call":
            called = f'{{"name": {json.dumps(item.get("name"))}, "arguments": {item.get("arguments") or "{}"}}}'
            messages.append({"role": "assistant", "content": f"<tool_call>\n{called}\n</tool_call>"})
        elif kind == "function_call_output":
            messages.append({"role": "tool", "content": str(item.get("output", ""))})
        elif kind == "message" and item.get("role") in _ROLES:
            messages.append({"role": _ROLES[item["role"]], "content": _text(item.get("content"), number)})
        elif kind != "reasoning":
            raise EnvironmentMistake(f"Row {number} has an input of the type {kind!r}, which cannot be shown as text.")
    return messages


def _text(content: Any, number: int) -> str:
    if isinstance(content, str):
        return content
    texts = [part.get("text") for part in content or () if isinstance(part, Mapping)]
    words = [text for text in texts if isinstance(text, str)]
    if len(words) != len(texts):
        raise EnvironmentMistake(f"Row {number} has content other than text, such as an image; only text is supported.")
    return "".join(words)


def _said(text: str, number: int, cut: bool, waiting: list[str]) -> list[dict[str, Any]]:
    """Convert an answer of the policy into response items; append the ids of its calls to `waiting`."""
    calls = calls_in(text)
    plain = text.split("<tool_call>", 1)[0].strip() if calls else text
    items: list[dict[str, Any]] = []
    if plain or not calls:
        content = [{"type": "output_text", "text": plain, "annotations": []}]
        status = "incomplete" if cut else "completed"
        items.append({"id": f"msg_{number}", "type": "message", "role": "assistant", "status": status,
                      "content": content})  # fmt: skip
    for place, call in enumerate(calls):
        waiting.append(f"call_{number}_{place}")
        named = {"name": call.name or "unreadable", "arguments": json.dumps(call.arguments or {})}
        items.append({"type": "function_call", "id": f"fc_{number}_{place}", "call_id": waiting[-1],
                      "status": "completed", **named})  # fmt: skip
    return items
