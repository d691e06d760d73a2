"""The prompt that a person can pick in a client, and completion of its arguments.

Tools are an agent's; a prompt is for who sits in front of it: one entry in the client's menu that asks for the main job
in the right order, with the environment's name completed from the catalog as it is typed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from anyio import to_thread
from mcp.server.mcpserver.prompts import Prompt
from mcp.types import Completion, PromptReference
from pydantic import Field

from toprope.errors import TopropeError

if TYPE_CHECKING:
    from mcp.types import CompletionArgument, ResourceTemplateReference

    from server.surface import Surface

__all__ = ["complete", "train_prompt"]

_MOST = 100
"""Values of one completion: the protocol's limit."""


def train_prompt() -> Prompt:
    """The prompt `train`."""
    return Prompt.from_function(train, name="train", title="Train on an environment")


def train(
    environment: Annotated[str, Field(description="What to train on; completed from the environments there are.")],
    goal: Annotated[str, Field(description="What the training is to reach, in your words; may be left out.")] = "",
) -> str:
    """Trains the policy on an environment: test first, train, wait, and report with intervals."""
    aim = f" The goal: {goal.strip()}" if goal.strip() else ""
    return (
        f"Use Toprope to train a policy on the environment {environment!r}.{aim}\n"
        "Describe the environment, make a draft of it, and test inference before any training; say if the reward does "
        "not vary. Change the configuration only where there is a reason, and name it. Then start training, wait with "
        "check_status, and tell me what it reached: held-out accuracy before and after with intervals, and what you "
        "would try next. Ask me before you stop a run or start another."
    )


async def complete(
    surface: Surface, ref: PromptReference | ResourceTemplateReference, argument: CompletionArgument
) -> Completion:
    """Names of environments that go on as, or else contain, what was typed; nothing for anything else."""
    if not isinstance(ref, PromptReference) or ref.name != "train" or argument.name != "environment":
        return Completion(values=[], total=0, has_more=False)
    try:
        entries = await to_thread.run_sync(lambda: surface.workshop.catalog.entries())
    except TopropeError:  # the tools say what is wrong with the owner's settings
        return Completion(values=[], total=0, has_more=False)
    typed = argument.value.casefold()
    names = [entry.name for entry in entries if entry.status == "ready" and typed in entry.name.casefold()]
    names.sort(key=lambda name: not name.casefold().startswith(typed))
    return Completion(values=names[:_MOST], total=len(names), has_more=len(names) > _MOST)
