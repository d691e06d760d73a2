"""A virtual environment in which every process is simulated; see `simulation`."""

from __future__ import annotations

import os
import site
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]


@dataclass(frozen=True)
class Simulated:
    """An environment with this checkout, and a home of its own."""

    folder: Path

    @property
    def python(self) -> str:
        return str(self.folder / "bin" / "python")

    @property
    def variables(self) -> dict[str, str]:
        """Variables of an owner whose folders are empty."""
        kept = {name: one for name, one in os.environ.items() if not name.startswith(("TOPROPE_", "PYTHON"))}
        home, configuration = str(self.folder / "home"), str(self.folder / "config")
        return kept | {"TOPROPE_HOME": home, "TOPROPE_CONFIG": configuration}

    def noted(self) -> list[str]:
        """The replacements of the simulation, a line each time."""
        return (self.folder / "simulated.log").read_text().splitlines()


def make_environment(folder: Path) -> Simulated:
    """Make an environment that borrows the packages of this one."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    [packages] = folder.glob("lib/python*/site-packages")
    ours = [str(ROOT / place) for place in ("", "server", "tools")]
    # Python processes .pth files only in the environment's own folder, so those of the borrowed one are not followed.
    lines = [*ours, *site.getsitepackages(), str(HERE), "import simulation; simulation.install()"]
    (packages / "simulated.pth").write_text("\n".join(lines) + "\n")
    return Simulated(folder)
