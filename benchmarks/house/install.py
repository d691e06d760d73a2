"""Install the wheel from an empty home, and measure what that takes: `make bench-install`.

Every installation begins without caches, so its seconds include the downloads. `image_server_mb` is the unpacked root
folder of the container image, which needs mmdebstrap. control: a planted file must count in the size of a folder, and
a release of another owner must differ from the first.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.report import refuse, report
from benchmarks.scratch import scratch
from tests.support.run_engines import RELEASE_TOOLS

ROOT = Path(__file__).resolve().parents[2]
HOMES = len(list((ROOT / "tests" / "data" / "homes").glob("*.tar.xz")))
GOALS = {
    "server_only_mb": "<= 120",
    "image_server_mb": "<= 300",
    "darwin_simulation_passed": "== 1",
    "old_homes_read": f"== {HOMES}",
    "rebuild_identical": "== 1",
}


def main() -> int:
    """Print the figures; exit with 1 if a goal is missed, with 2 if the control fails."""
    tools = {"make tools-release": RELEASE_TOOLS / "bin" / "cyclonedx-py", "mmdebstrap": shutil.which("mmdebstrap")}
    if lacking := [name for name, tool in tools.items() if not (tool and Path(tool).exists())]:
        return refuse(f"it needs {' and '.join(lacking)}")
    with scratch("install") as folder:
        planted = folder / "planted"
        planted.mkdir()
        (planted / "file").write_bytes(b"x" * 5_000_000)
        failed = "" if round(megabytes(planted)) == 5 else f"5 MB count as {megabytes(planted):.1f}"
        first, second, other = (folder / name for name in ("first", "second", "other"))
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        same = ("--commit", head.strip())  # also if somebody commits meanwhile
        sums = [release(first, *same), release(second, *same, TZ="Asia/Tokyo"), release(other, *same, "--owner", "me")]
        if sums[0] == sums[2]:
            failed = "a release of another owner is equal"
        [wheel] = first.glob("*.whl")
        server_mb, server_s = install(folder / "server", wheel, "")
        full_mb, full_s = install(folder / "full", wheel, "[train]")
        figures = {
            "server_only_mb": server_mb,
            "server_only_seconds": server_s,
            "full_mb": full_mb,
            "full_seconds": full_s,
            "image_server_mb": image_mb(folder, wheel),
            "wheel_kb": wheel.stat().st_size / 1000,
            "darwin_simulation_passed": int(passed("engines", "tests/whole/test_darwin.py") > 0),
            "old_homes_read": passed("not engines", "tests/whole/test_old_homes.py::test_tools_read_old_home"),
            "rebuild_identical": int(sums[0] == sums[1]),
        }
    control = "a planted file counts in the sizes; a release of another owner differs"
    return report("installation from an empty home", figures, goals=GOALS, control=control, control_failed=failed)


def release(output: Path, *options: str, **variables: str) -> str:
    """Make a release of the newest commit; return its checksums."""
    command = [sys.executable, "-P", "bundles/make_release.py", str(output), "--tools", str(RELEASE_TOOLS / "bin")]
    subprocess.run(
        [*command, *options], cwd=ROOT, env={**os.environ, **variables}, check=True, stdout=subprocess.DEVNULL
    )
    return (output / "SHA256SUMS").read_text()


def install(folder: Path, wheel: Path, extra: str) -> tuple[float, float]:
    """Install the wheel into a new virtual environment of an empty home; return its size in MB and the seconds."""
    home = folder / "home"
    home.mkdir(parents=True)
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("TOPROPE_", "XDG_"))}
    variables |= {"HOME": str(home)}
    begun = time.monotonic()
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True, env=variables)
    before = megabytes(folder / "venv")
    python = folder / "venv" / "bin" / "python"
    command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*command, "-c", ROOT / "constraints.txt", f"{wheel}{extra}"], check=True, env=variables)
    seconds = time.monotonic() - begun
    subprocess.run([folder / "venv" / "bin" / "toprope", "--version"], check=True, env=variables)
    return megabytes(folder / "venv") - before, seconds


def image_mb(folder: Path, wheel: Path) -> float | None:
    """Return the size of the server image's root in MB; None if it cannot be made here."""
    root = folder / "root"
    program = [sys.executable, "-P", "bundles/make_image.py", "server", wheel, folder / "image.tar", "--folder", root]
    done = subprocess.run(program, cwd=ROOT, stdout=subprocess.DEVNULL)
    return megabytes(root) if done.returncode == 0 else None


def megabytes(folder: Path) -> float:
    """Return the size of all files below a folder, in millions of bytes; links count nothing, hard links once."""
    seen: dict[tuple[int, int], int] = {}
    for place, _, names in os.walk(folder):
        for name in names:
            found = os.lstat(os.path.join(place, name))
            if not os.path.islink(os.path.join(place, name)):
                seen[found.st_dev, found.st_ino] = found.st_size
    return sum(seen.values()) / 1e6


def passed(marked: str, *tests: str) -> int:
    """Run tests and return how many passed; 0 if one failed."""
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marked, *tests]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    found = re.search(r"(\d+) passed", done.stdout)
    return int(found[1]) if done.returncode == 0 and found else 0


if __name__ == "__main__":
    sys.exit(main())
