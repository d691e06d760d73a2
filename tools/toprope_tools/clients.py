"""Known traits of clients: the longest call, and the part of an answer that their model sees.

A client gives its name in every request or at its handshake. An unknown client gets the shortest limit, and both the
text and the structure of an answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

UNKNOWN_S = 45.0
"""Claude Desktop (`claude-ai`) and clients on the TypeScript SDK's default drop a call at about 60 s."""
LONGEST_S = 3600.0
"""The most that the owner's settings may allow."""

_KNOWN_LIMITS: dict[str, tuple[float, float]] = {
    # Ends a silent call after 30 minutes on standard input and output, after 5 over HTTP; half and four fifths of it.
    # https://code.claude.com/docs/en/mcp; the name: its client is made with name "claude-code",
    # https://github.com/anthropics/claude-code/issues/43299
    "claude-code": (900.0, 240.0),
}
"""Client's name -> seconds over standard input and output, and over HTTP."""


_STRUCTURE_HIDES_TEXT = frozenset(
    {
        "claude-code",  # https://github.com/anthropics/claude-code/issues/79944
        "codex-mcp-client",  # https://github.com/openai/codex/issues/38287
        "opencode",  # up to 2026-06, https://github.com/anomalyco/opencode/pull/34505
        # Its product's names; https://olaservo-sandyland.static.hf.space/mcp/structured-content/client-survey.html
        "Visual Studio Code",
        "Visual Studio Code - Insiders",
    }
)
"""Clients whose model sees the structure of an answer instead of its text. They get the text alone."""


@dataclass(frozen=True)
class Client:
    """The caller: its name, empty if it gave none, and whether it came over HTTP."""

    name: str = ""
    over_http: bool = False

    @property
    def takes_structure(self) -> bool:
        """False if a structure would keep the text of an answer from the model."""
        return self.name not in _STRUCTURE_HIDES_TEXT


UNKNOWN = Client()


def longest_wait_s(client: Client, owners: Mapping[str, float]) -> float:
    """Return the seconds that a call of this client may take.

    Args:
        client: The caller.
        owners: The owner's limits by client name, which take precedence.
    """
    if client.name in owners:
        return min(owners[client.name], LONGEST_S)
    if client.name in _KNOWN_LIMITS:
        return _KNOWN_LIMITS[client.name][1 if client.over_http else 0]
    return UNKNOWN_S
