"""Hatchling's hook that puts the page into wheel and sdist.

Without Node the wheel is built all the same, with a warning: only `toprope dashboard` and the MCP App miss the page.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

sys.path.insert(0, str(Path(__file__).resolve().parent))
import make_page as page_build  # noqa: E402

sys.path.pop(0)


class PageHook(BuildHookInterface[Any]):
    """Builds the page before a wheel or an sdist; an editable installation leaves that to `make page`."""

    PLUGIN_NAME = "custom"

    def dependencies(self) -> list[str]:
        """Return Node for an isolated build if the system has none."""
        return [] if page_build.is_fresh() or page_build.node_programs() else [page_build.NODE_WHEEL]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build the page if it is missing or older than its sources."""
        if version == "editable":
            return
        try:
            page_build.build()
        except page_build.CannotBuild as error:
            self.app.display_warning(f"The wheel has no page, so `toprope dashboard` will not work: {error}")
