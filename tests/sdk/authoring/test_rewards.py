"""Reward functions that are added by configuration, and variants of an environment with other knobs, in workers."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from toprope.sdk.errors import WorkerError, WorkerFailure, WorkerTimeout
from toprope.sdk.worker.client import WorkerClient
from toprope.sdk.worker.splits import SPLITS


def split_of(content: str) -> str:
    """The split of a task with this normalised content: of 100 buckets, 80 train, 10 validate, 10 are held out."""
    bucket = int.from_bytes(hashlib.sha256(content.encode()).digest()[:8], "big") % 100
    return "train" if bucket < 80 else "validation" if bucket < 90 else "heldout"


ENVIRONMENT = '''
"""Numbers."""
from toprope.sdk import Environment, Part, Task, knob


class Numbers(Environment):
    """Say a number of so many digits."""

    class Knobs:
        digits: int = knob(1, ge=1, le=4)

    parts = {"exact": Part(2.0)}

    def tasks(self):
        for number in range(10 ** (self.knobs.digits - 1), 10 ** self.knobs.digits * 4):
            yield Task(f"Say {number}", reference=str(number), data={"digits": self.knobs.digits})

    def score(self):
        return {"exact": float(self.answer == self.task.reference)}


class Shown(Numbers):
    """With an example before the question."""

    def reset(self, task):
        example = [{"role": "user", "content": "1?"}, {"role": "assistant", "content": "1"}]
        return [*example, *task.messages]


class Own(Numbers):
    """With splits of its own, which know nothing of each other's levels."""

    def tasks(self, split):
        first = {"train": 0, "validation": 20, "heldout": 40}[split]
        for number in range(first + 15 * self.knobs.digits, first + 15 * self.knobs.digits + 20):
            yield Task(f"Say {number}", reference=str(number))
