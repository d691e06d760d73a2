"""Attacks on processes, the network and the machine's room."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.hostile.attack_registry import Victim, attack, call


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
    return call(310, 270, v["pid"], ctypes.c_char_p(local), 1, ctypes.c_char_p(remote), 1, 0)


@attack()
def trace_a_keeper(v: Victim) -> Any:
    seize, detach = 0x4206, 17
    call(101, 117, seize, v["pid"], None, None)
    call(101, 117, 0x4207, v["pid"], None, None)  # stop, so that it can be let go
    os.waitpid(v["pid"], 0x40000000)
    return call(101, 117, detach, v["pid"], None, None) == 0


@attack()
def steal_a_descriptor(v: Victim) -> Any:
    stolen = call(438, 438, os.pidfd_open(v["pid"]), v["descriptor"], 0)
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
    return call(234, 131, v["pid"], v["pid"], int(signal.SIGCONT)) == 0


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
def idle_all_of_its_user(v: Victim) -> Any:
    return call(251, 30, 3, 0, 0) == 0  # ioprio_set; the class that processes have anyway


@attack()
def move_a_keeper(v: Victim) -> Any:
    before = os.sched_getaffinity(v["pid"])
    os.sched_setaffinity(v["pid"], {min(before)})
    moved = os.sched_getaffinity(v["pid"]) != before
    os.sched_setaffinity(v["pid"], before)
    return moved  # one processor leaves nowhere to go


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
def tell_a_local_daemon(v: Victim) -> Any:
    for line in socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM):
        with line:
            line.sendto(b"forged", v["datagrams"])
    return True


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
    return call(425, 425, 8, ctypes.create_string_buffer(120)) > 0


@attack()
def make_namespaces(v: Victim) -> Any:
    return subprocess.run(["unshare", "--user", "--map-root-user", "true"], check=False).returncode == 0


@attack()
def make_namespaces_by_clone(v: Victim) -> Any:
    child = call(56, 220, 0x10000000 | int(signal.SIGCHLD), None, None, None, None)
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    return True


@attack()
def watch_faults(v: Victim) -> Any:
    return call(323, 282, 1) > 0


@attack()
def read_keyrings(v: Victim) -> Any:
    return call(250, 219, 0, -3, 1) != 0


@attack()
def queue_messages(v: Victim) -> Any:
    name = f"toprope-{os.getpid()}".encode()
    queue = call(240, 180, ctypes.c_char_p(name), os.O_CREAT | os.O_RDWR, 0o600, None)
    os.close(queue)
    return call(241, 181, ctypes.c_char_p(name)) == 0


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
        while len(opened) < v["descriptors"] + 2000:
            opened.append(os.open(os.devnull, os.O_RDONLY))
        return True
    finally:
        for one in opened:
            os.close(one)


@attack()
def raise_its_limits(v: Victim) -> Any:
    resource.setrlimit(resource.RLIMIT_NOFILE, (v["descriptors"] + 4000,) * 2)
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
