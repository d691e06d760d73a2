"""Shared by the tests of the workbench."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from toprope.records.index.database import Index
from toprope.workbench.drafts import Drafts


@pytest.fixture
def index(tmp_path: Path) -> Index:
    return Index(tmp_path / "index.db")


@pytest.fixture
def drafts(index: Index) -> Drafts:
    return Drafts(index)


@pytest.fixture
def children() -> Callable[[], set[int]]:
    """A function that returns the ids of all child processes, to find those that a test left."""
    return lambda: {child.pid for child in psutil.Process().children(recursive=True)}
