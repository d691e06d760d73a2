"""The documentation's site: pages and links as laid for it, and the site itself in Chromium."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.page.browser import MISSING, PAGE
from benchmarks.page.browser import ready as page_tools_ready
from tests.support.run_engines import RELEASE_TOOLS

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "bundles" / "make_site.py"


def test_pages_link_to_pages_of_the_site_alone(tmp_path: Path) -> None:
    pages = tmp_path / "pages"
    runpy.run_path(str(SCRIPT))["lay_pages"](pages)
    names = {path.name for path in pages.iterdir()}
    assert {"index.md", "contributing.md", "owner.md", "tools.md", "demo.png"} <= names
    menu = re.findall(r"[\w-]+\.md", (ROOT / "bundles" / "mkdocs.yml").read_text())
    assert sorted(menu) == sorted(name for name in names if name.endswith(".md")), "every page stands in the menu once"
    for page in pages.glob("*.md"):
        for target in re.findall(r"\]\(([^)\s#]+)", page.read_text()):
            assert "://" in target or target in names, f"{page.name} links to {target}"


@pytest.mark.engines
@pytest.mark.skipif(not (RELEASE_TOOLS / "bin" / "mkdocs").exists(), reason="make tools-release")
@pytest.mark.skipif(not page_tools_ready(), reason=MISSING)
def test_site_works_without_network(tmp_path: Path) -> None:
    site = tmp_path / "site"
    build = [sys.executable, "-P", str(SCRIPT), str(site), "--tools", str(RELEASE_TOOLS / "bin")]
    subprocess.run(build, check=True, timeout=300)
    node = shutil.which("node")
    assert node
    command = [node, "--test", "--test-concurrency=1", "tests/site.test.mjs"]
    done = subprocess.run(
        command, cwd=PAGE, env={**os.environ, "SITE_FOLDER": str(site)}, capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
