"""`toprope serve-model`: a trained policy for other programs, in OpenAI's dialect on loopback."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING

from toprope.workbench.interpreters.engines import engine_python
from toprope_server.cli.runs.chat import trained_policy
from toprope_server.http.token import TokenFile

if TYPE_CHECKING:
    from pathlib import Path

    from toprope_tools.workshop import Workshop

    from toprope.settings.schema import Config

KEY_FILE = "model-key"


def serve_model(workshop: Workshop, named: str, *, port: int, max_context: int | None, engine: str) -> None:
    """Serve a checkpoint until Ctrl-C or SIGTERM.

    Args:
        named: `RUN`, or `RUN@STEP`; clients give it as the model's name.
        port: 0 for any free one.
        max_context: Longest prompt and answer, in tokens; as in the run if None.
        engine: As `inference.engine`.

    Raises:
        NotFound, NotPossibleNow: There is no such run, or it has no weights yet, or no checkpoint of that step.
        InvalidValue: The port is taken, the file of the key is not private, or the engine is not installed.
    """
    config, python = trained_policy(workshop, named), engine_python(workshop.home, engine)
    if max_context is not None:
        config.policy = config.policy.model_copy(update={"max_context": max_context})
    key = TokenFile(workshop.home.configuration, KEY_FILE)
    key.ensure()
    asyncio.run(_serve(config, workshop.home.policies, named, port, key, engine, python))


async def _serve(
    config: Config, cache: Path, named: str, port: int, key: TokenFile, engine: str, python: str | None
) -> None:
    from toprope.training.rollouts.preview_policy import serving

    ending = asyncio.Event()
    print(f"Loading {named} ...", file=sys.stderr, flush=True)
    async with serving(
        config, cache, lambda text: None,
        port=port, secret=key.read(), name=named, ending=ending, engine=engine, python=python, sigterm=True,
    ) as served:  # fmt: skip
        if ending.is_set():
            return  # ended while it loaded
        print(f"{named} answers at {served.url}/v1 (OpenAI's dialect, model {named}). Ctrl-C ends.")
        print(f'OPENAI_BASE_URL={served.url}/v1 OPENAI_API_KEY="$(cat {key.path})"', flush=True)
        await ending.wait()
