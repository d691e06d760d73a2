"""The child process that runs an untrusted program. It is started by its path, never imported:

    python -I -S -B _confined.py MEMORY_BYTES CPU_SECONDS COUNTER [SCRATCH_FOLDER [tests]]

It reads the program from standard input, gives up everything that could do harm, and only then runs the program. On
Linux, without any privilege, it gives up:

- files: under Landlock it can read Python's library and write nothing but the scratch folder, if one is given
  (kernel.org, userspace-api/landlock);
- network, other processes, signals and everything else that is not computing: a seccomp filter passes a list of system
  calls and refuses all others with EPERM (kernel.org, userspace-api/seccomp_filter);
- memory and CPU time: resource limits. The parent limits wall time, output and threads: it answers each request for a
  thread, which arrives at a descriptor that it gets over the socket COUNTER.

It prints `confined` before it runs the program; without that word the parent must not trust what follows. If the
machine cannot confine it, it runs nothing and exits with 70. With a scratch folder it goes on and prints `limited`:
what can be given up is given up, the rest stays.

With `tests` it reads code, tests and the word that reports success; `_apart.py` says how they run in two processes.
"""

import ctypes
import functools
import marshal
import os
import resource
import signal
import struct
import sys

_HERE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "wall")
sys.path.insert(0, _HERE)
import kernel  # type: ignore[import-not-found]  # noqa: E402  # by its path, like this file

sys.path.remove(_HERE)

_DEATH_SIGNAL, _SECCOMP = 1, 22
_WRITES = (
    kernel.WRITE_FILE | kernel.REMOVE_DIR | kernel.REMOVE_FILE | kernel.MAKE_DIR | kernel.MAKE_REG | kernel.TRUNCATE
)
_NEW_USER_AND_NETWORK = kernel.NEW_USER | kernel.NEW_NETWORK
_FCNTL = (0, 1, 2, 3, 4, 1030)  # duplicate, flags; not F_SETOWN, by which others get signals
_IOCTL = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # is it a terminal, its size, bytes to read, flags

_EPERM, _EAGAIN, _ENOSYS = 1, 11, 38

# The calls that Python needs to compute: memory, time, files that Landlock still lets it open. By machine: the calls
# that pass, and those that change a scratch folder.
_CALLS = {
    "x86_64": (
        "0-15 17 19-25 28 32 33 35 39 60 63 78-81 89 96-100 102 104 107 108 110 131 158 186 201 202 204 217 218 228-233"
        " 257 262 267 269-271 273 281 290-293 318 332 334 439 441",
        "77 82-84 87 258 263 264 316",
    ),
    "aarch64": (
        "17 19-24 43 44 48-50 56 57 59 61-67 72 73 78-80 93 94 96 98 99 101 113-115 123 124 132 134-136 139 153 160 163"
        " 165 169 172-179 214-216 222 226 233 278 291 293 439 441",
        "34 35 38 46 276",
    ),
}


def _numbers(text: str) -> list[int]:
    """`0-2 5` as 0, 1, 2, 5."""
    ranges = (part.split("-") for part in text.split())
    return [number for ends in ranges for number in range(int(ends[0]), int(ends[-1]) + 1)]


def _close_files(scratch: str | None) -> None:
    """Landlock: reads below the folders of the library, writes below `scratch`, nothing else anywhere."""
    abi = kernel.landlock_abi()
    if abi < 1:
        raise OSError("this kernel has no Landlock (it needs Linux 5.13 or newer, with Landlock switched on)")
    # Extension modules need shared libraries of the system.
    reads = [os.path.dirname(os.__file__), os.path.join(sys.base_exec_prefix, "lib")]
    reads += ["/lib", "/lib64", "/usr/lib", "/usr/share/zoneinfo"]
    reads += [path for path in sys.path if path.startswith((sys.prefix, sys.base_prefix))]
    rules = [(path, kernel.READ) for path in reads]
    kernel.restrict_files([*rules, *([(scratch, kernel.READ | _WRITES)] if scratch else [])], abi, tcp=False)


def _filter(scratch: str | None, threads: bool) -> list[kernel.Line]:
    """The filter: the architecture, calls with conditions, then the other calls.

    Args:
        scratch: The folder that may be changed.
        threads: True if threads may be made.
    """
    if why := kernel.why_unsupported():
        raise OSError(why)
    allowed, changes = _CALLS[os.uname().machine]
    allow, refuse = kernel.give(kernel.ALLOW), kernel.give(kernel.ERRNO | _EPERM)
    lines = kernel.own_architecture(kernel.KILL)
    # A new process is refused. clone3 hides its flags, and libc does without it.
    lines += kernel.when("clone3", [kernel.give(kernel.ERRNO | _ENOSYS)])
    namespaces = (kernel.SOME, 0, 1, kernel.NEW_NAMESPACES & ~0xFF)
    thread = [(kernel.SOME, 0, 1, kernel.THREAD), allow if threads else kernel.give(kernel.ERRNO | _EAGAIN)]
    lines += kernel.when("clone", [kernel.argument(0), namespaces, refuse, *thread, refuse])
    # Signals to itself only: abort() sends one.
    lines += kernel.when("tgkill", [kernel.argument(0), (kernel.EQUAL, 0, 1, os.getpid()), allow, refuse])
    for name, commands in (("fcntl", _FCNTL), ("ioctl", _IOCTL)):
        checked = [line for command in commands for line in ((kernel.EQUAL, 0, 1, command), allow)]
        lines += kernel.when(name, [kernel.argument(1), *checked, refuse])
    for number in _numbers(f"{allowed} {changes}" if scratch else allowed):
        lines += [(kernel.EQUAL, 0, 1, number), allow]
    return [*lines, refuse]


