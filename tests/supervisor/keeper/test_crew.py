"""A crew keeps the API's listening socket open across restarts, and the addresses for environments outside."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys

import pytest

from tests.support.run_harness import eventually
from toprope.records.run.folder import RunFolder
from toprope.supervisor.keeper.crew import OUTSIDE, Crew
from toprope.supervisor.lock import RunLock

LISTENS = (
    "import json, os, socket\n"
    "listener = socket.socket(fileno=int(os.environ['TOPROPE_LISTENER_FD']))\n"
    "print(json.dumps(listener.getsockname()), flush=True)\n"
    "caller, _ = listener.accept()\n"
    "caller.sendall(os.environ['TOPROPE_LIFE'].encode())\n"
)


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="the guard's end is waited for by its pidfd")
def test_api_caller_waits_during_restart(harness):
    spec = harness.specification()
    folder = RunFolder.create(harness.path / "runs", spec.run_id)
    spec.write(folder)
    lock = RunLock.acquire(folder.lock)

    async def work() -> list[bytes]:
        programs = {"api": [sys.executable, "-I", "-S", "-c", LISTENS]}
        crew = Crew(folder, spec, lock, attempt=1, programs=programs, surroundings=os.environ)
        answers = []
        first = crew.launch("api")
        [line] = await asyncio.to_thread(eventually, lambda: first.excerpt(1))
        address = tuple(json.loads(line))
        for component in (first, None):
            caller = socket.create_connection(address, timeout=20)
            if component is None:  # nobody is there when it calls
                component = crew.launch("api")
            answers.append(await asyncio.to_thread(caller.recv, 10))
            caller.close()
            await asyncio.wait_for(component.gone.wait(), 20)
        await crew.close(0.0)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address, timeout=20)
        return answers

    try:
        assert asyncio.run(work()) == [b"0", b"1"]
    finally:
        lock.release()


def test_outside_environment_finds_addresses_and_keys_in_a_private_file(harness):
    spec = harness.specification()
    folder = RunFolder.create(harness.path / "runs", spec.run_id)
    lock = RunLock.acquire(folder.lock)
    try:
        file = folder.crew / OUTSIDE
        for outside in (False, True):
            spec.config.rollout.outside = outside
            crew = Crew(folder, spec, lock, attempt=1, programs=None, surroundings=os.environ)
            for name, address in (("policy", "/models/it's mine"), ("api", "http://127.0.0.1:1")):
                crew.announce(name, address)
                assert not file.exists()
            crew.announce("inference", "http://127.0.0.1:2")
            assert file.exists() == outside
        assert file.stat().st_mode & 0o077 == 0
        names = ("API", "INFERENCE", "KEY", "POLICY")
        told = f". {file}; printf '%s\\n' " + " ".join(f'"$TOPROPE_{name}"' for name in names)
        api, *rest = subprocess.run(["/bin/sh", "-c", told], capture_output=True, text=True).stdout.splitlines()
        secret = api.removeprefix("http://127.0.0.1:1/")
        assert len(secret) > 30 and rest == ["http://127.0.0.1:2/v1", f"{secret}.outside", "/models/it's mine"]
    finally:
        lock.release()
