"""A report's page: a list of blocks, rendered as Markdown or as one HTML file that needs nothing from elsewhere.

What stands in a block comes from environments, models and agents as well as from us, so every text is escaped at the
one place where it becomes markup. The HTML has no script, and a policy that forbids what could load anything.
"""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["Block", "Figure", "Heading", "Listed", "Paragraph", "Table", "to_html", "to_markdown"]


@dataclass(frozen=True)
class Heading:
    """Levels 1 to 3."""

    text: str
    level: int = 2


@dataclass(frozen=True)
class Paragraph:
    """Plain text. `tone`: good, bad or note sets it off."""

    text: str
    tone: str = ""


@dataclass(frozen=True)
class Listed:
    """Points."""

    points: Sequence[str]


@dataclass(frozen=True)
class Table:
    """Rows of texts under their head. Columns in `numbers` are set to the right, those in `narrow` are not broken."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: Sequence[int] = field(default_factory=tuple)
    narrow: Sequence[int] = field(default_factory=tuple)


@dataclass(frozen=True)
class Figure:
    """A picture as an SVG text, and what it shows."""

    svg: str
    caption: str


Block = Heading | Paragraph | Listed | Table | Figure

_STYLE = """
:root { color-scheme: light; --ink: #1d2429; --soft: #5b6570; --line: #e2e6e9; --accent: #1f6f8b; --paper: #fbfbfa; }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
main { max-width: 68rem; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }
h1 { font-size: 1.8rem; line-height: 1.2; margin: 0 0 .4rem; overflow-wrap: anywhere; }
h2 { font-size: 1.25rem; margin: 2.4rem 0 .6rem; padding-top: 1.1rem; border-top: 1px solid var(--line);
  overflow-wrap: anywhere; }
h3 { font-size: 1.02rem; margin: 1.6rem 0 .4rem; overflow-wrap: anywhere; }
p, ul { margin: .5rem 0; overflow-wrap: anywhere; }
ul { padding-left: 1.2rem; }
p.good, p.bad, p.note { padding: .6rem .9rem; border-left: 4px solid var(--accent); background: #eef5f8;
  border-radius: 0 .4rem .4rem 0; }
p.good { border-color: #5f8f3e; background: #f0f6ea; }
p.bad { border-color: #b4431a; background: #fbf0ea; }
.wide { overflow-x: auto; margin: .8rem 0; }
table { border-collapse: collapse; min-width: 100%; font-size: .92rem; }
th, td { text-align: left; vertical-align: top; padding: .38rem .7rem .38rem 0; border-bottom: 1px solid var(--line);
  overflow-wrap: anywhere; }
th { color: var(--soft); font-weight: 600; white-space: nowrap; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; padding-right: 1.1rem; }
td.w { white-space: nowrap; }
figure { margin: 1rem 0; }
.figures figure { max-width: 40rem; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap: .4rem 1.4rem; }
figure img { width: 100%; height: auto; display: block; background: #fff; border: 1px solid var(--line);
  border-radius: .4rem; padding: .4rem; }
figcaption { color: var(--soft); font-size: .88rem; margin-top: .3rem; }
footer { margin-top: 3rem; color: var(--soft); font-size: .85rem; }
@media print { main { max-width: none; padding: 0; } h2 { break-after: avoid; } figure, table { break-inside: avoid; } }
"""
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def to_html(title: str, blocks: Sequence[Block], footer: str = "") -> str:
    """The page as one HTML file."""
    parts: list[str] = []
    run: list[str] = []

    def close() -> None:
        if run:
            parts.append(f'<div class="figures">{"".join(run)}</div>')
            run.clear()

    for block in blocks:
        if isinstance(block, Figure):
            data = base64.b64encode(block.svg.encode()).decode()
            caption = html.escape(block.caption)
            run.append(
                f'<figure><img src="data:image/svg+xml;base64,{data}" alt="{caption}">'
                f"<figcaption>{caption}</figcaption></figure>"
            )
            continue
        close()
        parts.append(_html(block))
    close()
    end = f"<footer>{html.escape(footer)}</footer>" if footer else ""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head>\n<body><main>\n"
        + "\n".join(parts)
        + f"\n{end}</main></body></html>\n"
    )


def _html(block: Heading | Paragraph | Listed | Table) -> str:
    if isinstance(block, Heading):
        return f"<h{block.level}>{html.escape(block.text)}</h{block.level}>"
    if isinstance(block, Paragraph):
        tone = f' class="{block.tone}"' if block.tone in ("good", "bad", "note") else ""
        return f"<p{tone}>{html.escape(block.text)}</p>"
    if isinstance(block, Listed):
        return f"<ul>{''.join(f'<li>{html.escape(point)}</li>' for point in block.points)}</ul>"

    def cells(row: Sequence[str], tag: str) -> str:
        classes = [
            ' class="n"' if place in block.numbers else ' class="w"' if place in block.narrow else ""
            for place in range(len(row))
        ]
        shown = zip(row, classes, strict=True)
        return "".join(f"<{tag}{kind}>{html.escape(text)}</{tag}>" for text, kind in shown)

    body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in block.rows)
    head = f"<thead><tr>{cells(block.head, 'th')}</tr></thead>"
    return f'<div class="wide"><table>{head}<tbody>{body}</tbody></table></div>'


def to_markdown(blocks: Sequence[Block], pictures: str, footer: str = "") -> tuple[str, dict[str, str]]:
    """The page as Markdown, and its pictures by file name.

    Args:
        blocks: The page.
        pictures: Folder, relative to the page, that the pictures will lie in.
        footer: Last line.
    """
    parts: list[str] = []
    files: dict[str, str] = {}
    for block in blocks:
        if isinstance(block, Heading):
            parts.append(f"{'#' * block.level} {_escaped(block.text)}")
        elif isinstance(block, Paragraph):
            parts.append(f"{'> ' if block.tone else ''}{_escaped(block.text)}")
        elif isinstance(block, Listed):
            parts.append("\n".join(f"- {_escaped(point)}" for point in block.points))
        elif isinstance(block, Figure):
            name = f"figure-{len(files) + 1}.svg"
            files[name] = block.svg
            parts.append(f"![{_escaped(block.caption)}]({pictures}/{name})")
        else:
            rule = ["---:" if place in block.numbers else "---" for place in range(len(block.head))]
            rows = [block.head, rule, *block.rows]
            lines = ["| " + " | ".join(text if row is rule else _escaped(text) for text in row) + " |" for row in rows]
            parts.append("\n".join(lines))
    if footer:
        parts.append(f"---\n\n{_escaped(footer)}")
    return "\n\n".join(parts) + "\n", files


_BEGINS_A_LIST = re.compile(r"^(\d*)([-+=.)])(?=\s|$|=|-)")
_SPECIAL = str.maketrans({character: f"\\{character}" for character in "\\`*_[]<>#|~$!"})


def _escaped(text: str) -> str:
    """The text on one line, with nothing in it that Markdown or HTML would take for markup. Links are left as text."""
    line = " ".join(text.split()).replace("&", "&amp;").translate(_SPECIAL)
    # What would begin a list, and what GitHub would make a link of.
    line = _BEGINS_A_LIST.sub(r"\1\\\2", line, count=1)
    return line.replace("://", "\\://").replace("www.", "www\\.")
