"""Lets a worker import accepted files only as they were accepted, and nothing else from folders of agents.

A module is compared as it is imported, so code that is replaced after its driver's check does not run.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from importlib.machinery import ExtensionFileLoader, ModuleSpec, SourceFileLoader, SourcelessFileLoader
from types import CodeType, ModuleType

__all__ = ["accept_only"]


def accept_only(files: Mapping[str, str], folders: Sequence[str]) -> None:
    """From now on, this process's imports raise ImportError for accepted files that changed and others of agents.

    Other files of the owner are not compared, nor what code reads and executes by itself, nor programs that it starts.

    Args:
        files: SHA-256 of the accepted files in hexadecimal by real path.
        folders: The folders that agents write, with links and without.
    """
    watched = tuple(os.path.join(folder, "") for folder in folders)

    def is_watched(path: str) -> bool:
        real = os.path.realpath(path)  # a link may lead into these folders, or out of them
        return real in files or real.startswith(watched) or os.path.abspath(path).startswith(watched)

    def require(path: str, content: bytes) -> None:
        if files.get(os.path.realpath(path)) != hashlib.sha256(content).hexdigest():
            raise ImportError(f"{path} is not part of the code that the run was started with; it was not executed")

    source, sourceless = SourceFileLoader.get_code, SourcelessFileLoader.get_code
    extension = ExtensionFileLoader.create_module

    def of_source(self: SourceFileLoader, fullname: str) -> CodeType | None:
        path = self.get_filename(fullname)
        if not is_watched(path):
            return source(self, fullname)
        content = self.get_data(path)
        require(path, content)
        return self.source_to_code(content, path)  # never from __pycache__: nobody accepted what is there

    def of_bytecode(self: SourcelessFileLoader, fullname: str) -> CodeType | None:
        path = self.get_filename(fullname)
        if is_watched(path):
            require(path, self.get_data(path))
        return sourceless(self, fullname)

    def of_extension(self: ExtensionFileLoader, spec: ModuleSpec) -> ModuleType:
        path = self.get_filename(spec.name)
        if is_watched(path):
            with open(path, "rb") as file:
                require(path, file.read())
        return extension(self, spec)

    SourceFileLoader.get_code = of_source  # type: ignore[method-assign, assignment]
    SourcelessFileLoader.get_code = of_bytecode  # type: ignore[method-assign]
    ExtensionFileLoader.create_module = of_extension  # type: ignore[method-assign]
