"""Imports libraries once and forks the programs of a crew that need them.

The keeper starts this program (`toprope.supervisor.keeper.preloading`) and sends it a request per program. Each request
starts a guard, which the keeper adopts because its parent ends at once, and the guard starts the program. Both are
forks, so they share the libraries in memory. This program ends when the keeper closes the socket.

    python -P -m toprope.training.component.preload SOCKET_FD GUARD_FILE LIBRARIES PADDING

A request is one message of a SOCK_SEQPACKET socket, JSON with descriptors: {"module", "arguments", "variables",
"folder", "log", "namespace", "guard": [options], "descriptors": [options], "report_variable"}. The first descriptor
becomes standard input, the others are values of the options in "descriptors", in this order; that of --report is also
told to the program. With "namespace" the guard is the first process of a pid namespace with a /proc of its own, as
bubblewrap makes it. The answer is {"pid"} or {"error"}. LIBRARIES are separated by commas.
"""

from __future__ import annotations

import array
import ctypes
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from toprope.extras import without_collector
from toprope.machine import show_arguments

_MOST_BYTES = 1 << 20
_MOST_DESCRIPTORS = 16
_Guard = Callable[[list[str], Callable[[], None]], int]

# unshare(2), mount(2), prctl(2), capset(2)
_NEWNS, _NEWUSER, _NEWPID = 0x20000, 0x10000000, 0x20000000
_NOSUID, _NODEV, _NOEXEC, _REC, _SLAVE = 2, 4, 8, 0x4000, 0x80000
_PDEATHSIG, _DUMPABLE, _NO_NEW_PRIVS = 1, 4, 38
_CAPABILITIES_VERSION = 0x20080522


def main() -> int:
    """Serve until the keeper closes the socket; returns the exit status."""
    parent = os.getppid()
    _call("prctl", _PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # a killed keeper cannot end what hangs in an import
    _call("prctl", _DUMPABLE, 0, 0, 0, 0)  # it may wait for long with variables of the owner
    if os.getppid() != parent:
        return 1
    keeper = socket.socket(fileno=int(sys.argv[1]))
    guard: _Guard = runpy.run_path(sys.argv[2], run_name="toprope_guard")["main"]
    with without_collector():  # which would also write to pages that the forks share
        for name in sys.argv[3].split(","):
            importlib.import_module(name)
    if len(os.listdir("/proc/self/task")) > 1:
        return 1  # only one thread survives a fork, and others may hold locks
    while True:
        message, descriptors = _receive(keeper)
        if not message or _is_gone(keeper):
            return 0
        _serve(json.loads(message), descriptors, keeper, guard)
        for descriptor in descriptors:
            os.close(descriptor)


def _receive(keeper: socket.socket) -> tuple[bytes, list[int]]:
    """The next request with its descriptors; empty at the end."""
    descriptors = array.array("i")
    room = socket.CMSG_LEN(_MOST_DESCRIPTORS * descriptors.itemsize)
    message, ancillary, _, _ = keeper.recvmsg(_MOST_BYTES, room, socket.MSG_CMSG_CLOEXEC)
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
    return message, descriptors.tolist()


def _is_gone(keeper: socket.socket) -> bool:
    """True if the keeper has ended since it sent the request."""
    poll = select.poll()
    poll.register(keeper, 0)
    return any(events & select.POLLHUP for _, events in poll.poll(0))


def _serve(request: dict[str, Any], descriptors: Sequence[int], keeper: socket.socket, guard: _Guard) -> None:
    """Fork a guard whose parent is gone, and answer. The guard begins after the answer: if this process is killed
    before, the keeper starts another one."""
    reading, writing = os.pipe()
    begun, begin = os.pipe()
    middle = os.fork()
    if middle == 0:
        try:
            _call("prctl", _DUMPABLE, 1, 0, 0, 0)  # else the maps of a namespace could not be written
            outer = _unshare() if request["namespace"] else -1
            if pid := os.fork():
                os.write(writing, str(pid).encode())
                os._exit(0)
            if outer >= 0:
                _settle()
            os.write(writing, b"+")
            for descriptor in (reading, writing, begin, keeper.detach()):
                os.close(descriptor)
            if os.read(begun, 1):
                os.close(begun)
                os._exit(_run_guard(request, descriptors, guard, outer))
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(127)
    os.close(writing)
    os.waitpid(middle, 0)
    with os.fdopen(reading, "rb") as reports:
        ready, number = reports.read(), b""
    if b"+" in ready:
        number = ready.replace(b"+", b"")
    answer = {"pid": int(number)} if number.isdigit() else {"error": "the guard was not forked"}
    keeper.send(json.dumps(answer).encode())
    try:
        os.write(begin, b"1")
    except BrokenPipeError:
        pass  # it was killed
    for descriptor in (begun, begin):
        os.close(descriptor)


def _unshare() -> int:
    """Make new namespaces for the next fork; returns /proc as it is outside, from which the guard learns process ids.

    Raises:
        OSError: The system forbids it.
    """
    outer = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    user, group = os.geteuid(), os.getegid()
    _call("unshare", _NEWNS | _NEWPID | (_NEWUSER if user else 0))
    if user:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    _call("mount", b"none", b"/", None, _REC | _SLAVE, None)
    return outer


def _settle() -> None:
    """Mount the namespace's own /proc, and give up the rights that made it."""
    _call("mount", b"proc", b"/proc", b"proc", _NOSUID | _NODEV | _NOEXEC, None)
    _call("prctl", _NO_NEW_PRIVS, 1, 0, 0, 0)
    if os.geteuid():
        _call("capset", (ctypes.c_uint32 * 2)(_CAPABILITIES_VERSION, 0), (ctypes.c_uint32 * 6)())


def _call(name: str, *arguments: Any) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _run_guard(request: dict[str, Any], descriptors: Sequence[int], guard: _Guard, outer: int) -> int:
    orders, *others = descriptors
    os.dup2(orders, 0)
    os.close(orders)
    with suppress(OSError):  # this process may have been started before there was a log
        log = os.open(request["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.dup2(log, 2)
        os.close(log)
    if request["folder"]:
        os.chdir(request["folder"])
    variables: dict[str, str] = request["variables"]
    options = [*request["guard"], *(["--proc", str(outer)] if outer >= 0 else [])]
    for name, descriptor in zip(request["descriptors"], others, strict=True):
        options += [name, str(descriptor)]
        if name == "--report":
            variables[request["report_variable"]] = str(descriptor)
            kept_descriptors = {0, 1, 2, descriptor}

    def program() -> None:
        _run_program(request["module"], request["arguments"], variables, kept_descriptors)

    arguments = [*options, "--", sys.executable, "-P", "-m", request["module"], *request["arguments"]]
    show_arguments([sys.executable, sys.argv[2], *arguments])
    os.setsid()
    return guard(arguments, program)


def _run_program(module: str, arguments: Sequence[str], variables: dict[str, str], kept: set[int]) -> None:
    """Become the program, as if it had been executed; never returns."""
    for number in map(int, os.listdir("/proc/self/fd")):
        if number not in kept:
            try:
                os.close(number)
            except OSError:
                continue  # the one that listed them
    # The guard has reset them; these are Python's own.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(ignored, signal.SIG_IGN)
    os.environ.clear()
    os.environ.update(variables)
    tempfile.tempdir = None  # a library may have asked for it
    show_arguments([sys.executable, "-P", "-m", module, *arguments])
    sys.argv = [module, *arguments]
    code = 1
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
