"""A crew member pauses, continues and ends by the orders of its keeper, and waits for its peers."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.training_api_server import until
from toprope.errors import ComponentFailed
from toprope.records.messages import (
    ENV_COMPONENT,
    ENV_FOLDER,
    ENV_KEYS,
    ENV_REPORT_FD,
    ENV_SECRET,
    Keys,
    Order,
    Pause,
    Peers,
    Proceed,
    Stop,
    encode_line,
)
from toprope.records.run.folder import RunFolder
from toprope.records.run.specification import EnvironmentSource, Specification
from toprope.settings.schema import Config
from toprope.training.component.member import CrewMember


@dataclass
class Crew:
    """A member, and the keeper's end of its orders."""

    member: CrewMember
    orders: int

    def order(self, order: Order) -> None:
        os.write(self.orders, encode_line(order))


@pytest.fixture
def crew(tmp_path: Path) -> Iterator[Crew]:
    folder = RunFolder.create(tmp_path, "run-1")
    Specification(
        run_id="run-1", kind="train", created_at=0.0, toprope_version="0", policy_cache="", config=Config(),
        environment=EnvironmentSource(name="words"),
    ).write(folder)  # fmt: skip
    orders_out, orders_in = os.pipe()
    reports_out, reports_in = os.pipe()
    member = CrewMember(folder, "trainer", "secret", reports_in, orders_fd=orders_out)
    yield Crew(member, orders_in)
    os.close(orders_in)
    assert member.ending.wait(20), "the end of the orders ends the member"
    for descriptor in (orders_out, reports_out, reports_in):
        os.close(descriptor)


def test_hold_lasts_from_pause_to_proceed(crew: Crew) -> None:
    member = crew.member
    assert member.hold() == 0.0
    crew.order(Pause("the disk is full"))
    assert member.paused.wait(20)
    held: list[float] = []
    waiting = threading.Event()
    thread = threading.Thread(target=lambda: held.append(member.hold(waiting.set)))
    began = time.monotonic()
    thread.start()
    assert waiting.wait(20) and not held
    crew.order(Proceed())
    thread.join(20)
    assert 0.0 < held[0] <= time.monotonic() - began


def test_stop_ends_a_hold(crew: Crew) -> None:
    crew.order(Pause())
    assert crew.member.paused.wait(20)
    thread = threading.Thread(target=crew.member.hold)
    thread.start()
    crew.order(Stop())
    thread.join(20)
    assert not thread.is_alive() and crew.member.hold() == 0.0


def test_hold_async_does_not_block_the_event_loop(crew: Crew) -> None:
    crew.order(Pause())
    assert crew.member.paused.wait(20)

    async def main() -> int:
        hold, turns = asyncio.ensure_future(crew.member.hold_async()), 0
        while not hold.done():
            turns += 1
            await asyncio.sleep(0.01)
            if turns == 3:
                crew.order(Proceed())
        return turns

    assert asyncio.run(asyncio.wait_for(main(), 20)) >= 3


def test_address_waits_for_the_peer(crew: Crew) -> None:
    with pytest.raises(ComponentFailed, match="not ready within 0.01 s"):
        crew.member.address("api", 0.01)
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(crew.member.address("api")))
    thread.start()
    crew.order(Peers({"api": "http://127.0.0.1:1"}))
    thread.join(20)
    assert found == [crew.member.peer("api")] == ["http://127.0.0.1:1"]
    crew.order(Peers({}))
    until(lambda: crew.member.peer("api") is None)
    crew.order(Stop())
    with pytest.raises(ComponentFailed, match="the run is ending"):
        crew.member.address("api")


JOINING = """
import ctypes, json, os
from pathlib import Path
from toprope.training.component.member import CrewMember
member = CrewMember.join()
started_with = Path("/proc/self/environ").read_text() if os.geteuid() == 0 else ""
hidden = ctypes.CDLL(None).prctl(3, 0, 0, 0, 0) == 0
print(json.dumps([member.secret, os.environ["HF_TOKEN"], "canary" in started_with, hidden]), flush=True)
member.ending.wait(20)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="prctl")
def test_join_takes_keys_from_orders_and_hides_memory(crew: Crew) -> None:
    variables = {**os.environ, ENV_FOLDER: str(crew.member.folder.path), ENV_COMPONENT: "policy", ENV_KEYS: "1"}
    orders = encode_line(Keys({ENV_SECRET: "canary-1", "HF_TOKEN": "canary-2"})) + encode_line(Stop())
    done = subprocess.run(
        [sys.executable, "-P", "-c", JOINING], env={**variables, ENV_REPORT_FD: "2"}, input=orders, capture_output=True
    )
    assert json.loads(done.stdout) == ["canary-1", "canary-2", False, True]
