"""The owner's notices: a command or an address that hears of ends, failures and starts that wait."""

from __future__ import annotations

from typing import Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, Field, field_validator

Occasion = Literal["end", "failure", "waiting"]


class NotifySettings(BaseModel, extra="forbid"):
    """Addressees and occasions of notices. Both a command and an address may be set."""

    command: list[str] = Field(default_factory=list, max_length=32)
    """A program and its arguments, such as [mail, -s, Toprope, me]. It gets the notice as JSON on standard input, its
    text in the variable TOPROPE_NOTICE, and is run without a shell."""
    url: str = ""
    """An address that gets the notice as JSON by POST."""
    on: list[Occasion] = ["end", "failure", "waiting"]
    """end: a run completed or was stopped; failure: it failed or was lost; waiting: a start waits for a person."""

    @field_validator("url")
    @classmethod
    def _is_web_address(cls, value: str) -> str:
        parts = urlsplit(value)
        if value and (parts.scheme not in ("http", "https") or not parts.hostname):
            raise ValueError("must begin with http:// or https://")  # the address may be a secret: it is not repeated
        return value

    def wants(self, occasion: Occasion) -> bool:
        """True if somebody is to be told."""
        return bool(self.command or self.url) and occasion in self.on
