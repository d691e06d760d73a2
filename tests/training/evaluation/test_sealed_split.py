"""Held-out tasks stay sealed: whatever an author's code prints, raises or dies of, their texts reach no file and no
message; and what is trained on is held against what is measured."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.rollout_stand_ins import SAMPLING, ScriptedPolicy, only_environment
from toprope.errors import ComponentFailed
from toprope.records.journal import groups
from toprope.records.journal.groups import Outcome
from toprope.records.run import digests
from toprope.records.run.digests import environment_digest, measurement_digests
from toprope.records.run.folder import RunFolder, read_json
from toprope.records.run.specification import EnvironmentSource
from toprope.settings.sections.launcher import LauncherSection
from toprope.training.driver.contamination import ContaminationTracker, normalized_words, write_contamination
from toprope.training.evaluation.evaluator import Evaluator
from toprope.training.inference.sessions import Turn
from toprope.training.judges import judging, questions
from toprope.training.rollouts import environment_set, sampled_group
from toprope.training.rollouts.endpoint_client import Unanswered
from toprope.training.rollouts.environment_set import EnvironmentSet
from toprope.training.rollouts.group_sampler import GroupSampler
from toprope.training.rollouts.sampled_group import SampledGroup
from toprope.training.rollouts.workers.environment_worker import EnvironmentWorker
from toprope.training.rollouts.workers.restarting_worker import RestartingWorker

CHATTY = '''
"""Prints and raises what it is asked."""
import os
import sys
from toprope.sdk import Environment, Part, Task


class Chatty(Environment):
    """Talks too much."""

    parts = {"right": Part()}

    def tasks(self):
        for number in range(800):
            yield Task(f"canary{number:04d}", reference=str(number % 2))

    def reset(self, task):
        print("playing", task.prompt)
        if int(task.prompt[-4:]) % 5 == 0:
            raise ValueError(f"cannot play {task.prompt}")
        return task.messages

    def score(self):
        print("scoring", self.task.prompt, file=sys.stderr)
        if self.answer == "redirect":
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        if self.answer == "die":
            os.write(2, f"dying of {self.task.prompt}".encode())
            os._exit(3)
        if self.answer == "raise":
            raise KeyError(self.task.prompt)
        return {"right": float(self.answer == self.task.reference)}
'''


class Heard:
    """Collects a worker's log."""

    def __init__(self) -> None:
        self.data = b""

    def write(self, data: bytes, /) -> None:
        self.data += data


def play(tmp_path: Path, answer: str, work: Any) -> tuple[Any, Heard]:
    file = tmp_path / "chatty.py"
    file.write_text(CHATTY)
    heard = Heard()

    async def opened() -> EnvironmentWorker:
        link = await EnvironmentWorker.start(stderr=heard)
        await link.call("open", source={"file": str(file), "attribute": "Chatty"})
        return link

    async def run() -> Any:
        async with await RestartingWorker.start(opened, LauncherSection(restarts=0)) as worker:
            link = await worker.current()
            policy = ScriptedPolicy(lambda messages, index: answer)
            sampler = GroupSampler(worker, policy, multi_turn=False, call_timeout_s=30)  # type: ignore[arg-type]
            environments = only_environment(sampler)
            folder = RunFolder(tmp_path / "run")
            folder.evaluations.mkdir(parents=True)
            contents = ContaminationTracker()
            evaluator = Evaluator(
                folder,
                environments,
                SAMPLING,
                concurrency=4,
                progress=lambda *told: None,
                digests=lambda: {"loaded": {"environment": "e"}},
                on_group=lambda split, made: contents.add(split, made.task_id, made.messages),
            )
            return await work(evaluator, link, contents, environments)

    return asyncio.run(run()), heard


def canaries(text: str) -> set[str]:
    return {word for word in text.replace("'", " ").replace('"', " ").replace("\\n", " ").split() if "canary" in word}


