"""Absolute paths of a task's machine, which lie in a folder here.

That is no container: a program that builds such a path from pieces does not find it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

__all__ = ["DEEPER", "OWN_FOLDERS", "SYSTEM_FOLDERS", "MovedPaths"]

OWN_FOLDERS = (
    *("/app", "/workspace", "/workdir", "/tests", "/logs", "/solution", "/oracle", "/tmp", "/root", "/home", "/data"),
)
"""Folders that every task has to itself."""
SYSTEM_FOLDERS = ("/etc", "/opt", "/srv", "/var", "/mnt", "/usr", "/bin", "/")
DEEPER = re.compile(r"(?<![\w./-])/((?:etc|opt|srv|var|mnt|usr/local)/[\w.-]+)")
"""Folders within those of the system, which a task may have to itself."""
_TEXT = 1 << 20
"""Bytes of a file up to which its paths are moved."""


class MovedPaths:
    """Replaces paths in texts by those in a folder, and back.

    Args:
        root: The folder, by its real path.
        folders: Absolute paths that lie in it.
        kept: Paths of this machine that stay as they are, even within one of `folders`.
    """

    def __init__(self, root: str, folders: Iterable[str], kept: Iterable[str] = ()) -> None:
        self._root = root
        stay, move = (
            "|".join(map(re.escape, sorted(set(paths), key=len, reverse=True))) for paths in ((root, *kept), folders)
        )
        self._found = re.compile(rf"(?:{stay})|(?<![\w./-])(?P<path>{move})(?=$|[^\w.-]|\.(?:\W|$))")

    def into(self, text: str) -> str:
        """Return a text with the task's paths replaced by those in the folder."""
        return self._found.sub(lambda found: f"{self._root if found['path'] else ''}{found[0]}", text)

    def into_data(self, data: bytes) -> bytes:
        """Return the content of a file with its paths replaced if it is a text of at most 1 MiB."""
        if len(data) > _TEXT or b"\0" in data:
            return data
        try:
            return self.into(data.decode()).encode()
        except UnicodeDecodeError:
            return data

    def back(self, text: str) -> str:
        """Return a text with the folder's paths replaced by the task's."""
        return text.replace(self._root, "")

    def back_data(self, data: bytes) -> bytes:
        """Return the content of a file with the folder's paths replaced by the task's."""
        return data.replace(self._root.encode(), b"")
