"""What the driver found of its environments, for a trainer of the owner's own that checks it first."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import asdict

from toprope.atomic import write_json
from toprope.records.run.folder import RunFolder
from toprope.training.rollouts.environment_host import Hosted

__all__ = ["describe"]

_LONGEST = 4000


async def describe(folder: RunFolder, hosts: Sequence[Hosted]) -> Path:
    """Writes `toprope.sdk.training.Data` as JSON, where the trainer finds it.

    Args:
        folder: The run's; the file lies among what goes with the crew.
        hosts: The environments, checked; of several the first is described, and tasks and parts are of all.
    """
    first = hosts[0]
    link = await first.worker.link()
    [example] = (await link.tasks("train", 0, 1, timeout=first.plan.section.load_timeout_s)).tasks
    tasks: dict[str, int] = {}
    for host in hosts:
        for split, size in host.sizes.items():
            tasks[split] = tasks.get(split, 0) + size
    path = folder.crew / "data.json"
    write_json(
        path,
        {
            "environment": ", ".join(host.label for host in hosts),
            "tasks": tasks,
            "example": {
                "prompt": _text(example.messages),
                "reference": _text(example.reference),
            },
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
    return str(value)[:_LONGEST]
