"""What the program is asked to do, as a file in its folder: plain JSON, without any secret in it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from toprope.records.run.specification import EnvironmentSource
from toprope.settings.endpoints import Endpoint

__all__ = ["Code", "Order", "Outcome"]


class _Data(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Code(_Data):
    """A user's file, found in a folder that the owner allows."""

    file: str
    attribute: str
    arguments: dict[str, Any] = {}


class Order(_Data):
    """One export, or one build of a data set."""

    kind: Literal["export", "build"]
    runs: list[str] = []
    """Folders of runs."""
    versions: list[str] = []
    """Folders of versions of data sets."""
    files: list[str] = []
    """Files of JSON lines: what was posted, or is imported."""
    where: dict[str, Any] = {}
    strategy: Code | None = None
    # Of an export
    form: str = "jsonl"
    target: str = ""
    # Of a build
    store: str = ""
    name: str = ""
    recipe: dict[str, Any] = {}
    codes: dict[str, Code] = {}
    """Users' files of the steps, by their number from 1."""
    teachers: dict[str, Endpoint] = {}
    """Endpoints by the name that the recipe has for them. Keys come by variables."""
    environments: dict[str, EnvironmentSource] = {}
    locks: dict[str, Any] = {}
    """The owner's, which hold for the environments as well."""
    network: bool = True
    """Whether environments may have one."""
    most_items: int = 5_000_000
    """What a build may hold, and an export write."""


class Outcome(_Data):
    """What came of it."""

    items: int = 0
    bytes: int = 0
    path: str = ""
    seconds: float = 0.0
    texts: dict[str, int] = {}
    """Items by where their words come from."""
    left_out: dict[str, int] = {}
    """By reason."""
    read: int = 0
    """Items that were looked at."""
    generated: int = 0
    simplified: int = 0
    version: str = ""
    """`name@v2` of a build."""
    new: bool = True
    """Whether that version is new; the newest may have held exactly this already."""
    splits: dict[str, int] = {}
    complete: bool = True
    """Whether a target size was reached."""
    warnings: list[str] = []
