"""Build the documentation as a web site that needs no network and can be searched: `make docs-site`.

    python -P bundles/make_site.py OUTPUT --tools FOLDER

The pages are README, CONTRIBUTING, CHANGELOG, SECURITY and `docs/`; links between them and to pictures are rewritten,
links to other files of the repository become text. Scripts of the pages come from the npm registry, none from the web.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = {
    "mermaid.min.js": ("mermaid@11.17.2", "package/dist/mermaid.min.js"),
    "worker.js": ("iframe-worker@1.0.4", "package/shim/index.js"),
}
"""Scripts that the pages would fetch from elsewhere: their packages of the npm registry, and their places there."""
_ELSEWHERE = "https://unpkg.com/iframe-worker/shim"
"""Search without a server needs this; Material names its place on the web."""
_FRONT = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md",
          "SECURITY.md": "reporting.md"}  # fmt: skip
"""Pages in the repository's root and their names in the site."""
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
_PICTURES = (".png", ".webp")


def make_site(output: Path, tools: Path) -> None:
    """Build the site into a folder, which is replaced.

    Raises:
        SystemExit: npm is missing, or a page has a link to nowhere.
    """
    with tempfile.TemporaryDirectory(prefix="toprope-site-") as folder:
        pages = Path(folder) / "pages"
        lay_pages(pages)
        _fetch_scripts(pages / "javascripts", Path(folder))
        variables = {**os.environ, "TOPROPE_SITE_PAGES": str(pages), "TOPROPE_SITE": str(output.resolve())}
        # Material tells of its successor at every build.
        variables |= {"NO_MKDOCS_2_WARNING": "1", "DISABLE_MKDOCS_2_WARNING": "true"}
        command = [str(tools / "mkdocs"), "build", "--clean", "--quiet", "-f", str(ROOT / "bundles" / "mkdocs.yml")]
        if subprocess.run(command, env=variables).returncode:
            raise SystemExit("mkdocs failed; its output is above.")
        for page in output.glob("*.html"):
            page.write_text(
                page.read_text(encoding="utf-8").replace(_ELSEWHERE, "javascripts/worker.js"), encoding="utf-8"
            )


def lay_pages(folder: Path) -> None:
    """Write the pages, with links for their places in the site, and the pictures that they show."""
    folder.mkdir(parents=True)
    sources = {ROOT / name: target for name, target in _FRONT.items()}
    sources |= {page: page.name for page in sorted((ROOT / "docs").glob("*.md"))}
    for page, target in sources.items():

        def rewritten(link: re.Match[str], page: Path = page) -> str:
            mark, text, aim = link.groups()
            name, _, anchor = aim.partition("#")
            if not name or "://" in name:
                return link[0]
            file = (page.parent / name).resolve()
            if file.suffix in _PICTURES:
                shutil.copy(file, folder / file.name)
                return f"{mark}[{text}]({file.name})"
            if file not in sources:
                return text
            return f"{mark}[{text}]({sources[file]}{f'#{anchor}' if anchor else ''})"

        (folder / target).write_text(_LINK.sub(rewritten, page.read_text(encoding="utf-8")), encoding="utf-8")


def _fetch_scripts(folder: Path, aside: Path) -> None:
    npm = shutil.which("npm")
    if npm is None:
        raise SystemExit("npm is missing: install Node.js, then run this again. Nothing was built.")
    folder.mkdir()
    for name, (package, member) in SCRIPTS.items():
        done = subprocess.run([npm, "pack", "--json", package], cwd=aside, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"npm cannot fetch {package}: {done.stderr.strip()[-300:]} Nothing was built.")
        [packed] = json.loads(done.stdout)
        with tarfile.open(aside / packed["filename"]) as archive:
            script = archive.extractfile(member)
            assert script is not None
            (folder / name).write_bytes(script.read())


def main() -> None:
    """Build the site that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--tools", type=Path, required=True, help="the folder of the program mkdocs")
    given = parser.parse_args()
    make_site(given.output, given.tools)
    print(f"Open {given.output}/index.html")


if __name__ == "__main__":
    main()
