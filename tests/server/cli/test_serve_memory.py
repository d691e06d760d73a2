"""A server of many threads does not hold the peak of each of them."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

PROBE = """
import ctypes, re, sys, tempfile, threading
from toprope_server.cli import app
from toprope_server.mcp import app as served

def arenas(role):
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.fopen.restype = ctypes.c_void_p, ctypes.c_void_p
    together = threading.Barrier(12)
    def allocate():
        together.wait()
        libc.malloc(5000)
        together.wait()
    threads = [threading.Thread(target=allocate) for _ in range(12)]
    [one.start() for one in threads]
    [one.join() for one in threads]
    with tempfile.NamedTemporaryFile() as file:
        stream = ctypes.c_void_p(libc.fopen(file.name.encode(), b"w"))
        libc.malloc_info(0, stream)
        libc.fclose(stream)
        print(len(re.findall(b"<heap nr=", file.read())))
    sys.exit(0)

served.serve_stdio = arenas
app.serve()
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_info"), reason="glibc counts its arenas")
def test_threads_of_a_server_share_two_arenas():
    done = subprocess.run([sys.executable, "-P", "-c", PROBE], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) <= 2
