"""A run's picture for those who look at it in a client: the one that its keeper drew, or one drawn for the asking.

matplotlib is large and would stay in the server, so it draws in a process of its own, into a folder that goes with the
answer: reading a run leaves nothing behind in it.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from toprope_tools.answers.base import Answer, clip
from toprope_tools.resources.resources import MOST_PLOT_BYTES

if TYPE_CHECKING:
    from toprope_tools.workshop import Workshop

__all__ = ["with_picture"]

_LIMIT_S = 40.0


def with_picture(workshop: Workshop, run_id: str, answer: Answer) -> Answer:
    """The answer with the run's picture, a PNG of at most 1 MiB, or with a line that says why there is none."""
    folder, status = workshop.runs.folder(run_id), workshop.runs.status(run_id)
    try:
        picture = folder.plot.read_bytes() if folder.plot.stat().st_size <= MOST_PLOT_BYTES else b""
    except OSError:
        if not status.run_kind.has_plot:
            return _without(answer, f"a run of kind {status.kind} has none")
        if not status.ended:
            return _without(answer, "it is drawn when the run ends")
        try:
            picture = _drawn(folder.path)
        except _NotDrawn as error:
            return _without(answer, f"it could not be drawn: {clip(str(error), 200)}")
    if not 0 < len(picture) <= MOST_PLOT_BYTES:
        return _without(answer, f"it is larger than {MOST_PLOT_BYTES >> 20} MiB; it lies at {folder.plot}")
    return replace(answer, picture=picture)


class _NotDrawn(Exception):
    """Why there is no picture."""


def _drawn(run: Path) -> bytes:
    with tempfile.TemporaryDirectory(prefix="toprope-plot-") as place:
        picture = Path(place) / "plot.png"
        program = [sys.executable, "-P", "-m", "toprope.analysis.plots", str(run), str(picture)]
        try:
            done = subprocess.run(program, capture_output=True, stdin=subprocess.DEVNULL, timeout=_LIMIT_S, check=False)
        except subprocess.TimeoutExpired:
            raise _NotDrawn(f"not within {_LIMIT_S:.0f} s") from None
        if done.returncode != 0 or not picture.exists():
            said = done.stderr.decode(errors="replace").strip().splitlines()
            raise _NotDrawn(said[-1] if said else "no reason was given")
        return picture.read_bytes()


def _without(answer: Answer, why: str) -> Answer:
    return replace(answer, text=f"{answer.text}\nNo picture: {why}.")
