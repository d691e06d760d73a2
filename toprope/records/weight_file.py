"""The file through which a trainer publishes weights, without the library that computes with them.

weights.bin begins with the version at which the file began and its newest one, then has two slots; version v is in slot
v % 2. A slot is rewritten only by the next version but one. weights.json beside it names the tensors and gives the size
of a slot. The nodes of a run copy the file to each other.
"""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

from toprope.atomic import allocate, write_text

HEADER = struct.Struct("<qq")
"""The version at which the file began, and its newest one; equal until the first publication."""
ALIGN = 64
"""The first slot begins here, and tensors begin at multiples of it."""
ENV_WEIGHTS = "TOPROPE_WEIGHTS"
"""Names the folder of the two files, if it is not `crew` in the run folder."""


def newest_version(folder: Path) -> int | None:
    """Return the newest published version; None before the first."""
    try:
        with open(folder / "weights.bin", "rb", buffering=0) as file:
            began, newest = HEADER.unpack(file.read(HEADER.size))
    except (FileNotFoundError, struct.error):
        return None
    return None if began == newest else newest


def read_version(folder: Path) -> tuple[int, bytes, bytes]:
    """Return the newest version with its layout, the content of weights.json, and its slot.

    Raises:
        OSError, ValueError: There is no published version.
    """
    with open(folder / "weights.bin", "rb", buffering=0) as file:
        layout = (folder / "weights.json").read_bytes()
        size = json.loads(layout)["slot_bytes"]
        while True:
            version = HEADER.unpack(os.pread(file.fileno(), HEADER.size, 0))[1]
            slot, start = bytearray(), ALIGN + version % 2 * size
            while len(slot) < size:  # one call reads at most 2 GiB
                slot += os.pread(file.fileno(), size - len(slot), start + len(slot))
            if HEADER.unpack(os.pread(file.fileno(), HEADER.size, 0))[1] == version:
                return version, layout, bytes(slot)


def write_version(folder: Path, version: int, layout: bytes, slot: bytes) -> None:
    """Replace the file by one that holds this version only, for a reader that may have any other version mapped.

    Raises:
        OSError: The disk has no room.
    """
    write_text(folder / "weights.json", layout.decode())  # a reader that finds the new file must read its layout
    aside = folder / ".weights.bin"
    aside.unlink(missing_ok=True)
    descriptor = os.open(aside, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        allocate(descriptor, ALIGN + 2 * max(len(slot), ALIGN))
        os.pwrite(descriptor, HEADER.pack(version - 1, version), 0)
        written, start = 0, ALIGN + version % 2 * len(slot)
        while written < len(slot):
            written += os.pwrite(descriptor, memoryview(slot)[written:], start + written)
    finally:
        os.close(descriptor)
    os.replace(aside, folder / "weights.bin")
