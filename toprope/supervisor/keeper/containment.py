"""How tightly the processes of a component are held, and by what, on the machine at hand.

Everywhere a guard ends its component and what came of it. On Linux with bubblewrap, guard and component live in a pid
namespace of their own, whose first process is the guard: when the guard is gone, whatever ended it, the kernel ends
everything within, and no process can leave. Whether that works here cannot be told from versions and settings (user
namespaces may be forbidden, /proc masked in a container), so it is tried with all that is needed of it, and the answer
is kept for a while.

The level is the owner's `containment` of settings.yaml: `auto` takes what the trial shows, `bubblewrap` insists on it,
`guard` never uses it. The front end that starts a keeper decides and tells it by an environment variable.
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
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from toprope.atomic import write_json
from toprope.errors import ComponentFailed, TopropeError
from toprope.records.run.folder import read_json
from toprope.supervisor.lock import boot_id

__all__ = [
    "BUBBLEWRAP",
    "ENV_CONTAINMENT",
    "GUARD",
    "Containment",
    "Level",
    "ContainmentSetting",
    "wrap_command",
    "choose_containment",
    "level_from",
    "probe_bubblewrap",
]

Level = Literal["bubblewrap", "guard"]
ContainmentSetting = Literal["auto", "bubblewrap", "guard"]

BUBBLEWRAP: Level = "bubblewrap"
GUARD: Level = "guard"

ENV_CONTAINMENT = "TOPROPE_CONTAINMENT"
"""How the level travels to the keeper. No component gets it."""

_OPTIONS = ("--unshare-pid", "--as-pid-1", "--dev-bind", "/", "/", "--proc", "/proc")
"""A pid namespace with a /proc of its own, and everything else as it is: files, devices, network, /dev/shm. Not
--die-with-parent: that ends the trainer with the keeper, and its last checkpoint with it. The guard sees the keeper's
end on its pipe and gives the crew its grace; as pid 1 it takes everything along when it is killed itself."""

_TRY_WITHIN_S = 10.0
_ENDED_WITHIN_S = 1.0
"""The kernel ends a namespace before the end of its first process is told."""
_TRUSTED_S = 3600.0
"""How long a trial that passed holds."""
_DOUBTED_S = 60.0
"""How long one that did not: what forbids it may be lifted."""

_TRIAL = """
import json, os, sys, time
said, proc = int(sys.argv[1]), int(sys.argv[2])
facts = {"pid": os.getpid(), "self": os.readlink("/proc/self"), "outside": os.readlink("self", dir_fd=proc)}
facts["gpus"] = sorted(name for name in os.listdir("/dev") if name.startswith("nvidia"))
place = os.stat(".")
facts["place"] = [place.st_dev, place.st_ino, os.access(".", os.W_OK)]
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        # A daemon that left its parents. It holds the pipe: its end of file is the proof that the kernel ended it.
        time.sleep(20)
    os._exit(0)
