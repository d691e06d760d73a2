"""The environment `orchestrator`; its target holds the owner's folders and tools that it may use."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from toprope.records.run.specification import EnvironmentSource
from toprope.sdk.adapters import orchestrator
from toprope.workbench.entries import Entry, Names


class OrchestratorSource:
    """Lists the environment `orchestrator`.

    Args:
        folders: Folders whose data files it may read.
        tools: The owner's tools by name, see `LentTool.declaration`.
    """

    kind = "shipped"

    def __init__(self, folders: Sequence[Path], tools: Mapping[str, Any]) -> None:
        self._target = json.dumps({"folders": [str(folder) for folder in folders], "tools": tools}, sort_keys=True)

    def entries(self, names: Names) -> list[Entry]:
        """Return the single entry."""
        name = orchestrator.Orchestrator.name
        problem = names.objection(name, "Toprope itself", "Rename that one.")
        return [
            Entry(
                name=name,
                description=orchestrator.DESCRIPTION,
                source=self.kind,
                status="broken" if problem else "ready",
                problem=problem,
                turns=orchestrator.Orchestrator.max_turns,
                environment=EnvironmentSource(name=name, adapter="orchestrator", target=self._target),
                tags=orchestrator.Orchestrator.tags,
                tools=True,
            )
        ]
