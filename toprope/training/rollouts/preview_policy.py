"""Serves a policy within this process, for a person who tries an environment without starting a run."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from toprope.settings.schema import Config
from toprope.training.inference.client import PolicyClient


@asynccontextmanager
async def serve_policy(config: Config, cache: Path, report: Callable[[str], None]) -> AsyncIterator[PolicyClient]:
    """Serves the configured policy on loopback for the duration of the block.

    Args:
        config: Names the policy, its device and its context.
        cache: Folder for embedded policies.
        report: Called with a description of each slow step.

    Raises:
        TopropeError: The policy cannot be fetched or loaded.
    """
    import torch
    import transformers

    from toprope.training.component.http_server import serve
    from toprope.training.inference.app import InferenceServer
    from toprope.training.inference.embedded_engine import EmbeddedEngine
    from toprope.training.policy.loading import load_model, load_tokenizer, place

    torch.set_num_threads(config.launcher.threads)
    transformers.logging.set_verbosity(logging.ERROR)
    transformers.logging.disable_progress_bar()
    cache.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder = await asyncio.to_thread(place, config.policy, cache, lambda progress: report(progress.what))
    tokenizer = load_tokenizer(folder)
    model = load_model(folder, config).eval()
    model.requires_grad_(False)
    engine = EmbeddedEngine(model, tokenizer, max_context=config.policy.max_context, seed=config.algorithm.seed)
    secret = secrets.token_hex(16)
    server = InferenceServer(engine, tokenizer, model_name=config.policy.model, secret=secret)
    engine.start()
    ending, address = asyncio.Event(), asyncio.get_running_loop().create_future()
    task = asyncio.create_task(serve(server.app, address.set_result, ending))
    try:
        await asyncio.wait({task, address}, return_when=asyncio.FIRST_COMPLETED)
        client = PolicyClient(await address, secret)
        try:
            yield client
        finally:
            await client.close()
    finally:
        ending.set()
        await task
        engine.stop(timeout_s=1.0)