os.write(said, json.dumps(facts).encode() + b"\\n")
os._exit(0)
"""


@dataclass(frozen=True)
class Containment:
    """The level that holds. `why` says, where it is `guard`, what stands against more."""

    level: Level
    why: str = ""


@dataclass(frozen=True)
class WrappedCommand:
    """A command as it is to be started, and descriptors to pass on to it and to close afterwards."""

    command: list[str]
    descriptors: tuple[int, ...] = ()


def level_from(surroundings: Mapping[str, str]) -> Level:
    """What the starter of this keeper decided; `guard` where it said nothing."""
    return BUBBLEWRAP if surroundings.get(ENV_CONTAINMENT) == BUBBLEWRAP else GUARD


def wrap_command(command: Sequence[str], level: Level) -> WrappedCommand:
    """A guard's command line at a level. The program's own arguments begin behind `--`.

    Args:
        command: The guard's argv, its options first.
        level: Where to start it.
    """
    if level != BUBBLEWRAP:
        return WrappedCommand(list(command))
    # By this directory, which is the outer /proc, the guard learns how its component is called out here.
    proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    options = list(command)
    options[options.index("--control") : options.index("--control")] = ["--proc", str(proc)]
    return WrappedCommand([shutil.which("bwrap") or "bwrap", *_OPTIONS, "--", *options], (proc,))


def choose_containment(wanted: ContainmentSetting, cache: Path | None = None) -> Containment:
    """The level that holds here.

    Args:
        wanted: The owner's setting.
        cache: File in which the answer of a trial is kept; None: nothing is read or written.

    Raises:
        ComponentFailed: `bubblewrap` is wanted and does not work here.
    """
    if wanted == GUARD:
        return Containment(GUARD, "the owner's settings say containment: guard")
    why = _kept(cache) if cache is not None else probe_bubblewrap()
    if not why:
        return Containment(BUBBLEWRAP)
    if wanted == BUBBLEWRAP:
        raise ComponentFailed(
            f"The owner's settings say containment: bubblewrap, but {why}.",
            hint="The owner makes it work (toprope doctor says more), or sets containment: auto.",
        )
    return Containment(GUARD, why)


def probe_bubblewrap() -> str:
    """Tries everything that is needed of bubblewrap, in a few hundredths of a second. Empty where all of it works, else
    what does not."""
    if not sys.platform.startswith("linux"):
        return f"{sys.platform} has no pid namespaces"
    program = shutil.which("bwrap")
    if program is None:
        return "bwrap is not installed"
    return _tried(program)


def _tried(program: str) -> str:
    reader, said = os.pipe()
    proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    command = [program, *_OPTIONS, "--", sys.executable, "-I", "-S", "-c", _TRIAL, str(said), str(proc)]
    # A file that has no name, not a pipe: the daemon that this is about would hold its other end.
    complaints, process = tempfile.TemporaryFile(), None
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=complaints,
            pass_fds=(said, proc),
            start_new_session=True,
        )
        os.close(said)
        said = -1
        try:
            code = process.wait(_TRY_WITHIN_S)
        except subprocess.TimeoutExpired:
            return "bwrap does not come to an end here"
        if code != 0:
            complaints.seek(0)
            last = complaints.read().decode(errors="replace").strip().splitlines()[-1:] or [f"exit status {code}"]
            return f"bwrap may not do here what is needed ({last[0][:200]})"
        data, ended, limit = b"", False, time.monotonic() + _ENDED_WITHIN_S
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
        for descriptor in (reader, proc, said):
            if descriptor >= 0:
                os.close(descriptor)
    return _judged(data, ended)


def _judged(data: bytes, ended: bool) -> str:
    try:
        facts = json.loads(data)
    except ValueError:
        return "a program within bwrap says nothing here"
    if facts.get("pid") != 1 or facts.get("self") != "1":
        return "bwrap gives no pid namespace with a /proc of its own here"
    if not str(facts.get("outside", "")).isdigit() or facts["outside"] == "1":
        return "the outer /proc cannot be read within bwrap here"
    place = os.stat(".")
    if facts.get("place") != [place.st_dev, place.st_ino, os.access(".", os.W_OK)]:
        return "folders are not within bwrap what they are outside"
    if facts.get("gpus") != sorted(name for name in os.listdir("/dev") if name.startswith("nvidia")):
        return "GPUs are not seen within bwrap"
    return "" if ended else "a daemon outlived its pid namespace here"


def _kept(cache: Path) -> str:
    """The answer of the last trial on this machine since it was started, or of a new one."""
    here = _here()
    with suppress(TopropeError, TypeError, ValueError, KeyError):
        known = read_json(cache)
        age = time.time() - float(known["at"])
        if known["here"] == here and 0 <= age < (_DOUBTED_S if known["why"] else _TRUSTED_S):
            return str(known["why"])
    why = probe_bubblewrap()
    with suppress(OSError):  # the next one tries again
        write_json(cache, {"version": 1, "here": here, "at": time.time(), "why": why})
    return why


def _here() -> dict[str, Any]:
    """What an answer holds for: this boot of this machine, this user, this container, this bwrap."""
    program = shutil.which("bwrap")
    found: dict[str, Any] = {"platform": sys.platform, "uid": os.getuid(), "program": program, "boot": boot_id()}
    if program:
        stat = os.stat(program)
        found["built"] = [stat.st_mtime_ns, stat.st_size, stat.st_mode]
    for kind in ("user", "mnt", "pid"):
        with suppress(OSError):
            found[kind] = os.readlink(f"/proc/self/ns/{kind}")
    return found
