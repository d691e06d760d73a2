"""A service that speaks Tinker's interface, and the variables that lead to it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

from toprope.settings.sections import hosted

if find_spec("tinker") is None:  # pip install 'toprope[tinker]'
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture
def tinker_service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    from tests.training.hosted.tinker_stand_in import KEY, TinkerStandIn
    from toprope.training.hosted import service

    served = TinkerStandIn(260)
    monkeypatch.setenv(hosted.ADDRESS, served.url)
    monkeypatch.setenv(hosted.KEY, KEY)
    monkeypatch.setattr(service, "_hide_torch", lambda: None)  # this process has tests that need it
    yield served
    served.close()
    gc.collect()  # the client's connections end here, and not during another test
