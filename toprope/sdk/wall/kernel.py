"""The kernel's means to confine a process: Landlock, seccomp filters, capabilities, namespaces.

Standard library only, and importable alone by its path, because it also runs in programs that import nothing else of
Toprope. Numbers and layouts: kernel.org, userspace-api/landlock and userspace-api/seccomp_filter; the tables of system
calls of x86_64 and aarch64.
"""

from __future__ import annotations

import ctypes
import os
import stat
import struct
import sys

TYPE_CHECKING = False  # typing would cost each worker's start
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from typing import Any

ALLOW, ERRNO, KILL, NOTIFY = 0x7FFF0000, 0x00050000, 0x80000000, 0x7FC00000
LOAD, EQUAL, AT_LEAST, SOME, GIVE, MASK = 0x20, 0x15, 0x35, 0x45, 0x06, 0x54

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
REMOVE_DIR, REMOVE_FILE, MAKE_DIR, MAKE_REG = 1 << 4, 1 << 5, 1 << 7, 1 << 8
MAKE_SOCK, MAKE_FIFO, MAKE_SYM, REFER, TRUNCATE, IOCTL_DEV = 1 << 9, 1 << 10, 1 << 12, 1 << 13, 1 << 14, 1 << 15
READ = EXECUTE | READ_FILE | READ_DIR
CHANGE = (
    WRITE_FILE | REMOVE_DIR | REMOVE_FILE | MAKE_DIR | MAKE_REG | MAKE_SOCK | MAKE_FIFO | MAKE_SYM | REFER | TRUNCATE
)
_OF_FILES = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV

SHARED_MEMORY = "/dev/shm"

NEW_MOUNTS, NEW_USER, NEW_NETWORK = 0x00020000, 0x10000000, 0x40000000
NEW_NAMESPACES = 0x7E020080
THREAD = 0x00010000

_NO_NEW_PRIVILEGES, _DROP_BOUND, _DUMPABLE, _SET_FILTER, _NEW_LISTENER = 38, 24, 4, 1, 8
_KEPT_CAPABILITIES = 1 << 0 | 1 << 1 | 1 << 3 | 1 << 4  # CHOWN, DAC_OVERRIDE, FOWNER, FSETID: files, as of any owner

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_COLUMNS = {"x86_64": 0, "aarch64": 1}

# name -> number on x86_64, number on aarch64; -1: not there.
CALLS = {
    "acct": (163, 89), "add_key": (248, 217), "adjtimex": (159, 171), "bpf": (321, 280), "chroot": (161, 51),
    "clock_adjtime": (305, 266), "clock_settime": (227, 112), "clone": (56, 220), "clone3": (435, 435),
    "delete_module": (176, 106), "fanotify_init": (300, 262), "fcntl": (72, 25), "finit_module": (313, 273),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fsopen": (430, 430), "fspick": (433, 433),
    "init_module": (175, 105), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425), "ioctl": (16, 29), "ioperm": (173, -1), "iopl": (172, -1), "ioprio_set": (251, 30),
    "kcmp": (312, 272), "kexec_file_load": (320, 294), "kexec_load": (246, 104), "keyctl": (250, 219),
    "kill": (62, 129), "mount": (165, 40), "mount_setattr": (442, 442), "move_mount": (429, 429),
    "move_pages": (279, 239), "migrate_pages": (256, 238), "mq_open": (240, 180), "mq_unlink": (241, 181),
    "msgget": (68, 186), "open_by_handle_at": (304, 265), "open_tree": (428, 428), "perf_event_open": (298, 241),
    "pidfd_getfd": (438, 438), "pidfd_send_signal": (424, 424), "pivot_root": (155, 41), "prlimit64": (302, 261),
    "process_madvise": (440, 440), "process_mrelease": (448, 448), "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271), "ptrace": (101, 117), "quotactl": (179, 60), "quotactl_fd": (443, 443),
    "reboot": (169, 142), "request_key": (249, 218), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240),
    "sched_setattr": (314, 274), "sched_setparam": (142, 118), "sched_setscheduler": (144, 119),
    "seccomp": (317, 277), "semget": (64, 190), "setdomainname": (171, 162), "sethostname": (170, 161),
    "setns": (308, 268), "setpriority": (141, 140), "settimeofday": (164, 170), "shmget": (29, 194),
    "socket": (41, 198), "swapoff": (168, 225), "swapon": (167, 224), "syslog": (103, 116), "tgkill": (234, 131),
    "tkill": (200, 130), "umount2": (166, 39), "unshare": (272, 97), "userfaultfd": (323, 282), "vhangup": (153, 58),
    "open": (2, -1), "openat": (257, 56), "openat2": (437, 437), "sched_setaffinity": (203, 122),
    "socketpair": (53, 199), "truncate": (76, 45),
    "chmod": (90, -1), "chown": (92, -1), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452),
    "fchown": (93, 55), "fchownat": (260, 54), "file_setattr": (469, 469), "fremovexattr": (199, 16),
    "fsetxattr": (190, 7), "futimesat": (261, -1), "lchown": (94, -1), "lremovexattr": (198, 15), "lsetxattr": (189, 6),
    "removexattr": (197, 14), "removexattrat": (466, 466), "setxattr": (188, 5), "setxattrat": (463, 463),
    "utime": (132, -1), "utimensat": (280, 88), "utimes": (235, -1),
    "capset": (126, 91), "landlock_create_ruleset": (444, 444), "landlock_add_rule": (445, 445),
    "landlock_restrict_self": (446, 446),
}  # fmt: skip

