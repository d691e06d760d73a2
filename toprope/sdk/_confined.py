"""The child process that runs an untrusted program. It is started by its path, never imported:

    python -I -S -B _confined.py MEMORY_BYTES CPU_SECONDS [SCRATCH_FOLDER]

It reads the program from standard input, gives up everything that could do harm, and only then runs the program. On
Linux, without any privilege, it gives up:

- files: under Landlock it can read Python's library and write nothing but the scratch folder, if one is given
  (kernel.org, userspace-api/landlock);
- network, other processes, signals and everything else that is not computing: a seccomp filter passes a list of system
  calls and refuses all others with EPERM (kernel.org, userspace-api/seccomp_filter);
- memory and CPU time: resource limits. The parent limits wall time and output.

It prints `confined` before it runs the program; without that word the parent must not trust what follows. If the
machine cannot confine it, it runs nothing and exits with 70. With a scratch folder it goes on and prints `limited`:
what can be given up is given up, the rest stays.
"""

import ctypes
import os
import resource
import signal
import struct
import sys

_NO_NEW_PRIVILEGES, _DEATH_SIGNAL, _SECCOMP = 38, 1, 22
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_READS = 1 << 0 | 1 << 2 | 1 << 3  # execute, read a file, read a folder
_WRITES = 1 << 1 | 1 << 4 | 1 << 5 | 1 << 7 | 1 << 8 | 1 << 14  # write, remove both, make both, truncate
_NEW_USER_AND_NETWORK = 0x50000000
_THREAD = 0x10000  # CLONE_THREAD
_NEW_NAMESPACES = 0x7E020080
_FCNTL = (0, 1, 2, 3, 4, 1030)  # duplicate, flags; not F_SETOWN, by which others get signals
_IOCTL = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # is it a terminal, its size, bytes to read, flags

_EPERM, _ENOSYS = 1, 38
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000

# The calls that Python needs to compute: memory, time, files that Landlock still lets it open, its own threads. By
# machine: the architecture's audit number, the calls that pass, those that change a scratch folder, and those whose
# arguments are checked.
_CALLS = {
    "x86_64": (
        0xC000003E,
        "0-15 17 19-25 28 32 33 35 39 60 63 78-81 89 96-100 102 104 107 108 110 131 158 186 201 202 204 217 218 228-233"
        " 257 262 267 269-271 273 281 290-293 318 332 334 439 441",
        "77 82-84 87 258 263 264 316",
        {"tgkill": 234, "clone": 56, "clone3": 435, "fcntl": 72, "ioctl": 16},
    ),
    "aarch64": (
        0xC00000B7,
        "17 19-24 43 44 48-50 56 57 59 61-67 72 73 78-80 93 94 96 98 99 101 113-115 123 124 132 134-136 139 153 160 163"
        " 165 169 172-179 214-216 222 226 233 278 291 293 439 441",
        "34 35 38 46 276",
        {"tgkill": 131, "clone": 220, "clone3": 435, "fcntl": 25, "ioctl": 29},
    ),
}


def _numbers(text: str) -> list[int]:
    """`0-2 5` as 0, 1, 2, 5."""
    ranges = (part.split("-") for part in text.split())
    return [number for ends in ranges for number in range(int(ends[0]), int(ends[-1]) + 1)]


def _close_files(libc: ctypes.CDLL, scratch: str | None) -> None:
    """Landlock: reads below the folders of the library, writes below `scratch`, nothing else anywhere."""
    abi = libc.syscall(_CREATE_RULESET, None, 0, 1)
    if abi < 1:
        raise OSError("this kernel has no Landlock (it needs Linux 5.13 or newer, with Landlock switched on)")
    files = (1 << (13 if abi == 1 else 14 if abi == 2 else 15 if abi < 5 else 16)) - 1
    attributes = struct.pack("QQQ", files, 3 if abi >= 4 else 0, 3 if abi >= 6 else 0)
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    ruleset = libc.syscall(_CREATE_RULESET, ctypes.c_char_p(attributes), size, 0)
    if ruleset < 0:
        raise OSError("Landlock refused the rules")
    # Extension modules need shared libraries of the system.
    reads = [os.path.dirname(os.__file__), os.path.join(sys.base_exec_prefix, "lib")]
    reads += ["/lib", "/lib64", "/usr/lib", "/usr/share/zoneinfo"]
    reads += [path for path in sys.path if path.startswith((sys.prefix, sys.base_prefix))]
    for path, rights in [*((path, _READS) for path in reads), *([(scratch, _READS | _WRITES)] if scratch else [])]:
        try:
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue
        rule = struct.pack("=Qi", rights & files, descriptor)
        if libc.syscall(_ADD_RULE, ruleset, 1, ctypes.c_char_p(rule), 0):
            raise OSError("Landlock refused a rule")
        os.close(descriptor)
    if libc.syscall(_RESTRICT_SELF, ruleset, 0):
        raise OSError("Landlock could not be switched on")
    os.close(ruleset)


