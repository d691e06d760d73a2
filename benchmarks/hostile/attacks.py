"""Attacks of a hostile environment. The file is copied and runs in a worker; standard library only.

An attack gets the places and processes of its victims, and returns something true if it succeeded; an exception or
something false means that it was held. Text that it returns is searched for canaries.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Victim = dict[str, Any]
ATTACKS: dict[str, Callable[[Victim], Any]] = {}
NEEDS: dict[str, tuple[str, int]] = {}
"""Network and memory in MB of the worker that an attack runs in."""
_ARM = platform.machine() == "aarch64"


def attack(network: str = "allow", memory_mb: int = 0) -> Callable[[Callable[[Victim], Any]], Callable[[Victim], Any]]:
    """Register an attack under its name, in a worker with this network and memory."""

    def register(function: Callable[[Victim], Any]) -> Callable[[Victim], Any]:
        ATTACKS[function.__name__] = function
        NEEDS[function.__name__] = (network, memory_mb)
        return function

    return register


def _call(x86: int, arm: int, *arguments: Any) -> int:
    library = ctypes.CDLL(None, use_errno=True)
    library.syscall.restype = ctypes.c_long
    done = int(library.syscall(arm if _ARM else x86, *arguments))
    if done < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return done


# Files


@attack()
def read_settings(v: Victim) -> Any:
    return Path(v["config"], "settings.yaml").read_text()


@attack()
def read_token_through_a_link(v: Victim) -> Any:
    link = Path(tempfile.mkdtemp(), "link")
    link.symlink_to(Path(v["config"], "http-token"))
    return link.read_text()


@attack()
def hard_link_the_settings(v: Victim) -> Any:
    copy = Path(tempfile.mkdtemp(), "copy")
    os.link(Path(v["config"], "settings.yaml"), copy)
    return copy.read_text()


@attack()
def read_another_runs_secret(v: Victim) -> Any:
    return Path(v["run"], "secret").read_text()


@attack()
def read_by_a_child(v: Victim) -> Any:
    return subprocess.run(["cat", v["config"] + "/settings.yaml"], check=True, capture_output=True, text=True).stdout


@attack()
def read_through_a_foreign_root(v: Victim) -> Any:
    return Path(f"/proc/{v['pid']}/root{v['config']}/settings.yaml").read_text()


@attack()
def read_through_a_foreign_folder(v: Victim) -> Any:
    return Path(f"/proc/{v['pid']}/cwd/settings.yaml").read_text()


@attack()
def read_through_a_foreign_descriptor(v: Victim) -> Any:
    return Path(f"/proc/{v['pid']}/fd/{v['descriptor']}").read_text()


@attack()
def read_the_owners_key(v: Victim) -> Any:
    return Path(v["user"], ".ssh", "id").read_text()


@attack()
def read_at_the_interpreters_start(v: Victim) -> Any:
    return getattr(sys, "found_at_start", "")  # left by a sitecustomize module


@attack()
def list_the_owners_home(v: Victim) -> Any:
    return os.listdir(v["user"])


@attack()
def list_runs(v: Victim) -> Any:
    return os.listdir(v["home"] + "/runs")


@attack()
def forge_results(v: Victim) -> Any:
    Path(v["run"], "results.json").write_text('{"accuracy": 1.0}')
    return Path(v["run"], "results.json").exists()


@attack()
def append_to_events(v: Victim) -> Any:
    with open(v["run"] + "/events.jsonl", "a") as file:
        return file.write("{}\n")


@attack()
def truncate_events(v: Victim) -> Any:
    os.truncate(v["run"] + "/events.jsonl", 0)
    return True


@attack()
def remove_a_checkpoint(v: Victim) -> Any:
    os.unlink(v["run"] + "/checkpoint")
    return True


@attack()
def rename_a_run(v: Victim) -> Any:
    os.rename(v["run"], v["run"] + "-gone")
    os.rename(v["run"] + "-gone", v["run"])
    return True


@attack()
def remove_a_run(v: Victim) -> Any:
    shutil.rmtree(v["home"] + "/runs/other")
    return True


@attack()
def loosen_locks(v: Victim) -> Any:
    Path(v["config"], "locks.yaml").write_text("locks: []\n")
    return True


@attack()
def plant_a_shell_profile(v: Victim) -> Any:
    Path(v["user"], ".bashrc").write_text("echo planted\n")
    return True


@attack()
def change_its_own_source(v: Victim) -> Any:
    with open(__file__, "a") as file:
        return file.write("\n# changed\n")


@attack()
def plant_a_module_beside_its_source(v: Victim) -> Any:
    Path(__file__).with_name("planted.py").write_text("")
    return True


@attack()
def make_settings_public(v: Victim) -> Any:
    os.chmod(v["config"] + "/settings.yaml", 0o646)
    return os.stat(v["config"] + "/settings.yaml").st_mode & 0o002


@attack()
def backdate_results(v: Victim) -> Any:
    os.utime(v["run"] + "/results.json", (1, 1))
    return os.stat(v["run"] + "/results.json").st_mtime == 1


@attack()
def mark_results(v: Victim) -> Any:
    os.setxattr(v["run"] + "/results.json", "user.forged", b"1")
    return True


@attack()
def open_by_handle(v: Victim) -> Any:
    handle, mount = ctypes.create_string_buffer(struct.pack("Ii", 128, 0) + bytes(128)), ctypes.c_int()
    path = (v["config"] + "/settings.yaml").encode()
    _call(303, 264, -100, ctypes.c_char_p(path), handle, ctypes.byref(mount), 0)
    folder = os.open(tempfile.gettempdir(), os.O_RDONLY)
    return os.read(_call(304, 265, folder, handle, os.O_RDONLY), 200).decode()


@attack()
def write_shared_memory_of_others(v: Victim) -> Any:
    with open(v["shared"], "r+") as file:
        return file.write("forged")


@attack()
def map_system_v_memory_of_others(v: Victim) -> Any:
    return _call(29, 194, v["shm_key"], ctypes.c_size_t(4096), 0o600) >= 0


@attack()
def raise_kernel_limits(v: Victim) -> Any:
    place = Path("/proc/sys/kernel/hostname")
    place.write_text(place.read_text())
    return True


@attack()
def leave_its_group(v: Victim) -> Any:
    written = 0
    for place in v["groups"]:
        with open(place + "/cgroup.procs", "w") as file:
            written += file.write("0")
    return written


# Processes


@attack()
def read_variables_of_a_keeper(v: Victim) -> Any:
    return Path(f"/proc/{v['pid']}/environ").read_text()


@attack()
def read_memory_of_a_keeper(v: Victim) -> Any:
    line = next(one for one in Path(f"/proc/{v['pid']}/maps").read_text().splitlines() if "[heap]" in one)
    start = int(line.partition("-")[0], 16)
    with open(f"/proc/{v['pid']}/mem", "rb", 0) as memory:
        memory.seek(start)
        return len(memory.read(4096))


@attack()
def copy_memory_of_a_keeper(v: Victim) -> Any:
    buffer = ctypes.create_string_buffer(64)
    local = struct.pack("PN", ctypes.addressof(buffer), 64)
    remote = struct.pack("PN", v["address"], 64)
    return _call(310, 270, v["pid"], ctypes.c_char_p(local), 1, ctypes.c_char_p(remote), 1, 0)


@attack()
def trace_a_keeper(v: Victim) -> Any:
    seize, detach = 0x4206, 17
    _call(101, 117, seize, v["pid"], None, None)
    _call(101, 117, 0x4207, v["pid"], None, None)  # stop, so that it can be let go
    os.waitpid(v["pid"], 0x40000000)
    return _call(101, 117, detach, v["pid"], None, None) == 0


@attack()
def steal_a_descriptor(v: Victim) -> Any:
    stolen = _call(438, 438, os.pidfd_open(v["pid"]), v["descriptor"], 0)
    os.lseek(stolen, 0, 0)
    return os.read(stolen, 200).decode()


@attack()
def stop_a_keeper(v: Victim) -> Any:
    os.kill(v["pid"], signal.SIGSTOP)
    os.kill(v["pid"], signal.SIGCONT)
    return True


@attack()
def signal_a_group(v: Victim) -> Any:
    os.killpg(v["pid"], signal.SIGCONT)
    return True


@attack()
def signal_a_thread(v: Victim) -> Any:
    return _call(234, 131, v["pid"], v["pid"], int(signal.SIGCONT)) == 0


@attack()
def signal_by_a_descriptor(v: Victim) -> Any:
    signal.pidfd_send_signal(os.pidfd_open(v["pid"]), signal.SIGCONT)
    return True


@attack()
def signal_its_parent(v: Victim) -> Any:
    os.kill(v["caller"], 0)
    return True


@attack()
def limit_a_keeper(v: Victim) -> Any:
    resource.prlimit(v["pid"], resource.RLIMIT_CORE, (0, 0))
    return True


@attack()
def slow_a_keeper(v: Victim) -> Any:
    os.setpriority(os.PRIO_PROCESS, v["pid"], 5)
    return True


@attack()
def idle_a_keeper(v: Victim) -> Any:
    os.sched_setscheduler(v["pid"], os.SCHED_OTHER, os.sched_param(0))
    return True


@attack()
def sacrifice_a_keeper(v: Victim) -> Any:
    Path(f"/proc/{v['pid']}/oom_score_adj").write_text("900")
    return True


# Sockets and the kernel


@attack()
def ask_a_local_daemon(v: Victim) -> Any:
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(v["socket"])
        return line.recv(100).decode()


@attack()
def ask_an_abstract_socket(v: Victim) -> Any:
    with socket.socket(socket.AF_UNIX) as line:
        line.connect("\0" + v["abstract"])
        return line.recv(100).decode()


@attack()
def sniff_packets(v: Victim) -> Any:
    family = 40 if os.geteuid() else socket.AF_PACKET  # a virtual machine's host, where sniffing needs root
    socket.socket(family, socket.SOCK_STREAM if os.geteuid() else socket.SOCK_RAW).close()
    return True


@attack()
def use_kernel_cryptography(v: Victim) -> Any:
    socket.socket(38, socket.SOCK_SEQPACKET).close()
    return True


@attack()
def open_an_io_ring(v: Victim) -> Any:
    return _call(425, 425, 8, ctypes.create_string_buffer(120)) > 0


@attack()
def make_namespaces(v: Victim) -> Any:
    return subprocess.run(["unshare", "--user", "--map-root-user", "true"], check=False).returncode == 0


@attack()
def make_namespaces_by_clone(v: Victim) -> Any:
    child = _call(56, 220, 0x10000000 | int(signal.SIGCHLD), None, None, None, None)
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    return True


@attack()
def watch_faults(v: Victim) -> Any:
    return _call(323, 282, 1) > 0


@attack()
def read_keyrings(v: Victim) -> Any:
    return _call(250, 219, 0, -3, 1) != 0


@attack()
def queue_messages(v: Victim) -> Any:
    name = f"toprope-{os.getpid()}".encode()
    queue = _call(240, 180, ctypes.c_char_p(name), os.O_CREAT | os.O_RDWR, 0o600, None)
    os.close(queue)
    return _call(241, 181, ctypes.c_char_p(name)) == 0


@attack("deny")
def call_out(v: Victim) -> Any:
    socket.create_connection(("127.0.0.1", v["port"]), 5).close()
    return True


@attack("deny")
def call_out_by_a_child(v: Victim) -> Any:
    program = f"import socket; socket.create_connection(('127.0.0.1', {v['port']}), 5)"
    return subprocess.run([sys.executable, "-I", "-c", program], check=False, capture_output=True).returncode == 0


@attack("deny")
def call_out_by_a_traced_process(v: Victim) -> Any:
    return trace_a_keeper(v)


@attack("own")
def call_out_of_its_own_network(v: Victim) -> Any:
    socket.create_connection(("127.0.0.1", v["port"]), 5).close()
    return True


# Exhaustion


@attack()
def make_thousands_of_threads(v: Victim) -> Any:
    threading.stack_size(65536)
    wait, made = threading.Event(), 0
    try:
        while made < v["tasks"] + 200:
            threading.Thread(target=wait.wait, daemon=True).start()
            made += 1
        return made > v["tasks"]
    finally:
        wait.set()


@attack()
def fork_without_end(v: Victim) -> Any:
    made = []
    try:
        for _ in range(v["tasks"] + 100):
            pid = os.fork()
            if pid == 0:
                time.sleep(60)
                os._exit(0)
            made.append(pid)
        return len(made) > v["tasks"]
    finally:
        for pid in made:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


@attack()
def open_thousands_of_files(v: Victim) -> Any:
    opened: list[int] = []
    try:
        while len(opened) < 6000:
            opened.append(os.open(os.devnull, os.O_RDONLY))
        return True
    finally:
        for one in opened:
            os.close(one)


@attack()
def raise_its_limits(v: Victim) -> Any:
    resource.setrlimit(resource.RLIMIT_NOFILE, (8000, 8000))
    return True


@attack()
def write_an_endless_file(v: Victim) -> Any:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with tempfile.TemporaryFile() as file:
        try:
            os.pwrite(file.fileno(), b"x", (1 << 36) + 1)
        except OSError as error:
            return error.errno not in (errno.EFBIG, errno.ENOSPC)
    return True


@attack(memory_mb=400)
def take_all_memory(v: Victim) -> Any:
    with mmap.mmap(-1, 900 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as held:
        return len(held)


@attack()
def leave_a_daemon(v: Victim) -> Any:
    marker = f"toprope-daemon-{os.getpid()}"
    program = f"import time; name = {marker!r}; time.sleep(600)"
    child = os.fork()
    if child == 0:
        os.setsid()
        if os.fork() == 0:
            os.execve(sys.executable, [sys.executable, "-I", "-S", "-c", program], {})
        os._exit(0)
    os.waitpid(child, 0)
    return f"daemon {marker}"


class Hostile:
    """What a worker makes of this file."""

    def attempt(self, name: str, victim: Victim) -> list[Any]:
        """Whether an attack succeeded, and everything that it got hold of."""
        try:
            found = ATTACKS[name](victim)
        except BaseException as error:
            return [False, f"{type(error).__name__}: {error}"[:300]]
        return [bool(found), str(found)[:2000]]
