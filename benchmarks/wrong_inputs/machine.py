"""Faults of the machine and the client: a full disk, missing permissions, limits, malformed messages, too many
calls."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import psutil

from benchmarks.wrong_inputs.house import SERVER, Case, Expected, House, Told

__all__ = ["CASES"]

_HOME, _WIRE = "the machine", "the wire"
_OPENING = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "bench", "version": "1"}}
_ANSWER_S = 15.0
_MANY_CALLS = 2000
_GROWTH_MB = 40.0


async def _home_below_a_file(house: House) -> AsyncIterator[tuple[Told, Expected]]:
    """A home that cannot be created: even root cannot create a folder below a file."""
    (house.path / "file").write_text("no folder")
    house.variables["TOPROPE_HOME"] = str(house.path / "file" / "home")
    await house.connect()
    house.mark()
    told = await house.call("select_environment", name="sort_letters")
    yield told, Expected((str(house.path / "file"), "Nothing was changed"), ("cannot be created",), ("TOPROPE_HOME",))


async def _no_room_for_a_draft(house: House) -> AsyncIterator[tuple[Told, Expected]]:
    house.limits = "ulimit -f 0; "
    await house.connect()
    house.mark()
    told = await house.call("select_environment", name="sort_letters")

    def empty_home(key: str) -> bool:
        return key == "index"

    names = (str(house.home), "Nothing was changed")
    yield told, Expected(names, ("cannot be used", "cannot be written", "No space", "full"), ("room",), may=empty_home)


async def _no_room_for_an_edit(house: House) -> AsyncIterator[tuple[Told, Expected]]:
    draft_id = await house.draft()
    await house.close()
    house.limits = "ulimit -f 0; "
    await house.connect()
    house.mark()
    told = await house.call("edit_config", draft_id=draft_id, changes={"budget.steps": 7})
    yield told, Expected(("index.db", "Nothing was changed"), ("cannot be used",), ("room",))


async def _no_room_for_a_run(house: House) -> AsyncIterator[tuple[Told, Expected]]:
    """The folder can be created, its files cannot be written: no partial run may stay."""
    draft_id = await house.draft()
    (house.home / "runs").mkdir()
    await house.close()
    house.limits = "ulimit -f 0; "
    await house.connect()
    house.mark()
    told = await house.call("start_training", draft_id=draft_id)
    yield told, Expected(("Nothing was changed",), ("cannot be used", "cannot be written"), ("room",))


async def _runs_is_a_file(house: House) -> AsyncIterator[tuple[Told, Expected]]:
    draft_id = await house.draft()
    (house.home / "runs").write_text("no folder")
    house.mark()
    told = await house.call("start_training", draft_id=draft_id)
    yield told, Expected((str(house.home / "runs"),), ("cannot be created", "is no folder"), ("TOPROPE_HOME", "Move"))


async def _no_more_descriptors(house: House) -> AsyncIterator[tuple[Told, Expected]]:
    house.limits = "ulimit -n 14; "
    await house.connect()
    house.mark()
    told = await house.call("describe_environment", name="sort_letters")
    yield told, Expected(("sort_letters",), ("open files", "descriptors"), ("ulimit", "limit"))


class _Raw:
    """A server called with raw lines, which no sound client sends."""

    def __init__(self, house: House) -> None:
        self._house = house

    async def __aenter__(self) -> _Raw:
        self.process = await asyncio.create_subprocess_exec(
            *SERVER,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env=self._house.environ(),
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

    async def told(self, line: bytes, number: int | None) -> Told:
        """Return the answer as a person reads it; a missing answer counts as an error of the protocol."""
        try:
            answer = await self.ask(line, number)
        except (TimeoutError, ValueError):
            return Told("there was no answer: a client would wait until its own limit", True, protocol_error=True)
        if "error" in answer:
            return Told(answer["error"]["message"], True)
        return Told(answer["result"]["content"][0]["text"], bool(answer["result"].get("isError")))


def _line(title: str, arguments: bytes, cause: tuple[str, ...]) -> Case:
    """A call whose line is not valid JSON. It is answered, and so is the next call."""

    async def play(house: House) -> AsyncIterator[tuple[Told, Expected]]:
        house.mark()
        async with _Raw(house) as raw:
            told = await raw.told(
                b'{"jsonrpc":"2.0","id":2,"method":"tools/call","params":{"name":"get_config","arguments":'
                + arguments
                + b"}}",
                2,
            )
            after = await raw.told(
                b'{"jsonrpc":"2.0","id":3,"method":"tools/call","params":{"name":"list_runs","arguments":{}}}', 3
            )
            if after.is_error:
                told = after
        yield told, Expected((), cause, ("Nothing was", "not called"))

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


async def _no_json(house: House) -> AsyncIterator[tuple[Told, Expected]]:
    house.mark()
    async with _Raw(house) as raw:
        for line in (b"this is not JSON", b"\xff\xfe", b"[]", b'"a"', b"{}", b""):
            raw.say(line)
        told = await raw.told(
            b'{"jsonrpc":"2.0","id":2,"method":"tools/call","params":{"name":"get_config","arguments":{}}}', 2
        )
    yield told, Expected(("draft_id",), ("is missing",), ("select_environment",))


async def _thousands_of_calls(house: House) -> AsyncIterator[tuple[Told, Expected]]:
    """Thousands of wrong calls: each is answered, and the server does not grow."""
    await house.call("edit_config", draft_id="draft-none", changes={"x": 1})
    servers = [
        one for one in psutil.Process().children(recursive=True) if "toprope_server.cli" in " ".join(one.cmdline())
    ]
    house.mark()
    told, before = Told("", False), 0
    for number in range(_MANY_CALLS):
        told = await house.call("edit_config", draft_id=f"draft-{number}", changes={"rollout.x": number})
        if number == 200:
            before = sum(server.memory_info().rss for server in servers)
    grown = (sum(server.memory_info().rss for server in servers) - before) / 2**20
    if grown > _GROWTH_MB:
        told = Told(f"the server grew by {grown:.0f} MB in {_MANY_CALLS} wrong calls", True, protocol_error=True)
    yield told, Expected((f"draft-{_MANY_CALLS - 1}", "Nothing was changed"), ("no draft",), ("select_environment",))


async def _at_once(house: House) -> AsyncIterator[tuple[Told, Expected]]:
    """A hundred wrong calls at the same time."""
    import anyio

    await house.connect()
    house.mark()
    found: list[Told] = []

    async def one(number: int) -> None:
        found.append(await house.call("start_training", draft_id=f"none-{number}"))

    async with anyio.create_task_group() as tasks:
        for number in range(100):
            tasks.start_soon(one, number)
    odd = [told for told in found if told.protocol_error or "no draft" not in told.text]
    told = odd[0] if odd or len(found) != 100 else found[-1]
    yield told, Expected(("none-", "Nothing was changed"), ("no draft",), ("select_environment",))


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
