"""The front doors of Toprope."""

import logging
import os
import sys
from pathlib import Path

BUNDLE = Path(__file__).parent / "page"
"""The built page; see `page/` in the repository."""


def leave() -> None:
    """End the process at once, even if its threads still wait."""
    logging.shutdown()
    sys.stderr.flush()
    os._exit(0)
