"""A report's page: a list of blocks, rendered as Markdown or as one self-contained HTML file.

Blocks hold texts of environments, models and agents. The templates escape every text.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined


@dataclass(frozen=True)
class Heading:
    """A heading of level 1 to 3."""

    text: str
    level: int = 2


@dataclass(frozen=True)
class Paragraph:
    """Plain text. `tone` (good, bad or note) sets it off."""

    text: str
    tone: str = ""


@dataclass(frozen=True)
class Listed:
    """A bullet list."""

    points: Sequence[str]


@dataclass(frozen=True)
class Table:
    """Rows below a head. Columns in `numbers` are aligned right, those in `narrow` do not wrap."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: Sequence[int] = field(default_factory=tuple)
    narrow: Sequence[int] = field(default_factory=tuple)


@dataclass(frozen=True)
class Figure:
    """A picture as SVG text with a caption."""

    svg: str
    caption: str


Block = Heading | Paragraph | Listed | Table | Figure


def to_html(title: str, blocks: Sequence[Block], footer: str = "") -> str:
    """Render the page as one HTML file that loads nothing."""
    grouped = groupby(blocks, key=lambda block: isinstance(block, Figure))
    sections = [(figures, list(group)) for figures, group in grouped]
    return _templates().get_template("page.html.j2").render(title=title, sections=sections, footer=footer)


def to_markdown(blocks: Sequence[Block], pictures: str, footer: str = "") -> tuple[str, dict[str, str]]:
    """Render the page as Markdown.

    Args:
        blocks: The page.
        pictures: Folder of the pictures, relative to the page.
        footer: Last line.

    Returns:
        The text, and the SVG text of each picture by file name.
    """
    names: dict[int, str] = {}
    files: dict[str, str] = {}
    for place, block in enumerate(blocks):
        if isinstance(block, Figure):
            names[place] = f"figure-{len(files) + 1}.svg"
            files[names[place]] = block.svg
    template = _templates().get_template("page.md.j2")
    text = template.render(blocks=blocks, pictures=pictures, names=names, footer=footer)
    return text.rstrip("\n") + "\n", files


@cache
def _templates() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=lambda name: bool(name and name.endswith(".html.j2")),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["base64"] = lambda text: base64.b64encode(text.encode()).decode()
    environment.filters["md"] = escape_markdown
    kinds = {"heading": Heading, "paragraph": Paragraph, "listed": Listed, "figure": Figure}
    for name, kind in kinds.items():
        environment.tests[name] = lambda block, kind=kind: isinstance(block, kind)
    return environment


_LIST_MARKER = re.compile(r"^(\d*)([-+=.)])(?=\s|$|=|-)")
_SPECIAL = str.maketrans({character: f"\\{character}" for character in "\\`*_[]<>#|~$!"})


def escape_markdown(text: str) -> str:
    """Return the text on one line without anything that Markdown or HTML would take for markup or for a link."""
    line = " ".join(text.split()).replace("&", "&amp;").translate(_SPECIAL)
    line = _LIST_MARKER.sub(r"\1\\\2", line, count=1)
    return line.replace("://", "\\://").replace("www.", "www\\.")
