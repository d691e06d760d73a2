"""Control groups: the processes and threads of a worker are counted by the kernel, and ended together.

A group can be made by root, and in a part of the tree that was delegated to this user, under cgroup v2 or with the
`pids` controller of v1 (kernel.org, admin-guide/cgroup-v2). Elsewhere the caller's watch over the worker holds.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import time
from collections.abc import Iterator

__all__ = ["ProcessGroup"]

_NAME = "toprope-worker-"
_STALE_S = 300.0
_END_S = 2.0


class ProcessGroup:
    """A control group. Create it with `ProcessGroup.make`.

    Args:
        path: Its folder in the tree of groups.
    """

    def __init__(self, path: str) -> None:
        self.path = path

    @classmethod
    def make(cls, tasks: int, memory_mb: int = 0) -> ProcessGroup | None:
        """Make an empty group; None if this process may not.

        Args:
            tasks: Most processes and threads in it.
            memory_mb: Most memory of all together in MB, if the machine counts it; 0: no limit.
        """
        for parent in _parents():
            path = os.path.join(parent, f"{_NAME}{secrets.token_hex(8)}")
            try:
                _remove_stale(parent)
                os.mkdir(path)
            except OSError:
                continue
            try:
                _write(path, "pids.max", str(tasks))
            except OSError:
                with contextlib.suppress(OSError):
                    os.rmdir(path)
                continue
            if memory_mb and os.path.exists(os.path.join(path, "memory.max")):
                with contextlib.suppress(OSError):
                    _write(path, "memory.max", str(memory_mb << 20))
                    _write(path, "memory.swap.max", "0")
            return cls(path)
        return None

    def kill(self) -> None:
        """End every process in it."""
        with contextlib.suppress(OSError):
            _write(self.path, "cgroup.kill", "1")  # v2, Linux 5.14
            return
        for pid in self.members():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)

    def remove(self) -> None:
        """End every process in it and remove it; gives up after two seconds."""
        until = time.monotonic() + _END_S
        while time.monotonic() < until:
            self.kill()
            try:
                os.rmdir(self.path)
                return
            except FileNotFoundError:
                return
            except OSError:
                time.sleep(0.01)

    def members(self) -> list[int]:
        """The ids of the processes in it."""
        try:
            with open(os.path.join(self.path, "cgroup.procs")) as file:
                return [int(line) for line in file]
        except (OSError, ValueError):
            return []


def _parents() -> Iterator[str]:
    """Yield groups in which a group of ours may be made: this process's own, so that limits on it hold as well."""
    try:
        with open("/proc/self/mounts") as file:
            mounts = [line.split()[1:4] for line in file]
        with open("/proc/self/cgroup") as file:
            places = [line.rstrip("\n").split(":", 2) for line in file]
    except OSError:
        return
    for root, kind, options in mounts:
        if kind == "cgroup2":
            own_path = next((path for hierarchy, _, path in places if hierarchy == "0"), "/")
        elif kind == "cgroup" and "pids" in options.split(","):
            own_path = next((path for _, names, path in places if "pids" in names.split(",")), "/")
        else:
            continue
        place = root + own_path.rstrip("/")
        if os.access(place, os.W_OK) and (kind == "cgroup" or _counts(place)):
            yield place


def _counts(place: str) -> bool:
    """True if groups below a group of v2 count processes."""
    try:
        with open(os.path.join(place, "cgroup.subtree_control")) as file:
            return "pids" in file.read().split()
    except OSError:
        return False


def _remove_stale(parent: str) -> None:
    """Remove groups whose maker was killed. Groups with processes cannot be removed, and new ones stay."""
    for name in os.listdir(parent):
        path = os.path.join(parent, name)
        with contextlib.suppress(OSError):
            if name.startswith(_NAME) and time.time() - os.stat(path).st_mtime > _STALE_S:
                os.rmdir(path)


def _write(path: str, name: str, text: str) -> None:
    # Not created: a missing file is a missing ability.
    with open(os.open(os.path.join(path, name), os.O_WRONLY), "w") as file:
        file.write(text)