Line = tuple[int, int, int, int]
"""One instruction of a filter: code, jump if true, jump if false, constant (struct sock_filter)."""


def why_unsupported() -> str:
    """Return why no filter can be made here; empty if one can."""
    if not sys.platform.startswith("linux"):
        return f"{sys.platform} has neither Landlock nor seccomp"
    machine = os.uname().machine
    return "" if machine in ARCHITECTURES else f"the numbers of its system calls are unknown on {machine}"


def number(name: str) -> int:
    """The number of a system call on this machine; -1 if it has none."""
    return CALLS[name][_COLUMNS[os.uname().machine]]


def libc() -> ctypes.CDLL:
    """The C library, whose `syscall` returns a long."""
    library = ctypes.CDLL(None, use_errno=True)
    library.syscall.restype = ctypes.c_long
    return library


def call(name: str, *arguments: object) -> int:
    """Make a system call.

    Raises:
        OSError: The kernel refused it.
    """
    result: int = libc().syscall(number(name), *arguments)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
    return result


def landlock_abi() -> int:
    """The version of Landlock in this kernel; 0 without it."""
    if why_unsupported():
        return 0
    version: int = libc().syscall(number("landlock_create_ruleset"), None, ctypes.c_size_t(0), 1)
    return max(0, version)


def forbid_new_privileges() -> None:
    """Let no program that this process starts gain rights (setuid); needed before Landlock and filters."""
    if libc().prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0):
        raise OSError("no_new_privs was refused")


def hide_memory() -> None:
    """Let no other process of this user read this one's memory and environment, or attach to it. Linux only."""
    if sys.platform.startswith("linux"):
        libc().prctl(_DUMPABLE, 0, 0, 0, 0)


def drop_capabilities() -> None:
    """Give up every privilege of root except to use files of any owner. Harmless for other users."""
    library = libc()
    for capability in range(64):
        if not _KEPT_CAPABILITIES >> capability & 1:
            library.prctl(_DROP_BOUND, capability, 0, 0, 0)
    if os.geteuid() == 0:
        header = struct.pack("Ii", 0x20080522, 0)
        data = struct.pack("6I", _KEPT_CAPABILITIES, _KEPT_CAPABILITIES, 0, 0, 0, 0)
        call("capset", ctypes.c_char_p(header), ctypes.c_char_p(data))


