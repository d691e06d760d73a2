"""Puts the policy's folder in place: the crew's first program, which ends when that is done.

`embedded` is made once and kept under the owner's cache, by a fingerprint of its recipe; a folder is looked at; a
Hugging Face id is downloaded into the Hub's own cache. The other members get a local folder in every case, and load it
with `load_model` and `load_tokenizer`.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toprope.errors import Corrupt, InvalidValue, NotFound, TopropeError
from toprope.records.messages import Failed, Finished, Progress, Ready
from toprope.records.run.checkpoints import MANIFEST, problem_of
from toprope.settings.schema import EMBEDDED, Config, PolicySection

if TYPE_CHECKING:
    from toprope.training.component.member import CrewMember

__all__ = [
    "EMBEDDED",
    "describe_device",
    "embedded_folder",
    "fix_kernels",
    "load_model",
    "load_tokenizer",
    "main",
    "place",
]

_READY = "recipe.json"
_NEEDED = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "tokenizer*"]


def embedded_folder(cache: Path, name: str = "embedded") -> Path:
    """Where an embedded policy of this version's recipe lies, whether it has been made or not."""
    from toprope.training.policy.tiny_model import RECIPES

    return cache / f"{name}-{RECIPES[name].fingerprint()}"


def place(policy: PolicySection, cache: Path, report: Any) -> Path:
    """The local folder of a policy, which is made or downloaded if need be.

    Args:
        policy: The configuration's section.
        cache: Folder for embedded policies.
        report: Called with a `Progress` now and then.

    Raises:
        TopropeError: It cannot be had; the text says why and what to do.
    """
    if policy.model in EMBEDDED:
        return _make_embedded(policy.model, cache, report)
    local = Path(policy.model).expanduser()
    if local.is_dir():
        adapters = (local / "adapter_config.json").is_file()  # what a run with LoRA saved: it names its model
        for name in ("tokenizer_config.json",) if adapters else ("config.json", "tokenizer_config.json"):
            if not (local / name).is_file():
                raise InvalidValue(
                    f"The folder {local} holds no {name}, so it is not a saved model with its tokenizer.",
                    hint="Save both there with save_pretrained, or set policy.model to another folder or a Hub id.",
                )
        if not any(local.glob("*.safetensors")):
            raise InvalidValue(
                f"The folder {local} holds no weights as safetensors. Pickled weights (pytorch_model.bin) are not "
                "loaded: that would run code that is in them.",
                hint="Save the model anew with save_pretrained, or set policy.model to another folder or a Hub id.",
            )
        checkpoint = local.resolve().parent
        ours = local.name == "model" and (checkpoint / MANIFEST).is_file() and (checkpoint / "state.json").is_file()
        if ours and (problem := problem_of(checkpoint)) is not None:
            raise Corrupt(
                f"The checkpoint {checkpoint} cannot be used: {problem}.",
                hint="It was left as it is. Set policy.model to the folder model/ of another checkpoint.",
            )
        return local.resolve()
    if policy.model.startswith((".", "/", "~")):
        raise NotFound(f"There is no folder {local}.", hint="Set policy.model to a folder, a Hub id or 'embedded'.")
    return _download(policy, report)


def _make_embedded(name: str, cache: Path, report: Any) -> Path:
    from filelock import FileLock

    folder = embedded_folder(cache, name)
    if (folder / _READY).is_file():
        return folder
    cache.mkdir(parents=True, exist_ok=True, mode=0o700)
    with FileLock(str(folder) + ".lock"):  # two runs that need it at once make it once
        if (folder / _READY).is_file():
            return folder
        making = f".making-{folder.name}-"
        for left in cache.glob(f"{making}*"):  # of runs that were stopped meanwhile: under the lock nobody makes it
            shutil.rmtree(left, ignore_errors=True)
        from toprope.training.policy.tiny_model import RECIPES, build

        aside = Path(tempfile.mkdtemp(prefix=making, dir=cache))
        try:

            def tell(done: int, total: int, loss: float) -> None:
                report(Progress(f"making the {name} policy (first use)", done, total, {"loss": loss}))

            build(aside, RECIPES[name], tell)
            shutil.rmtree(folder, ignore_errors=True)  # what lies there is no whole policy
            os.replace(aside, folder)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
    return folder


