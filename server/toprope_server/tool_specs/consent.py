"""A person's consent before a start, if the owner requires it: asked through the client, in both eras of MCP.

The question shows what starting would take, with a hash. Everything is checked again between question and start: the
person agreed to that hash and to nothing else. Clients that cannot ask get a refusal with the same text, and the
person approves the hash on the command line (`toprope approve`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from anyio import to_thread
from mcp.server.elicitation import AcceptedElicitation, ElicitationResult
from mcp.server.mcpserver import Context
from mcp.server.mcpserver.resolve import Elicit, Resolve
from pydantic import BaseModel, Field, ModelWrapValidatorHandler, ValidationError, model_validator

from toprope.errors import NotPossibleNow
from toprope_server.tool_specs.base import name_of, workshop_of

_ASKS_IN_ITS_ANSWER = "2026-07-28"
"""From this protocol version a question is an answer to the call; before, it is a request of its own."""


class Consent(BaseModel):
    """A person's answer."""

    start: bool | None = Field(description="Start it?")
    """None if the client answered something else than was asked."""

    @model_validator(mode="wrap")
    @classmethod
    def _of_any(cls, content: Any, handler: ModelWrapValidatorHandler[Consent]) -> Consent:
        try:
            return handler(content)
        except ValidationError:
            return cls(start=None)


@dataclass(frozen=True)
class Preview:
    """The text shown to a person, and its hash."""

    text: str
    hash: str


async def preview_to_show(
    ctx: Context, draft_id: str, name: str | None, key: str | None, seeds: int, preview: bool
) -> Preview | None:
    """The preview a person must see before this call starts anything; None if nobody has to be asked, or can be.

    Raises:
        TopropeError: The draft cannot start.
    """
    if preview or not _can_ask(ctx):
        return None
    from toprope_tools.planning.preview_text import asked_about, said

    from toprope.records.run.specification import training_plan
    from toprope.workbench.launch.start import StartRequest

    workshop = workshop_of(ctx)
    draft = await to_thread.run_sync(workshop.drafts.get, draft_id)
    request = StartRequest(draft, training_plan(draft.config), name, seeds, key=key)
    wanted = await to_thread.run_sync(workshop.starter.consent_wanted, request)
    return None if wanted is None else Preview(asked_about(draft, said(wanted)), wanted.hash)


async def sweep_preview_to_show(
    ctx: Context,
    draft_id: str,
    space: dict[str, Any],
    strategy: str,
    population: int,
    epochs: int,
    options: dict[str, Any],
) -> Preview | None:
    """`preview_to_show` for a sweep: what all of its runs take together.

    Raises:
        TopropeError: The sweep cannot start.
    """
    if not _can_ask(ctx):
        return None
    from toprope_tools.runs import sweeps

    text_and_hash = await sweeps.consent_wanted(
        workshop_of(ctx),
        draft_id=draft_id,
        space=space,
        strategy=strategy,
        population=population,
        epochs=epochs,
        options=options,
    )
    return None if text_and_hash is None else Preview(*text_and_hash)


async def selected_preview_to_show(ctx: Context) -> Preview | None:
    """`preview_to_show` for the draft that the client selected under the names of Hermes Agent.

    Raises:
        TopropeError: Nothing is selected, or it cannot start.
    """
    from toprope_tools.hermes import selected

    draft_id = selected(workshop_of(ctx), name_of(ctx)).draft_id
    return await preview_to_show(ctx, draft_id, None, None, 1, False)


def ask_selected_consent(
    shown: Annotated[Preview | None, Resolve(selected_preview_to_show)],
) -> Elicit[Consent] | Consent:
    """See `ask_consent`."""
    return _question("Start this training run?", shown)


def ask_sweep_consent(shown: Annotated[Preview | None, Resolve(sweep_preview_to_show)]) -> Elicit[Consent] | Consent:
    """See `ask_consent`."""
    return _question("Start this sweep?", shown)


def ask_consent(shown: Annotated[Preview | None, Resolve(preview_to_show)]) -> Elicit[Consent] | Consent:
    """The question to ask; consent at once if there is nothing to show."""
    return _question("Start this training run?", shown)


def _question(question: str, shown: Preview | None) -> Elicit[Consent] | Consent:
    if shown is None:
        return Consent(start=True)
    return Elicit(f"{question}\n{shown.text}\n(hash {shown.hash})", Consent)


def confirmed_hash(shown: Preview, consent: ElicitationResult[Consent]) -> str:
    """The hash that the person agreed to, or UNREAD, with which the start waits for `toprope approve`.

    Raises:
        NotPossibleNow: They did not agree.
    """
    if isinstance(consent, AcceptedElicitation) and consent.data.start is not False:
        from toprope.workbench.launch.start import UNREAD

        return shown.hash if consent.data.start else UNREAD
    raise NotPossibleNow(
        "The person who was asked did not agree to this start.",
        hint="Ask them what to change; edit_config changes the draft, a preview by the same tool shows the rest.",
    )


def _can_ask(ctx: Context) -> bool:
    """True if this client shows forms to a person and can be asked on this connection."""
    capabilities = ctx.client_capabilities
    if capabilities is None or capabilities.elicitation is None:
        return False
    if (ctx.protocol_version or "") < _ASKS_IN_ITS_ANSWER and not ctx.session.can_send_request:
        return False
    form, url = capabilities.elicitation.form, capabilities.elicitation.url
    return form is not None or url is None
