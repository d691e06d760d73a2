"""Make the pictures of the page for the documentation: `make page-pictures`.

A home with real runs is made, three minutes, and thrown away; `--home` names one that was kept.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from benchmarks.page.browser import MISSING, PAGE, dashboard, ready, variables
from benchmarks.page.home import PageHome, make_home
from benchmarks.scratch import scratch


def main() -> int:
    """Write the pictures; return the exit status of the browser's part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--home", type=Path, help="A folder that an earlier call made, or where to keep this one's.")
    parser.add_argument("--to", type=Path, default=PAGE / "pictures", help="Where the pictures go.")
    parser.add_argument("--all", action="store_true", help="All screens, to look at; else Now and a run.")
    given = parser.parse_args()
    if not ready():
        print(MISSING, file=sys.stderr)
        return 2
    subprocess.run(["make", "page"], cwd=PAGE.parent, check=True)
    with scratch("pictures", given.home) as folder:
        kept = folder / "ids.json"
        if kept.exists():
            home = PageHome(folder, json.loads(kept.read_text()))
        else:
            home = make_home(folder, live=False)
            kept.write_text(json.dumps(home.ids))
        with dashboard(home) as (address, _):
            facts = {"PAGE_ADDRESS": address, "PAGE_PICTURES": str(given.to.resolve()), "PAGE_ALL": str(int(given.all))}
            return subprocess.run(["node", "tests/pictures.mjs"], cwd=PAGE, env=variables(home, **facts)).returncode


if __name__ == "__main__":
    sys.exit(main())
