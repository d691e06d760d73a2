"""A member that is told to pause finishes what is at hand, begins nothing new, and goes on when it is let."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from toprope.records.messages import Pause, Proceed, Stop
from toprope.training.component.member import Member


@pytest.fixture
def member() -> Member:
    """A member whose orders the test gives; it has no keeper."""
    member = object.__new__(Member)
    member.ending, member.paused = threading.Event(), threading.Event()
    member._changed, member._orders, member._addresses, member._listeners = threading.Condition(), [], {}, []
    return member


def test_holding_lasts_from_pause_to_proceed_and_tells_how_long(member: Member) -> None:
    assert member.hold() == 0.0
    member._take(Pause("the disk is full"))
    held: list[float] = []
    thread = threading.Thread(target=lambda: held.append(member.hold()))
    began = time.monotonic()
    thread.start()
    time.sleep(0.05)
    assert not held
    member._take(Proceed())
    thread.join(20)
    assert 0.0 < held[0] <= time.monotonic() - began


def test_a_stop_ends_a_hold(member: Member) -> None:
    member._take(Pause())
    thread = threading.Thread(target=member.hold)
    thread.start()
    member._take(Stop())
    thread.join(20)
    assert not thread.is_alive() and member.hold() == 0.0


def test_holding_leaves_the_event_loop_to_others(member: Member) -> None:
    async def main() -> int:
        member._take(Pause())
        hold, turns = asyncio.ensure_future(member.hold_async()), 0
        while not hold.done():
            turns += 1
            await asyncio.sleep(0.01)
            if turns == 3:
                member._take(Proceed())
        return turns

    assert asyncio.run(asyncio.wait_for(main(), 20)) >= 3
