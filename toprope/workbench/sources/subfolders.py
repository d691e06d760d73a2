"""Environments in folders of the owner's folders: their Python files, and folders that are environments as a whole.

A name begins with the folders, so that it depends on the file's own place alone: `games/chess.py` is `games-chess`. Two
places can still give one name, such as `a/b-c.py` and `a-b/c.py`: then the later one is listed as broken.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from toprope.sdk.discovery import EARLIER, searched, subfolders
from toprope.workbench.entries import Entry, Names
from toprope.workbench.interpreters.known import Known
from toprope.workbench.sources.folders import FileReader, FolderSource


class SubfolderSource:
    """Lists the environments in subfolders.

    Args:
        apart: Returns the folders and files that other sources list, without links in their paths.
    """

    kind = "folder"

    def __init__(
        self,
        places: Sequence[Path],
        reader: FileReader,
        interpreters: Callable[[], Sequence[Known]],
        apart: Callable[[], Collection[Path]],
    ) -> None:
        self._apart = apart
        self._sources = {place: FolderSource(place, self.kind, reader, interpreters, placed=True) for place in places}

    def entries(self, names: Names) -> list[Entry]:
        """Return the environments by folder and file, as if each of these folders had been added.

        All folders share one search, so that its bounds hold for all of them together.
        """
        apart = self._apart()
        left_out = {path for place in self._sources for path in _inside(place, apart)}
        divided = {folder for path in left_out for folder in path.parents}
        # Example: a place p has games/chess.py, games/maze/ and lab/new/, and the owner added p/lab/old by itself.
        #   source_of: p/games and p/lab; left_out: p/lab/old; divided: p/lab and the folders above it
        #   files: those of p/games and p/lab, without those in p/lab/old
        #   wholes, each of which may be one environment: p/games and p/lab/new
        source_of = {
            folder: source
            for place, source in self._sources.items()
            for folder in subfolders(place)
            if folder.name != EARLIER
        }
        files: dict[Path, list[Path]] = {folder: [] for folder in source_of}
        wholes: dict[Path, list[Path]] = {folder: [] for folder in source_of}
        for folder, inside in searched(*source_of, left_out=left_out):
            top = next(candidate for candidate in (folder, *folder.parents) if candidate in source_of)
            files[top] += [file for file in inside if file not in left_out]
            if folder not in divided and (folder == top or folder.parent in divided):
                wholes[top].append(folder)
        return [entry for top, source in source_of.items() for entry in source.listed(files[top], wholes[top], names)]


def _inside(place: Path, apart: Collection[Path]) -> list[Path]:
    """Return those of these folders and files that lie in a place, as paths that begin with the place as given."""
    real = Path(os.path.realpath(place))
    return [place / path.relative_to(real) for path in apart if path != real and path.is_relative_to(real)]
