"""Structures of the answers about data: exports and data sets.

Like `toprope_tools.answers.base`, this is read at the server's start and imports nothing of the engine.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

__all__ = ["BuiltDataset", "Exported"]


class _Data(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Exported(_Data):
    """`state`: done, or running: the same call waits on. `texts`: items by where their words come from."""

    state: str
    path: str = ""
    format: str = ""
    items: int = 0
    bytes: int = 0
    read: int = 0
    left_out: dict[str, int] = {}
    texts: dict[str, int] = {}
    warnings: list[str] = []


class BuiltDataset(_Data):
    """`state` as in Exported. `new`: false where the newest version held exactly this already."""

    state: str
    dataset: str = ""
    path: str = ""
    card: str = ""
    items: int = 0
    splits: dict[str, int] = {}
    read: int = 0
    generated: int = 0
    left_out: dict[str, int] = {}
    texts: dict[str, Any] = {}
    new: bool = True
    complete: bool = True
    warnings: list[str] = []
