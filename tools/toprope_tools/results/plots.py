"""The plot of a run for an answer: the keeper's plot, or one that is drawn on request.

matplotlib is large and would stay loaded in the server, so a separate process draws into a temporary folder. Reading a
run changes nothing in its folder.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from toprope.text_format import clip
from toprope_tools.answers.answer import Answer
from toprope_tools.resources.resources import MOST_PLOT_BYTES

if TYPE_CHECKING:
    from toprope_tools.workshop import Workshop

_LIMIT_S = 40.0


def with_picture(workshop: Workshop, run_id: str, answer: Answer) -> Answer:
    """Add the run's plot to an answer, a PNG of at most 1 MiB, or a line that says why it has none."""
    folder, status = workshop.runs.folder(run_id), workshop.runs.status(run_id)
    try:
        picture = folder.plot.read_bytes() if folder.plot.stat().st_size <= MOST_PLOT_BYTES else b""
    except OSError:
        if not status.run_kind.has_plot:
            return _without_picture(answer, f"runs of kind {status.kind} have none")
        if not status.ended:
            return _without_picture(answer, "it is drawn when the run ends")
        try:
            picture = _draw(folder.path)
        except _NotDrawn as error:
            return _without_picture(answer, f"it could not be drawn: {clip(str(error), 200)}")
    if not 0 < len(picture) <= MOST_PLOT_BYTES:
        return _without_picture(answer, f"it is larger than {MOST_PLOT_BYTES >> 20} MiB; it is at {folder.plot}")
    return replace(answer, picture=picture)


class _NotDrawn(Exception):
    """The plot could not be drawn; the message says why."""


def _draw(run: Path) -> bytes:
    with tempfile.TemporaryDirectory(prefix="toprope-plot-") as place:
        picture = Path(place) / "plot.png"
        program = [sys.executable, "-P", "-m", "toprope.analysis.plots", str(run), str(picture)]
        try:
            process = subprocess.run(
                program, capture_output=True, stdin=subprocess.DEVNULL, timeout=_LIMIT_S, check=False
            )
        except subprocess.TimeoutExpired:
            raise _NotDrawn(f"not within {_LIMIT_S:.0f} s") from None
        if process.returncode != 0 or not picture.exists():
            error_lines = process.stderr.decode(errors="replace").strip().splitlines()
            raise _NotDrawn(error_lines[-1] if error_lines else "no reason was given")
        return picture.read_bytes()


def _without_picture(answer: Answer, reason: str) -> Answer:
    return replace(answer, text=f"{answer.text}\nNo picture: {reason}.")
