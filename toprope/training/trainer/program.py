"""Program of the crew's trainer: runs the training of the run's algorithm."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from toprope.errors import TopropeError
from toprope.extras import without_collector
from toprope.records.messages import ENV_CHECKPOINT, Failed
from toprope.records.run.full_disk import NO_ROOM
from toprope.settings.sections.algorithms import ALGORITHMS
from toprope.training.component.member import CrewMember
from toprope.training.component.peer_addresses import PeerAway

if TYPE_CHECKING:
    from toprope.training.trainer.base import TrainingRun

_HOSTED_GROUPS = "toprope.training.hosted.trainer:HostedGroups"
_HOSTED_DEMONSTRATIONS = "toprope.training.hosted.trainer:HostedDemonstrations"


def create_training(member: CrewMember) -> TrainingRun:
    """The training that the run's kind or algorithm names.

    It is imported here: torch takes seconds to load, and the member has reported its start by now.
    """
    config, demonstrates = member.spec.config, member.spec.run_kind.demonstrates
    program = ALGORITHMS["sft" if demonstrates else config.algorithm.name].program
    if config.is_hosted:
        program = _HOSTED_DEMONSTRATIONS if demonstrates else _HOSTED_GROUPS
    module, _, attribute = program.partition(":")
    with without_collector():
        training: TrainingRun = getattr(importlib.import_module(module), attribute)(member)
    return training


def main() -> int:
    """Runs the component; returns its exit status."""
    member = CrewMember.join()
    checkpoint = os.environ.get(ENV_CHECKPOINT)
    try:
        create_training(member).run(None if checkpoint is None else Path(checkpoint))
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
