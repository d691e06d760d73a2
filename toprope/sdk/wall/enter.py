"""The last step before a worker's interpreter starts: puts the wall around this process, then becomes the interpreter.

    python -I -S enter.py PLAN argv...

PLAN has the fields of `toprope.sdk.wall.plan.Plan`, as `marshal` writes them, in hexadecimal: it comes from the same
interpreter, and every import here costs each worker's start. No line of user code has run before, also none of
a site-packages folder. A wall that cannot be built as planned ends the process with 126 before anything of the user's
starts; the worker's caller gets the reason as its last words.
"""

from __future__ import annotations

import ctypes
import errno
import marshal
import os
import struct
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import kernel  # type: ignore[import-not-found]  # noqa: E402  # beside this file, which runs without packages

UNBUILT = 126
"""Exit code if the wall cannot be built."""

_PRIVATE, _RECURSIVE, _BIND = 1 << 18, 1 << 14, 1 << 12
_NO_SUID, _NO_DEVICES = 2, 4
_AT_CURRENT, _AT_RECURSIVE, _READ_ONLY = -100, 0x8000, 1
_SET_FLAGS, _UP, _LOOPBACK = 0x8914, 1, b"lo"
_LOCAL, _INTERNET, _NETLINK = 1, (2, 10), 16
_TEMPORARY = {"/tmp": ".tmp", "/var/tmp": ".var-tmp"}
"""Folders of temporary files, and the folders of a worker's own that take their places."""
_FIRST_TO_GO = "500"  # if the machine runs out of memory
_PUSH_INPUT, _CONSOLE = 0x5412, 0x541C  # TIOCSTI and TIOCLINUX type into a terminal as its user
_STREAM, _PACKETS, _TYPE = 1, 5, 0xF  # the kinds of sockets that are connected, and the bits that hold the kind
_SET_OWNER, _SET_OWNER_BY_IOCTL = (8, 15), (0x8901, 0x8902)  # F_SETOWN, F_SETOWN_EX, FIOSETOWN, SIOCSPGRP
_WRITING, _EMPTY = 3, 0x200  # O_ACCMODE and O_TRUNC

_REFUSED = (
    *("ptrace", "process_vm_readv", "process_vm_writev", "process_madvise", "process_mrelease", "kcmp", "pidfd_getfd"),
    *("perf_event_open", "bpf", "userfaultfd", "fanotify_init", "open_by_handle_at"),
    *("mount", "umount2", "pivot_root", "chroot", "open_tree", "move_mount", "mount_setattr", "setns"),
    *("fsopen", "fsconfig", "fsmount", "fspick", "quotactl", "quotactl_fd", "swapon", "swapoff", "acct"),
    *("init_module", "finit_module", "delete_module", "kexec_load", "kexec_file_load", "reboot", "syslog", "vhangup"),
    *("settimeofday", "clock_settime", "clock_adjtime", "adjtimex", "sethostname", "setdomainname", "iopl", "ioperm"),
    *("add_key", "request_key", "keyctl", "shmget", "semget", "msgget", "mq_open", "mq_unlink"),
    *("move_pages", "migrate_pages"),
)
"""Calls that reach other processes, shared objects of the user, or the machine. Nothing that computes needs them."""
_ABSENT = ("io_uring_setup", "io_uring_enter", "io_uring_register", "clone3")
"""Answered as by a kernel without them, since libraries fall back: io_uring evades filters, clone3 hides flags."""
_OF_OTHERS = (
    *(("prlimit64", 0), ("sched_setscheduler", 0), ("sched_setparam", 0), ("sched_setattr", 0)),
    *(("setpriority", 1), ("ioprio_set", 1)),
)
"""Calls with the argument that names a process; 0 is the caller."""
_OF_USER = {"setpriority": 2, "ioprio_set": 3}
"""Calls by which 0 may also be the caller's user, with the first argument that says so."""
_ATTRIBUTES = (
    *("chmod", "fchmod", "fchmodat", "fchmodat2", "chown", "fchown", "lchown", "fchownat"),
    *("utime", "utimes", "futimesat", "utimensat"),
)
"""Changes of attributes, by path or by a descriptor that only reads: Landlock governs neither. Where mounts cannot be
made read-only, they are answered as done and change nothing: libraries that copy or unpack files go on."""
_EXTENDED = (
    *("setxattr", "fsetxattr", "lsetxattr", "setxattrat", "file_setattr"),
    *("removexattr", "fremovexattr", "lremovexattr", "removexattrat"),
)
_SET_FLAGS_OF_FILE = (0x40086602, 0x401C5820)  # FS_IOC_SETFLAGS, FS_IOC_FSSETXATTR: as file_setattr
_SIGNALS = ("kill", "tkill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo")