def _download(policy: PolicySection, report: Any) -> Path:
    report(Progress(f"fetching {policy.model}", 0, 1))
    try:
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(policy.model, revision=policy.revision, allow_patterns=_NEEDED))
    except Exception as error:  # the Hub's client raises its own tree, and requests' and httpx' besides
        text = str(error).strip()
        cause = text.splitlines()[0] if text else type(error).__name__
        raise NotFound(
            f"The model {policy.model!r} could not be fetched from the Hugging Face Hub: {cause}",
            hint="Check the id and revision, the network and HF_TOKEN in the owner's settings; or set policy.model to "
            "a local folder, or to 'embedded', which needs no network.",
        ) from None
    report(Progress(f"fetching {policy.model}", 1, 1))
    return folder


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a placed policy, padding on the left, with a padding token.

    Raises:
        InvalidValue: It cannot be loaded, or has no chat template, without which messages cannot be put to the policy.
    """
    from transformers import AutoTokenizer

    with _loading("tokenizer", folder):
        tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if not tokenizer.chat_template:
        raise InvalidValue(
            f"The tokenizer of {folder} has no chat template.",
            hint="Choose an instruction-tuned model, or add a chat_template to its tokenizer.",
        )
    return tokenizer


@contextmanager
def _loading(what: str, folder: Path) -> Iterator[None]:
    """What the libraries raise for a folder that is damaged or too new for them, in one sentence with the remedy."""
    try:
        yield
    except TopropeError:
        raise
    except Exception as error:  # transformers, tokenizers and safetensors each raise trees of their own
        text = str(error).strip()
        cause = text.splitlines()[0] if text else type(error).__name__
        raise InvalidValue(
            f"The {what} in {folder} cannot be loaded: {type(error).__name__}: {cause[:300]}",
            hint="Set policy.model to another folder or Hub id, save or download it again, or update transformers.",
        ) from error


def load_model(folder: Path, config: Config, *, trained: bool = False) -> Any:
    """The policy as a causal LM on its device, with fresh LoRA adapters where the configuration asks for them.

    Args:
        folder: The placed policy.
        config: The run's configuration.
        trained: For the trainer. With dtype `auto` weights that are all trained are float32 on a GPU, too: a step of
            usual size is lost in bfloat16, whose neighbours are 0.8 % apart. Inference rounds what is published.

    Raises:
        InvalidValue: It cannot be loaded, or the device is not there.
    """
    import torch
    from transformers import AutoModelForCausalLM

    device = describe_device(config)
    dtype = config.policy.dtype
    if dtype == "auto":
        whole = trained and not config.policy.lora
        dtype = "float32" if device == "cpu" or whole else "bfloat16"
    with _loading("model", folder):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), use_safetensors=True)
    model = model.to(device)
    if config.policy.lora:
        from peft import LoraConfig, get_peft_model

        targets = config.policy.lora_target_modules
        torch.manual_seed(config.algorithm.seed)  # trainer and inference start from the same adapters
        model = get_peft_model(
            model,
            LoraConfig(
                r=config.policy.lora_rank,
                lora_alpha=config.policy.lora_alpha,
                lora_dropout=config.policy.lora_dropout,
                target_modules=targets if targets == "all-linear" else [name.strip() for name in targets.split(",")],
                task_type="CAUSAL_LM",
            ),
        )
    return model


def fix_kernels(config: Config) -> None:
    """In deterministic mode has torch choose kernels that give the same twice; call it before anything is computed."""
    import torch

    if config.algorithm.deterministic:
        # cuBLAS reads it when it is first used: https://docs.nvidia.com/cuda/cublas/#results-reproducibility
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        # TRL, accelerate and models of the Hub are not ours to mend: what has no such kernel warns and goes on.
        torch.use_deterministic_algorithms(True, warn_only=True)


def describe_device(config: Config) -> str:
    """`cuda` or `cpu`.

    Raises:
        InvalidValue: A GPU is asked for and there is none.
    """
    import torch

    if config.launcher.device == "cpu":
        return "cpu"
    if torch.cuda.is_available():
        return "cuda"
    if config.launcher.device == "cuda":
        raise InvalidValue(
            "launcher.device is cuda, but PyTorch sees no GPU here.",
            hint="Set launcher.device to auto or cpu, or install a CUDA build of PyTorch.",
        )
    return "cpu"


def main() -> int:
    """The component program."""
    from toprope.training.component.member import CrewMember

    member: CrewMember = CrewMember.join()
    try:
        if member.spec.config.launcher.device == "cuda":
            describe_device(member.spec.config)  # before a model is fetched that could not be used
        folder = place(member.spec.config.policy, Path(member.spec.policy_cache), member.report)
    except TopropeError as error:
        member.report(Failed(error.message, error.hint))
        return 1
    member.report(Ready(str(folder)))
    member.report(Finished())
    return 0