@pytest.mark.parametrize("answer", ["1", "raise"])
def test_heldout_tasks_reach_no_file_and_no_log(tmp_path, answer):
    async def work(
        evaluator: Evaluator, link: EnvironmentWorker, contents: ContaminationTracker, environments: EnvironmentSet
    ) -> set[str]:
        await evaluator.evaluate_heldout("before", 30, 3, greedy=True)
        write_contamination(RunFolder(tmp_path / "run"), 1, contents)
        sealed = await link.call("tasks", split="heldout", start=0, count=800)
        await link.call("score", split="validation", index=1, answer="1")
        return {task["messages"][0]["content"] for task in sealed["tasks"]}

    sealed, heard = play(tmp_path, answer, work)
    assert len(sealed) > 30
    log = heard.data.decode()
    # Examples and the later score are of the validation split, which is not sealed.
    assert canaries(log) and not canaries(log) & sealed
    assert "bytes printed while held-out tasks were sampled are not kept" in log
    for path in (tmp_path / "run").rglob("*.json"):
        assert not canaries(path.read_text()) & sealed, path
    measured = read_json(tmp_path / "run" / "evaluations" / "before.json")
    assert measured["evaluator"] == {"loaded": {"environment": "e"}}
    kinds = measured["sampled"]["error_kinds"]
    assert "ValueError (its text is sealed)" in kinds
    assert ("KeyError (its text is sealed)" in kinds) == (answer == "raise")
    by_task = measured["sampled"]["by_task"]
    assert len(by_task["tasks"]) == len(by_task["wins"]) == 30
    assert sum(by_task["wins"]) == measured["sampled"]["successes"]
    assert by_task["tasks"] == measured["greedy"]["by_task"]["tasks"]
    assert measured["sampled"]["answer_tokens"] > 0


def test_worker_death_in_heldout_task_hides_its_output(tmp_path):
    async def work(
        evaluator: Evaluator, link: EnvironmentWorker, contents: ContaminationTracker, environments: EnvironmentSet
    ) -> None:
        await evaluator.evaluate_heldout("before", 10, 1, greedy=False)

    with pytest.raises(ComponentFailed, match="sealed") as failed:
        play(tmp_path, "die", work)
    assert "canary" not in str(failed.value)


def test_failed_evaluation_leaves_no_heldout_task_in_the_log(tmp_path, monkeypatch):
    """One group fails while others go on: they end with it, and what they print stays sealed."""
    monkeypatch.setitem(globals(), "CHATTY", CHATTY.replace("% 5 == 0", "< 0"))

    async def work(
        evaluator: Evaluator, link: EnvironmentWorker, contents: ContaminationTracker, environments: EnvironmentSet
    ) -> None:
        policy: Any = environments.samplers["only"]._policy
        answer, asked, answered = policy.chat, 0, 0

        async def chat(messages: Any, sampling: Any, *, n: int = 1, session: str = "") -> Any:
            nonlocal asked, answered
            asked += 1
            if asked == 3:
                raise ComponentFailed("inference is gone")
            await asyncio.sleep(0.2)
            answered += 1
            return await answer(messages, sampling, n=n, session=session)

        policy.chat = chat
        with pytest.raises(ComponentFailed, match="inference is gone"):
            await evaluator.evaluate_heldout("after", 30, 0, greedy=False)
        await asyncio.sleep(0.5)
        assert asked <= 4 and not answered
        await link.call("score", split="heldout", index=1, answer="1")

    _, heard = play(tmp_path, "1", work)
    assert b"canary" not in heard.data


@pytest.mark.parametrize(
    ("error", "told"),
    [
        ("ValueError: canary", "ValueError (its text is sealed)"),
        ("cannot grade canary", "an error (its text is sealed)"),
        ("Canary: no such place", "an error (its text is sealed)"),
        ("toprope.sdk.errors.EnvironmentMistake: canary", "toprope.sdk.errors.EnvironmentMistake (its text is sealed)"),
        ("a reward asked a model: APIError: canary", "an error (its text is sealed)"),
        ("context is full", "context is full"),
        (None, None),
    ],
)
def test_errors_of_heldout_tasks_keep_their_kind_alone(tmp_path, error, told):
    async def work(
        evaluator: Evaluator, link: EnvironmentWorker, contents: ContaminationTracker, environments: EnvironmentSet
    ) -> None:
        outcomes = [Outcome(0.0, error=error), Outcome(1.0)]

        async def sample(split: str, index: int, size: int, sampling: Any) -> SampledGroup:
            return SampledGroup(f"t{index}", ask("x"), [""], outcomes[index : index + 1], [[]], 0.1)

        environments.sample = sample  # type: ignore[method-assign]
        await evaluator.evaluate_heldout("before", 2, 0, greedy=False)

    play(tmp_path, "1", work)
    measured = read_json(tmp_path / "run" / "evaluations" / "before.json")
    assert measured["sampled"]["error_kinds"] == ({} if told is None else {told: 1})


