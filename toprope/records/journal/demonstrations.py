"""Demonstrations: conversations of a teacher or a data set, one JSON line each, for `sft` runs to train on.

The first line is the file's version. A file of a newer version is refused; a torn last line is skipped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from toprope.atomic import append
from toprope.errors import Corrupt
from toprope.records.run.folder import REPAIR_HINT

_VERSION = 1


class Trace(msgspec.Struct, omit_defaults=True):
    """One demonstration."""

    task_id: str
    """Hash of the task's content."""
    variant: int
    """Number of the demonstration among those of its task."""
    messages: list[dict[str, Any]]
    """The whole conversation; the assistant's messages after the first ones are the answers."""
    reward: float = 0.0
    parts: dict[str, float] = {}
    turns: int = 1
    teacher: str = ""
    verdict: dict[str, Any] = {}
    """Of an item of a data set, as far as it has them: `success`, `score`, `unscored`, and `first_task` and
    `first_prompt`, by which a copy is known as one of a task that may be held out."""
    tools: list[dict[str, Any]] = []
    """Tools that the assistant could call, in OpenAI's form."""
    first_messages: int = 0
    """Number of messages of the prompt; 0 if it is unknown, as in files of earlier versions."""

    @property
    def prompt(self) -> list[dict[str, Any]]:
        """The messages before the first answer."""
        answer_places = (n for n, message in enumerate(self.messages) if message["role"] == "assistant")
        return self.messages[: self.first_messages or next(answer_places, None)]


class _Head(msgspec.Struct):
    version: int


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Trace).decode


def append_traces(path: Path, traces: Sequence[Trace]) -> None:
    """Append and fsync; write the version header if the file is new."""
    append(path, b"".join(_encode(trace) + b"\n" for trace in traces), header=_encode(_Head(_VERSION)) + b"\n")


def read_traces(path: Path) -> Iterator[Trace]:
    """The traces in a file; none if the file is missing. Unreadable lines are skipped.

    Raises:
        Corrupt: It is not a file of traces, or a newer version wrote it.
    """
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        try:
            head = msgspec.json.decode(file.readline() or b"null", type=_Head)
        except msgspec.DecodeError:
            raise Corrupt(f"{path} is not a file of traces.", hint=REPAIR_HINT) from None
        if head.version > _VERSION:
            raise Corrupt(f"{path} was written by a newer version of Toprope.", hint="Update Toprope.")
        for line in file:
            try:
                yield _decode(line)
            except msgspec.DecodeError:
                continue
