"""Explain failures of pip and uv: the requirement at fault, and the remedy."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Sequence

from packaging.specifiers import InvalidSpecifier, SpecifierSet

from toprope.errors import EnvironmentFailed

OLDEST = (3, 11)
"""Oldest Python that environments run in."""
_NEWEST_MINOR = 20
_SPECIFIER = r"[<>=!~][^\s'\";,]*(?:,\s*[<>=!~][^\s'\";,]*)*"
_REQUIRED = re.compile(rf"(?:satisfy Python|Requires-Python|not in:? ')\s*(?P<specifier>{_SPECIFIER})")
_TAGS = re.compile(r"following Python \w+ tags?: (?P<tags>[^\n]+)")
"""uv's list of the Pythons that a package has wheels for."""
_LONGEST = 900
NO_NETWORK = re.compile(
    r"Failed to establish a new connection|Name or service not known|Temporary failure in name resolution|"
    r"Network is unreachable|ConnectTimeoutError|dns error|error sending request|Could not connect|"
    r"network was disabled",
    re.IGNORECASE,
)
_NO_HOST = re.compile(r"Could not resolve host: ([\w.-]+)|Failed to connect to ([\w.-]+) port")
"""git's words, which pip and uv pass on."""
_WHICH = (
    # pip
    r"No matching distribution found for (?P<what>[^\n]+?)\s*$",
    r"Could not find a version that satisfies the requirement (?P<what>.+?) \(from",
    r"Cannot install (?P<what>.+?) because these package versions have conflicting dependencies",
    r"Failed building wheel for (?P<what>\S+)",
    r"Failed to build '?(?P<what>[\w.\-\[\]]+)",
    r"Package '(?P<what>[^']+)' requires a different Python",
    r"Invalid requirement: '?(?P<what>[^'\n]+?)'?(?::|$)",
    r"THESE PACKAGES DO NOT MATCH THE HASHES[^\n]*\n\s*(?P<what>\S+)",
    # uv
    r"[Bb]ecause (?P<what>[\w.\-\[\]]+) was not found in ",
    r"Because (?!(?:all|the|only|there)\b)(?P<what>[\w.\-\[\]]+)(?:\s|==|<|>)[^\n]*",
    r"Failed to (?:build|download|fetch|resolve)[^`\n]*`(?P<what>[^`]+)`",
)
_VERSIONS = re.compile(r"(?P<name>[\w.\-\[\]]+)==[^\s,]+(?:(?:,| and|, and) (?P=name)==[^\s,]+){2,}")
"""pip's list of all versions of one package that it tried."""
_NOISE = re.compile(r"^\s*(WARNING: Retrying|Looking in|Requirement already|\[notice\]|Using cached|Downloading|$)")


class OtherPythonNeeded(EnvironmentFailed):
    """An installer refused the Python of the environment.

    Args:
        required: Pythons that packages ask for; each may do.
    """

    def __init__(self, message: str, required: Sequence[SpecifierSet], *, hint: str) -> None:
        super().__init__(message, hint=hint)
        self.required = required


def pythons_required(printed: str) -> list[SpecifierSet]:
    """Return the Pythons that an installer's output asks for; pip lists one for each version of a package."""
    required: dict[SpecifierSet, None] = {}
    for match in _REQUIRED.finditer(printed):
        with contextlib.suppress(InvalidSpecifier):
            required[SpecifierSet(match["specifier"].rstrip(",.;)"))] = None
    for match in _TAGS.finditer(printed):
        required |= {SpecifierSet(f"==3.{minor}.*"): None for minor in re.findall(r"`cp3(\d+)`", match["tags"])}
    return list(required)


def missing_python(required: Sequence[SpecifierSet]) -> str:
    """Return the hint that names the Python to install."""
    wanted = " or ".join(str(specifiers) for specifiers in required[:4])
    minors = (f"3.{minor}" for minor in range(OLDEST[1], _NEWEST_MINOR))
    first = next((text for text in minors if any(one.contains(f"{text}.99") for one in required)), None)
    if first is None:
        return f"It requires Python {wanted}, and environments need 3.11 or newer: choose another version of it."
    return (
        f"It requires Python {wanted}: install one (`uv python install {first}`) and repeat this; --base names one "
        "that is not found."
    )


def excerpt(lines: Sequence[str]) -> str:
    """Return the output lines that show the error, shortened."""
    kept = [_VERSIONS.sub(r"any version of \g<name>", line) for line in lines if not _NOISE.match(line)]
    first = next((place for place, line in enumerate(kept) if re.match(r"\s*(ERROR|error|×)", line)), None)
    chosen = kept[first : first + 12] if first is not None else kept[-8:]
    cause = [line for line in kept if line.lstrip().startswith("fatal: ")]  # of git; pip prints it above its own error
    text = "\n".join(dict.fromkeys(line.strip() for line in [*cause, *chosen]))
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def failure(name: str, lines: Sequence[str], *, offline: bool, constraint: str = "") -> EnvironmentFailed:
    """Return the error for a failed installer.

    Args:
        name: The requested environment.
        lines: Output of the installer.
        offline: True if it ran without an index.
        constraint: The pin of torch in force, with which others may conflict.
    """
    text = _VERSIONS.sub(r"any version of \g<name>", "\n".join(lines))
    which = next((match["what"].strip() for pattern in _WHICH if (match := re.search(pattern, text, re.MULTILINE))), "")
    message = f"{name} was not installed and nothing was kept."
    if which:
        message = f"{name} was not installed, because of the requirement {which}; nothing was kept."
    hint = "Fix the requirement, or give another with --requirement."
    if "No space left on device" in text:
        hint = "The disk is full: make room (toprope prune) and add it again."
    elif (required := pythons_required(text)) and (offline or not NO_NETWORK.search(text)):
        printed = f"{message} The installer printed:\n{excerpt(lines)}"
        return OtherPythonNeeded(printed, required, hint=missing_python(required))
    elif offline:
        hint = "--offline uses only --find-links and the installer's cache: omit it, or name a folder."
    elif host := _NO_HOST.search(text):
        hint = f"{host[1] or host[2]} could not be reached: check the network, or give what it needs from a folder."
    elif NO_NETWORK.search(text) and "conflicting dependencies" not in text:
        hint = "No package index was reached: check the network, or give --offline --find-links FOLDER."
    elif constraint and "torch" in text and ("conflict" in text or "unsatisfiable" in text):
        hint = f"torch is pinned to Toprope's own version ({constraint}); --torch any removes the pin (gigabytes)."
    return EnvironmentFailed(f"{message} The installer printed:\n{excerpt(lines)}", hint=hint)


def progress_of(line: str) -> str:
    """Return an installer's line as a progress message; empty for other lines."""
    text = line.strip()
    if match := re.match(r"Collecting (\S+)", text):
        return f"looking at {match[1]}"
    if match := re.match(r"Downloading (?:\S*/)?(\w+)-\S+ (\([^)]*\))$", text):
        return f"downloading {match[1]} {match[2]}"
    if text.startswith("Building wheel"):
        return text.lower()
    if match := re.match(r"Installing collected packages: (.+)", text):
        return f"putting {len(match[1].split(','))} packages in place"
    if match := re.match(r"(?:Resolved|Prepared|Installed) \d+ packages? in .+", text):
        return match[0].lower()
    return ""


def telling(progress: Callable[[str], None]) -> Callable[[str], None]:
    """Return a function that takes an installer's lines and passes on what is news."""
    last = [""]

    def pass_on(line: str) -> None:
        news = progress_of(line)
        if news and news != last[0]:
            last[0] = news
            progress(news)

    return pass_on
