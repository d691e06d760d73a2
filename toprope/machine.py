"""Facts about this machine, on Linux and macOS: boot, processors, their name, GPUs, processes."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import psutil

_SYSCTL = "/usr/sbin/sysctl"
_SYSCTL_S = 5.0
_SYSTEMD_S = 2.0
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
"""Of malloc.h."""


@cache
def boot_id() -> str:
    """Return an id of the present boot of this machine; empty if the system has none."""
    if sys.platform == "darwin":
        return _sysctl("kern.bootsessionuuid")
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


@cache
def has_pidfd() -> bool:
    """Return True if this system shows the end of a process by a descriptor: Linux from 5.3 on, unless the seccomp
    profile of a container forbids it."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return True


def is_shutting_down() -> bool:
    """Return True if systemd ends the system's processes, as before a restart; False where it is not the init."""
    command = ["systemctl", "is-system-running"]
    try:
        printed = subprocess.run(command, capture_output=True, text=True, timeout=_SYSTEMD_S).stdout
    except (OSError, ValueError, subprocess.SubprocessError):
        return False
    return printed.strip() == "stopping"


def return_freed_memory() -> None:
    """Have glibc's malloc keep two arenas and return freed memory to the system; without glibc, do nothing.

    By default each thread gets an arena of its own, up to eight for each processor, and the size from which memory is
    mapped grows with what is freed (mallopt(3)): a server of many threads then holds the peak of each of them.
    """
    _set_malloc({_M_ARENA_MAX: 2, _M_TRIM_THRESHOLD: 128 << 10, _M_MMAP_THRESHOLD: 128 << 10})


def keep_freed_memory() -> None:
    """Have glibc's malloc keep freed memory for the next request; without glibc, do nothing.

    For a process that takes and frees the same amount again and again, as a training step or a decode batch does: the
    system clears each page anew, which is up to a fifth of a small policy's step, and a quarter of 256 rows' decode.
    """
    _set_malloc({_M_TRIM_THRESHOLD: 1 << 30, _M_MMAP_THRESHOLD: 32 << 20})


def _set_malloc(options: Mapping[int, int]) -> None:
    with suppress(AttributeError, OSError, TypeError):
        libc = ctypes.CDLL(None)
        for option, value in options.items():
            libc.mallopt(option, value)


def processor_count() -> int:
    """Return the number of processors that this process may use; macOS does not restrict them."""
    usable = getattr(os, "sched_getaffinity", None)
    return len(usable(0)) if usable else os.cpu_count() or 1


@cache
def processor_name() -> str:
    """Return what the processor calls itself; empty if the system does not say."""
    if sys.platform == "darwin":
        return _sysctl("machdep.cpu.brand_string") or platform.processor()
    try:
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor()


def gpu_names(root: Path = Path("/proc/driver/nvidia/gpus")) -> list[str]:
    """Return the names of this machine's NVIDIA GPUs as Linux's driver reports them, ordered by address."""
    if sys.platform == "darwin":
        return []
    names = []
    for path in sorted(root.glob("*/information")):
        try:
            lines = path.read_text(errors="replace").splitlines()
        except OSError:
            continue
        names += [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]
    return names


def processes_with(variable: str, value: str) -> Iterator[psutil.Process]:
    """Yield this user's processes that started with an environment variable of this value.

    psutil.process_iter is not used: it keeps its objects, so it hides a process whose id belonged to an earlier one.
    """
    import psutil

    for pid in psutil.pids():
        try:
            process = psutil.Process(pid)
            if process.environ().get(variable) == value:
                yield process
        except (psutil.Error, OSError):
            continue


def cpu_and_memory(pid: int | None = None) -> tuple[float, int]:
    """Return the processor seconds of a process and everything below it, ended processes included, and the resident
    bytes of the live processes below it.

    Args:
        pid: The process; this one, with less effort, if None.
    """
    import psutil

    seconds, memory = 0.0, 0
    try:
        root = psutil.Process(pid)
        below = root.children(recursive=True) + ([] if pid is None else [root])
    except (psutil.Error, OSError):
        below = []
    if pid is None:
        for scope in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
            used = resource.getrusage(scope)
            seconds += used.ru_utime + used.ru_stime
    for process in below:
        try:
            with process.oneshot():
                times = process.cpu_times()
                memory += process.memory_info().rss
        except psutil.Error:
            continue
        seconds += times.user + times.system + getattr(times, "children_user", 0.0)
        seconds += getattr(times, "children_system", 0.0)
    return seconds, memory


def _sysctl(name: str) -> str:
    try:
        done = subprocess.run([_SYSCTL, "-n", name], capture_output=True, text=True, timeout=_SYSCTL_S, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def show_arguments(words: Sequence[str]) -> None:
    """Show these words as this process's arguments in lists of processes, as far as the present ones leave room.

    Linux only: it writes to the memory between arg_start and arg_end of proc(5).
    """
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    if end - start < 2:
        return
    data = b"\0".join(map(os.fsencode, words))[: end - start - 1]
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, data, len(data))
