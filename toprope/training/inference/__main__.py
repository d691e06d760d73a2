"""The inference component's program: load the policy, serve it, take new weights as they come."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Callable
from pathlib import Path

from toprope.errors import TopropeError
from toprope.records.messages import Failed, Ready
from toprope.training.component.member import CrewMember, send_heartbeats


def main() -> int:
    """Runs until the keeper says stop or is gone."""
    member = CrewMember.join()
    config = member.spec.config
    try:
        # The slow imports come before the wait for the policy's folder, which may still be in the making.
        import torch
        import transformers

        torch.set_num_threads(config.launcher.threads)
        transformers.logging.set_verbosity_error()
        from toprope.training.inference.app import InferenceServer
        from toprope.training.inference.engine import Engine
        from toprope.training.policy.loading import fix_kernels, load_model, load_tokenizer
        from toprope.training.policy.weight_sync import WeightReader

        fix_kernels(config)
        folder = Path(member.address("policy"))
        tokenizer = load_tokenizer(folder)
        model = load_model(folder, config).eval()
        model.requires_grad_(False)
    except TopropeError as error:
        member.report(Failed(error.message, error.hint))
        return 1
    engine = Engine(
        model,
        tokenizer,
        weights=WeightReader(member.folder.crew, dict(model.named_parameters())),
        max_context=config.policy.max_context,
        # Who shares a decode batch moves the last bits of its logits: alone, a request has always the same company.
        **({"max_rows": 1} if config.algorithm.deterministic else {}),
        seed=config.algorithm.seed,
    )
    server = InferenceServer(engine, tokenizer, model_name=config.policy.model, secret=member.secret)
    engine.start()
    gc.freeze()  # what was imported stays: the collector need not walk it between decode batches
    asyncio.run(_serve(member, server, engine.moves, len(tokenizer)))
    engine.stop(timeout_s=1.0)
    return 0


async def _serve(member: CrewMember, server: object, moves: Callable[[], bool], vocabulary: int) -> None:
    from toprope.training.component.http_server import serve
    from toprope.training.inference.app import InferenceServer

    assert isinstance(server, InferenceServer)
    ending = asyncio.Event()

    async def listen() -> None:
        async for _ in member.orders():
            if member.ending.is_set():
                break
        ending.set()

    tasks = [asyncio.create_task(listen()), asyncio.create_task(send_heartbeats(member.report, moves))]
    await serve(server.app, lambda url: member.report(Ready(url, {"vocabulary": vocabulary})), ending)
    for task in tasks:
        task.cancel()


if __name__ == "__main__":
    sys.exit(main())
