"""Shared by the tests of adapters: stand-ins for the packages that they adapt."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A function that installs a stand-in module with these members, and its parent packages, in `sys.modules`."""

    def install(name: str, **members: Any) -> None:
        words = name.split(".")
        for end in range(1, len(words) + 1):
            known = ".".join(words[:end])
            if known not in sys.modules:
                made = types.ModuleType(known)
                made.__path__ = []  # type: ignore[attr-defined]
                monkeypatch.setitem(sys.modules, known, made)
        for key, value in members.items():
            monkeypatch.setattr(sys.modules[name], key, value, raising=False)

    return install