def filter_lines(
    network: str, spared: list[int], *, attributes: bool = True, emptying: bool = True
) -> list[kernel.Line]:
    """The filter of system calls.

    Args:
        network: `allow`, `own` or `deny`.
        spared: Processes that must get no signal, on kernels whose Landlock does not keep signals in.
        attributes: True if attributes of files may be changed.
        emptying: True if the kernel governs which files may be emptied.
    """
    refuse, absent = kernel.give(kernel.ERRNO | errno.EPERM), kernel.give(kernel.ERRNO | errno.ENOSYS)
    no_network, allow = kernel.give(kernel.ERRNO | errno.ENETUNREACH), kernel.give(kernel.ALLOW)
    lines = kernel.own_architecture(kernel.ERRNO | errno.EPERM)
    families: list[kernel.Line] = [kernel.argument(0), (kernel.EQUAL, 0, 1, _LOCAL), refuse]
    if network != "deny":
        for family in _INTERNET:
            families += [(kernel.EQUAL, 0, 1, family), allow]
        # Netlink only to list addresses and routes.
        families += [(kernel.EQUAL, 0, 3, _NETLINK), kernel.argument(2), (kernel.EQUAL, 0, 1, 0), allow]
    lines += kernel.when("socket", [*families, no_network])
    # Sockets for datagrams send to any daemon's, also those of a pair.
    connected = [kernel.argument(0), (kernel.EQUAL, 1, 0, _LOCAL), refuse, kernel.argument(1), kernel.mask(_TYPE)]
    lines += kernel.when("socketpair", [*connected, *_one_of((_STREAM, _PACKETS), allow), refuse])
    for name in _REFUSED:
        lines += kernel.when(name, [refuse])
    for name in _ABSENT:
        lines += kernel.when(name, [absent])
    for name in ("clone", "unshare"):
        lines += kernel.when(name, [kernel.argument(0), (kernel.SOME, 0, 1, _namespaces(name)), refuse, allow])
    for name, place in _OF_OTHERS:
        users = [kernel.argument(0), *_one_of((_OF_USER[name],), refuse)] if name in _OF_USER else []
        lines += kernel.when(name, [*users, kernel.argument(place), (kernel.EQUAL, 1, 0, 0), refuse, allow])
    # Libraries place processes and threads on processors by number; for others than the first, nothing is done.
    of_itself = [kernel.argument(0), *_one_of((0, os.getpid()), allow)]
    lines += kernel.when("sched_setaffinity", [*of_itself, kernel.give(kernel.ERRNO)])
    refused = (_PUSH_INPUT, _CONSOLE, *(_SET_OWNER_BY_IOCTL if spared else ()))
    refused += () if attributes else _SET_FLAGS_OF_FILE
    lines += kernel.when("ioctl", [kernel.argument(1), *_one_of(refused, refuse), allow])
    for name in () if attributes else _ATTRIBUTES:
        lines += kernel.when(name, [kernel.give(kernel.ERRNO)])
    for name in () if attributes else _EXTENDED:
        lines += kernel.when(name, [kernel.give(kernel.ERRNO | errno.EOPNOTSUPP)])
    if not emptying:
        lines += kernel.when("truncate", [refuse]) + kernel.when("openat2", [absent])
        for name, place in (("open", 1), ("openat", 2)):  # opened to read alone, and emptied by that
            flags = [kernel.argument(place), kernel.mask(_WRITING | _EMPTY), *_one_of((_EMPTY,), refuse)]
            lines += kernel.when(name, [*flags, allow])
    if spared:
        lines += kernel.when("fcntl", [kernel.argument(1), *_one_of(_SET_OWNER, refuse), allow])
        targets = [0xFFFFFFFF, *(pid & 0xFFFFFFFF for process in spared for pid in (process, -process))]
        for name in _SIGNALS:
            lines += kernel.when(name, [kernel.argument(0), *_one_of(targets, refuse), allow])
        lines += kernel.when("pidfd_send_signal", [refuse])
    return [*lines, allow]


