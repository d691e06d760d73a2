"""The inference component: load the policy, serve it, and adopt new weights as the trainer publishes them."""

from __future__ import annotations

import asyncio
import gc
import sys
from pathlib import Path
from typing import Any

from toprope.errors import TopropeError
from toprope.records.messages import Failed, Ready
from toprope.settings.endpoints import BASE
from toprope.training.component.http_server import serve
from toprope.training.component.member import CrewMember, send_heartbeats
from toprope.training.inference.app import InferenceServer
from toprope.training.inference.engine import Engine


def main() -> int:
    """Run until a Stop order comes or the keeper is gone; returns the exit status."""
    member = CrewMember.join()
    config = member.spec.config
    try:
        # Slow imports come first: the policy's folder may still be in preparation.
        import torch
        import transformers

        torch.set_num_threads(config.launcher.threads)
        transformers.logging.set_verbosity_error()
        from toprope.training.inference.embedded_engine import EmbeddedEngine
        from toprope.training.policy.loading import fix_kernels, load_model, load_tokenizer
        from toprope.training.policy.weight_sync import WeightReader

        fix_kernels(config)
        folder = Path(member.address("policy"))
        tokenizer = load_tokenizer(folder)
        model = load_model(folder, config).eval()
        model.requires_grad_(False)
        other = member.spec.opponent_policy or (str(folder) if config.environment.opponent == BASE else None)
        if other is not None:
            other_tokenizer, other_model = load_tokenizer(Path(other)), load_model(Path(other), config).eval()
            other_model.requires_grad_(False)
    except TopropeError as error:
        member.report(Failed(error.message, error.hint))
        return 1
    engine = EmbeddedEngine(
        model,
        tokenizer,
        weights=WeightReader(member.weights, dict(model.named_parameters())),
        max_context=config.policy.max_context,
        # Other rows of a decode batch change the last bits of a row's logits, so every request is a batch of its own.
        **({"max_rows": 1} if config.algorithm.deterministic else {}),
        seed=config.algorithm.seed,
    )
    server = InferenceServer(engine, tokenizer, model_name=config.policy.model, secret=member.secret)
    engine.start()
    fixed = None
    if other is not None:
        most: dict[str, Any] = {"max_rows": 1} if config.algorithm.deterministic else {}
        fixed = EmbeddedEngine(
            other_model, other_tokenizer, max_context=config.policy.max_context, seed=config.algorithm.seed, **most
        )
        server.opponent = InferenceServer(fixed, other_tokenizer, model_name=other, secret=member.secret)
        fixed.start()
    gc.freeze()  # loaded modules stay: the collector need not visit them between decode batches
    asyncio.run(_serve(member, server, engine, len(tokenizer)))
    engine.stop(timeout_s=1.0)
    if fixed is not None:
        fixed.stop(timeout_s=1.0)
    return 0


async def _serve(member: CrewMember, server: InferenceServer, engine: Engine, vocabulary: int) -> None:
    ending = asyncio.Event()

    async def follow_orders() -> None:
        async for _ in member.orders():
            if member.ending.is_set():
                break
        ending.set()

    tasks = [
        asyncio.create_task(follow_orders()),
        asyncio.create_task(send_heartbeats(member.report, engine.is_progressing)),
    ]
    await serve(server.app, lambda url: member.report(Ready(url, {"vocabulary": vocabulary})), ending)
    for task in tasks:
        task.cancel()


if __name__ == "__main__":
    sys.exit(main())
