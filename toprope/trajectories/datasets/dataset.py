"""A data set of trajectories: captured one by one, or read lazily from runs and files; queried, counted, exported.

    dataset = TrajectoryDataset(OnlySolved())
    dataset.capture(TrajectoryItem("2+2?", "4", 1.0))
    TrajectoryDataset.of_runs([RunFolder(path)]).query(success=True).export("best.parquet")

What comes from runs and files is never in memory as a whole: items are read anew at each look.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from toprope.errors import Corrupt, InvalidValue
from toprope.records.run.folder import LEFT, RunFolder
from toprope.trajectories.capture.run_reader import RunReader
from toprope.trajectories.capture.selection import Query
from toprope.trajectories.capture.strategy import TrajectoryStrategy, batched
from toprope.trajectories.datasets.writers import writing
from toprope.trajectories.items import TrajectoryItem, item_from

__all__ = ["TrajectoryDataset", "read_items"]

_LONGEST_LINE = 64 << 20

Source = Callable[[], Iterable[TrajectoryItem]]


class TrajectoryDataset:
    """Trajectories, those that were captured and those of its sources.

    Args:
        strategy: Decides what is kept and in what form; by default everything as it is. It sees each item of a source
            at every look, so it should answer the same twice.
    """

    def __init__(self, strategy: TrajectoryStrategy | None = None) -> None:
        self._strategy = strategy or TrajectoryStrategy()
        self._captured: list[TrajectoryItem] = []
        self._sources: list[Source] = []

    @classmethod
    def of_runs(cls, folders: Sequence[RunFolder], strategy: TrajectoryStrategy | None = None) -> TrajectoryDataset:
        """Every rollout of these runs."""
        dataset = cls(strategy)
        for folder in folders:
            dataset.add_source(lambda folder=folder: RunReader(folder))
        return dataset

    def add_source(self, source: Source) -> None:
        """Adds items that are read when they are wanted: `source` is called at each look."""
        self._sources.append(source)

    def capture(self, item: TrajectoryItem) -> bool:
        """Takes an item in; whether the strategy wanted it."""
        kept = self._judged(item)
        if kept is None:
            return False
        self._captured.append(kept)
        return True

    def query(self, query: Query | None = None, **filters: Any) -> TrajectoryDataset:
        """A data set of those that match, as lazy as this one. See `Query` for the filters."""
        wanted = query or Query.of(filters)
        found = TrajectoryDataset()
        found.add_source(lambda: wanted.select(lambda: iter(self)))
        return found

    def items(self) -> list[TrajectoryItem]:
        """All of them, in memory."""
        return list(self)

    def __iter__(self) -> Iterator[TrajectoryItem]:
        yield from self._captured
        for source in self._sources:
            for item in source():
                kept = self._judged(item)
                if kept is not None:
                    yield kept

    def __len__(self) -> int:
        """How many there are; those of sources are read to be counted."""
        return sum(1 for _ in self) if self._sources else len(self._captured)

    def export(self, path: str | Path, form: str | None = None) -> int:
        """Writes them and returns how many there are.

        Args:
            path: A file, for `datasets` a folder; what lies there is replaced.
            form: json, jsonl, csv, parquet or datasets; by the ending of `path` when None, a folder where it has none.

        Raises:
            InvalidValue: There is no such format.
            DiskFull: There is no room.
        """
        path = Path(path)
        with writing(path, form or path.suffix.removeprefix(".") or "datasets") as writer:
            for batch in batched(self):
                writer.write(batch)
        return writer.count

    def export_json(self, path: str | Path) -> int:
        return self.export(path, "json")

    def export_jsonl(self, path: str | Path) -> int:
        return self.export(path, "jsonl")

    def export_csv(self, path: str | Path) -> int:
        return self.export(path, "csv")

    def export_parquet(self, path: str | Path) -> int:
        return self.export(path, "parquet")

    def export_datasets(self, path: str | Path) -> int:
        """A folder for `datasets.load_from_disk`."""
        return self.export(path, "datasets")

    def _judged(self, item: TrajectoryItem) -> TrajectoryItem | None:
        return self._strategy.process(item) if self._strategy.should_capture(item) else None


def read_items(path: Path) -> Iterator[TrajectoryItem]:
    """The items of a file of JSON lines, one at a time; empty lines are passed over.

    Raises:
        InvalidValue: A line is no item; the message names it.
        Corrupt: The file cannot be read.
    """
    try:
        with path.open("rb") as file:
            number = 0
            while line := file.readline(_LONGEST_LINE):
                number += 1
                if not line.strip():
                    continue
                try:
                    given = msgspec.json.decode(line)
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                    raise InvalidValue(f"{path.name}, line {number} is no JSON.", hint="One object a line.") from None
                yield item_from(given, f"{path.name}, line {number}")
    except OSError as error:
        raise Corrupt(f"{path} cannot be read: {error.strerror or error}.", hint=LEFT) from None
