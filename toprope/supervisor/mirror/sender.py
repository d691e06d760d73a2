"""Sends what is new in a run folder to the server, again and again, and takes orders. See `wire` for the protocol."""

from __future__ import annotations

import os
import re
import stat
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import httpx2 as httpx

from toprope.atomic import open_plain, write_text
from toprope.records.run.folder import RunFolder, checkpoints_in, folder_bytes
from toprope.supervisor.mirror.wire import CHUNK, WHOLE, Prefix, Refused, Wire, is_mirrored
from toprope.supervisor.runs.orders import write_end_order

_EVERY_S, _LAST_EVERY_S = 0.5, 0.1
_AGAIN_S = 2.0
_ROOM_S = 60.0
"""Until a file for which the server had no room is tried again."""
_TAIL = 256
_REPLACED = (".json", ".png", ".diff")
_ORDER = re.compile(r"(?:stop|end)-[A-Za-z0-9]{1,16}\.json")


@dataclass
class _Sent:
    """The part of a file that the server has."""

    prefix: Prefix = field(default_factory=Prefix)
    inode: int = 0
    tail: bytes = b""
    """The last bytes of that part: they differ if somebody rewrote it in place."""
    stamp: tuple[int, int, int] = (0, 0, 0)
    refused_at: float = -_ROOM_S
    lacks_room: bool = False
    """The server's disk is full, so it may take the file later; it never takes one beyond the owner's limit."""


