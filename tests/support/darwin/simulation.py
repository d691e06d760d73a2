"""Makes a Python on Linux behave towards our modules as one on macOS does, as far as that can be simulated.

`install` runs in every process of an environment that `make_environment` made, by a .pth file; programs that start with
-S get it from `run_simulated.py`. Our modules then see the platform darwin, no /proc, no /dev/shm, and no function of a
Linux libc. The whole process has no pidfd, fdatasync, posix_fallocate, sched_getaffinity or epoll; new processes of
multiprocessing are spawned, and a process that has loaded PyTorch cannot fork. Each use of a replaced part is noted in
`simulated.log` of the environment.

It cannot show what macOS itself does otherwise: its kernel, its libc, its file system, its builds of PyTorch.
"""

from __future__ import annotations

import builtins
import fcntl
import os
import select
import subprocess
import sys
import sysconfig
from types import FrameType
from typing import Any

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
RUNNER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "run_simulated.py")
LOG = os.path.join(os.path.dirname(os.path.dirname(sys.executable)), "simulated.log")
_OURS = tuple(os.path.join(ROOT, folder) + os.sep for folder in ("toprope", "server", "tools"))
_STDLIB = sysconfig.get_path("stdlib") + os.sep
_MISSING_IN_OS = (
    *("pidfd_open", "fdatasync", "posix_fallocate", "posix_fadvise", "sched_getaffinity", "sched_setaffinity"),
    *(
        "memfd_create",
        "eventfd",
        "getrandom",
        "splice",
        "copy_file_range",
        "setresuid",
        "setresgid",
        "setns",
        "unshare",
    ),
)
_MISSING_IN_LIBC = ("prctl", "unshare", "capset", "landlock_create_ruleset")
_HIDDEN = ("/proc", "/dev/shm")
_FULL_SYNC = 51


class _Sys:
    """The module sys, as on macOS."""

    def __getattr__(self, name: str) -> Any:
        return "darwin" if name == "platform" else getattr(sys, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(sys, name, value)


def note(kind: str) -> None:
    """Write one line to the log."""
    descriptor = os.open(LOG, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(descriptor, f"{kind}\n".encode())
    os.close(descriptor)


def install() -> None:
    """Change this process, once: some interpreters read .pth files twice."""
    if not hasattr(os, "fdatasync"):
        return
    _give_ours_another_sys()
    _remove_linux_functions()
    _start_the_same_below()
    sys.addaudithook(_refuse)
    note("process")


def _give_ours_another_sys() -> None:
    original, darwin = builtins.__import__, _Sys()

    def imported(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        if name == "sys" and not fromlist and globals and str(globals.get("__file__")).startswith(_OURS):
            return darwin
        return original(name, globals, locals, fromlist, level)

    builtins.__import__ = imported


def _remove_linux_functions() -> None:
    for name in _MISSING_IN_OS:
        if hasattr(os, name):
            delattr(os, name)
    del select.epoll
    original = fcntl.fcntl

    def controlled(descriptor: Any, command: int, argument: Any = 0) -> Any:
        if command != _FULL_SYNC:
            return original(descriptor, command, argument)
        note("full sync")
        os.fsync(descriptor)
        return 0

    fcntl.fcntl, fcntl.F_FULLFSYNC = controlled, _FULL_SYNC  # type: ignore[assignment,attr-defined]


def _start_the_same_below() -> None:
    """Put the runner before our programs that are started with -S, and spawn what multiprocessing starts."""
    start = subprocess.Popen.__init__

    def started(self: Any, args: Any, *rest: Any, **named: Any) -> None:
        if isinstance(args, list | tuple) and "-S" in args:
            place = list(args).index("-S") + 1
            if str(args[place]).startswith(_OURS):
                args = [*args[:place], RUNNER, *args[place:]]
        start(self, args, *rest, **named)

    subprocess.Popen.__init__ = started  # type: ignore[method-assign]
    if not sys.flags.no_site:
        import multiprocessing.context as context

        context._default_context._default_context = context._concrete_contexts["spawn"]  # type: ignore[attr-defined]


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    if event in ("open", "os.listdir", "os.scandir"):
        place = arguments[0]
        if isinstance(place, bytes | os.PathLike):
            place = os.fsdecode(place)
        if isinstance(place, str) and place.startswith(_HIDDEN) and _asked_by_ours(sys._getframe(1)):
            note(f"refused {place}")
            raise FileNotFoundError(2, "No such file or directory", place)
    elif event == "ctypes.dlsym" and arguments[1] in _MISSING_IN_LIBC and _asked_by_ours(sys._getframe(1)):
        note(f"refused {arguments[1]}")
        raise AttributeError(f"dlsym(RTLD_DEFAULT, {arguments[1]}): symbol not found")
    elif event == "os.fork" and "torch" in sys.modules:
        note("refused fork")
        raise OSError("a process that has loaded PyTorch cannot fork")


def _asked_by_ours(frame: FrameType | None) -> bool:
    """True if the first caller outside the standard library is a module of ours."""
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith("<frozen") and (not file.startswith(_STDLIB) or "site-packages" in file):
            return file.startswith(_OURS)
        frame = frame.f_back
    return False
