"""Faults of the machine and the client: a full disk, missing permissions, limits, malformed messages, too many
calls."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import psutil

from benchmarks.wrong_inputs.installation import SERVER, Answer, Case, Expected, Installation

__all__ = ["CASES"]

_HOME, _WIRE = "the machine", "the wire"
_OPENING = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "bench", "version": "1"}}
_ANSWER_S = 15.0
_MANY_CALLS = 2000
_GROWTH_MB = 40.0


async def _home_below_a_file(site: Installation) -> AsyncIterator[tuple[Answer, Expected]]:
    """A home that cannot be created: even root cannot create a folder below a file."""
    (site.path / "file").write_text("no folder")
    site.variables["TOPROPE_HOME"] = str(site.path / "file" / "home")
    await site.connect()
    site.mark()
    answer = await site.call("select_environment", name="sort_letters")
    yield answer, Expected((str(site.path / "file"), "Nothing was changed"), ("cannot be created",), ("TOPROPE_HOME",))


async def _no_room_for_a_draft(site: Installation) -> AsyncIterator[tuple[Answer, Expected]]:
    site.limits = "ulimit -f 0; "
    await site.connect()
    site.mark()
    answer = await site.call("select_environment", name="sort_letters")

    def empty_home(key: str) -> bool:
        return key == "index"

    names = (str(site.home), "Nothing was changed")
    yield (
        answer,
        Expected(names, ("cannot be used", "cannot be written", "No space", "full"), ("room",), may=empty_home),
    )


async def _no_room_for_an_edit(site: Installation) -> AsyncIterator[tuple[Answer, Expected]]:
    draft_id = await site.draft()
    await site.close()
    site.limits = "ulimit -f 0; "
    await site.connect()
    site.mark()
    answer = await site.call("edit_config", draft_id=draft_id, changes={"budget.steps": 7})
    yield answer, Expected(("index.db", "Nothing was changed"), ("cannot be used",), ("room",))


async def _no_room_for_a_run(site: Installation) -> AsyncIterator[tuple[Answer, Expected]]:
    """The folder can be created, its files cannot be written: no partial run may stay."""
    draft_id = await site.draft()
    (site.home / "runs").mkdir()
    await site.close()
    site.limits = "ulimit -f 0; "
    await site.connect()
    site.mark()
    answer = await site.call("start_training", draft_id=draft_id)
    yield answer, Expected(("Nothing was changed",), ("cannot be used", "cannot be written"), ("room",))


async def _runs_is_a_file(site: Installation) -> AsyncIterator[tuple[Answer, Expected]]:
    draft_id = await site.draft()
    (site.home / "runs").write_text("no folder")
    site.mark()
    answer = await site.call("start_training", draft_id=draft_id)
    yield answer, Expected((str(site.home / "runs"),), ("cannot be created", "is no folder"), ("TOPROPE_HOME", "Move"))


async def _no_more_descriptors(site: Installation) -> AsyncIterator[tuple[Answer, Expected]]:
    site.limits = "ulimit -n 14; "
    await site.connect()
    site.mark()
    answer = await site.call("describe_environment", name="sort_letters")
    yield answer, Expected(("sort_letters",), ("open files", "descriptors"), ("ulimit", "limit"))


class _Raw:
    """A server called with raw lines, which no sound client sends."""

    def __init__(self, site: Installation) -> None:
        self._site = site

    async def __aenter__(self) -> _Raw:
        self.process = await asyncio.create_subprocess_exec(
            *SERVER,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env=self._site.environ(),
            limit=1 << 24,
        )
        await self.ask(json.dumps({"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": _OPENING}).encode(), 1)
        self.say(b'{"jsonrpc":"2.0","method":"notifications/initialized"}')
        return self

    async def __aexit__(self, *exception: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        await self.process.wait()

    def say(self, line: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + b"\n")

    async def ask(self, line: bytes, number: int | None) -> dict[str, Any]:
        """Send a line and return the answer with that id."""
        assert self.process.stdout is not None
        self.say(line)
        while True:
            answer = json.loads(await asyncio.wait_for(self.process.stdout.readline(), _ANSWER_S))
            if answer.get("id") == number:
                return answer

    async def answer(self, line: bytes, number: int | None) -> Answer:
        """Return the answer as a person reads it; a missing answer counts as an error of the protocol."""
        try:
            answer = await self.ask(line, number)
        except (TimeoutError, ValueError):
            return Answer("there was no answer: a client would wait until its own limit", True, protocol_error=True)
        if "error" in answer:
            return Answer(answer["error"]["message"], True)
        return Answer(answer["result"]["content"][0]["text"], bool(answer["result"].get("isError")))


def _line(title: str, arguments: bytes, cause: tuple[str, ...]) -> Case:
    """A call whose line is not valid JSON. It is answered, and so is the next call."""

    async def play(site: Installation) -> AsyncIterator[tuple[Answer, Expected]]:
        site.mark()
        async with _Raw(site) as raw:
            answer = await raw.answer(
                b'{"jsonrpc":"2.0","id":2,"method":"tools/call","params":{"name":"get_config","arguments":'
                + arguments
                + b"}}",
                2,
            )
            after = await raw.answer(
                b'{"jsonrpc":"2.0","id":3,"method":"tools/call","params":{"name":"list_runs","arguments":{}}}', 3
            )
            if after.is_error:
                answer = after
        yield answer, Expected((), cause, ("Nothing was", "not called"))

    return Case(_WIRE, title, play)


_LINES = [
    _line("nested deeper than JSON is read", b'{"draft_id":' + b"[" * 300 + b"]" * 300 + b"}", ("could not be read",)),
    _line("half of a surrogate pair", b'{"draft_id":"\\ud800"}', ("could not be read",)),
    _line(
        "a number of five thousand digits", b'{"draft_id":1' + b"0" * 5000 + b"}", ("could not be read", "not a text")
    ),
    _line("a raw NUL within a text", b'{"draft_id":"a\x00b"}', ("could not be read",)),
    _line("NaN for a text", b'{"draft_id":NaN}', ("is not a text",)),
]


async def _no_json(site: Installation) -> AsyncIterator[tuple[Answer, Expected]]:
    site.mark()
    async with _Raw(site) as raw:
        for line in (b"this is not JSON", b"\xff\xfe", b"[]", b'"a"', b"{}", b""):
            raw.say(line)
        answer = await raw.answer(
            b'{"jsonrpc":"2.0","id":2,"method":"tools/call","params":{"name":"get_config","arguments":{}}}', 2
        )
    yield answer, Expected(("draft_id",), ("is missing",), ("select_environment", "Drafts: "))


async def _thousands_of_calls(site: Installation) -> AsyncIterator[tuple[Answer, Expected]]:
    """Thousands of wrong calls: each is answered, and the server does not grow."""
    await site.call("edit_config", draft_id="draft-none", changes={"x": 1})
    servers = [
        one for one in psutil.Process().children(recursive=True) if "toprope_server.cli" in " ".join(one.cmdline())
    ]
    site.mark()
    answer, before = Answer("", False), 0
    for number in range(_MANY_CALLS):
        answer = await site.call("edit_config", draft_id=f"draft-{number}", changes={"rollout.x": number})
        if number == 200:
            before = sum(server.memory_info().rss for server in servers)
    grown = (sum(server.memory_info().rss for server in servers) - before) / 2**20
    if grown > _GROWTH_MB:
        answer = Answer(f"the server grew by {grown:.0f} MB in {_MANY_CALLS} wrong calls", True, protocol_error=True)
    yield answer, Expected((f"draft-{_MANY_CALLS - 1}", "Nothing was changed"), ("no draft",), ("select_environment",))


async def _at_once(site: Installation) -> AsyncIterator[tuple[Answer, Expected]]:
    """A hundred wrong calls at the same time."""
    import anyio

    await site.connect()
    site.mark()
    found: list[Answer] = []

    async def one(number: int) -> None:
        found.append(await site.call("start_training", draft_id=f"none-{number}"))

    async with anyio.create_task_group() as tasks:
        for number in range(100):
            tasks.start_soon(one, number)
    odd = [answer for answer in found if answer.protocol_error or "no draft" not in answer.text]
    answer = odd[0] if odd or len(found) != 100 else found[-1]
    yield answer, Expected(("none-", "Nothing was changed"), ("no draft",), ("select_environment",))


CASES: list[Case] = [
    Case(_HOME, "a home that cannot be made", _home_below_a_file, own=True),
    Case(_HOME, "no disk left for a draft", _no_room_for_a_draft, own=True),
    Case(_HOME, "no disk left for an edit", _no_room_for_an_edit, own=True),
    Case(_HOME, "no disk left for a run", _no_room_for_a_run, own=True),
    Case(_HOME, "a file where the runs' folder belongs", _runs_is_a_file, own=True),
    Case(_HOME, "no more descriptors", _no_more_descriptors, own=True),
    *_LINES,
    Case(_WIRE, "lines that are no messages", _no_json),
    Case(_WIRE, "two thousand wrong calls", _thousands_of_calls, own=True, slow=True),
    Case(_WIRE, "a hundred wrong calls at once", _at_once, own=True),
]
