"""`toprope chat`: put questions to the policy of a run, or to a base policy, in the terminal or from a pipe.

This process serves the policy, so no run is started and nothing is kept.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import anyio
from anyio import to_thread

from toprope.errors import ComponentFailed, TopropeError, visible
from toprope.extras import TRAINING, require
from toprope.records.run.checkpoints import split_step
from toprope.records.run.specification import Specification
from toprope.settings.sections.environment import RUN
from toprope.workbench.interpreters.engines import engine_python
from toprope.workbench.launch.lineage import base_of

if TYPE_CHECKING:
    from pathlib import Path

    from toprope_tools.workshop import Workshop

    from toprope.settings.schema import Config

_LONGEST = 20_000


def trained_policy(workshop: Workshop, named: str) -> Config:
    """The configuration that loads a trained policy: that of its run, with the checkpoint as the model.

    Args:
        named: `RUN`, or `RUN@STEP`.

    Raises:
        NotFound, NotPossibleNow: There is no such run, or it has no weights yet, or no checkpoint of that step.
    """
    require("A policy's answer", *TRAINING)
    run_id, _ = split_step(named)
    config = Specification.read(workshop.runs.folder(run_id)).config.model_copy(deep=True)
    base = base_of(f"{RUN}{named}", workshop.home.runs)
    assert base is not None  # an id after `run:` names a run
    # The checkpoint holds the adapters, where there are any.
    config.policy = config.policy.model_copy(update={"model": base[1], "revision": None, "lora": False})
    return config


def chat(
    workshop: Workshop, run_id: str, *, temperature: float, max_tokens: int | None, whole: bool, engine: str
) -> None:
    """Answer each line of standard input until it ends.

    Args:
        run_id: A run, or one of its checkpoints: `RUN@STEP`.
        temperature: 0 takes the most likely token at each position.
        max_tokens: Longest answer; as in the run if None.
        whole: Keep the conversation; otherwise each line begins anew, as tasks of one turn do.
        engine: As `inference.engine`.

    Raises:
        NotFound, NotPossibleNow: There is no such run, or it has no weights yet.
        InvalidValue: The engine was not added, or cannot serve this policy.
    """
    config, python = trained_policy(workshop, run_id), engine_python(workshop.home, engine)
    limit = max_tokens or config.rollout.max_new_tokens
    anyio.run(_talk, workshop.home.policies, config, temperature, limit, whole, engine, python)


async def _talk(
    cache: Path, config: Config, temperature: float, max_tokens: int, whole: bool, engine: str, python: str | None
) -> None:
    from toprope.training.inference.client import PromptTooLong, Sampling
    from toprope.training.rollouts.preview_policy import serve_policy

    sampling, live = Sampling(temperature, 1.0, max_tokens), sys.stdin.isatty()
    messages: list[dict[str, str]] = []
    if live:
        print(f"Loading {config.policy.model} ...", file=sys.stderr, flush=True)
    async with serve_policy(config, cache, lambda text: None, engine=engine, python=python) as policy:
        if live:
            print("Write a line to ask; Ctrl-D ends.", file=sys.stderr, flush=True)
        while (line := await to_thread.run_sync(_read, live, abandon_on_cancel=True)) is not None:
            if not line.strip():
                continue
            question = {"role": "user", "content": line[:_LONGEST]}
            messages = [*messages, question] if whole else [question]
            try:
                [answer] = await policy.chat(messages, sampling)
            except PromptTooLong:
                print("The conversation leaves no room for an answer; the next line begins a new one.", file=sys.stderr)
                messages = []
                continue
            except ComponentFailed as error:
                raise TopropeError(f"The policy did not answer: {error.message}", hint=error.hint) from None
            messages = [*messages, {"role": "assistant", "content": answer.text}]
            print(visible(answer.text), flush=True)


def _read(live: bool) -> str | None:
    """The next line; None at the end."""
    try:
        return input("> " if live else "")
    except EOFError:
        return None
