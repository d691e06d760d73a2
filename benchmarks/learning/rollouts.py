"""Measure browsing a long journal, and the text in its groups: `make bench-rollouts`.

    python -P -m benchmarks.learning.rollouts [--groups N]

A journal of groups as the embedded policy makes them (8 answers of some tokens) is written, then browsed in every
order: the first calls make the index, within their time limit, the later ones read it. The first five pages of each
order must be those of a sort of all groups; rewards do not depend on a group's number. `page_cost_share` is a later
page's processor time over that of reading and ordering the whole journal, in turn, the worst order. Groups carry their
prompt and answers as text; `text_cost_ratio` is the processor time of encoding and decoding them with over without.
Control: the pages of each order must not be those of another, and making the index anew misses the goal for a page.
Takes about a minute; needs nothing else.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import random
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, get_args

import msgspec

from benchmarks.report import is_met, report
from benchmarks.scratch import scratch
from toprope.records.journal.file_journal import FileJournal
from toprope.records.journal.groups import Group, Outcome
from toprope.records.journal.marks import GroupNote
from toprope.records.journal.rollout_browser import Order, Query, find_rollouts
from toprope.records.run.folder import RunFolder

SIZE, TOKENS, TASKS = 8, 18, 30_000
_PAGE = "<= 0.1"
_PAGES = 5
_LONG, _LONG_S = 10_000, 3600.0
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Group).decode
_Shown = tuple[str | None, str | None]
"""Ids of a group and of the first group of its task, which orders by change tell."""


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
            journal.append(_encode(_group(dice, number)), GroupNote(rows=SIZE))
        journal.close()
        began, calls, page = time.monotonic(), 0, None
        while page is None or not page.complete:
            page, calls = find_rollouts(folder, Query()), calls + 1
        first = time.monotonic() - began
        pages, shares, shown = {}, [], dict[Order, list[_Shown]]()
        for order in get_args(Order):
            whole = _cpu_ms(lambda: sorted(_all(folder), key=lambda one: sum(one.scores)))
            pages[order], cost, shown[order] = _page_ms(folder, order)
            shares.append(cost / whole)
        wanted = _sorted(_all(folder))
        file = folder.journal / "rollouts.idx"
        index = file.stat().st_size
        file.unlink()
        whole = _cpu_ms(lambda: sorted(_all(folder), key=lambda one: sum(one.scores)))
        anew = _cpu_ms(lambda: find_rollouts(folder, Query(), seconds=_LONG_S)) / whole
        size = sum(segment.stat().st_size for segment in folder.journal.glob("*.journal"))
    figures: dict[str, Any] = {
        "groups": given.groups,
        "journal_mb": round(size / 1e6, 1),
        "index_mb": round(index / 1e6, 1),
        "index_seconds": round(first, 2),
        "index_calls": calls,
        "groups_indexed": page.matching,
        "pages_out_of_order": sum(shown[order] != wanted[order] for order in wanted),
        "page_cost_share": max(shares),
        "control_page_cost_share": anew,
        **{f"page_ms_{order}": value for order, value in pages.items()},
        "memory_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        **_cost_of_text(dice),
    }
    failed = [
        f"the pages of {other} count as those of {order}"
        for order, other in itertools.permutations(wanted, 2)
        if shown[other] == wanted[order]
    ]
    failed += ["a page that makes the index meets the goal for a page"] if is_met(anew, _PAGE) else []
    # A short journal is read as fast as its index; goals of time hold for the whole measurement only.
    timed = {"page_cost_share": _PAGE, "text_cost_ratio": "<= 1.2"} if given.groups >= _LONG else {}
    return report(
        "Browsing a journal",
        figures,
        goals={"pages_out_of_order": "== 0", "groups_indexed": f"== {given.groups}"} | timed,
        control="pages of another order must be out of order; a page that makes the index must miss its goal.",
        control_failed="; ".join(failed),
    )


def _sorted(groups: Iterable[Group]) -> dict[Order, list[_Shown]]:
    """Return the first pages of every order by a sort of all groups; of equal ones, the newest first."""
    every, first, last = list(groups), dict[str | None, int](), dict[str | None, int]()
    for number, group in enumerate(every):
        first.setdefault(group.task_id, number)
        last[group.task_id] = number
    scores = [one.scores for one in every]
    total = [sum(one) for one in scores]
    keys: dict[Order, Callable[[int], tuple[float, ...]]] = {
        "newest": lambda n: (n,),
        "best": lambda n: (max(scores[n]), total[n], n),
        "worst": lambda n: (-min(scores[n]), -total[n], n),
    }
    found = {
        order: [(every[n].group_id, None) for n in sorted(range(len(every)), key=key, reverse=True)]
        for order, key in keys.items()
    }
    pairs = [(n, first[task]) for task, n in last.items() if n != first[task]]
    pairs.sort(key=lambda pair: (abs(total[pair[0]] - total[pair[1]]), pair[0]), reverse=True)
    found["most_changed"] = [(every[n].group_id, every[before].group_id) for n, before in pairs]
    return {order: ids[: _PAGES * Query().limit] for order, ids in found.items()}


def _group(dice: random.Random, number: int, *, text: bool = True) -> Group:
    tokens = [[dice.randrange(300) for _ in range(TOKENS)] for _ in range(SIZE)]
    skill = dice.random()
    rewards = [float(dice.random() < skill) for _ in range(SIZE)]
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


def _all(folder: RunFolder) -> Iterator[Group]:
    """Yield every group of the journal."""
    journal = FileJournal(folder.journal)
    try:
        yield from (_decode(journal.read(number)) for number in range(journal.first, journal.last + 1))
    finally:
        journal.close()


def _cpu_ms(work: Callable[[], object]) -> float:
    gc.disable()  # what others left in this process is not the work's
    try:
        began = time.thread_time()  # others may work in this process
        work()
        return 1000 * (time.thread_time() - began)
    finally:
        gc.enable()


def _page_ms(folder: RunFolder, order: Order) -> tuple[float, float, list[_Shown]]:
    """Return the medians of five pages, one after the other: milliseconds on the clock, and of the processor; and their
    groups."""
    took, worked, shown, after = [], [], list[_Shown](), None
    for _ in range(_PAGES):
        began, used = time.monotonic(), time.thread_time()
        page = find_rollouts(folder, Query(order, after=after))
        took.append(1000 * (time.monotonic() - began))
        worked.append(1000 * (time.thread_time() - used))
        shown += [(one.group and one.group.group_id, one.before and one.before.group_id) for one in page.groups]
        after = page.groups[-1].key if page.groups else None
    return round(sorted(took)[_PAGES // 2], 1), sorted(worked)[_PAGES // 2], shown


def _cost_of_text(dice: random.Random, rounds: int = 5000) -> dict[str, float]:
    """Return the CPU microseconds to encode and decode a group, the least of five tries in turn, and its bytes."""
    groups = {name: _group(dice, 50, text=text) for name, text in (("without", False), ("with", True))}

    def work(one: Group) -> None:
        for _ in range(rounds):
            _decode(_encode(one))

    tries = [{name: _cpu_ms(lambda one=one: work(one)) for name, one in groups.items()} for _ in range(5)]  # type: ignore[misc]
    least = {name: min(one[name] for one in tries) for name in groups}
    return {
        "text_cost_ratio": least["with"] / least["without"],
        **{f"group_us_{name}_text": round(1000 * cost / rounds, 1) for name, cost in least.items()},
        **{f"group_bytes_{name}_text": len(_encode(one)) for name, one in groups.items()},
    }


if __name__ == "__main__":
    sys.exit(main())
