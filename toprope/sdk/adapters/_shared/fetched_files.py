"""Files that a project fetches while its image is built, which a server that runs without the image misses."""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

__all__ = ["with_source"]

_MISSING = re.compile(r"FileNotFoundError|No such file or directory|(?:not found|does not exist):? ")
_PATH = re.compile(r"(/[\w.+@-]+(?:/[\w.+@-]+)+)")
_VERB = re.compile(
    r"snapshot_download|hf_hub_download|load_dataset|\b(?:hf|huggingface-cli) download|\bwget |\bcurl |\bgit clone|"
    r"\bgdown|urlretrieve|\baws s3 |\bgsutil "
)
_OF_HUB = re.compile(r"snapshot_download|hf_hub_download|load_dataset|\b(?:hf|huggingface-cli) download")
_URL = re.compile(r"https?://[\w.-]+[^\s\"'<>)]*")
_COMMENT = re.compile(r"^\s*#.*$", re.MULTILINE)
_STEPS = ("Dockerfile", "*/Dockerfile", "*.sh", "*/*.sh", "README.md")
_SCRIPTS = ("prepare*.py", "download*.py", "fetch*.py", "*/prepare*.py", "*/download*.py")
_LARGEST = 200_000
_LONGEST = 200
_LEAST = 4
"""Letters of a name that a step has to mention."""
_VARIABLE = re.compile(r"^\s*ENV\s+(\w+)[= ]\"?([^\s\"]+)\"?", re.MULTILINE)


def with_source(message: str, folder: str) -> str:
    """Add to a message about a missing file what its project does to fetch it, and the host if it is not reached.

    Args:
        message: Of a server's error.
        folder: Of the project.
    """
    missed = _PATH.search(message[found.end() :]) if (found := _MISSING.search(message)) else None
    if missed is None or not folder or "could not be reached" in message:
        return message
    step = next(_steps(Path(folder), missed[1]), None)
    if step is None:
        return message
    name, text, host, variable = step
    told = f"{message.rstrip('. ')}. Its {name} fetches it ({text})"
    if host and not _is_reached(host):
        return f"{told}; {host} could not be reached"
    place = f", and {variable} names the folder (settings.yaml, variables: {{environment: ...}})" if variable else ""
    return f"{told}: do the same on this machine{place}."


def _steps(folder: Path, missed: str) -> Iterator[tuple[str, str, str, str]]:
    """Yield the steps that fetch a path: the file with the step, its text, the host, and the variable of its place."""
    parts = missed.strip("/").split("/")
    places = ["/" + "/".join(parts[:end]) for end in range(len(parts), 1, -1)]
    names = [part for part in parts[-1:] if len(part) >= _LEAST]
    for file in _files(folder, _STEPS):
        text = file.read_text("utf-8", "replace")
        for line in re.sub(r"\\\r?\n", " ", text).splitlines():
            if _VERB.search(line) and any(word in line for word in (*places, *names)):
                variables = (name for name, value in _VARIABLE.findall(text) if value.rstrip("/") in places)
                yield str(file.relative_to(folder)), _short(line), _host(line), next(variables, "")
    for file in _files(folder, _SCRIPTS):
        text = _COMMENT.sub("", file.read_text("utf-8", "replace"))
        if url := _URL.search(text):
            yield str(file.relative_to(folder)), _short(url[0]), _host(url[0]), ""


def _files(folder: Path, patterns: tuple[str, ...]) -> Iterator[Path]:
    for pattern in patterns:
        for file in sorted(folder.glob(pattern)):
            with contextlib.suppress(OSError):
                if file.is_file() and file.stat().st_size <= _LARGEST:
                    yield file


def _short(step: str) -> str:
    text = " ".join(step.split())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} …"


def _host(step: str) -> str:
    if url := _URL.search(step):
        return urlsplit(url[0]).hostname or ""
    return "huggingface.co" if _OF_HUB.search(step) else ""


def _is_reached(host: str) -> bool:
    try:
        return bool(socket.getaddrinfo(host, 443))
    except OSError:
        return False
