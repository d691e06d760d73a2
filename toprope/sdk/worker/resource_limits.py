"""Limits that a worker sets on itself before it loads an environment's code: memory, and no network.

Neither needs a privilege, and neither can be undone, also not by child processes. On Linux the network is removed by a
seccomp filter (kernel.org, userspace-api/seccomp_filter): local sockets (AF_UNIX) still work, sockets of any network do
not, the loopback interface included. io_uring is refused too, because it can create sockets around the filter. Memory
is limited by RLIMIT_DATA, which bounds what one process allocates; the driver watches the worker with its children.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import subprocess
import sys

from toprope.sdk.errors import LoadError

__all__ = ["deny_network", "limit_memory", "network_can_be_denied"]

_NO_NEW_PRIVILEGES = 38
_SET_FILTER, _ALL_THREADS = 1, 1
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_LOAD, _EQUAL, _AT_LEAST, _GIVE = 0x20, 0x15, 0x35, 0x06
_AF_UNIX = 1
_X32 = 0x40000000

_MACHINES = {
    # audit number; socket, socketpair, io_uring_setup; seccomp
    "x86_64": (0xC000003E, (41, 53), 425, 317),
    "aarch64": (0xC00000B7, (198, 199), 425, 277),
}


def network_can_be_denied() -> str:
    """Empty if `deny_network` works on this machine, else the reason why not. Tries it in a child process."""
    if why := _unsupported():
        return why
    program = "from toprope.sdk.worker.resource_limits import deny_network; deny_network()"
    try:
        done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"it cannot be tried: {error}"
    return "" if done.returncode == 0 else done.stderr.decode(errors="replace").strip().rpartition("\n")[2][:200]


def deny_network() -> None:
    """Take the network from this process, all its threads and its future children.

    Raises:
        LoadError: This machine cannot do it; the network is still there.
    """
    if why := _unsupported():
        raise LoadError(f"The network cannot be denied to this environment: {why}. Set environment.network to allow.")
    _, _, _, number = _MACHINES[os.uname().machine]
    program = _filter()
    buffer = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    refused = libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) or libc.syscall(
        number, _SET_FILTER, _ALL_THREADS, ctypes.c_char_p(header)
    )
    if refused:
        said = os.strerror(ctypes.get_errno())
        raise LoadError(f"The network cannot be denied to this environment: the kernel refuses a filter ({said}).")
    import socket

    try:
        socket.socket(socket.AF_INET, socket.SOCK_STREAM).close()
    except OSError:
        return
    raise LoadError("The network could not be denied to this environment: a socket can still be made.")


def limit_memory(megabytes: int) -> None:
    """Limit what this process, and each of its future children, can allocate; beyond it they get a MemoryError.

    Does nothing on systems without such a limit, where only the driver's watch over the worker holds.
    """
    try:
        import resource
    except ImportError:
        return
    limit = megabytes << 20
    try:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        if hard != resource.RLIM_INFINITY:
            limit = min(limit, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    except (OSError, ValueError):
        return


def _unsupported() -> str:
    if not sys.platform.startswith("linux"):
        return f"{sys.platform} has no seccomp"
    if os.uname().machine not in _MACHINES:
        return f"the numbers of its system calls are unknown on {os.uname().machine}"
    return ""


def _filter() -> bytes:
    """The seccomp program (struct sock_filter[]): refuses other architectures, network sockets and io_uring."""
    architecture, sockets, io_uring, _ = _MACHINES[os.uname().machine]
    refuse, forbid = (_GIVE, 0, 0, _ERRNO | errno.EPERM), (_GIVE, 0, 0, _ERRNO | errno.ENETUNREACH)
    allow = (_GIVE, 0, 0, _ALLOW)
    code = [
        (_LOAD, 0, 0, 4),
        (_EQUAL, 1, 0, architecture),
        refuse,
        (_LOAD, 0, 0, 0),
        (_AT_LEAST, 0, 1, _X32),
        refuse,
        (_EQUAL, 0, 1, io_uring),
        refuse,
        (_EQUAL, 2, 0, sockets[0]),
        (_EQUAL, 1, 0, sockets[1]),
        allow,
        (_LOAD, 0, 0, 16),
        (_EQUAL, 0, 1, _AF_UNIX),
        allow,
        forbid,
    ]
    return b"".join(struct.pack("HBBI", *line) for line in code)
