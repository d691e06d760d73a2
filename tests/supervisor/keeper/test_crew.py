"""A crew keeps the API's listening socket open across restarts."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys

import pytest

from tests.support.run_harness import eventually
from toprope.records.run.folder import RunFolder
from toprope.supervisor.keeper.crew import Crew
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
