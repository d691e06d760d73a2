"""The numbers of system calls against the kernel's own headers, for the processors that the wall knows."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from toprope.sdk import _confined
from toprope.sdk.wall import kernel

HEADERS = {
    "x86_64": (Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"), Path("/usr/include/asm/unistd_64.h")),
    # arm64 uses the generic table (Documentation/arch/arm64, include/uapi/asm-generic/unistd.h).
    "aarch64": (Path("/usr/include/asm-generic/unistd.h"),),
}
GIVEN_UP_BY_NEW_PROCESSORS = {"chmod", "chown", "lchown", "futimesat", "open", "utime", "utimes", "ioperm", "iopl"}


def numbers_of(machine: str) -> dict[str, int]:
    """The numbers in a header of this machine's packages, which every processor's headers include."""
    file = next((path for path in HEADERS[machine] if path.exists()), None)
    if file is None:
        pytest.skip(f"the kernel's headers for {machine} are not installed (Debian: linux-libc-dev)")
    words = dict(re.findall(r"^#define (__NR\w*)\s+(\w+)", file.read_text(), re.M))
    found = {}
    for name, value in words.items():
        while not value.isdigit() and value in words:
            value = words[value]
        if value.isdigit():
            found[name.removeprefix("__NR_").removeprefix("__NR3264_")] = int(value)
    return found


@pytest.mark.parametrize("machine", kernel.ARCHITECTURES)
def test_numbers_are_those_of_the_headers(machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    headers = numbers_of(machine)
    ours = {name: numbers[list(kernel.ARCHITECTURES).index(machine)] for name, numbers in kernel.CALLS.items()}
    newest = max(headers.values())
    wrong = {
        name: (number, headers.get(name))
        for name, number in ours.items()
        if headers.get(name, -1) != number and not (name not in headers and number > newest)
    }
    assert not wrong
    assert sum(name in headers for name in ours) > 80
    release = os.uname()
    monkeypatch.setattr(
        os, "uname", lambda: os.uname_result((release.sysname, "", release.release, release.version, machine))
    )
    assert kernel.number("seccomp") == headers["seccomp"] and not kernel.why_unsupported()
    assert {name for name, number in ours.items() if number == -1} == (
        GIVEN_UP_BY_NEW_PROCESSORS if machine == "aarch64" else set()
    )


def test_an_unknown_processor_gets_no_wall_instead_of_wrong_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    release = os.uname()
    fields = (release.sysname, "", release.release, release.version, "riscv64")
    monkeypatch.setattr(os, "uname", lambda: os.uname_result(fields))
    assert "riscv64" in kernel.why_unsupported()
    assert kernel.landlock_abi() == 0


def test_programs_of_policies_get_the_same_calls_on_both_processors() -> None:
    allowed = {}
    for machine in kernel.ARCHITECTURES:
        names = {number: name for name, number in numbers_of(machine).items()}
        text = " ".join(_confined._CALLS[machine])
        # On 64 bits the generic table's names with these endings are those without.
        found = {re.sub("^llseek$", "lseek", names[number]) for number in _confined._numbers(text)}
        allowed[machine] = {
            re.sub("(64|mmap2)$", lambda end: "mmap" if end[0] == "mmap2" else "", one) for one in found
        }
    more = allowed["aarch64"] - allowed["x86_64"]
    # fstatat is newfstatat there; the others tell, and change nothing.
    assert more <= {"fstatat", "fstatfs", "rt_sigpending", "statfs"}
    old = {"access", "arch_prctl", "dup2", "epoll_wait", "getdents", "lstat", "mkdir", "newfstatat", "open", "pipe"}
    old |= {"poll", "readlink", "rename", "rmdir", "select", "stat", "time", "unlink"}
    assert allowed["x86_64"] - allowed["aarch64"] <= {*old, "pread", "pwrite"}