def _have_threads_counted(counter: int) -> bool:
    """Have the parent answer each request for a new thread; False if this kernel cannot.

    Args:
        counter: Socket that takes the descriptor on which the requests arrive.
    """
    import _socket

    thread_checks = [(kernel.SOME, 0, 1, kernel.THREAD), kernel.give(kernel.NOTIFY)]
    allow = kernel.give(kernel.ALLOW)
    lines = kernel.own_architecture(kernel.KILL) + kernel.when("clone", [kernel.argument(0), *thread_checks, allow])
    try:
        listener = kernel.install_filter([*lines, allow], listener=True)
    except OSError:
        return False
    parent = _socket.socket(fileno=counter)
    parent.sendmsg([b"+"], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, struct.pack("i", listener))])
    os.close(listener)
    parent.close()
    return True


def _close_calls(scratch: str | None, counter: int) -> None:
    # The order matters: the second filter lets no filter be added.
    kernel.install_filter(_filter(scratch, counter >= 0 and _have_threads_counted(counter)))


def _limit(memory: int, seconds: int, scratch: str | None) -> None:
    for limited_resource, value in (
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_FSIZE, 1 << 20 if scratch else 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 64 if scratch else 32),
        (resource.RLIMIT_AS, memory),
    ):
        hard = resource.getrlimit(limited_resource)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        try:
            resource.setrlimit(limited_resource, (value, value))
        except ValueError as error:  # macOS cannot limit memory
            if not scratch:
                raise OSError(f"a limit was refused: {error}") from error


def _confine(scratch: str | None, counter: int) -> bool:
    """Give up files and system calls; False if only some of it was possible, which a scratch folder permits.

    Raises:
        OSError: The machine cannot confine the program, and there is no scratch folder.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if sys.platform.startswith("linux"):
        libc.prctl(_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        try:
            kernel.forbid_new_privileges()
        except OSError:
            if not scratch:
                raise
    elif not scratch:
        raise OSError(f"{sys.platform} has neither Landlock nor seccomp")
    else:
        return False
    whole = True
    for give_up in (functools.partial(_close_files, scratch), functools.partial(_close_calls, scratch, counter)):
        try:
            give_up()
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
        last_statement = tree.body[-1] if tree.body else None
        if isinstance(last_statement, ast.Expr):
            tree.body.pop()
        exec(compile(tree, "<program>", "exec"), names)
        if isinstance(last_statement, ast.Expr):
            value = eval(compile(ast.Expression(last_statement.value), "<program>", "eval"), names)  # noqa: S307
            if value is not None:
                print(repr(value))
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "<program>"]
        location = f" (line {frames[-1].lineno})" if frames else ""
        print(f"{type(error).__name__}: {error}{location}")
        return 1
    return 0


def _test(memory: int, seconds: int, counter: int, scratch: str) -> None:
    """Run code in this process and its tests in another, which alone reads the tests and the word."""
    place = os.path.dirname(os.path.abspath(__file__))
    sys.path.insert(0, place)
    import _apart  # type: ignore[import-not-found]  # by its path, like this file

    sys.path.remove(place)
    os.umask(0o077)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    (requests, asks), (answers, says) = os.pipe(), os.pipe()
    is_of_tests = os.fork() == 0
    for descriptor in (requests, says, counter) if is_of_tests else (asks, answers):
        os.close(descriptor)
    request = sys.stdin.buffer.read() if is_of_tests else b""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    _limit(memory, seconds, scratch)
    whole = _confine(scratch, -1 if is_of_tests else counter)
    if is_of_tests:
        try:
            _apart.run_tests(answers, asks, *marshal.loads(request))
        finally:
            os._exit(0)
    print("confined" if whole else "limited", flush=True)
    _apart.serve_code(requests, says)


def main() -> int:
    memory, seconds, counter = map(int, sys.argv[1:4])
    if sys.argv[5:] == ["tests"]:
        _test(memory, seconds, counter, sys.argv[4])
    text = sys.stdin.buffer.read().decode("utf-8", "replace")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    scratch = sys.argv[4] if len(sys.argv) > 4 else None
    os.umask(0o077 if scratch else 0o777)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    # Import what the program names before memory gets short; importing all would take longer than most runs.
    for name in ("ast", "collections", "datetime", "decimal", "fractions", "itertools", "json", "math", "random", "re"):
        if name == "ast" or name in text:
            __import__(name)

    _limit(memory, seconds, scratch)
    print("confined" if _confine(scratch, counter) else "limited", flush=True)
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
