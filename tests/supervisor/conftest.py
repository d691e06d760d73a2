"""Fixtures for tests of the supervisor."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.run_harness import RunHarness


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[RunHarness]:
    """Runs whose crews are stand-ins. Waits for automatic resumes and kills leftover processes at the end."""
    made = RunHarness(tmp_path)
    yield made
    for thread in threading.enumerate():
        if thread.name == "resume":
            thread.join(30)
    made.close()