def _namespaces(name: str) -> Any:
    # In clone the lowest bits are a signal, so a namespace of time cannot be asked for there.
    return kernel.NEW_NAMESPACES & ~0xFF if name == "clone" else kernel.NEW_NAMESPACES


def _one_of(values: Any, answer: kernel.Line) -> list[kernel.Line]:
    return [line for value in values for line in ((kernel.EQUAL, 0, 1, value), answer)]


def limit(plan: dict[str, Any]) -> None:
    """Set what the kernel bounds per process, and join the group of processes that is bounded together."""
    import resource

    for place in plan["groups"]:
        with open(os.path.join(place, "cgroup.procs"), "w") as file:
            file.write("0")
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write(_FIRST_TO_GO)
    except OSError:
        pass  # another system
    bounds = [
        ("RLIMIT_CORE", 0),
        ("RLIMIT_NOFILE", plan["descriptors"]),
        ("RLIMIT_FSIZE", plan["disk_mb"] << 20),
        ("RLIMIT_DATA", plan["memory_mb"] << 20),
    ]
    for name, value in bounds:
        kind = getattr(resource, name, None)
        if kind is None or (not value and name != "RLIMIT_CORE"):
            continue
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        try:
            resource.setrlimit(kind, (value, value))
        except (OSError, ValueError):
            continue  # macOS lacks some


def unshare(kinds: int) -> None:
    """Move this process to new namespaces of these kinds; to a new user namespace as well if that is needed.

    Raises:
        OSError: It is forbidden here.
    """
    try:
        kernel.call("unshare", kinds)
    except OSError:
        user, group = os.getuid(), os.getgid()
        kernel.call("unshare", kinds | kernel.NEW_USER)
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)


def limit_tasks(tasks: int) -> None:
    """Limit processes and threads where the kernel counts those of this wall alone: in a user namespace of its own. The
    limit does not hold for root, who gets a control group instead."""
    import resource

    with open("/proc/self/uid_map") as file:
        has_own_users = file.read().split() != ["0", "0", "4294967295"]
    if tasks and has_own_users and os.getuid():
        resource.setrlimit(resource.RLIMIT_NPROC, (tasks, tasks))


def close_mounts(writes: list[str], rules: Sequence[tuple[str, int]] = (), scratch: str = "") -> list[str]:
    """Make every file system read-only here except `writes`, and give this process a shared memory of its own, and
    folders for temporary files, if it has a scratch folder.

    Landlock does not govern the attributes of files (chmod, chown, times), a read-only mount does.

    Args:
        writes: Files and folders that it may change.
        rules: Everything within its reach, as `kernel.rules` yields it.
        scratch: Its scratch folder, which is one of `writes`; empty: it has none.

    Returns:
        The folders for temporary files that are its own.

    Raises:
        OSError: It is forbidden here.
    """
    unshare(kernel.NEW_MOUNTS)
    working = os.getcwd()
    _mount(None, "/", None, _RECURSIVE | _PRIVATE)
    folders = [place for place in writes if os.path.isdir(place) and place != kernel.SHARED_MEMORY]
    for place in folders:
        _mount(place, place, None, _BIND | _RECURSIVE)
    own_folders = []
    if scratch:
        reached = [os.path.realpath(path) for path, _ in rules]
        own_folders = [
            folder
            for folder, name in _TEMPORARY.items()
            if _replace_folder(folder, f"{scratch}/{name}", folders, reached)
        ]
    _set_read_only("/", True)
    if os.path.isdir(kernel.SHARED_MEMORY):
        _mount("tmpfs", kernel.SHARED_MEMORY, "tmpfs", _NO_SUID | _NO_DEVICES, b"mode=1777,size=25%")
    for place in own_folders:
        _set_read_only(place, False, below=0)
    for place in folders:
        _set_read_only(place, False)
    os.chdir(working)  # through the new mounts
    return own_folders


