"""Paths of the data files that ship with Toprope: inside the package in a wheel, beside it in a checkout."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def _shipped(name: str) -> Path:
    inside = _PACKAGE / name
    return inside if inside.exists() else _PACKAGE.parent / name


CONFIGS = _shipped("configs")
CONSTRAINTS = _shipped("constraints.txt")
"""The versions that were tested."""
DOCS = _shipped("docs")
ENVIRONMENTS = _shipped("environments")
