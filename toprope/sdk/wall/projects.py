"""The project that an environment's file is of, whose tree its code may read."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable

from toprope.sdk.wall.kernel import is_within

__all__ = ["MANIFEST", "MARKS", "PROJECT", "is_broad", "is_marked", "project_root", "roots_above"]

PROJECT = "pyproject.toml"
MANIFEST = "openenv.yaml"
_REQUIREMENTS = "requirements.txt"
MARKS = (".git", PROJECT, "setup.py", MANIFEST)
_LIST = "system.posix_acl_access"
_OF_OTHERS = ("site-packages", "dist-packages", "node_modules")


def project_root(file: str, added: Iterable[str], closed: Iterable[str] = ()) -> str:
    """The root of the project that a file is of, whose whole tree its code may read; empty without such a project.

    Authors run their scripts and tasks from there, which import and read what lies anywhere in the project. The root is
    the nearest folder above the file with a mark of a project, else the added folder if it lists requirements. It is
    never above a folder that the owner added: a file there may come from anybody, as a pyproject.toml in a HOME that
    another program left. Neither is it one of these:

    - a HOME or another broad folder: it holds more than this project;
    - one that the file reaches through a link, a hidden folder, or a folder of installed packages: those are of others;
    - one above a closed folder that the file lies in: agents save files there;
    - one where another user can write, or has written, any of the folders down to the file, or the file itself: the
      code of that user would read what is the owner's.

    Hidden files, links that lead out, and closed folders stay out of reach in it as in every source.

    Args:
        file: Its path.
        added: Folders that the owner added by name.
        closed: See `folders_above`.
    """
    file, closed_paths = os.path.abspath(file), [os.path.realpath(place) for place in closed]
    for place in sorted(added, key=len, reverse=True):
        if not is_within(os.path.dirname(file), place):
            continue
        above = [os.path.dirname(file)]
        while above[-1] != place and not is_marked(above[-1]):
            above.append(os.path.dirname(above[-1]))
        root = above[-1]
        if not (is_marked(root) or os.path.isfile(os.path.join(root, _REQUIREMENTS))) or is_broad(root):
            continue
        real = [os.path.realpath(path) for path in (file, root, place)]
        is_inside = is_within(real[0], real[1]) and is_within(real[1], real[2])
        is_saved = any(is_within(real[0], path) and is_within(path, real[1]) for path in closed_paths)
        if is_inside and not is_saved and not any(map(_is_of_others, above[:-1])) and _has_one_writer([*above, file]):
            return root
    return ""


def is_marked(folder: str) -> bool:
    return any(os.path.exists(os.path.join(folder, name)) for name in MARKS)


def _is_of_others(folder: str) -> bool:
    name = os.path.basename(folder)
    return name.startswith(".") or name in _OF_OTHERS or os.path.exists(os.path.join(folder, "pyvenv.cfg"))


def _has_one_writer(places: Iterable[str], *, by_group: bool = False) -> bool:
    """True if files and folders are of one user, and no other can write them, except by a group that has that user's
    number and so is the user's own. Where a list names other users, the bits of the group are the most that it gives
    to any of them.

    Args:
        by_group: Any group may write them as well.
    """
    try:
        stats = {place: os.stat(place) for place in places}
    except OSError:
        return False
    return len({found.st_uid for found in stats.values()}) == 1 and not any(
        found.st_mode & stat.S_IWOTH
        or (not by_group and found.st_mode & stat.S_IWGRP and (found.st_gid != found.st_uid or _lists_users(place)))
        for place, found in stats.items()
    )


def _lists_users(place: str) -> bool:
    """True if a file has an access control list."""
    try:
        return _LIST in os.listxattr(place)
    except (AttributeError, OSError):  # another system, a file system without lists
        return False


def roots_above(file: str) -> list[str]:
    """The folders above a file with a mark of a project, from the nearest on, that this process can list. Behind a wall
    these are the ones that it opens: `project_root` and the folder of a manifest. Without one, a module that another
    user left above would run with all rights, so folders where others can write are no roots; a manifest's folder may
    be a group's."""
    found, passed = list[str](), [os.path.abspath(file)]
    manifests_place = os.path.dirname(os.path.dirname(passed[0]))
    while not is_broad(folder := os.path.dirname(passed[-1])):
        passed.append(folder)
        has_manifest = folder == manifests_place and os.path.isfile(os.path.join(folder, MANIFEST))
        is_root = is_marked(folder) or os.path.isfile(os.path.join(folder, _REQUIREMENTS))
        if is_root and _has_one_writer(passed, by_group=has_manifest):
            with contextlib.suppress(OSError):
                os.scandir(folder).close()
                found.append(folder)
    return found


def is_broad(folder: str) -> bool:
    """True if a folder holds more than one program: a HOME, one above it, or a place of temporary files."""
    folder = os.path.realpath(folder or "/")
    home = os.path.realpath(os.path.expanduser("~"))
    return folder in ("/tmp", "/var/tmp", "/dev/shm", "/home", "/Users") or is_within(home, folder)
