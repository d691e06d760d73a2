"""The folder of a policy whose weights are at a service: its tokenizer, and `tinker.json` with the paths there."""

from __future__ import annotations

import shutil
from pathlib import Path

from pydantic import BaseModel, ValidationError

from toprope.atomic import write_json
from toprope.errors import Corrupt, InvalidValue
from toprope.records.run.folder import read_json
from toprope.settings.schema import PolicySection
from toprope.training.policy.loading import fetch

FILE = "tinker.json"
WEIGHTS = "weights"
"""Folder of a run's folder with the downloaded adapters of its last step."""
TOKENIZER_FILES = ["tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "*.jinja",
                   "config.json", "generation_config.json"]  # fmt: skip


class HostedPolicy(BaseModel):
    """Weights at a service."""

    base_model: str
    """Name of the model there."""
    sampler: str | None = None
    """`tinker://` path of the adapters for sampling; None: the model as it is."""
    state: str | None = None
    """`tinker://` path of the adapters with the optimizer's state."""
    tokens: int = 0
    """Tokens on which the run that saved them had trained."""

    @classmethod
    def read(cls, folder: Path) -> HostedPolicy:
        """The policy of a folder.

        Raises:
            NotFound, Corrupt: The file is missing or damaged.
        """
        try:
            return cls.model_validate(read_json(folder / FILE))
        except ValidationError as error:
            raise Corrupt(f"{folder / FILE} cannot be read: {error.error_count()} fields are wrong.") from None

    def write(self, folder: Path) -> None:
        write_json(folder / FILE, self.model_dump())


def place_hosted(policy: PolicySection, folder: Path) -> Path:
    """The folder of a policy at a service: that of a checkpoint, or `folder` with the model's tokenizer.

    Args:
        policy: The configuration's section; `model` is the name at the service, which is a Hub id or a folder.
        folder: For the tokenizer of a model that was not trained yet.

    Raises:
        TopropeError: There is no tokenizer.
    """
    local = Path(policy.model).expanduser()
    if (local / FILE).is_file():
        return local.resolve()
    source = local if local.is_dir() else fetch(policy, TOKENIZER_FILES, policy.revision)
    copy_tokenizer(source, folder)
    if not (folder / "tokenizer_config.json").is_file():
        raise InvalidValue(
            f"{source} has no tokenizer_config.json: the texts of tasks cannot become tokens of {policy.model}.",
            hint="Set policy.model to a model of the service that is on the Hugging Face Hub with its tokenizer.",
        )
    HostedPolicy(base_model=policy.model).write(folder)
    return folder


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy the files of a tokenizer, and the configurations that name end tokens, into a folder that is created."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    for pattern in TOKENIZER_FILES:
        for file in source.glob(pattern):
            shutil.copyfile(file, folder / file.name)
