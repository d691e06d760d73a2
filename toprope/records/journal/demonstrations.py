"""Demonstrations: conversations in which a task was solved, one JSON line each, as a teacher made them and an `sft` run
trains on them.

The first line says what they are of. A file of a newer version is refused; a torn last line is passed over.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from toprope.atomic import append
from toprope.errors import Corrupt
from toprope.records.run.folder import LEFT

__all__ = ["Trace", "append_traces", "read_traces"]

_VERSION = 1


class Trace(msgspec.Struct, omit_defaults=True):
    """One demonstration."""

    task_id: str
    """Hash of the task's content."""
    variant: int
    """Which of its task's demonstrations."""
    messages: list[dict[str, Any]]
    """The whole conversation, the answers being the assistant's."""
    reward: float = 0.0
    parts: dict[str, float] = {}
    turns: int = 1
    teacher: str = ""


class _Head(msgspec.Struct):
    version: int


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Trace).decode


def append_traces(path: Path, traces: Sequence[Trace]) -> None:
    """Append and fsync; write the version header if the file is new."""
    append(path, b"".join(_encode(trace) + b"\n" for trace in traces), header=_encode(_Head(_VERSION)) + b"\n")


def read_traces(path: Path) -> Iterator[Trace]:
    """The traces in a file, none where there is no file; lines that are none are passed over.

    Raises:
        Corrupt: It is no file of traces, or one of a newer version.
    """
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        try:
            head = msgspec.json.decode(file.readline() or b"null", type=_Head)
        except msgspec.DecodeError:
            raise Corrupt(f"{path} is no file of traces.", hint=LEFT) from None
        if head.version > _VERSION:
            raise Corrupt(f"{path} was written by a newer version of Toprope.", hint="Update Toprope.")
        for line in file:
            try:
                yield _decode(line)
            except msgspec.DecodeError:
                continue
