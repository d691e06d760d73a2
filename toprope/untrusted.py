"""Mark text that others wrote, so that a reader can tell it from Toprope's own words. Standard library only.

Environments, models, programs, files and other clients choose what it says, so it may imitate an answer of ours.
Marked text stays on its line, and the marks cannot occur within it: `«text»` within a line, `| ` before a line.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from toprope.text_format import clip

__all__ = ["RULE", "cleaned", "marked", "marked_lines", "named"]

OPENS, CLOSES, LINE = "«", "»", "| "
_NAME = re.compile(r"[\w./:@+%#-]{1,80}")
"""A name without spaces cannot say anything."""
_WITHIN = str.maketrans({OPENS: "‹", CLOSES: "›"})

RULE = f"Text in {OPENS}{CLOSES} and lines that begin with {LINE.strip()} were written by others"
"""For readers of answers."""


def marked(text: object, limit: int) -> str:
    """Return foreign text on one line of at most `limit` characters, cleaned, in marks."""
    return f"{OPENS}{clip(str(text), limit).translate(_WITHIN)}{CLOSES}"


def named(name: object, limit: int = 80) -> str:
    """Return a name that others chose: as it is if it has no spaces, else in marks."""
    text = str(name)
    return text if _NAME.fullmatch(text) and len(text) <= limit else marked(text, limit)


def marked_lines(lines: Iterable[str], limit: int = 500) -> list[str]:
    """Return foreign lines, each cleaned, cut to `limit` characters, and with its mark."""
    return [f"{LINE}{_line(line, limit)}".rstrip() for line in lines]


def _line(line: str, limit: int) -> str:
    indent = line[: len(line) - len(line.lstrip(" "))][:40]
    return indent + clip(line, limit)


def cleaned(text: str, limit: int, *, lines: bool = False) -> str:
    """Return foreign text without marks, for readers that mark it themselves: cut, without invisible characters.

    Args:
        lines: Keep line ends and the indents of lines.
    """
    if not lines:
        return clip(text, limit)
    joined = "\n".join(_line(line, limit) for line in text.splitlines())
    return joined if len(joined) <= limit else joined[: limit - 1] + "…"