class Sender:
    """Mirrors one run folder.

    Args:
        folder: The run folder on the cluster.
        wire: The way to the server.
        attempt: The attempt that ends if the server gives its place to another job.
    """

    def __init__(self, folder: RunFolder, wire: Wire, attempt: int) -> None:
        self._folder, self._wire, self._attempt = folder, wire, attempt
        self._sent: dict[str, _Sent] = {}
        self._status, self._bytes = b"", dict[tuple[Path, int], int]()
        self._taken: list[str] = []
        self._wanted: list[str] = []
        self._complete: list[str] = []
        self._finishing = threading.Event()
        self._last_line = ""
        self._thread = threading.Thread(target=self._run, name="mirror", daemon=True)
        self.arrived = False
        """Everything has arrived, the end of the run included."""

    def start(self) -> None:
        """Send from now on, in a thread of its own."""
        self._thread.start()

    def finish(self, within_s: float) -> bool:
        """Send the rest of a run that has ended; True if everything arrived in so many seconds."""
        self._finishing.set()
        self._thread.join(within_s)
        return self.arrived

    def _run(self) -> None:
        while not self.arrived:
            last = self._finishing.is_set()
            try:
                self._look(last=last)
                self._last_line = ""
            except Refused as error:
                self._say(f"The server takes nothing more from this job: {error}")
                write_end_order(self._folder, self._attempt, f"Its server gave the run to another job: {error}")
                return
            except (httpx.HTTPError, OSError, ValueError, KeyError) as error:
                self._say(f"The server cannot be reached, or not used; trying on: {error!r}")
                self._wanted = []  # the next answer names what is wanted then
                time.sleep(_AGAIN_S)
                continue
            if last:
                time.sleep(_LAST_EVERY_S)
            elif not self._wanted or any(sent.lacks_room for sent in self._sent.values()):
                self._finishing.wait(_EVERY_S)

    def _say(self, text: str) -> None:
        if text != self._last_line:
            print(text, file=sys.stderr, flush=True)
        self._last_line = text

    def _look(self, *, last: bool) -> None:
        """Send what is new, then the status as it was before: a reader who sees it finds all that it tells of."""
        status = self._folder.status.read_bytes()
        names = sorted(self._names())
        for name in names:
            if name != "status.json":
                self._send(name, self._folder.path / name, again=last)
        for step in self._wanted:
            self._send_checkpoint(step, last=last)
        lacking = [name for name in names if name in self._sent and self._sent[name].lacks_room]
        if lacking and last:
            raise OSError(f"no room for {lacking[0]}")
        if status != self._status and not lacking:
            answer = self._wire.ask("PUT", "/file", params={"path": "status.json", "whole": 1}, content=status)
            if not answer.is_success:
                raise OSError(f"no room for the status: {answer.text[:300]}")
            self._status = status
        sizes = self._measure_checkpoints()
        body = {
            "names": names,
            "kept": sizes,
            "complete": self._complete,
            "taken": self._taken,
            "beat": time.time_ns() if last or not self._folder.lock.exists() else self._folder.lock.stat().st_mtime_ns,
            "last": last and not self._wanted,
        }
        answer = self._wire.ask("POST", "/pass", json=body).json()
        self._taken, self._complete = [], []
        for name, text in answer["orders"].items():
            if _ORDER.fullmatch(name):
                write_text(self._folder.orders / name, text)
                self._taken.append(name)
        self._wanted = [step for step in answer["wanted"] if step in sizes]
        self.arrived = bool(answer["over"])

    def _measure_checkpoints(self) -> dict[str, int]:
        """Return the bytes of the checkpoints by name. A finished one is measured once, as it never changes."""
        checkpoints = {(path, path.stat().st_mtime_ns) for path in checkpoints_in(self._folder.checkpoints)}
        self._bytes = {key: self._bytes.get(key) or folder_bytes(key[0]) for key in checkpoints}
        return {path.name: size for (path, _), size in self._bytes.items()}

    def _names(self) -> Iterator[str]:
        standard = ("standard",) if (self._folder.path / "standard").is_dir() else ()
        for place in ("", "evaluations", "journal", "logs", *standard):
            with os.scandir(self._folder.path / place) as entries:
                for entry in entries:
                    name = f"{place}/{entry.name}" if place else entry.name
                    if is_mirrored(name) and entry.is_file(follow_symlinks=False):
                        yield name

    def _send_checkpoint(self, step: str, *, last: bool) -> None:
        """Send a checkpoint under a hidden name; its manifest, without which it is unfinished, comes last."""
        root = self._folder.checkpoints / step
        files = [path for path in sorted(root.rglob("*")) if path.is_file() and not path.name.startswith(".")]
        for path in sorted(files, key=lambda path: path == root / "manifest.json"):
            name = f"checkpoints/.{step}/{path.relative_to(root).as_posix()}"
            self._send(name, path, again=last)
            if name in self._sent and self._sent[name].lacks_room:
                if last:
                    raise OSError(f"no room for the checkpoint {step}")
                return
        self._complete.append(step)

    def _send(self, name: str, path: Path, *, again: bool) -> None:
        """Send what is new in a file. One that is gone meanwhile, or is no regular file, is left out.

        Args:
            again: Also if the server had no room for it a moment ago.
        """
        try:
            file_stat, sent = path.lstat(), self._sent.setdefault(name, _Sent())
            stamp = (file_stat.st_ino, file_stat.st_size, file_stat.st_mtime_ns)
            if sent.stamp == stamp or (not again and time.monotonic() < sent.refused_at + _ROOM_S):
                return
            if not stat.S_ISREG(file_stat.st_mode):
                return
            with open_plain(path, links=False) as file:
                if path.suffix in _REPLACED and file_stat.st_size <= WHOLE:
                    query = {"path": name, "whole": 1}
                    answer = self._wire.ask("PUT", "/file", params=query, content=file.read())
                else:
                    answer = self._append(name, path, file, sent)
                sent.lacks_room = "Retry-After" in answer.headers
                if answer.status_code != httpx.codes.INSUFFICIENT_STORAGE:
                    sent.stamp = stamp
                else:
                    sent.refused_at = time.monotonic()
                    self._say(f"The server has no room for {name}.")
        except FileNotFoundError:
            return

    def _append(self, name: str, path: Path, file: BinaryIO, sent: _Sent) -> httpx.Response:
        """Send the bytes after those that the server has, or all if it has others; return its last answer."""
        file_stat = os.fstat(file.fileno())
        file.seek(max(0, sent.prefix.size - len(sent.tail)))
        if (
            sent.inode != file_stat.st_ino
            or file_stat.st_size < sent.prefix.size
            or file.read(len(sent.tail)) != sent.tail
        ):
            sent.prefix, sent.tail = Prefix(), b""  # another file: the server says what it has of it
        sent.inode, anew = file_stat.st_ino, False
        answer: httpx.Response | None = None
        while True:
            file.seek(sent.prefix.size)
            data = file.read(CHUNK)
            if name.endswith(".jsonl"):
                # So that readers at the server see whole lines; one that is longer than a chunk comes in parts.
                data = data[: data.rfind(b"\n") + 1] or (data if len(data) == CHUNK else b"")
            if answer is not None and not data and not anew:
                return answer
            query = {"path": name, "at": sent.prefix.size, "head": sent.prefix.head, "anew": int(anew)}
            answer = self._wire.ask("PUT", "/file", params=query, content=data)
            if answer.status_code == httpx.codes.PRECONDITION_FAILED:
                server_part = answer.json()
                common = Prefix.of(path, int(server_part["size"]))
                anew = (common.size, common.head) != (server_part["size"], server_part["head"])
                sent.prefix, sent.tail = Prefix() if anew else common, b""
            elif answer.is_success:
                sent.prefix.feed(data)
                sent.tail, anew = (sent.tail + data)[-_TAIL:], False
            else:
                return answer
