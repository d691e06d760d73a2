"""Reports on a run's environments to a custom trainer, which checks them first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import asdict

from toprope.atomic import write_json
from toprope.records.run.folder import RunFolder
from toprope.training.rollouts.environment_host import EnvironmentHost

_MAX_LENGTH = 4000


async def write_environment_report(folder: RunFolder, hosts: Sequence[EnvironmentHost]) -> Path:
    """Writes the fields of `toprope.sdk.training.Data` as JSON into the crew's folder; returns the file.

    Args:
        hosts: The environments, checked. Example and outcome come from the first, tasks and parts from all.
    """
    first = hosts[0]
    worker = await first.worker.current()
    [example] = (await worker.tasks("train", 0, 1, timeout=first.plan.section.load_timeout_s)).tasks
    tasks: Counter[str] = Counter()
    for host in hosts:
        tasks.update(host.sizes)
    path = folder.crew / "data.json"
    write_json(
        path,
        {
            "environment": ", ".join(host.label for host in hosts),
            "tasks": dict(tasks),
            "example": {"prompt": _text(example.messages), "reference": _text(example.reference)},
            "parts": {name: asdict(part) for host in hosts for name, part in host.card.parts.items()},
            "reference_outcome": {} if first.outcome is None else asdict(first.outcome),
        },
    )
    return path


def _text(value: Any) -> str | None:
    if value is None:
        return None
    if isinstance(value, list):
        value = "\n".join(str(message.get("content", "")) for message in value if isinstance(message, dict))
    return str(value)[:_MAX_LENGTH]
