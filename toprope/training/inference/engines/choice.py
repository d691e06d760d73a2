"""The engine that a configuration names, over the policy in a folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toprope.errors import InvalidValue, TopropeError
from toprope.machine import keep_freed_memory
from toprope.settings.schema import Config

if TYPE_CHECKING:
    from toprope.training.inference.engine import Engine


def make_engine(
    config: Config,
    folder: Path,
    tokenizer: Any,
    *,
    crew: Path | None = None,
    is_trained: bool = False,
    python: str | None = None,
    gave_up: Callable[[TopropeError], object] = lambda error: None,
) -> Engine:
    """Load the policy into an engine, which is not started yet.

    Args:
        folder: The policy's folder.
        crew: Folder in which a trainer publishes weights; None for a policy that is not trained.
        is_trained: True if there is such a trainer, whose weights replace adapters of the folder that do not fit.
        python: The engine's own interpreter, for engines that need one.
        gave_up: Called with the reason if the engine can sample no more.

    Raises:
        InvalidValue: The engine cannot serve this policy, or the policy cannot be loaded.
    """
    if config.inference.engine == "vllm":
        return _vllm(config, folder, tokenizer, crew, python, gave_up)
    import torch
    import transformers

    from toprope.training.policy.loading import load_model
    from toprope.training.policy.weight_sync import WeightReader

    torch.set_num_threads(config.launcher.threads)
    keep_freed_memory()
    transformers.logging.set_verbosity_error()
    model = load_model(folder, config, overwritten=is_trained).eval()
    model.requires_grad_(False)
    weights = None if crew is None else WeightReader(crew, dict(model.named_parameters()), model)
    options: dict[str, Any] = {"max_context": config.policy.max_context, "seed": config.algorithm.seed}
    options["gave_up"] = gave_up
    if config.inference.engine == "transformers":
        from toprope.training.inference.engines.continuous import ContinuousEngine

        share = config.inference.memory_share
        return ContinuousEngine(model, tokenizer, weights=weights, memory_share=share, **options)
    from toprope.training.inference.embedded_engine import EmbeddedEngine

    if config.algorithm.deterministic:
        # Other rows of a decode batch change the last bits of a row's logits, so every request is a batch of its own.
        # So do keys and values of a former prompt, which a server that was started again does not have.
        options |= {"max_rows": 1, "kept_bytes": 0}
    return EmbeddedEngine(model, tokenizer, weights=weights, in_flight=config.rollout.in_flight, **options)


def _vllm(
    config: Config,
    folder: Path,
    tokenizer: Any,
    crew: Path | None,
    python: str | None,
    gave_up: Callable[[TopropeError], object],
) -> Engine:
    from toprope.machine import gpu_names
    from toprope.training.inference.engines.vllm_engine import VllmEngine
    from toprope.training.inference.engines.vllm_process import VllmSettings, keeps_old_head
    from toprope.training.policy.turn_end import end_ids_of

    device = "cpu" if config.launcher.device == "cpu" or not gpu_names() else "cuda"
    if python is None:
        raise InvalidValue("inference.engine is vllm, and this run was frozen without its interpreter.")
    if (folder / "adapter_config.json").is_file():
        raise InvalidValue(
            f"{folder} has adapters without the model below them, and vLLM begins with a whole model.",
            hint="Merge them: toprope export RUN --to FOLDER. Or choose engine embedded or transformers.",
        )
    for field, is_set in (("sleep", config.inference.sleep), ("transfer", config.inference.transfer == "gpu")):
        if is_set and device == "cpu":
            raise InvalidValue(
                f"inference.{field} is {getattr(config.inference, field)}, and vLLM does that on a GPU only.",
                hint=f"Unset inference.{field}, or use a GPU.",
            )
    if crew is not None and not config.policy.lora and keeps_old_head(folder, device):
        raise InvalidValue(
            "On a CPU vLLM keeps the output head of its first weights if embeddings are tied, as this policy's are, so "
            "training would sample from a mixed model.",
            hint="Set inference.engine to embedded or transformers, train adapters (policy.lora), or use a GPU.",
        )
    settings = VllmSettings.of(config, python, folder, device)
    return VllmEngine(settings, tokenizer, end_ids_of(folder, tokenizer), crew=crew, gave_up=gave_up)