def _filter(scratch: str | None) -> bytes:
    """The seccomp program (struct sock_filter[]): the architecture, calls with conditions, then the other calls."""
    machine = os.uname().machine
    if machine not in _CALLS:
        raise OSError(f"the numbers of its system calls are unknown on {machine}")
    architecture, allowed, changes, special = _CALLS[machine]
    load, equal, at_least, some, give = 0x20, 0x15, 0x35, 0x45, 0x06
    code = [
        (load, 0, 0, 4),
        (equal, 1, 0, architecture),
        (give, 0, 0, _KILL),
        (load, 0, 0, 0),
        (at_least, 0, 1, 0x40000000),  # x32 calls have other numbers
        (give, 0, 0, _KILL),
        # A new process is refused, a new thread is not. clone3 hides its flags, and libc does without it.
        (equal, 0, 1, special["clone3"]),
        (give, 0, 0, _ERRNO | _ENOSYS),
        (equal, 0, 5, special["clone"]),
        (load, 0, 0, 16),
        (some, 2, 0, _NEW_NAMESPACES),
        (some, 0, 1, _THREAD),
        (give, 0, 0, _ALLOW),
        (give, 0, 0, _ERRNO | _EPERM),
        # Signals to itself only: abort() sends one.
        (equal, 0, 4, special["tgkill"]),
        (load, 0, 0, 16),
        (equal, 0, 1, os.getpid()),
        (give, 0, 0, _ALLOW),
        (give, 0, 0, _ERRNO | _EPERM),
    ]
    for name, commands in (("fcntl", _FCNTL), ("ioctl", _IOCTL)):
        code += [(equal, 0, 2 + 2 * len(commands), special[name]), (load, 0, 0, 24)]
        for command in commands:
            code += [(equal, 0, 1, command), (give, 0, 0, _ALLOW)]
        code.append((give, 0, 0, _ERRNO | _EPERM))
    for number in _numbers(f"{allowed} {changes}" if scratch else allowed):
        code += [(equal, 0, 1, number), (give, 0, 0, _ALLOW)]
    code.append((give, 0, 0, _ERRNO | _EPERM))
    return b"".join(struct.pack("HBBI", *line) for line in code)


def _close_calls(libc: ctypes.CDLL, scratch: str | None) -> None:
    program = _filter(scratch)
    buffer = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))
    if libc.prctl(_SECCOMP, 2, ctypes.c_char_p(header), 0, 0):
        raise OSError("the kernel refused the seccomp filter")


def _limit(memory: int, seconds: int, scratch: str | None) -> None:
    for what, value in (
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_FSIZE, 1 << 20 if scratch else 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 64 if scratch else 32),
        (resource.RLIMIT_AS, memory),
    ):
        hard = resource.getrlimit(what)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        try:
            resource.setrlimit(what, (value, value))
        except ValueError as error:  # macOS cannot limit memory
            if not scratch:
                raise OSError(f"a limit was refused: {error}") from error


def _confine(scratch: str | None) -> bool:
    """Give up files and system calls; False if only some of it was possible, which a scratch folder permits.

    Raises:
        OSError: The machine cannot confine the program, and there is no scratch folder.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if sys.platform.startswith("linux"):
        libc.syscall.restype = ctypes.c_long
        libc.prctl(_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        if libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) and not scratch:
            raise OSError("no_new_privs was refused")
    elif not scratch:
        raise OSError(f"{sys.platform} has neither Landlock nor seccomp")
    else:
        return False
    whole = True
    for give_up in (_close_files, _close_calls):
        try:
            give_up(libc, scratch)
        except OSError:
            if not scratch:
                raise
            whole = False
    if not whole:
        libc.unshare(_NEW_USER_AND_NETWORK)
    return whole


def _run(text: str) -> int:
    """Run the program as a notebook would: the value of a last expression is printed."""
    import ast
    import traceback

    names = {"__name__": "__main__", "__builtins__": __builtins__}
    try:
        tree = ast.parse(text, "<program>")
        last = tree.body[-1] if tree.body else None
        if isinstance(last, ast.Expr):
            tree.body.pop()
        exec(compile(tree, "<program>", "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "<program>", "eval"), names)  # noqa: S307
            if value is not None:
                print(repr(value))
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "<program>"]
        where = f" (line {frames[-1].lineno})" if frames else ""
        print(f"{type(error).__name__}: {error}{where}")
        return 1
    return 0


def main() -> int:
    memory, seconds = int(sys.argv[1]), int(sys.argv[2])
    text = sys.stdin.buffer.read().decode("utf-8", "replace")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    scratch = sys.argv[3] if len(sys.argv) > 3 else None
    os.umask(0o077 if scratch else 0o777)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    # Import what the program names before memory gets short; importing all would take longer than most runs.
    for name in ("ast", "collections", "datetime", "decimal", "fractions", "itertools", "json", "math", "random", "re"):
        if name == "ast" or name in text:
            __import__(name)

    _limit(memory, seconds, scratch)
    print("confined" if _confine(scratch) else "limited", flush=True)
    code = _run(text)
    try:
        sys.stdout.flush()
    finally:
        os._exit(code)


if __name__ == "__main__":
    try:
        main()
    except OSError as error:
        print(f"unconfined: {error}", flush=True)
        os._exit(70)