'''
REWARDS = """
import asyncio


def short(*, answer, reference, parts, prompt, **others):
    assert prompt[-1]["content"].startswith("Say") and set(others) == {"messages", "data", "turns", "truncated"}
    return max(0.0, 1.0 - abs(len(answer) - len(reference)))


async def judged(answer):
    await asyncio.sleep(0.4)
    if answer == "boom":
        raise RuntimeError("the judge is ill")
    if answer == "never":
        await asyncio.sleep(600)
    return 7 if answer == "seven" else 0.5


def exclaims(output):
    return float(output.endswith("!"))


def shouts(output, **others):
    return float(output == others["answer"] and output.isupper())


def wants(answer, wisdom):
    return 0


LIMIT = 3
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "numbers_env.py").write_text(ENVIRONMENT)
    (tmp_path / "more_rewards.py").write_text(REWARDS)
    return tmp_path


def reward(folder: Path, attribute: str, weight: float = 1.0, name: str | None = None) -> dict[str, Any]:
    file = str(folder / "more_rewards.py")
    return {"name": name or attribute, "weight": weight, "low": 0.0, "high": 1.0, "file": file, "attribute": attribute}


def worked(
    folder: Path, work: Callable[[WorkerClient], Awaitable[Any]], attribute: str = "Numbers", **arguments: Any
) -> tuple[dict[str, Any], Any]:
    """The card of the opened environment, and what `work` gave."""

    async def run() -> tuple[dict[str, Any], Any]:
        async with await WorkerClient.start() as link:
            source = {"file": str(folder / "numbers_env.py"), "attribute": attribute}
            card = await link.call("open", source=source, **arguments)
            return card, await work(link)

    return asyncio.run(run())


async def played(link: WorkerClient, *answers: str, variant: str = "", **how: Any) -> list[dict[str, Any]]:
    where = {"variant": variant} if variant else {}
    begun = await link.call("begin", split="train", index=0, count=len(answers), **where, **how)
    moves = [[handle, answer] for handle, answer in zip(begun["rollouts"], answers, strict=True)]
    return [one["outcome"] for one in await link.call("advance", moves=moves)]


def test_answers_in_the_prompt_belong_to_the_prompt(folder: Path) -> None:
    async def work(link: WorkerClient) -> list[dict[str, Any]]:
        return await played(link, "1")

    _, [outcome] = worked(folder, work, "Shown", rewards=[reward(folder, "short")])
    assert not outcome["error"] and outcome["parts"]["short"] == 1.0


def test_reward_functions_do_not_change_success(folder: Path) -> None:
    async def work(link: WorkerClient) -> Any:
        task = (await link.call("tasks", split="train", start=0, count=1))["tasks"][0]
        return await played(link, task["reference"], "123456789"), await played(link, "x", weights={"short": 3.0})

    card, (plain, weighed) = worked(folder, work, rewards=[reward(folder, "short", 0.5)])
    assert list(card["parts"]) == ["exact", "short"] and card["max_reward"] == 2.5
    assert plain[0]["parts"] == {"exact": 1.0, "short": 1.0} and plain[0]["reward"] == 2.5 and plain[0]["success"]
    assert plain[1]["reward"] == 0.0 and not plain[1]["success"]
    assert weighed[0]["reward"] == 3.0 and not weighed[0]["success"], "shaping earns reward, and no success"
    # Where its own part weighs nothing, it still says what is solved.
    _, (plain, _) = worked(folder, work, rewards=[reward(folder, "short")], reward_weights={"exact": 0.0, "short": 1.0})
    assert plain[0]["reward"] == 1.0 and plain[0]["success"] and not plain[1]["success"]


def test_function_of_output_alone_scores_the_answer(folder: Path) -> None:
    async def work(link: WorkerClient) -> Any:
        return await played(link, "hey!", "HEY")

    _, outcomes = worked(folder, work, rewards=[reward(folder, "exclaims", 0.5), reward(folder, "shouts", 0.25)])
    assert [one["parts"]["exclaims"] for one in outcomes] == [1.0, 0.0]
    assert [one["parts"].get("shouts") for one in outcomes] == [0.0, 1.0], outcomes
    assert [one["reward"] for one in outcomes] == [0.5, 0.25]


def test_async_reward_functions_run_concurrently(folder: Path) -> None:
    async def work(link: WorkerClient) -> Any:
        began = time.monotonic()
        outcomes = await played(link, "boom", "seven", *["x"] * 14)
        elapsed = time.monotonic() - began
        scored = await link.call("score", split="train", index=0, answer="x")
        return outcomes, elapsed, scored

    _, (outcomes, elapsed, scored) = worked(folder, work, rewards=[reward(folder, "judged")])
    assert elapsed < 0.4 * 8, "one after the other they would take 6.4 s"
    ill, wild, *others = outcomes
    assert ill["error"].startswith("RuntimeError: reward function 'judged': the judge is ill") and ill["reward"] == 0
    assert "outside its range of 0 to 1" in wild["error"]
    assert [one["parts"]["judged"] for one in others] == [0.5] * 14 and scored["parts"]["judged"] == 0.5


def test_hanging_async_reward_function_times_out(folder: Path) -> None:
    async def work(link: WorkerClient) -> None:
        hangs = asyncio.create_task(link.call("score", split="train", index=0, answer="never", timeout=1.0))
        until = time.monotonic() + 60
        while not hangs.done() and time.monotonic() < until:
            try:
                await link.call("score", split="train", index=1, answer="x", timeout=30)
            except WorkerFailure:
                break
        with pytest.raises(WorkerTimeout):
            await asyncio.wait_for(hangs, 10)

    worked(folder, work, rewards=[reward(folder, "judged")])


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (("wants",), "has an unknown parameter 'wisdom'"),
        (("LIMIT",), "assigned from elsewhere"),
        (("absent",), "does not define 'absent'"),
        (("short", 1.0, "exact"), "already has a reward part 'exact'"),
    ],
)
def test_invalid_reward_function_fails_at_open(folder: Path, function: tuple[Any, ...], says: str) -> None:
    async def nothing(link: WorkerClient) -> None: ...

    with pytest.raises(WorkerError, match=says):
        worked(folder, nothing, rewards=[reward(folder, *function)])


def test_variant_runs_beside_open_rollouts(folder: Path) -> None:
    async def work(link: WorkerClient) -> Any:
        begun = await link.call("begin", split="train", index=0, count=1)
        card = await link.call("vary", variant="level-1", knobs={"digits": 2})
        assert [knob["value"] for knob in card["knobs"]] == [2]
        [over] = await link.call("advance", moves=[[begun["rollouts"][0], "no"]])
        assert over["done"] and not over["outcome"]["success"]
        found = {}
        for variant in ("", "level-1"):
            where = {"variant": variant} if variant else {}
            for split in SPLITS:
                tasks = (await link.call("tasks", split=split, start=0, count=400, **where))["tasks"]
                found[variant, split] = {task["messages"][0]["content"] for task in tasks}
        [outcome] = await played(link, "no", variant="level-1")
        with pytest.raises(WorkerError, match="No variant 'level-7'"):
            await played(link, "x", variant="level-7")
        return found, outcome

    _, (found, _) = worked(folder, work)
    assert found["", "train"] & found["level-1", "train"], "the levels overlap"
    for (_, split), texts in found.items():
        assert {split_of(text.casefold()) for text in texts} == {split}
    _, (found, _) = worked(folder, work, "Own", knobs={"digits": 1})
    kept = found["", "heldout"] | found["level-1", "heldout"]
    assert kept and not kept & (found["", "train"] | found["level-1", "train"])
    assert not kept & (found["", "validation"] | found["level-1", "validation"])