def rules(plan: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield the files that stay within reach, with the rights to them.

    Args:
        plan: The fields of `toprope.sdk.wall.plan.Plan`.
    """
    yield from ((path, READ) for path in plan["reads"])
    yield from (rule for path in plan["sources"] for rule in without_hidden(path))
    yield from ((path, READ | CHANGE) for path in plan["writes"])
    yield from ((path, READ_FILE | WRITE_FILE | IOCTL_DEV | READ_DIR) for path in plan["devices"])
    if plan["within"]:  # semaphores and the like have names that nobody guesses
        yield SHARED_MEMORY, READ_FILE | WRITE_FILE | MAKE_REG | REMOVE_FILE | TRUNCATE


def restrict_files(rules: Iterable[tuple[str, int]], abi: int, *, tcp: bool = True, signals: bool = False) -> None:
    """Restrict this thread and its children to some files, for good. Missing paths are skipped.

    Args:
        rules: Paths with the rights to what is at and below them.
        abi: As `landlock_abi` returned it.
        tcp: False takes TCP away as well, from ABI 4 on.
        signals: False puts signals and abstract sockets of processes outside out of reach as well, from ABI 6 on.

    Raises:
        OSError: The kernel refused.
    """
    known_rights = (1 << (13 if abi == 1 else 14 if abi == 2 else 15 if abi < 5 else 16)) - 1
    attributes = struct.pack("QQQ", known_rights, 0 if tcp or abi < 4 else 3, 3 if abi >= 6 and not signals else 0)
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    ruleset = call("landlock_create_ruleset", ctypes.c_char_p(attributes), ctypes.c_size_t(size), 0)
    for path, rights in rules:
        try:
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            rights &= known_rights if stat.S_ISDIR(os.fstat(descriptor).st_mode) else known_rights & _OF_FILES
            if rights:
                rule = struct.pack("=Qi", rights, descriptor)
                call("landlock_add_rule", ruleset, 1, ctypes.c_char_p(rule), 0)
        finally:
            os.close(descriptor)
    call("landlock_restrict_self", ruleset, 0)
    os.close(ruleset)


def without_hidden(place: str) -> Iterator[tuple[str, int]]:
    """Yield rules by which a file, or a folder without its hidden files, can be read; all names can be listed.

    Landlock can close nothing within what it opens, so a folder with something hidden is opened entry by entry. Links
    open nothing: what they lead to may lie elsewhere. Installed packages of Python and Node are opened whole.
    """
    holding: set[str] = set()
    for folder, folders, names in os.walk(place):
        if ("pyvenv.cfg" in names and folder != place) or os.path.basename(folder) == "node_modules":
            folders.clear()
            continue
        installed = ("bin", "lib") if "pyvenv.cfg" in names else ()  # of a project that is its own environment
        if any(map(is_hidden, (*folders, *names))):
            above = folder
            while above not in holding:
                holding.add(above)
                above = above if above == place else os.path.dirname(above)
        folders[:] = [name for name in folders if not (is_hidden(name) or name in installed)]
    if place not in holding:
        yield place, READ
    for folder in holding:
        yield folder, READ_DIR
        for name in os.listdir(folder):
            path = os.path.join(folder, name)
            if not (is_hidden(name) or os.path.islink(path) or path in holding):
                yield path, READ


def is_hidden(name: str) -> bool:
    """True for names that `ls` leaves out, except shared libraries of wheels."""
    return name.startswith(".") and name != ".libs"


def is_within(path: str, folder: str) -> bool:
    """True if `path` is `folder` or below it; both are real paths."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def packed(lines: Sequence[Line]) -> bytes:
    """A filter as bytes (struct sock_filter[])."""
    return b"".join(struct.pack("HBBI", *line) for line in lines)


def own_architecture(otherwise: int) -> list[Line]:
    """The head of a filter: other architectures and x32, whose calls have other numbers, get `otherwise`. The number of
    the call is loaded afterwards."""
    return [
        (LOAD, 0, 0, 4),
        (EQUAL, 1, 0, ARCHITECTURES[os.uname().machine]),
        (GIVE, 0, 0, otherwise),
        (LOAD, 0, 0, 0),
        (AT_LEAST, 0, 1, 0x40000000),
        (GIVE, 0, 0, otherwise),
    ]


def when(name: str, lines: Sequence[Line]) -> list[Line]:
    """Lines for one system call. They must end by giving an answer; a call that this machine lacks needs none."""
    return [] if number(name) < 0 else [(EQUAL, 0, len(lines), number(name)), *lines]


def argument(place: int) -> Line:
    """Load the low half of argument `place`."""
    return (LOAD, 0, 0, 16 + 8 * place)


def mask(bits: int) -> Line:
    """Keep these bits of what was loaded."""
    return (MASK, 0, 0, bits)


def give(answer: int) -> Line:
    """Answer the call."""
    return (GIVE, 0, 0, answer)


def install_filter(lines: Sequence[Line], *, listener: bool = False) -> int:
    """Filter the system calls of this process and its future children, for good.

    Args:
        lines: The filter.
        listener: Return a descriptor on which calls that it answers with NOTIFY arrive.

    Raises:
        OSError: The kernel refused.
    """
    program = packed(lines)
    buffer = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", len(lines), ctypes.addressof(buffer))
    return call("seccomp", _SET_FILTER, _NEW_LISTENER if listener else 0, ctypes.c_char_p(header))
