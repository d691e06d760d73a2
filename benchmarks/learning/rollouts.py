"""Measure browsing a long journal, and the text in its groups: `make bench-rollouts`.

    python -P -m benchmarks.learning.rollouts [--groups N]

A journal of groups as the embedded policy makes them (8 answers of some tokens) is written, then browsed in every
order: the first calls make the index, within their time limit, the later ones read it. Groups carry their prompt and
answers as text; encoding and decoding them is timed with and without. Takes about 40 seconds; needs nothing else.
"""

from __future__ import annotations

import argparse
import random
import resource
import sys
import time
from collections.abc import Sequence
from typing import Any, get_args

import msgspec

from benchmarks.report import report
from benchmarks.scratch import scratch
from toprope.records.journal.file_journal import FileJournal
from toprope.records.journal.groups import Group, Outcome
from toprope.records.journal.marks import GroupNote
from toprope.records.journal.rollout_browser import Order, Query, find_rollouts
from toprope.records.run.folder import RunFolder

SIZE, TOKENS, TASKS = 8, 18, 30_000
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Group).decode


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="python -P -m benchmarks.learning.rollouts", description="Browsing a long journal."
    )
    parser.add_argument("--groups", type=int, default=100_000, help="groups in the journal (default 100,000)")
    given = parser.parse_args(arguments)
    dice = random.Random(0)
    with scratch("rollouts") as path:
        folder = RunFolder.create(path, "run-a")
        journal = FileJournal(folder.journal)
        for number in range(given.groups):
            journal.append(_encode(_group(dice, number, given.groups)), GroupNote(rows=SIZE))
        journal.close()
        began, calls, page = time.monotonic(), 0, None
        while page is None or not page.complete:
            page, calls = find_rollouts(folder, Query()), calls + 1
        first = time.monotonic() - began
        pages = {order: _page_ms(folder, order) for order in get_args(Order)}
        best = find_rollouts(folder, Query("best")).groups
        ordered = _descending([*find_rollouts(folder, Query("worst")).groups, *best])
        index = (folder.journal / "rollouts.idx").stat().st_size
        size = sum(segment.stat().st_size for segment in folder.journal.glob("*.journal"))
    figures: dict[str, Any] = {
        "groups": given.groups,
        "journal_mb": round(size / 1e6, 1),
        "index_mb": round(index / 1e6, 1),
        "index_seconds": round(first, 2),
        "index_calls": calls,
        "groups_indexed": page.matching,
        "pages_out_of_order": int(not _descending(best)),
        **{f"page_ms_{order}": value for order, value in pages.items()},
        "memory_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        **_cost_of_text(dice),
    }
    return report(
        "Browsing a journal",
        figures,
        goals={"pages_out_of_order": "== 0", "groups_indexed": f"== {given.groups}"},
        control="the worst groups before the best must be seen to be out of order.",
        control_failed="the worst before the best count as ordered" if ordered else "",
    )


def _descending(groups: Sequence[Any]) -> bool:
    """True if groups have falling mean rewards."""
    means = [one.entry.mean for one in groups]
    return means == sorted(means, reverse=True)


def _group(dice: random.Random, number: int, of: int, *, text: bool = True) -> Group:
    tokens = [[dice.randrange(300) for _ in range(TOKENS)] for _ in range(SIZE)]
    rewards = [float(dice.random() < number / of) for _ in range(SIZE)]
    return Group(
        tokens=tokens,
        masks=tokens,
        scores=rewards,
        inference_logprobs=[[-dice.random() for _ in range(TOKENS)] for _ in range(SIZE)],
        versions=[[(number // 8, TOKENS)]] * SIZE,
        group_id=f"run-a-1-{number}",
        environment="words",
        task_id=f"{number % TASKS:016x}",
        outcomes=[Outcome(reward, {"exact": reward}, success=reward >= 1) for reward in rewards],
        prompt="Spell this word backward (example: sun -> nus): rope" if text else None,
        answers=["epor"] * SIZE if text else None,
        seconds=0.05,
    )


def _page_ms(folder: RunFolder, order: Order) -> float:
    """Return the median of five pages, one after the other."""
    took, after = [], None
    for _ in range(5):
        began = time.monotonic()
        page = find_rollouts(folder, Query(order, after=after))
        took.append(1000 * (time.monotonic() - began))
        after = page.groups[-1].key if page.groups else None
    return round(sorted(took)[2], 1)


def _cost_of_text(dice: random.Random, rounds: int = 5000) -> dict[str, float]:
    """Return the CPU microseconds to encode and decode a group, the minimum of five tries, and its bytes."""
    found = {}
    for name, text in (("without_text", False), ("with_text", True)):
        one = _group(dice, 50, 100, text=text)
        body = _encode(one)
        tries = []
        for _ in range(5):
            began = time.process_time()
            for _ in range(rounds):
                _decode(_encode(one))
            tries.append(1e6 * (time.process_time() - began) / rounds)
        found |= {f"group_us_{name}": round(min(tries), 1), f"group_bytes_{name}": len(body)}
    return found


if __name__ == "__main__":
    sys.exit(main())
