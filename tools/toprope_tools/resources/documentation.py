"""The documentation as resources, so that an agent need not guess: every page, and two environments to start from.

toprope://docs                          the pages, with their titles
toprope://docs/PAGE                     a page
toprope://docs/environment-template     an environment with everything it can have, to copy
toprope://docs/environment-example      a shipped environment of several turns
"""

from __future__ import annotations

import json
from pathlib import Path

from toprope.errors import NotFound, shown
from toprope.settings.yamlfiles import nearest
from toprope.shipped import DOCS, ENVIRONMENTS

_FILES = {
    "environment-template": (ENVIRONMENTS / "template.py", "An environment with everything it can have, to copy"),
    "environment-example": (ENVIRONMENTS / "number_guess.py", "A shipped environment of several turns"),
}


def pages() -> dict[str, Path]:
    """Return every page and file by name."""
    found = {path.stem: path for path in sorted(DOCS.glob("*.md"))}
    return found | {name: path for name, (path, _) in _FILES.items()}


def listing() -> str:
    """Return the pages with their titles, as JSON."""
    items = [
        {"uri": f"toprope://docs/{name}", "title": _FILES[name][1] if name in _FILES else _title(path)}
        for name, path in pages().items()
    ]
    return json.dumps({"pages": items}, ensure_ascii=False)


def page(name: str) -> tuple[str, str]:
    """Return a page and its media type.

    Raises:
        NotFound: There is no such page.
    """
    known = pages()
    if name not in known:
        raise NotFound(f"There is no page {shown(name)}.", hint=f"{nearest(name, known)} toprope://docs lists them.")
    path = known[name]
    return path.read_text(encoding="utf-8"), "text/x-python" if path.suffix == ".py" else "text/markdown"


def _title(path: Path) -> str:
    with path.open(encoding="utf-8") as lines:
        return next((line.removeprefix("# ").strip() for line in lines if line.startswith("# ")), path.stem)
