"""Paths of the data files that ship with Toprope: inside the package in a wheel, beside it in a checkout."""

from __future__ import annotations

from pathlib import Path

__all__ = ["CHECKOUT", "CONFIGS", "ENVIRONMENTS"]

_PACKAGE = Path(__file__).resolve().parent
CHECKOUT = _PACKAGE.parent
"""The repository's root in a checkout; site-packages in a wheel."""


def _shipped(name: str) -> Path:
    inside = _PACKAGE / name
    return inside if inside.is_dir() else CHECKOUT / name


CONFIGS = _shipped("configs")
ENVIRONMENTS = _shipped("environments")
