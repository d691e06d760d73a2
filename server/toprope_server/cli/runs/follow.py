"""`toprope logs`: print the end of logs, and with --follow what is written until the run ends.

Components print untrusted text, so it is cleaned as everywhere, and the owner's keys are masked. A log is followed
through its rotation: the open file is read to its end before the new one of the same name.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING

from toprope_tools.runs.logs import components_of, owners_secrets, require_log

from toprope.records.run.folder import open_record
from toprope.supervisor.keeper.logs import clean_line, read_page

if TYPE_CHECKING:
    from toprope_tools.workshop import Workshop

_CHECK_EVERY_S = 0.2
_CHUNK = 1 << 18


class LogTail:
    """New lines of one log.

    Args:
        path: The log; it need not exist yet.
        start: The first byte to read.
        secrets: Texts to mask.
    """

    def __init__(self, path: Path, start: int = 0, secrets: Sequence[str] = ()) -> None:
        self._path, self._secrets = path, secrets
        self._file: IO[bytes] | None = None
        self._start = start
        self._rest = b""

    def lines(self, *, last: bool = False) -> list[str]:
        """Complete lines that were added since the last call, cleaned.

        Args:
            last: Include an incomplete last line, because nothing follows.

        Raises:
            Corrupt: The log cannot be read.
        """
        data = self._rest + self._read()
        *complete_lines, self._rest = data.split(b"\n")
        if last and self._rest:
            complete_lines.append(self._rest)
            self._rest = b""
        return [clean_line(line.decode(errors="replace"), self._secrets) for line in complete_lines]

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _read(self) -> bytes:
        data = b""
        while True:
            if self._file is None:
                try:
                    self._file = open_record(self._path)
                except FileNotFoundError:
                    return data
                self._file.seek(self._start)
                self._start = 0
            while chunk := self._file.read(_CHUNK):
                data += chunk
            if not self._rotated():
                return data
            # Read the rest that was written between the last read and the rotation.
            while chunk := self._file.read(_CHUNK):
                data += chunk
            self._file.close()
            self._file = None

    def _rotated(self) -> bool:
        assert self._file is not None
        try:
            return not os.path.samestat(os.fstat(self._file.fileno()), os.stat(self._path))
        except FileNotFoundError:
            return False  # being renamed; the next check finds the new file


def show_logs(workshop: Workshop, run_id: str, component: str | None, lines: int, *, follow: bool) -> None:
    """Print the end of a run's logs, and with `follow` all new lines, until the run has ended.

    Args:
        component: The component; None for all, with the component's name in each line.
        lines: Existing lines to print, per log.

    Raises:
        NotFound: There is no such run, or the component has no log.
        InvalidValue: There is no such component.
    """
    folder = workshop.runs.folder(run_id)
    if component is not None and not (follow and component in components_of(folder)):
        require_log(folder, component)
    components = components_of(folder) if component is None else (component,)
    tails, secrets = {}, owners_secrets(workshop)
    for name in components:
        page = read_page(folder.log(name), lines=lines, secrets=secrets)
        for line in page.lines:
            _print(name if component is None else None, line)
        tails[name] = LogTail(folder.log(name), page.size, secrets)
    if follow:
        _follow(workshop, run_id, tails, with_names=component is None)
    elif not any(folder.log(name).is_file() for name in components):
        print(f"{run_id} has no logs yet.", file=sys.stderr)


def _follow(workshop: Workshop, run_id: str, tails: dict[str, LogTail], *, with_names: bool) -> None:
    try:
        while True:
            status = workshop.runs.status(run_id)  # read before the logs, so that their last lines are not missed
            over = status.is_over and not status.goes_on
            for name, tail in tails.items():
                for line in tail.lines(last=over):
                    _print(name if with_names else None, line)
            if over:
                return
            time.sleep(_CHECK_EVERY_S)
    finally:
        for tail in tails.values():
            tail.close()


def _print(name: str | None, line: str) -> None:
    print(line if name is None else f"{name:<11} | {line}", flush=True)
