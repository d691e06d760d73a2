"""The structure of the answer about an installation; like `toprope_tools.answers.base`, it imports nothing of the
engine."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

__all__ = ["Installed"]


class Installed(BaseModel):
    """What became of it, or how far it is."""

    model_config = ConfigDict(extra="forbid")

    name: str
    done: bool
    packages: int = 0
    megabytes: float = 0.0
    seconds: float = 0.0
    environments: int = 0
    news: str = ""
