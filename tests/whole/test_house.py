"""The floors of the house: who may import whom, as pyproject.toml has it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_rooms_import_from_floors_below_them_only() -> None:
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()"]
    found = subprocess.run([*command, "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert found.returncode == 0, found.stdout + found.stderr
    assert " 0 broken" in found.stdout
