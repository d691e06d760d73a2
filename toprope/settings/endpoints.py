"""Models behind OpenAI-compatible endpoints, as an owner or a preset names them.

An agent may only choose among these names: with a free choice of URL it could send the owner's keys and the texts of
tasks anywhere. Base URLs, the names of keys and the keys themselves are therefore in the owner's files.
"""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import urlsplit

from pydantic import BaseModel, Field, field_validator

from toprope.errors import InvalidValue
from toprope.settings.yamlfiles import read_fields

BASE = "base"
"""Name of the draft's own policy among models under test."""

MODEL_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_SECRET_NAME = re.compile(r"[A-Z][A-Z0-9_]{0,99}")
_SECRET_WORDS = ("KEY", "TOKEN", "SECRET", "PASSWORD")


class Endpoint(BaseModel, extra="forbid", frozen=True):
    """One model: its endpoint, its name there, the key that it needs, and its prices."""

    base_url: str
    """Up to and with the version: http://127.0.0.1:8000/v1; `/chat/completions` is appended."""
    model: str = Field(min_length=1, max_length=200)
    key: str | None = None
    """Name of the variable that holds the key; null if none is needed. Never the key itself."""
    prompt_usd: float | None = Field(None, ge=0)
    """US dollars per million tokens of prompts."""
    completion_usd: float | None = Field(None, ge=0)
    """US dollars per million tokens of answers."""

    @field_validator("base_url")
    @classmethod
    def _checked_url(cls, value: str) -> str:
        parts = urlsplit(value)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("must begin with http:// or https:// and name a host")
        if parts.username or parts.password or parts.query or parts.fragment:
            raise ValueError("must hold no user, password, query or fragment; a key goes into `key`, by name")
        return value.rstrip("/")

    @field_validator("key")
    @classmethod
    def _checked_key(cls, value: str | None) -> str | None:
        if value is None:
            return None
        # Logs hide the values of variables with such names, and workers never inherit them.
        if not _SECRET_NAME.fullmatch(value) or not any(word in value for word in _SECRET_WORDS):
            raise ValueError(
                f"must be the name of a variable in capitals with one of {', '.join(_SECRET_WORDS)} in it, such as "
                "OPENROUTER_API_KEY; the key itself stands under `variables` in settings.yaml"
            )
        return value


def parse_endpoints(data: Any, where: str) -> dict[str, Endpoint]:
    """The models in a mapping of names to entries.

    Args:
        data: The mapping as read from YAML; None: no models.
        where: File and place, for errors.

    Raises:
        InvalidValue: A name or an entry is wrong. The message repeats no values: one of them may be a key.
    """
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise InvalidValue(f"{where} must be a mapping of names to base_url, model and key.")
    endpoints = {}
    for name, entry in data.items():
        if not isinstance(name, str) or not MODEL_NAME.fullmatch(name) or name == BASE:
            raise InvalidValue(
                f"{where}: {name!r} is not a valid name for a model.",
                hint=f"Lower-case letters, digits, '.', '_' and '-'; {BASE!r} is the draft's own policy.",
            )
        endpoints[name] = read_fields(Endpoint, entry, f"{where}, {name}")
    return endpoints
