"""Carry out what errors ask of the owner."""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

from benchmarks.foreign.candidates import Candidate
from benchmarks.foreign.result import Result
from toprope.sdk.discovery import name_of

_LACKS = re.compile(r"Its text asks for (the package of )?«?([\w.\[\],-]+)»?\. If the owner agrees")
_ADDS = re.compile(
    r"The owner adds it: toprope env add "
    r"('[\w.-]+\[[\w,.-]+\]'|[\w.-]+(?= -r))((?: -r [\w-]+)*)"
)
_TAKEN = "which was added before. Choose another with --name"
_BOUNDS = re.compile(r"(?:is|score) (-?[\d.]+)\b[^«»]*: set the knobs reward_low and reward_high")
_RANGE = re.compile(r"gave (-?[\d.]+), beyond (-?[\d.]+) to (-?[\d.]+): declare `range`[^«»]*among the knobs")
_WHOLE_ACTION = "action_json (true: the answer is the whole action) would do as well"
_PACKAGES = {
    "PIL": "pillow", "bs4": "beautifulsoup4", "cv2": "opencv-python-headless", "dotenv": "python-dotenv",
    "hydra": "hydra-core", "yaml": "pyyaml",
}  # fmt: skip
"""Module -> package of another name."""
_SHUT = re.compile(r"Read-only file system: '(?P<place>[^']+)'|dir '(?P<made>[^']+)': Read-only file system")
_FOLDER_FOR_FILE = re.compile(r"Is a directory: '([^']+)'")
_KEPT = re.compile(r"Its HOME, (/[^,]+), keeps what it loads")
_COPIED = ".data-copied"


class Cures:
    """The owner of a home, who does what errors ask for.

    Args:
        home: The owner's home.
        data: A folder with data of other hosts, laid out as in a HOME; None: the owner has none.
    """

    def __init__(self, home: Path, data: Path | None = None) -> None:
        self._home, self._data = home, data

    def carry_out(self, result: Result) -> bool:
        """Carry out the cure that an error names: a package of a missing module, another name, a folder to be written,
        the bounds of rewards, data to be copied, or the form of actions; False if it names no such cure, or it did not
        help."""
        candidate = result.candidate
        if beyond := _BOUNDS.search(result.error):
            value, knobs = float(beyond[1]), dict(candidate.knobs)
            size = 10.0 ** len(str(int(abs(value))))
            name, bound = ("reward_low", -size) if value < 0 else ("reward_high", size)
            if abs(float(str(knobs.get(name, 0.0)))) >= size:
                return False
            result.candidate = replace(candidate, knobs=(*(knobs | {name: bound}).items(),))
            return True
        if beyond := _RANGE.search(result.error):
            value, low, high = map(float, beyond.groups())
            size = 10.0 ** len(str(int(abs(value))))
            wider = [min(low, -size) if value < low else low, max(high, size) if value > high else high]
            result.candidate = replace(candidate, knobs=(*(dict(candidate.knobs) | {"range": wider}).items(),))
            return True
        if _WHOLE_ACTION in result.error and ("action_json", True) not in candidate.knobs:
            result.candidate = replace(candidate, knobs=(*candidate.knobs, ("action_json", True)))
            return True
        if candidate.add and (lacks := _LACKS.search(result.error)):
            name = lacks[2].partition(".")[0] if lacks[1] else lacks[2]
            package = _PACKAGES.get(name, name)
            if package in candidate.add:
                return False
            result.candidate = replace(candidate, add=(*candidate.add, "-r", package))
            return True
        if not candidate.entry and _TAKEN in " ".join(result.error.split()) and "--name" not in candidate.add:
            named = ("--name", name_of(f"{candidate.ecosystem}-{candidate.name}"))
            result.candidate = replace(candidate, add=(*candidate.add, *named))
            return True
        if candidate.entry and (adds := _ADDS.search(result.error)):
            words = (adds[1].strip("'"), *adds[2].split())
            if words == candidate.add:
                return False
            result.candidate = replace(candidate, add=words)
            return True
        if "writes: [FOLDER]" in result.error and (shut := _SHUT.search(result.error)):
            place = self._own_place(shut["place"] or os.path.dirname(shut["made"]), candidate)
            file = self._home / "config" / "settings.yaml"
            settings = json.loads(file.read_text())
            writes = settings.setdefault("environment", {}).setdefault(result.names[0], {}).setdefault("writes", [])
            if place is None or str(place) in writes:
                return False
            try:
                place.mkdir(parents=True, exist_ok=True)
            except OSError:
                return False
            writes.append(str(place))
            file.write_text(json.dumps(settings))
            return True
        # What the environment itself said is quoted.
        if self._data is not None and (kept := _KEPT.search(result.error.rpartition("»")[2])):
            return self._copied(Path(kept[1]))
        if mistaken := _FOLDER_FOR_FILE.search(result.error):
            return self._opened_above(Path(os.path.realpath(mistaken[1])), result)
        return False

    def _copied(self, place: Path) -> bool:
        """Copy the owner's data to an environment's HOME; False if that was done, or is not possible."""
        assert self._data is not None
        try:
            is_linked = any(map(Path.is_symlink, place.rglob("*")))  # by the environment, to anywhere
            if is_linked or place.parent.resolve() != (self._home / "homes").resolve() or (place / _COPIED).exists():
                return False
            shutil.copytree(self._data, place, dirs_exist_ok=True)
            (place / _COPIED).touch()
        except OSError:
            return False
        return True

    def _opened_above(self, made: Path, result: Result) -> bool:
        """Open the folder above one that was made where the environment writes a file; False if none was made there."""
        file = self._home / "config" / "settings.yaml"
        settings = json.loads(file.read_text())
        writes = settings.get("environment", {}).get(result.names[0], {}).get("writes", [])
        above = self._own_place(str(made.parent), result.candidate)
        if str(made) not in writes or above is None:
            return False
        try:
            made.rmdir()
        except OSError:
            return False
        writes[writes.index(str(made))] = str(above)
        file.write_text(json.dumps(settings))
        return True

    def _own_place(self, named: str, candidate: Candidate) -> Path | None:
        """Return the folder to open for a path that an error names, without links; None if it is not the benchmark's.

        The error is of other authors' code and may name any path. Only places of the benchmark are opened: below its
        home and its temporary folder, and in the candidate's folder, but no settings and no repository of git.
        """
        try:
            place = Path(os.path.realpath(named))
            place = place.parent if place.is_file() else place
            added = Path(os.path.realpath(candidate.add[0])) if candidate.add else None
        except (OSError, ValueError):
            return None
        config = (self._home / "config").resolve()
        if not os.path.isabs(named) or place.is_relative_to(config) or config.is_relative_to(place):
            return None
        own = [self._home.resolve()]
        if temporary := os.environ.get("TOPROPE_BENCH_DIR"):
            own.append(Path(temporary).resolve())
        if added is not None and added.exists():
            own.append(added if added.is_dir() else added.parent)
        inside = any(place.is_relative_to(folder) for folder in own)
        return place if inside and ".git" not in place.parts else None
