"""Notes where Weights & Biases keeps a run: wandb tells only the process that it is in, and others report on it."""

from __future__ import annotations

import sys
from typing import Any

from toprope.atomic import write_json
from toprope.records.run.folder import WANDB_VERSION, RunFolder

__all__ = ["note_wandb"]


def note_wandb(folder: RunFolder, mode: str) -> None:
    """Writes wandb.json of a run: version, mode, folder, and url when online. Nothing where wandb has not begun.

    Args:
        folder: The run's.
        mode: logging.wandb.
    """
    wandb: Any = sys.modules.get("wandb")
    run = getattr(wandb, "run", None)
    if run is None:
        return
    found: dict[str, Any] = {"version": WANDB_VERSION, "mode": mode, "folder": str(run.dir).removesuffix("/files")}
    if run.url:
        found["url"] = str(run.url)
    write_json(folder.path / "wandb.json", found)
