"""The tasks that a run's weights were trained on, by its own training and by that of the runs that it descends from,
and those that its evaluations held out.

trained-tasks.txt in the run's folder has an id on each line: that of the task in its environment, and the hash of its
prompt, so that other environments with the same questions are known, too. A run that begins from another's weights
evaluates on none of that run's tasks.

Weights outlive a run in checkpoints only, so the record is synced before each checkpoint and not for each group, which
would stop the driver for milliseconds.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from toprope.atomic import append, fsync
from toprope.errors import Corrupt, NotFound
from toprope.records.run.folder import RunFolder, read_json
from toprope.records.run.full_disk import NO_ROOM

FILE = "trained-tasks.txt"
_EVALUATIONS = ("before", "after")
_SEALED = "heldout"


def content_id(messages: Sequence[dict[str, Any]]) -> str:
    """Id of a task whose content is its prompt alone; see `toprope.sdk.authoring.environment.Task`."""
    questions = [str(message.get("content", "")) for message in messages if message.get("role") == "user"]
    text = " ".join(questions or [str(message.get("content", "")) for message in messages])
    return hashlib.sha256(" ".join(text.casefold().split()).encode("utf-8", "surrogatepass")).hexdigest()[:16]


class TrainedTasks:
    """The record of one run.

    Args:
        folder: The run's folder.
        base: Folder of the run whose weights it begins with, if any.
        driver: Number of the driver that records; each has a file of its own.
    """

    def __init__(self, folder: Path, base: Path | None, driver: int = 1) -> None:
        self._path = folder / (FILE if driver == 1 else FILE.replace(".", f"-{driver}."))
        self.inherited = read_trained(base) if base is not None else frozenset[str]()
        """Ids of the tasks that the first weights were trained on."""
        self._recorded = set(read_trained(folder))
        self._unwritten: set[str] = set()
        """Ids that a full disk has not taken yet."""
        self._append(self.inherited - self._recorded)

    def add(self, task_id: str, messages: Sequence[dict[str, Any]], others: Collection[str] = ()) -> None:
        """Record a task before it is trained on, and the ids of `others` that its words come from."""
        ids = {name.rpartition("/")[2] for name in (task_id, *others)}
        self._append((ids | {content_id(messages)}) - self._recorded)

    def _append(self, ids: set[str] | frozenset[str]) -> None:
        self._recorded |= ids
        self._unwritten |= ids
        if not self._unwritten:
            return
        try:
            append(self._path, "".join(f"{task_id}\n" for task_id in sorted(self._unwritten)).encode(), wait=False)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            return
        self._unwritten.clear()


def sync_trained(folder: Path) -> None:
    """Wait until the record of a run is on disk.

    Raises:
        OSError: The disk is full, or failed.
    """
    for path in _files(folder):
        with contextlib.suppress(FileNotFoundError):
            fsync(path)


def read_trained(folder: Path) -> frozenset[str]:
    """Return the ids that a run recorded; empty for runs of earlier versions."""
    ids: set[str] = set()
    for path in _files(folder):
        with contextlib.suppress(FileNotFoundError):
            ids.update(path.read_text(encoding="utf-8").split())
    return frozenset(ids)


def _files(folder: Path) -> list[Path]:
    return [folder / FILE, *folder.glob(FILE.replace(".", "-*."))]


def heldout_tasks(folder: RunFolder) -> frozenset[str]:
    """Return the ids of tasks that the run's evaluations held out. An outside environment may post groups of them."""
    ids: set[str] = set()
    for label in _EVALUATIONS:
        try:
            evaluation = read_json(folder.evaluation(label))
            for measured in evaluation.values():
                if isinstance(measured, dict) and measured.get("split", _SEALED) == _SEALED:
                    by_task = measured.get("by_task", {})
                    ids.update(by_task.get("tasks", ()), by_task.get("unjudged", ()))
        except (NotFound, Corrupt, AttributeError, TypeError):
            continue
    return frozenset(ids)
