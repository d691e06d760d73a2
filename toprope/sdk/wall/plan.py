"""The wall around a worker: what its caller asks for, and the command line that builds it.

A worker reads its sources, its interpreter, the system's libraries and the data that its owner declared. It writes a
scratch folder and a HOME of its own. Landlock and a seccomp filter hold that (Linux 5.13 or newer); bubblewrap stands
in where Landlock is missing. `enter.py` builds the wall before the worker's interpreter starts, so that also packages
which run code at its start are behind it.
"""

from __future__ import annotations

import functools
import marshal
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal

from toprope.sdk.errors import WorkerDied
from toprope.sdk.wall import kernel, paths

__all__ = [
    "Level",
    "Network",
    "Plan",
    "Wall",
    "command_for",
    "entering",
    "level_here",
    "namespaces_refusal",
    "network_refusal",
    "variables_behind",
]

Network = Literal["allow", "own", "deny"]
Level = Literal["landlock", "bubblewrap", "none"]

_ENTER = Path(__file__).with_name("enter.py")
_SDK = Path(__file__).parents[1]
_CACHES = (
    *("HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "TORCH_HOME", "MPLCONFIGDIR", "PYTHONPYCACHEPREFIX"),
    *("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME", "XDG_RUNTIME_DIR", "PIP_CACHE_DIR"),
    *("UV_CACHE_DIR", "TRITON_CACHE_DIR", "NUMBA_CACHE_DIR"),
)
"""Variables that name folders to write to. They pass only if the wall lets a worker write there."""
_FILES_IN_VARIABLES = ("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "NODE_EXTRA_CA_CERTS")
_PATHS_IN_VARIABLES = ("PYTHONPATH", "LD_LIBRARY_PATH", "PYTHONUSERBASE")
_TRIAL_S = 30.0


@dataclass(frozen=True)
class Wall:
    """Rights of a worker. The defaults: its interpreter, the system, a scratch folder, the network."""

    sources: tuple[str, ...] = ()
    """Files and folders of its code and data, in which hidden files stay closed."""
    reads: tuple[str, ...] = ()
    """Files and folders that it reads, with all that is in them."""
    writes: tuple[str, ...] = ()
    """Files and folders that it changes, besides its scratch folder and HOME."""
    closed: tuple[str, ...] = ()
    """Folders that are no part of any of these, wherever they lie, unless one is named from within."""
    home: str | None = None
    """Its HOME, which is kept; None: a part of the scratch folder."""
    network: Network = "allow"
    """own: a network with nothing but loopback and what the caller relays; deny: no network."""
    memory_mb: int = 0
    """Memory that one process may allocate in MB; 0: no limit."""
    trusted: bool = False
    """The owner lets it out: only limits and `network` hold."""
    required: bool = False
    """Refuse to start it without Landlock or bubblewrap."""
    withheld: tuple[str, ...] = ()
    """Names of variables that it does not get."""


@dataclass
class Plan:
    """The wall as `enter.py` builds it."""

    reads: list[str] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    """Read without hidden files."""
    writes: list[str] = field(default_factory=list)
    devices: list[str] = field(default_factory=list)
    scratch: str = ""
    """Holds a `/tmp` and a `/var/tmp` of its own; empty: it has none."""
    landlock: int = 0
    """Version of Landlock to use; 0: none."""
    mounts: bool = True
    trusted: bool = False
    within: bool = False
    """Only the files, for a process that has a wall already."""
    network: Network = "allow"
    listener_maker: int = -1
    memory_mb: int = 0
    disk_mb: int = 0
    """Largest file in MB; 0: no limit."""
    descriptors: int = 0
    tasks: int = 0
    """Most processes and threads; 0: no limit."""
    groups: list[str] = field(default_factory=list)
    """Control groups to join."""
    spared: list[int] = field(default_factory=list)
    """Processes that get no signal from it where Landlock does not keep signals in."""


@functools.cache
def level_here() -> tuple[Level, str]:
    """The wall that this machine can build, and what it lacks; empty if nothing."""
    if why := kernel.why_unsupported():
        return "none", why
    abi = kernel.landlock_abi()
    if abi:
        return "landlock", "" if abi >= 6 else f"Landlock {abi} lets signals out (Linux 6.12 keeps them in)"
    if program := shutil.which("bwrap"):
        command = [program, *_BUBBLEWRAP, "--ro-bind", "/", "/", "--", sys.executable, "-I", "-S", "-c", ""]
        try:
            if subprocess.run(command, capture_output=True, timeout=_TRIAL_S, check=False).returncode == 0:
                return "bubblewrap", "this kernel has no Landlock (Linux 5.13)"
        except (OSError, subprocess.TimeoutExpired):
            pass
    return "none", "this kernel has no Landlock (Linux 5.13), and bubblewrap does not work here"


_BUBBLEWRAP = ("--unshare-pid", "--die-with-parent", "--proc", "/proc", "--dev", "/dev")


@functools.cache
def network_refusal(network: Network) -> str:
    """Return why a worker cannot have this network here; empty if it can. Tries it in a child process."""
    if network == "allow":
        return ""
    if why := kernel.why_unsupported():
        return why
    trial = Plan(trusted=True, network=network)
    command = [*entering(trial), sys.executable, "-I", "-S", "-c", ""]
    try:
        process = subprocess.run(command, capture_output=True, timeout=_TRIAL_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"it cannot be tried: {error}"
    return "" if process.returncode == 0 else process.stderr.decode(errors="replace").strip().rpartition("\n")[2][:200]


@functools.cache
def namespaces_refusal() -> str:
    """Return why file systems cannot be made read-only for a worker alone; empty if they can.

    Without that, attributes of files cannot be changed at all, the shared memory of the owner's other processes is
    within a worker's reach, and it has no `/tmp` of its own.
    """
    program = "import sys; sys.path.insert(0, sys.argv[1]); import enter; enter.close_mounts([])"
    command = [sys.executable, "-I", "-S", "-c", program, str(_ENTER.parent)]
    try:
        process = subprocess.run(command, capture_output=True, timeout=_TRIAL_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"it cannot be tried: {error}"
    return "" if process.returncode == 0 else process.stderr.decode(errors="replace").strip().rpartition("\n")[2][:200]


def plan_for(wall: Wall, python: str, variables: Mapping[str, str], writes: Sequence[str]) -> Plan:
    """The wall for a worker.

    Args:
        wall: What it may do.
        python: Its interpreter.
        variables: Its environment without a wall.
        writes: Its own folders.

    Raises:
        WorkerDied: The wall is required and cannot be built, or the network cannot be had.
    """
    level, lacks = level_here()
    if wall.required and not wall.trusted and level == "none":
        raise WorkerDied(
            f"No wall can be built around this worker ({lacks}), and the owner's settings say wall.missing: refuse. "
            "Nothing of its code was run."
        )
    if why := network_refusal(wall.network):
        raise WorkerDied(f"environment.network: {wall.network} cannot be had here: {why}. Set it to allow.")
    files_named = [variables[name] for name in _FILES_IN_VARIABLES if name in variables]
    packages = [place for name in _PATHS_IN_VARIABLES for place in variables.get(name, "").split(os.pathsep) if place]
    read_paths = [*paths.interpreter_paths(python), str(_SDK), *files_named, *wall.reads]
    sources = [*paths.editable_paths(python), *packages, *wall.sources]
    return Plan(
        reads=[*paths.SYSTEM, *paths.without(read_paths, wall.closed)],
        sources=[place for source in sources for place in _visible_places(source, wall.closed)],
        writes=[*writes, *paths.without(wall.writes, wall.closed), kernel.SHARED_MEMORY],
        devices=paths.devices(),
        landlock=kernel.landlock_abi() if level == "landlock" and not wall.trusted else 0,
        trusted=wall.trusted,
        network=wall.network,
        memory_mb=wall.memory_mb,
        spared=[os.getpid(), os.getppid()],
    )


def _visible_places(source: str, closed: Sequence[str]) -> Iterator[str]:
    for place in paths.without([os.path.abspath(source)], closed):
        inside = os.path.relpath(place, source)
        if inside == "." or not any(map(kernel.is_hidden, inside.split(os.sep))):
            yield place


def command_for(plan: Plan, command: Sequence[str], cwd: str) -> list[str]:
    """The command line that builds the wall and then starts `command` behind it.

    Args:
        plan: The wall.
        command: The worker's interpreter, by its absolute path, and its arguments.
        cwd: The worker's folder.
    """
    if plan.trusted or plan.landlock or level_here()[0] != "bubblewrap":
        return [*entering(plan), *command]
    wrapped = [shutil.which("bwrap") or "bwrap", *_BUBBLEWRAP, "--tmpfs", "/tmp", "--tmpfs", "/var/tmp"]
    visible = [
        place for source in plan.sources for place, right in kernel.without_hidden(source) if right == kernel.READ
    ]
    reads = [*plan.reads, *visible, str(_ENTER.parent), sys.prefix, sys.base_prefix]
    reads = [place for place in reads if place != "/proc"]
    for option, places in (("--ro-bind-try", reads), ("--bind-try", plan.writes), ("--dev-bind-try", plan.devices)):
        for place in _outermost(places):
            wrapped += [option, place, place]
    # Control groups are out of reach behind bubblewrap, so they are joined before it.
    outside, inside = Plan(trusted=True, groups=plan.groups), replace(plan, groups=[])
    return [*entering(outside), *wrapped, "--chdir", cwd, "--", *entering(inside), *command]


def _outermost(places: Sequence[str]) -> list[str]:
    """Leave out what lies within another place; a mount on a link there would have to create its target."""
    outermost: list[str] = []
    for place in sorted(places, key=len):
        if not any(kernel.is_within(place, outer) for outer in outermost):
            outermost.append(place)
    return outermost


def entering(plan: Plan) -> list[str]:
    """The beginning of a command line that builds a wall and then starts what follows."""
    return [sys.executable, "-I", "-S", str(_ENTER), marshal.dumps(asdict(plan)).hex()]


def variables_behind(variables: Mapping[str, str], plan: Plan, scratch: str, home: str) -> dict[str, str]:
    """A worker's environment variables: folders to write to are its own.

    Args:
        variables: All it would have without a wall.
        plan: The wall.
        scratch: For temporary files.
        home: Its HOME.
    """
    result = dict(variables)
    if plan.network != "allow":  # Its library asks the Hub again and again, 23 s for each missing file.
        result.setdefault("HF_HUB_OFFLINE", "1")
    if plan.trusted:
        return result
    writable = [os.path.realpath(place) for place in plan.writes]
    for name in _CACHES:
        place = result.get(name)
        if place and not any(kernel.is_within(os.path.realpath(place), folder) for folder in writable):
            del result[name]
    users = os.path.join(os.path.expanduser("~"), ".local")
    if os.path.isdir(os.path.join(users, "lib")) and users in plan.reads:
        result.setdefault("PYTHONUSERBASE", users)
    if plan.landlock:  # Searches for a program ask access(2), which names some that the wall then refuses to start.
        folders = [os.path.realpath(place) for place in (*plan.reads, *plan.sources, *plan.writes)]
        folders_of_files = {os.path.realpath(os.path.dirname(place)) for place in plan.reads if os.path.isfile(place)}
        result["PATH"] = os.pathsep.join(
            place
            for place in result.get("PATH", os.defpath).split(os.pathsep)
            if os.path.realpath(place) in folders_of_files
            or any(kernel.is_within(os.path.realpath(place), folder) for folder in folders)
        )
    result |= {"TOPROPE_WALLED": "1", "GIT_CONFIG_NOSYSTEM": "1"}  # git gives up if it cannot read /etc/gitconfig
    folders_of_its_own = {"HOME": home, "TMPDIR": scratch, "TEMP": scratch, "TMP": scratch}
    result |= {name: place or "/nonexistent" for name, place in folders_of_its_own.items()}
    return result
