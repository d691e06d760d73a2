"""Rules of the page's sources: foreign text becomes text nodes only, and nothing is loaded from elsewhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "page"
FORBIDDEN = {
    "markup from text": r"innerHTML|outerHTML|insertAdjacentHTML|dangerouslySetInnerHTML|createContextualFragment"
    r"|DOMParser|document\.write|srcdoc|setHTML",
    "code from text": r"\beval\(|new Function\b|javascript:|import\(",
    "another origin": r"""["'`(]\s*(?:https?:)?//(?!www\.w3\.org/2000/svg)\w""",
    "a link made of text": r"href=\{(?!\s*(?:link\(|address\b|`?\$?\{?runLink\())",
    "a style attribute that the policy refuses": r"\bstyle=\"|setAttribute\(\s*[\"']style",
}


def sources() -> Iterator[Path]:
    for pattern in ("src/**/*.ts*", "style/*"):
        yield from sorted(SOURCE.glob(pattern))


def broken_rules(text: str) -> list[str]:
    """Names of the rules that a source breaks, with the text that does."""
    found = []
    for rule, pattern in FORBIDDEN.items():
        found += [f"{rule}: {match[0]}" for match in re.finditer(pattern, text)]
    return found


@pytest.mark.parametrize("path", list(sources()), ids=lambda path: path.name)
def test_source_keeps_the_rules(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".svg":
        text = text.replace('xmlns="http://www.w3.org/2000/svg"', "")
    if path.name in ("router.ts", "parts.tsx"):  # they pass on addresses that `link` made
        text = text.replace("href={address}", "")
    assert broken_rules(text) == []


@pytest.mark.parametrize(
    "planted",
    [
        "node.innerHTML = answer",
        "<p dangerouslySetInnerHTML={{ __html: text }} />",
        "eval(text)",
        'fetch("https://example.org/x")',
        '@import url("//example.org/a.css")',
        "<a href={message.text}>",
        '<p style="color: red">',
    ],
)
def test_rules_find_planted_violations(planted: str) -> None:
    assert len(broken_rules(planted)) == 1


def test_limits_of_files() -> None:
    counted = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in sources()}
    assert counted and max(counted.values()) <= 450
    folders = [path.parent for path in counted]
    assert max(folders.count(folder) for folder in folders) <= 16