def test_tasks_that_an_opponent_does_not_answer_count_nowhere(tmp_path):
    async def work(
        evaluator: Evaluator, link: EnvironmentWorker, contents: ContaminationTracker, environments: EnvironmentSet
    ) -> None:
        async def sample(split: str, index: int, size: int, sampling: Any) -> SampledGroup:
            if index == 1:
                raise Unanswered("The question was refused: HTTP 400: canary")
            return SampledGroup(f"t{index}", ask("x"), ["y"], [Outcome(1.0, success=True)], [[]], 0.1)

        environments.sample = sample  # type: ignore[method-assign]
        summary = await evaluator.evaluate_heldout("before", 3, 0, greedy=False)
        assert (summary["accuracy"], summary["tasks"], summary["errors"]) == (1.0, 2, 0)

    play(tmp_path, "1", work)
    file = tmp_path / "run" / "evaluations" / "before.json"
    assert read_json(file)["sampled"]["unjudged"] == 1 and "canary" not in file.read_text()


def test_worker_output_is_logged_after_seal(tmp_path):
    async def work(
        evaluator: Evaluator, link: EnvironmentWorker, contents: ContaminationTracker, environments: EnvironmentSet
    ) -> None:
        for _ in range(3):
            link.seal()
            await link.call("score", split="heldout", index=1, answer="1")
            await link.unseal()
        await link.call("score", split="validation", index=1, answer="1")

    _, heard = play(tmp_path, "1", work)
    assert heard.data.count(b"are not kept") == 3 and heard.data.count(b"scoring") == 1


def test_seal_stays_where_the_worker_redirected_its_output(tmp_path, monkeypatch):
    monkeypatch.setattr("toprope.sdk.worker.seal._MARK_S", 0.5)

    async def work(
        evaluator: Evaluator, link: EnvironmentWorker, contents: ContaminationTracker, environments: EnvironmentSet
    ) -> None:
        for _ in range(2):
            link.seal()
            await link.call("score", split="heldout", index=1, answer="redirect")
            await asyncio.wait_for(link.unseal(), 20)
            assert link.sealed
        assert await link.call("ping") == "pong"

    _, heard = play(tmp_path, "1", work)
    assert heard.data.count(b"redirected its standard error") == 2 and b"canary" not in heard.data


def test_only_sealed_evaluations_sample_heldout_tasks(tmp_path):
    """Searches, early stopping and curricula use validation tasks; held-out tasks need a seal."""
    played: list[str] = []

    async def work(
        evaluator: Evaluator, link: EnvironmentWorker, contents: ContaminationTracker, environments: EnvironmentSet
    ) -> None:
        ask_worker = link.call

        async def call(op: str, /, **arguments: Any) -> Any:
            played.extend([arguments["split"]] if op == "begin" else [])
            return await ask_worker(op, **arguments)

        link.call = call  # type: ignore[method-assign]
        await evaluator.evaluate_validation("step-5", 5)
        await evaluator.test(4, 2)
        assert played and set(played) == {"validation"}
        with pytest.raises(ValueError, match="under seal"):
            await environments.sample("heldout", 0, 1, SAMPLING)
        await evaluator.evaluate_heldout("after", 3, 1, greedy=True)
        with pytest.raises(ValueError, match="under seal"):
            await environments.sample("heldout", 0, 1, SAMPLING)

    play(tmp_path, "1", work)
    assert played.count("heldout") == 6


