"""A person's word before a start, where the owner wants it: asked by the client where it can, in both eras of MCP.

The question shows what starting would take and the hash of it. Between the question and the start everything is looked
at again: what was agreed to is that hash and nothing else. Clients that cannot ask get a refusal with the same text,
and the call that a person's agreement allows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from anyio import to_thread
from mcp.server.elicitation import AcceptedElicitation, ElicitationResult
from mcp.server.mcpserver import Context
from mcp.server.mcpserver.resolve import Elicit, Resolve
from pydantic import BaseModel, Field

from toprope.errors import NotPossibleNow

__all__ = ["Consent", "Preview", "agreed", "ask_consent", "shown_first"]


_ASKS_IN_ITS_ANSWER = "2026-07-28"
"""From this version of the protocol on a question is an answer to the call; before, it is a request of its own."""


class Consent(BaseModel):
    """What a person answers."""

    start: bool = Field(description="Start it?")


@dataclass(frozen=True)
class Preview:
    """What was shown, and its hash."""

    text: str
    hash: str


async def shown_first(
    ctx: Context, draft_id: str, name: str | None, key: str | None, seeds: int, preview: bool, confirm: str | None
) -> Preview | None:
    """What a person has to be shown before this call starts anything; None where nobody is to be asked, or cannot be.

    Raises:
        TopropeError: The draft cannot start.
    """
    if preview or confirm is not None or not _can_ask(ctx):
        return None
    from toprope_tools.planning.preview_text import said
    from toprope_tools.runs.start import consent_wanted

    workshop = ctx.mcp_server.surface.workshop  # type: ignore[attr-defined]
    found = await to_thread.run_sync(
        lambda: consent_wanted(workshop, draft_id=draft_id, name=name, seeds=seeds, key=key)
    )
    return None if found is None else Preview(said(found), found.hash)


def ask_consent(shown: Annotated[Preview | None, Resolve(shown_first)]) -> Elicit[Consent] | Consent:
    """The question, where there is one."""
    if shown is None:
        return Consent(start=True)
    return Elicit(f"Start this training run?\n{shown.text}\n(hash {shown.hash})", Consent)


def agreed(shown: Preview, consent: ElicitationResult[Consent]) -> str:
    """The hash that a person agreed to.

    Raises:
        NotPossibleNow: They did not.
    """
    if isinstance(consent, AcceptedElicitation) and consent.data.start:
        return shown.hash
    raise NotPossibleNow(
        "The person who was asked did not agree to this start.",
        hint="Ask them what to change; edit_config changes the draft, start_training with preview=true shows the rest.",
    )


def _can_ask(ctx: Context) -> bool:
    """Whether this client shows forms to a person, and can be asked on this connection."""
    told = ctx.client_capabilities
    if told is None or told.elicitation is None:
        return False
    if (ctx.protocol_version or "") < _ASKS_IN_ITS_ANSWER and not ctx.session.can_send_request:
        return False
    form, url = told.elicitation.form, told.elicitation.url
    return form is not None or url is None
