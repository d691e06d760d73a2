"""A dashboard for a browser, and the programs of `page/tests` that drive one."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.page.home import HOSTILE, PageHome
from benchmarks.scratch import end_process

PAGE = Path(__file__).resolve().parents[2] / "page"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
MISSING = "'make tools-page' installs the page's tools (needs npm and a network); Chromium is a package of the system."


def ready() -> bool:
    """Return True if Chromium, Node and the page's tools are there."""
    browser = os.environ.get("TOPROPE_CHROMIUM") or any(shutil.which(name) for name in BROWSERS)
    return bool(browser and shutil.which("node") and (PAGE / "node_modules" / "puppeteer-core").is_dir())


@contextmanager
def dashboard(home: PageHome, *options: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Yield the address that works once, and the process."""
    command = [sys.executable, "-P", "-m", "toprope_server.cli", "dashboard", "--no-open", *options]
    process = subprocess.Popen(
        command, env=os.environ | home.variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:\d+/#key=\S+", line)
        if found is None:
            raise RuntimeError(f"the dashboard did not start: {line}{process.stdout.read()}")
        yield found[0], process
    finally:
        end_process(process)
        if process.stdout:
            process.stdout.close()


def variables(home: PageHome, **more: str) -> dict[str, str]:
    """Environment for the programs of `page/tests`."""
    facts = {
        "PAGE_IDS": json.dumps(home.ids),
        "PAGE_HELDOUT": json.dumps(home.heldout_texts()),
        "PAGE_HOSTILE": HOSTILE,
        "PAGE_PYTHON": sys.executable,
    }
    return os.environ | home.variables | facts | more
