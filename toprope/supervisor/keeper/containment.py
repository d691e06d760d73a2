"""Chooses the level of containment for the processes of a component on this machine.

On every system a guard ends its component and the component's descendants. On Linux with bubblewrap, guard and
component run in a pid namespace of their own, whose first process is the guard: when the guard ends for any reason, the
kernel ends every process in the namespace, and no process can leave it. Versions and settings do not show whether this
works (user namespaces may be forbidden, /proc masked in a container), so a trial uses every feature that is needed, and
its result is cached for a while.

The owner sets the level by `containment` in settings.yaml: `auto` follows the trial, `bubblewrap` requires it, `guard`
never uses it. The front end that starts a keeper decides, and passes the level on by an environment variable.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from toprope.atomic import write_json
from toprope.errors import ComponentFailed, TopropeError
from toprope.machine import boot_id
from toprope.records.run.folder import read_json

Level = Literal["bubblewrap", "guard"]
ContainmentSetting = Literal["auto", "bubblewrap", "guard"]

BUBBLEWRAP: Level = "bubblewrap"
GUARD: Level = "guard"

ENV_CONTAINMENT = "TOPROPE_CONTAINMENT"
"""Carries the level to the keeper. No component gets it."""

_OPTIONS = ("--unshare-pid", "--as-pid-1", "--dev-bind", "/", "/", "--proc", "/proc")
"""A pid namespace with its own /proc, and everything else unchanged: files, devices, network, /dev/shm. Not
--die-with-parent, which would end the trainer with the keeper, before its last checkpoint. The guard sees the keeper's
end on its pipe and gives the crew its grace; if the guard, as pid 1, is killed, every process in the namespace ends."""

_TRIAL_TIMEOUT_S = 10.0
_DAEMON_TIMEOUT_S = 1.0
"""The kernel ends a namespace before it reports the end of the first process."""
_PASSED_FOR_S = 3600.0
"""A trial that passed is repeated after so long."""
_FAILED_FOR_S = 60.0
"""A trial that failed is repeated sooner, because the cause may go away."""

_TRIAL = """
import json, os, sys, time
writer, proc = int(sys.argv[1]), int(sys.argv[2])
facts = {"pid": os.getpid(), "self": os.readlink("/proc/self"), "outside": os.readlink("self", dir_fd=proc)}
facts["gpus"] = sorted(name for name in os.listdir("/dev") if name.startswith("nvidia"))
place = os.stat(".")
facts["place"] = [place.st_dev, place.st_ino, os.access(".", os.W_OK)]
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        # A daemon that left its parents and holds the pipe: the end of file proves that the kernel ended it.
        time.sleep(20)
    os._exit(0)
os.write(writer, json.dumps(facts).encode() + b"\\n")
os._exit(0)
"""


@dataclass(frozen=True)
class Containment:
    """The chosen level; for `guard`, `why` is the reason against `bubblewrap`."""

    level: Level
    why: str = ""


@dataclass(frozen=True)
class WrappedCommand:
    """A command to start, and descriptors to pass on to it and to close afterwards."""

    command: list[str]
    descriptors: tuple[int, ...] = ()


def level_from(surroundings: Mapping[str, str]) -> Level:
    """Return the level in a keeper's environment variables; `guard` without one."""
    return BUBBLEWRAP if surroundings.get(ENV_CONTAINMENT) == BUBBLEWRAP else GUARD


def wrap_command(command: Sequence[str], level: Level) -> WrappedCommand:
    """Wrap a guard's command line for a level of containment. The program's own arguments follow `--`.

    Args:
        command: The guard's argv, its options first.
        level: The level of containment.
    """
    if level != BUBBLEWRAP:
        return WrappedCommand(list(command))
    # Through this directory, the outer /proc, the guard learns the process id of its component outside the namespace.
    proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    options = list(command)
    options[options.index("--control") : options.index("--control")] = ["--proc", str(proc)]
    return WrappedCommand([shutil.which("bwrap") or "bwrap", *_OPTIONS, "--", *options], (proc,))


def choose_containment(wanted: ContainmentSetting, cache: Path | None = None) -> Containment:
    """Choose the level of containment on this machine.

    Args:
        wanted: The owner's setting.
        cache: File with the result of the last trial; None: always try, and store nothing.

    Raises:
        ComponentFailed: The owner requires `bubblewrap`, which does not work here.
    """
    if wanted == GUARD:
        return Containment(GUARD, "the owner's settings say containment: guard")
    why = _cached_trial(cache) if cache is not None else probe_bubblewrap()
    if not why:
        return Containment(BUBBLEWRAP)
    if wanted == BUBBLEWRAP:
        raise ComponentFailed(
            f"The owner's settings say containment: bubblewrap, but {why}.",
            hint="The owner makes it work (toprope doctor shows more), or sets containment: auto.",
        )
    return Containment(GUARD, why)


