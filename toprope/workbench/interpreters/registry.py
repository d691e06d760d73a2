"""What the owner added to the environments: one versioned file in the home, replaced as a whole, changed under a lock.

Only the command line and, where the owner allows it, one tool write it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout
from pydantic import BaseModel, ConfigDict, ValidationError

from toprope.atomic import write_json
from toprope.errors import Corrupt, NotFound, NotPossibleNow
from toprope.records.run.folder import LEFT, misfits, read_json

__all__ = ["Added", "Registry"]

REGISTRY_VERSION = 1
_WAIT_S = 30.0


class Added(BaseModel):
    """One thing that the owner added."""

    model_config = ConfigDict(extra="ignore")

    name: str
    kind: str
    """`packages`, `folder`, `git`, `server` or `dataset`."""
    given: str
    """As the owner named it."""
    requirements: list[str] = []
    adapter: str | None = None
    """The ecosystem, where one was named."""
    path: str | None = None
    """Of a folder, a file, or a checkout."""
    url: str | None = None
    commit: str | None = None
    """Of a checkout that was cloned."""
    python: str | None = None
    """The interpreter that its environments run in; None: ours."""
    site_packages: str | None = None
    lock: str | None = None
    """Digest of the interpreter in the store; None where the owner brought it or ours does."""
    added_at: float = 0.0


class _File(BaseModel):
    model_config = ConfigDict(extra="ignore")

    version: int = REGISTRY_VERSION
    environments: dict[str, Added] = {}


class Registry:
    """environments.json of a home.

    Args:
        path: The file; it need not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> dict[str, Added]:
        """What was added, by name.

        Raises:
            Corrupt: The file cannot be read; TooNew where a newer version wrote it.
        """
        try:
            return _File.model_validate(read_json(self.path, REGISTRY_VERSION)).environments
        except NotFound:
            return {}
        except ValidationError as error:
            raise Corrupt(f"{self.path} is not a list of environments: {misfits(error)}.", hint=LEFT) from None

    @contextmanager
    def changing(self) -> Iterator[dict[str, Added]]:
        """The entries to change, under the lock; written at the end where nothing was raised.

        Raises:
            NotPossibleNow: Somebody else holds the lock for long.
            Corrupt: See `read`.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            with FileLock(f"{self.path}.lock", timeout=_WAIT_S, mode=0o600):
                entries = self.read()
                before = {name: one.model_copy() for name, one in entries.items()}
                yield entries
                if entries != before:
                    whole = _File(environments=dict(sorted(entries.items())))
                    write_json(self.path, whole.model_dump(mode="json", exclude_none=True))
        except Timeout:
            raise NotPossibleNow(
                f"{self.path} is being changed by somebody else.", hint="Try again in a moment."
            ) from None
