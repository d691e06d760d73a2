"""Programs that try to do harm; each leaves a mark if it succeeds.

`{parent}` is the process that runs them, `{canary}` a file that it owns, `{port}` a port on which it listens.
"""

from __future__ import annotations

__all__ = ["PROGRAMS"]

PROGRAMS: dict[str, str] = {
    "fork bomb": "import os\nwhile True: os.fork()",
    "fork bomb by threads": "import threading\ndef f():\n    while True: threading.Thread(target=f).start()\nf()",
    "fork, then on in the background": "import os,time\nif os.fork() == 0:\n    time.sleep(600)",
    "vfork by the C library": "import ctypes; ctypes.CDLL(None).vfork()",
    "clone by its number": "import ctypes; print(ctypes.CDLL(None).syscall(56, 17, 0, 0, 0, 0))",
    "clone3 by its number": "import ctypes; print(ctypes.CDLL(None).syscall(435, ctypes.create_string_buffer(88), 88))",
    "another program": "import os; os.execv('/bin/sh', ['sh', '-c', 'echo out > {canary}'])",
    "a shell": "import subprocess; subprocess.run('echo out > {canary}', shell=True)",
    "posix_spawn": "import os; os.posix_spawn('/bin/sh', ['sh', '-c', 'echo out > {canary}'], {{}})",
    "all memory at once": "x = bytearray(64 << 30)",
    "all memory by and by": "x = []\nwhile True: x.append(bytearray(1 << 20))",
    "memory by mmap": "import mmap; m = mmap.mmap(-1, 64 << 30)",
    "endless output": "while True: print('x' * 1000)",
    "endless output without lines": "import os\nwhile True: os.write(1, b'x' * 65536)",
    "endless loop": "while True: pass",
    "endless loop that catches all": "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
    "sleep for ever": "import time; time.sleep(10**6)",
    "deaf to signals": "import signal\nfor n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n"
    "    except Exception: pass\nwhile True: pass",
    "read a file outside": "print(open('{canary}').read())",
    "read the passwords": "print(open('/etc/passwd').read())",
    "write a file outside": "open('{canary}', 'w').write('out')",
    "append by a descriptor": "import os; os.write(os.open('{canary}', os.O_WRONLY | os.O_APPEND), b'out')",
    "remove a file": "import os; os.remove('{canary}')",
    "rename a file": "import os; os.rename('{canary}', '{canary}.out')",
    "truncate a file": "import os; os.truncate('{canary}', 0)",
    "change rights": "import os; os.chmod('{canary}', 0o777)",
    "a link to it": "import os; os.symlink('{canary}', '/tmp/link'); print(open('/tmp/link').read())",
    "list the root": "import os; print(os.listdir('/'))",
    "the parent's memory": "print(open('/proc/{parent}/mem', 'rb').read(1))",
    "the parent's variables": "print(open('/proc/{parent}/environ').read())",
    "own descriptors": "import os\nfor n in range(3, 64):\n    try: os.write(n, b'out')\n    except OSError: pass",
    "a connection": "import socket; socket.create_connection(('127.0.0.1', {port})).send(b'out')",
    "a datagram": "import socket; socket.socket(2, 2).sendto(b'out', ('127.0.0.1', {port}))",
    "listen": "import socket; s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen()",
    "socket by its number": "import ctypes; print(ctypes.CDLL(None).syscall(41, 2, 1, 0))",
    "io_uring": "import ctypes; print(ctypes.CDLL(None).syscall(425, 8, ctypes.create_string_buffer(120)))",
    "kill the parent": "import os; os.kill({parent}, 9)",
    "kill everyone": "import os; os.kill(-1, 9)",
    "kill the group": "import os; os.killpg({parent}, 9)",
    "signal by its thread": "import ctypes; print(ctypes.CDLL(None).syscall(234, {parent}, {parent}, 9))",
    "signal by a pipe's owner": "import fcntl, os\nr, w = os.pipe()\nfcntl.fcntl(r, 8, {parent})\n"
    "fcntl.fcntl(r, 10, 9)\nfcntl.fcntl(r, 4, 0o20000)\nos.write(w, b'x')",
    "trace the parent": "import ctypes; print(ctypes.CDLL(None).ptrace(16, {parent}, 0, 0))",
    "higher limits": "import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))\nx = bytearray(2 << 30)",
    "another user": "import os; os.setuid(0); os.setresuid(65534, 65534, 65534)",
    "a namespace": "import ctypes; print(ctypes.CDLL(None).unshare(0x10000000))",
    "crash": "import ctypes; ctypes.string_at(1)",
    "deep recursion": "import sys\nsys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
    "huge number": "print(10 ** 10 ** 8)",
    "lie about being confined": "import os; os.write(1, b'confined\\n' * 3); os._exit(70)",
    "more of the program than there is": "import sys; print(sys.stdin.read())",
}
"""The programs, by the harm that they try."""
