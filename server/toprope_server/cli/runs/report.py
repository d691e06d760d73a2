"""`toprope report`: a report of one run or of everything, as HTML or Markdown."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from toprope_tools.experiments.config_history import compared_with_original
from toprope_tools.experiments.ledger import ledger_of, refreshed

import toprope
from toprope.analysis.reports.narrative import RunRecords, compose_overview, compose_run_report
from toprope.analysis.reports.page import to_html, to_markdown
from toprope.analysis.reports.report import gather
from toprope.atomic import write_text
from toprope.errors import Corrupt, InvalidValue, NotFound, NotPossibleNow
from toprope.records.run.manifest import Manifest
from toprope.records.run.metrics import read_rows
from toprope.records.run.specification import Specification
from toprope.records.run.status import read_events
from toprope.records.sweep_journal import read_standing

if TYPE_CHECKING:
    from toprope_tools.workshop import Workshop

_MOST_RUNS = 200


def write_report(
    workshop: Workshop, run_id: str | None, path: Path, show: Callable[[str], None] = lambda text: None
) -> list[Path]:
    """Write a report.

    Args:
        run_id: The run; None for all runs and experiments.
        path: `.html` for one self-contained file, `.md` for Markdown with its pictures in a folder beside it.
        show: Called with what is done now.

    Returns:
        The files and folders written.

    Raises:
        NotFound: There is no such run.
        InvalidValue: The path has another ending.
        NotPossibleNow: The path cannot be written.
    """
    if path.suffix.lower() not in (".html", ".htm", ".md", ".markdown"):
        raise InvalidValue(
            f"{path} ends neither with .html nor with .md.", hint="The ending of the file selects the format."
        )
    ledger = ledger_of(workshop)
    experiments = [refreshed(workshop, entry) for entry in ledger.entries()]
    if run_id is not None:
        run_records = _read_records(workshop, run_id)
        show("Drawing ...")
        blocks, title = compose_run_report(run_records, experiments), run_id
    else:
        statuses = workshop.statuses()
        runs = []
        for place, status in enumerate(statuses[:_MOST_RUNS], 1):
            show(f"Reading run {place} of {min(len(statuses), _MOST_RUNS)} ...")
            if (other_records := _readable(workshop, status.run_id)) is not None:
                runs.append(other_records)
        show("Drawing ...")
        blocks, title = (
            compose_overview(runs, experiments, ledger.goals(), len(statuses)),
            "Training runs and experiments",
        )
    footer = f"Made by Toprope {toprope.__version__} from the records in {workshop.home.path}."
    try:
        if path.suffix.lower().startswith(".htm"):
            write_text(path, to_html(title, blocks, footer))
            return [path]
        folder = path.with_name(f"{path.stem}-figures")
        text, files = to_markdown(blocks, folder.name, footer)
        if files:
            folder.mkdir(parents=True, exist_ok=True)
        for name, svg in files.items():
            write_text(folder / name, svg)
        write_text(path, text)
        return [path, *([folder] if files else [])]
    except OSError as error:
        raise NotPossibleNow(f"Cannot write {path}: {error.strerror or error}.") from None


def _readable(workshop: Workshop, run_id: str) -> RunRecords | None:
    """A run; None if its records are unreadable, which a report of that run alone says."""
    try:
        return _read_records(workshop, run_id)
    except (NotFound, Corrupt):
        return None


def _read_records(workshop: Workshop, run_id: str) -> RunRecords:
    folder = workshop.runs.folder(run_id)
    status, specification = workshop.runs.status(run_id), Specification.read(folder)
    repeated = compared_with_original(workshop, specification)
    return RunRecords(
        specification=specification,
        status=status,
        results=gather(folder, specification, status),
        rows=read_rows(folder.metrics),
        events=list(read_events(folder.events)),
        manifest=Manifest.read(folder),
        sweep=None if specification.sweep is None else read_standing(folder),
        repeated="" if repeated is None else repeated.says,
    )
