"""A crew program that reports what it was started with, obeys a word on its standard input, and ends."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from toprope.records.messages import ENV_REPORT_FD, Progress, encode_line


def main() -> int:
    found = {
        "arguments": sys.argv[1:],
        "shown": Path("/proc/self/cmdline").read_bytes().split(b"\0")[:5],
        "variables": dict(os.environ),
        "descriptors": sorted(
            int(name) for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")
        ),
        "folder": os.getcwd(),
        "parent": os.getppid(),
        "loaded": "colorsys" in sys.modules,
        "sigpipe": signal.getsignal(signal.SIGPIPE) is signal.SIG_IGN,
    }
    print("printed", flush=True)
    os.write(int(os.environ[ENV_REPORT_FD]), encode_line(Progress(json.dumps(found, default=bytes.decode), 0, 1)))
    word = sys.stdin.readline().strip()
    if "daemon" in word:
        if os.fork() == 0:
            os.setsid()
            signal.pause()
    return 7 if "seven" in word else 0


if __name__ == "__main__":
    sys.exit(main())