def _replace_folder(place: str, new_folder: str, folders: list[str], reached: list[str]) -> bool:
    """Mount `new_folder`, in the place of a folder, with those of `folders` that lie in it.

    False if that fails, or if more there is within reach, such as code: Landlock would open hidden files beside it too.
    """
    if os.path.realpath(place) != place or any(kernel.is_within(place, path) for path in reached):
        return False
    inside = {folder for folder in folders if kernel.is_within(folder, place)}
    reached_inside = [path for path in reached if kernel.is_within(path, place)]
    if not all(any(kernel.is_within(path, folder) for folder in inside) for path in reached_inside):
        return False
    try:
        os.mkdir(new_folder)
        os.chmod(new_folder, 0o1777)
        for folder in inside:
            if not any(kernel.is_within(folder, outer) for outer in inside if outer != folder):
                point = new_folder + folder.removeprefix(place)
                os.makedirs(point)
                _mount(folder, point, None, _BIND | _RECURSIVE)
        _mount(new_folder, place, None, _BIND | _RECURSIVE)
    except OSError:
        return False
    return True


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: bytes | None = None) -> None:
    texts = [None if text is None else ctypes.c_char_p(os.fsencode(text)) for text in (source, target, kind)]
    kernel.call("mount", *texts, ctypes.c_ulong(flags), data if data is None else ctypes.c_char_p(data))


def _set_read_only(place: str, is_so: bool, below: int = _AT_RECURSIVE) -> None:
    attributes = struct.pack("QQQQ", _READ_ONLY if is_so else 0, 0 if is_so else _READ_ONLY, 0, 0)
    path, size = ctypes.c_char_p(os.fsencode(place)), ctypes.c_size_t(len(attributes))
    kernel.call("mount_setattr", _AT_CURRENT, path, below, ctypes.c_char_p(attributes), size)


def own_network(listener_maker: int) -> None:
    """Move to a network with nothing but a loopback interface.

    Args:
        listener_maker: Descriptor of a socket over which the caller asks for listeners in this network.
    """
    import fcntl
    import socket

    unshare(kernel.NEW_NETWORK)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sH14x", _LOOPBACK, _UP))
    if listener_maker < 0:
        return
    child = os.fork()
    if child == 0:
        try:
            if os.fork() == 0:  # a grandchild: the worker has no child that it did not start
                _make_listeners(listener_maker)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(listener_maker)


def _make_listeners(listener_maker: int) -> None:
    """Answer each port, two bytes, with a socket that listens on it in this network, until the caller has gone."""
    import socket

    kernel.hide_memory()
    for stream in (0, 1, 2):
        os.close(stream)
    with socket.socket(fileno=listener_maker) as caller:
        while len(data := caller.recv(2)) == 2:
            try:
                with socket.create_server(("127.0.0.1", struct.unpack("!H", data)[0]), backlog=256) as server:
                    socket.send_fds(caller, [b"+"], [server.fileno()])
            except OSError as error:
                caller.send(b"-" + str(error).encode()[:200])


def build(plan: dict[str, Any]) -> None:
    """Put the wall around this process.

    Raises:
        OSError: A part of it cannot be built.
    """
    if plan["within"]:
        kernel.forbid_new_privileges()
        kernel.restrict_files(kernel.rules(plan), plan["landlock"], signals=True)
        return
    limit(plan)
    if plan["network"] == "own":
        own_network(plan["listener_maker"])
    closed = not plan["landlock"]  # bubblewrap has done it, or there is no wall
    rules = list(kernel.rules(plan)) if plan["landlock"] else []
    if plan["landlock"] and plan["mounts"]:
        try:
            own_folders = close_mounts(
                plan["writes"], rules, plan.get("scratch", "")
            )  # callers from before an upgrade have none
            rules += [(place, kernel.READ | kernel.CHANGE) for place in own_folders]
            closed = True
            limit_tasks(plan["tasks"])
        except (OSError, ValueError):
            pass  # namespaces are forbidden here
    if plan["trusted"] and plan["network"] != "deny":
        return
    if kernel.why_unsupported():
        return
    kernel.forbid_new_privileges()
    if plan["landlock"]:
        kernel.drop_capabilities()
        kernel.restrict_files(rules, plan["landlock"])
    spared = plan["spared"] if plan["landlock"] < 6 else []
    emptying = closed or plan["landlock"] >= 3
    kernel.install_filter(filter_lines(plan["network"], spared, attributes=closed, emptying=emptying))


def main() -> None:
    plan = marshal.loads(bytes.fromhex(sys.argv[1]))
    try:
        build(plan)
    except (OSError, ValueError) as error:
        os.write(2, f"The wall around this worker cannot be built: {error}. Nothing of its code was run.\n".encode())
        os._exit(UNBUILT)
    command = sys.argv[2:]
    try:
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]} cannot be started: {error}\n".encode())
        os._exit(127)


if __name__ == "__main__":
    main()
