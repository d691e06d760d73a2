"""The trainer's program: batches or demonstrations in, weights and checkpoints out, by the run's algorithm."""

from __future__ import annotations

import importlib
import os
from pathlib import Path

from toprope.errors import TopropeError
from toprope.records.messages import ENV_CHECKPOINT, Failed
from toprope.records.run.lines import NO_ROOM
from toprope.settings.algorithms import ALGORITHMS
from toprope.training.component.member import CrewMember
from toprope.training.component.peer_addresses import PeerAway
from toprope.training.trainer.base import TrainingRun

__all__ = ["main"]


def _training_of(member: CrewMember) -> TrainingRun:
    name = "sft" if member.spec.run_kind.demonstrates else member.spec.config.algorithm.name
    module, _, program = ALGORITHMS[name].program.partition(":")
    return getattr(importlib.import_module(module), program)(member)


def main() -> int:
    """The component program."""
    member = CrewMember.join()
    logging = member.spec.config.logging
    os.environ["WANDB_MODE"] = logging.wandb
    os.environ["WANDB_DIR"] = str(member.folder.path)
    os.environ["WANDB_PROJECT"] = logging.wandb_project
    os.environ["WANDB_NAME"] = member.spec.run_id
    os.environ["WANDB_SILENT"] = "true"
    # An attempt goes on in the same record there.
    os.environ["WANDB_RUN_ID"] = member.spec.run_id
    os.environ["WANDB_RESUME"] = "allow"
    checkpoint = os.environ.get(ENV_CHECKPOINT)
    try:
        _training_of(member).run(None if checkpoint is None else Path(checkpoint))
    except TopropeError as error:
        member.report(Failed(error.message, error.hint, isinstance(error, PeerAway)))
        return 1
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        member.report(
            Failed(f"There is no room on the disk of {member.folder.path}: {error}.", "Make room, then resume.")
        )
        return 1
    return 0