def test_games_that_ask_for_no_answer_are_measured(tmp_path):
    """In a game for several players, another seat may lose before the policy's turn."""

    async def work(
        evaluator: Evaluator, link: EnvironmentWorker, contents: ContaminationTracker, environments: EnvironmentSet
    ) -> None:
        outcome, turns = Outcome(1.0, success=True), []

        async def sample(split: str, index: int, size: int, sampling: Any) -> SampledGroup:
            return SampledGroup(f"t{index}", ask("Your seat: 1"), [""], [outcome], turns or [[]], 0.1)

        environments.sample = sample  # type: ignore[method-assign]
        summary = await evaluator.evaluate_validation("step-5", 2)
        assert summary["accuracy"] == 1.0 and summary["policy_version"] is None
        turns.append([Turn([1], [2], [-0.1], [(version, 1)], "stop") for version in (52, 61)])
        summary = await evaluator.evaluate_validation("step-50", 2)
        assert (summary["policy_version"], summary["newest_version"]) == (52, 61)
        turns.clear()
        outcome = Outcome(0.0, error="boom")
        with pytest.raises(ComponentFailed, match="the first: boom") as failed:
            await evaluator.evaluate_validation("step-6", 2)
        assert "check_environment" in failed.value.hint  # where the text is not sealed

    play(tmp_path, "1", work)


def ask(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def long_text(start: int) -> str:
    return "Read this: " + " ".join(f"word{start * 100 + number}" for number in range(30))


def test_contamination_counts_copies_and_shared_passages():
    contents = ContaminationTracker()
    for number in range(25):
        contents.add("heldout", f"h{number}", ask(f"What is the sum of {number} and 7, please tell me now?"))
    contents.add("heldout", "copied", ask(long_text(1)))
    contents.add("heldout", "quoted", ask(long_text(2)))
    contents.add("validation", "v0", ask("Something else"))
    for number in range(100, 160):
        contents.add("train", f"t{number}", ask(f"What is the sum of {number} and 7, please tell me now?"))
    clean = contents.report()
    assert clean["seen"] == {"train": 60, "validation": 1, "heldout": 27}
    assert set(clean["copies"].values()) == {0} and clean["heldout_sharing_passages"] == 0
    contents.add("train", "copy", ask("  " + long_text(1).upper() + " ."))
    contents.add("train", "quotes", ask("Before. " + long_text(2)[40:180] + " And after."))
    found = contents.report()
    assert found["copies"]["train_heldout"] == 1
    assert found["heldout_sharing_passages"] == 2
    for number in range(90):
        for split in ("train", "heldout", "validation"):
            contents.add(split, f"{split}-{number}", ask(long_text(9)))
    found = contents.report()
    assert found["copies"] == {"train_heldout": 1, "train_validation": 0, "validation_heldout": 0}
    assert found["heldout_sharing_passages"] == 2, "tasks with one text differ in something hidden"
    assert normalized_words(ask("Ｗｈａｔ\u200b is it??")) == normalized_words(ask("what IS it"))


def test_environment_digest_follows_source(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("a = 1\n")
    source = EnvironmentSource(name="mine", file=str(file), attribute="A")
    first = measurement_digests(source)
    assert measurement_digests(source) == first and set(first) == {"environment", "toprope"}
    file.write_text("a = 2\n")
    assert environment_digest(source) != first["environment"]
    os.unlink(file)
    assert environment_digest(source) == "missing"
    adapter = EnvironmentSource(name="x", adapter="reasoning_gym", target="spell_backward")
    assert environment_digest(adapter) not in (
        "missing",
        environment_digest(adapter.model_copy(update={"target": "y"})),
    )


def test_evaluator_digest_follows_all_code_that_measures(monkeypatch):
    read = []
    monkeypatch.setattr(digests, "digest_of", lambda files, more="": read.extend(map(str, files)))
    digests.evaluator_digest()
    assert {module.__file__ for module in (environment_set, sampled_group, judging, questions, groups)} <= set(read)
    assert all(os.path.isfile(file) for file in read)


def test_contamination_of_earlier_attempts_stays(tmp_path):
    folder, contents = RunFolder(tmp_path), ContaminationTracker()
    contents.add("train", "t", ask("x"))
    write_contamination(folder, 1, contents)
    write_contamination(folder, 2, ContaminationTracker())
    assert {
        key: one["seen"]["train"]
        for key, one in json.loads((tmp_path / "contents.json").read_text())["attempts"].items()
    } == {"1": 1, "2": 0}
