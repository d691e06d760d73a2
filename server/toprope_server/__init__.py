"""The front doors of Toprope."""

from pathlib import Path

BUNDLE = Path(__file__).parent / "page"
"""The built page; see `page/` in the repository."""
