"""Measure the structure of the repository: `make bench-house`.

The last line is one JSON object. control: a scratch package with two modules that import each other must count as one
circle; otherwise the counter is broken and the benchmark exits with 2.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grimp
import networkx

from benchmarks.report import report
from docs.count_words import documentation_words

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("toprope", "server", "tools")
PACKAGES = ("toprope", "toprope_server", "toprope_tools")
LINES_BEFORE = 56_217 + 11_946
"""Lines of the product at commit 74c0148, before its rooms were rebuilt: toprope, then server and tools. Afterwards
they were 67,638. What has come since then (clusters, engines, the page, walls) is told, and has no goal."""

LARGEST_FOLDER, LARGEST_FILE, THIN_LINES = 16, 450, 40
EXEMPT_FOLDERS: dict[str, str] = {}
"""Folder -> why it may hold more files."""
NOT_THIN = {"__init__.py", "__main__.py", "conftest.py"}
EXEMPT_THIN: dict[str, str] = {
    "server/cli.py": "keeps `python -m server.cli` working in a checkout",
    "toprope/shipped.py": "platform seam: where data files lie in a wheel and in a checkout",
    "toprope/sdk/adapters/_servers/ors_serve.py": "program of another interpreter",
    "toprope/training/inference/engines/worker/toprope_worker.py": "program of another interpreter",
    "benchmarks/findings/environments/rotated_letters.py": "an environment as small as users write them",
    "benchmarks/findings/environments/sorted_letters.py": "an environment as small as users write them",
}
"""File -> why it may be thin. With `EXEMPT_FOLDERS` at most six."""

GOALS = {
    "circles": "== 0",
    "largest_folder": f"<= {LARGEST_FOLDER}",
    "exemptions": "<= 6",
    "largest_file": f"<= {LARGEST_FILE}",
    "thin_files": "<= 10",
}
"""Limits that tests/whole/test_house.py holds too."""


def main() -> int:
    """Print the figures; exit with 1 if a limit is broken, with 2 if the control fails."""
    structure, broken = measure_structure()
    print("\n".join(broken))
    files = line_counts()
    product_lines = sum(n for path, n in files.items() if path.relative_to(ROOT).parts[0] in PRODUCT)
    figures: dict[str, Any] = {
        **structure,
        "product_lines": product_lines,
        "product_lines_before": LINES_BEFORE,
        "documentation_words": sum(documentation_words(ROOT).values()),
        "wheel_top_level": wheel_top_level(),
        "type_errors": type_errors(),
    }
    figures["foreign_top_level"] = sum(not name.startswith("toprope") for name in figures["wheel_top_level"])
    return report(
        "The repository",
        figures,
        goals={
            **GOALS,
            "documentation_words": "<= 18000",
            "foreign_top_level": "== 0",
            "type_errors": "== 0",
        },
        control="a planted import circle must be counted.",
        control_failed="" if circles_of_control() == 1 else "it was not counted",
    )


def measure_structure() -> tuple[dict[str, Any], list[str]]:
    """Return the figures of `GOALS`, and lines that name what they count."""
    circles, files = import_circles(PACKAGES), line_counts()
    folders = Counter(str(path.parent.relative_to(ROOT)) for path in files)
    thin = sorted(thin_files(files))
    figures = {
        "circles": len(circles),
        "largest_folder": max(n for name, n in folders.items() if name not in EXEMPT_FOLDERS),
        "exemptions": len(EXEMPT_FOLDERS) + len(EXEMPT_THIN),
        "largest_file": max(files.values()),
        "thin_files": len(thin),
    }
    return figures, [
        *(f"circle: {' '.join(members)}" for members in circles),
        *(f"folder: {name} {n}" for name, n in sorted(folders.items()) if n > LARGEST_FOLDER),
        *(f"file: {path.relative_to(ROOT)} {n}" for path, n in files.items() if n > LARGEST_FILE),
        *(f"thin: {name}" for name in thin),
    ]


def line_counts() -> dict[Path, int]:
    """Return the lines of every tracked Python file."""
    return {path: len(path.read_text(encoding="utf-8").splitlines()) for path in python_files()}


def python_files() -> Iterator[Path]:
    """Yield every tracked Python file of product, tests, benchmarks and documentation."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in listed.stdout.splitlines():
        if (path := ROOT / name).is_file():
            yield path


def thin_files(files: dict[Path, int]) -> Iterator[str]:
    """Yield files of fewer than 40 lines that no rule keeps small."""
    for path, lines in files.items():
        name = str(path.relative_to(ROOT))
        if lines < THIN_LINES and path.name not in NOT_THIN and name not in EXEMPT_THIN:
            yield name


def import_circles(packages: tuple[str, ...]) -> list[list[str]]:
    """Return groups of modules that import each other, function-level and TYPE_CHECKING imports included."""
    graph = grimp.build_graph(*packages, cache_dir=None)
    edges = networkx.DiGraph()
    for module in graph.modules:
        edges.add_edges_from((module, found) for found in graph.find_modules_directly_imported_by(module))
    return sorted(sorted(found) for found in networkx.strongly_connected_components(edges) if len(found) > 1)


def circles_of_control() -> int:
    """Return the circles of a scratch package that has exactly one, behind a function-level import."""
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "planted_circle"
        package.mkdir()
        (package / "__init__.py").write_text("")
        (package / "a.py").write_text("def f():\n    from planted_circle import b\n")
        (package / "b.py").write_text("import planted_circle.a\n")
        sys.path.insert(0, folder)
        try:
            return len(import_circles(("planted_circle",)))
        finally:
            sys.path.remove(folder)


def wheel_top_level() -> list[str]:
    """Return the top-level names that the wheel puts into site-packages, its metadata aside."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, str(ROOT)],
            check=True,
            capture_output=True,
        )
        [wheel] = Path(folder).glob("*.whl")
        names = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    return sorted(name for name in names if not name.endswith(".dist-info"))


def type_errors() -> int:
    """Return the number of errors that mypy finds with the settings of pyproject.toml; at least one if it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--no-error-summary"], cwd=ROOT, capture_output=True, text=True
    )
    return max(sum(": error:" in line for line in done.stdout.splitlines()), int(done.returncode != 0))


if __name__ == "__main__":
    sys.exit(main())