def choose_on_node(surroundings: MutableMapping[str, str]) -> None:
    """Replace the owner's setting in a far keeper's variables by the level that works on its node.

    Raises:
        ComponentFailed: As `choose_containment`.
    """
    wanted = surroundings.get(ENV_CONTAINMENT)
    chosen: ContainmentSetting = "bubblewrap" if wanted == BUBBLEWRAP else "guard" if wanted == GUARD else "auto"
    surroundings[ENV_CONTAINMENT] = choose_containment(chosen).level


def probe_bubblewrap() -> str:
    """Try every needed feature of bubblewrap, in a few hundredths of a second. Return an empty text if all of them
    work, else the reason against it."""
    if not sys.platform.startswith("linux"):
        return f"{sys.platform} has no pid namespaces"
    program = shutil.which("bwrap")
    if program is None:
        return "bwrap is not installed"
    return _try(program)


def _try(program: str) -> str:
    reader, writer = os.pipe()
    proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    command = [program, *_OPTIONS, "--", sys.executable, "-I", "-S", "-c", _TRIAL, str(writer), str(proc)]
    # A file without a name instead of a pipe, because the daemon of the trial would hold the other end of a pipe.
    complaints, process = tempfile.TemporaryFile(), None
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=complaints,
            pass_fds=(writer, proc),
            start_new_session=True,
        )
        os.close(writer)
        writer = -1
        try:
            code = process.wait(_TRIAL_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return "bwrap does not end here"
        if code != 0:
            complaints.seek(0)
            last_lines = complaints.read().decode(errors="replace").strip().splitlines()[-1:] or [f"exit status {code}"]
            return f"bwrap lacks the permissions that it needs here ({last_lines[0][:200]})"
        data, ended, limit = b"", False, time.monotonic() + _DAEMON_TIMEOUT_S
        while not ended and select.select([reader], [], [], max(0.0, limit - time.monotonic()))[0]:
            chunk = os.read(reader, 4096)
            data, ended = data + chunk, not chunk
    except OSError as error:
        return f"bwrap cannot be started: {error.strerror or error}"
    finally:
        if process is not None and process.poll() is None:
            process.kill()
            process.wait()
        complaints.close()
        for descriptor in (reader, proc, writer):
            if descriptor >= 0:
                os.close(descriptor)
    return _judge(data, ended)


def _judge(data: bytes, ended: bool) -> str:
    try:
        facts = json.loads(data)
    except ValueError:
        return "a program within bwrap cannot report here"
    if facts.get("pid") != 1 or facts.get("self") != "1":
        return "bwrap gives no pid namespace with a /proc of its own here"
    if not str(facts.get("outside", "")).isdigit() or facts["outside"] == "1":
        return "the outer /proc cannot be read within bwrap here"
    place = os.stat(".")
    if facts.get("place") != [place.st_dev, place.st_ino, os.access(".", os.W_OK)]:
        return "folders look different within bwrap"
    if facts.get("gpus") != sorted(name for name in os.listdir("/dev") if name.startswith("nvidia")):
        return "GPUs are not visible within bwrap"
    return "" if ended else "a daemon outlived its pid namespace here"


def _cached_trial(cache: Path) -> str:
    """Return the result of the last trial since this machine booted, or of a new trial."""
    machine = _identify_machine()
    with suppress(TopropeError, TypeError, ValueError, KeyError):
        trial = read_json(cache)
        age = time.time() - float(trial["at"])
        if trial["here"] == machine and 0 <= age < (_FAILED_FOR_S if trial["why"] else _PASSED_FOR_S):
            return str(trial["why"])
    why = probe_bubblewrap()
    with suppress(OSError):  # the next caller tries again
        write_json(cache, {"version": 1, "here": machine, "at": time.time(), "why": why})
    return why


def _identify_machine() -> dict[str, Any]:
    """Return everything that a result depends on: boot, user, container and bwrap."""
    program = shutil.which("bwrap")
    facts: dict[str, Any] = {"platform": sys.platform, "uid": os.getuid(), "program": program, "boot": boot_id()}
    if program:
        stat = os.stat(program)
        facts["built"] = [stat.st_mtime_ns, stat.st_size, stat.st_mode]
    for kind in ("user", "mnt", "pid"):
        with suppress(OSError):
            facts[kind] = os.readlink(f"/proc/self/ns/{kind}")
    return facts
