"""Attacks on files and memory of others."""

from __future__ import annotations

import ctypes
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.hostile.attack_registry import Victim, attack, call


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
    call(303, 264, -100, ctypes.c_char_p(path), handle, ctypes.byref(mount), 0)
    folder = os.open(tempfile.gettempdir(), os.O_RDONLY)
    return os.read(call(304, 265, folder, handle, os.O_RDONLY), 200).decode()


@attack()
def write_shared_memory_of_others(v: Victim) -> Any:
    with open(v["shared"], "r+") as file:
        return file.write("forged")


@attack()
def map_system_v_memory_of_others(v: Victim) -> Any:
    return call(29, 194, v["shm_key"], ctypes.c_size_t(4096), 0o600) >= 0


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
