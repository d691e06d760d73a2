"""The interface for authors: tasks, knobs, parts, and how a rollout ends, whatever their code does."""

from __future__ import annotations

import asyncio
import copy
import datetime
import enum
import hashlib
import math
import random
from dataclasses import asdict, fields
from types import SimpleNamespace
from typing import Any, Literal

import msgspec
import pytest

from toprope.records.journal import groups
from toprope.sdk import Environment, Outcome, Part, Task, knob, play
from toprope.sdk.authoring import env_managed
from toprope.sdk.authoring import environment as authoring
from toprope.sdk.authoring.env_managed import OwnLoop, Played, off_the_clock, sample_group
from toprope.sdk.authoring.environment import Scoring, copy_for
from toprope.sdk.authoring.knobs import describe_knobs, make_knobs
from toprope.sdk.errors import EnvironmentMistake, InvalidRequest
from toprope.sdk.rollouts import Rollout, configure
from toprope.sdk.tooled import ToolEnvironment, tool


class Echo(Environment):
    """Say the word back.

    The rest is not the description.
    """

    parts = {"right": Part(), "short": Part(weight=0.5, low=-1.0, high=1.0)}

    class Knobs:
        word: str = knob("a", help="what to say")
        times: int = knob(1, ge=1, le=3)
        style: Literal["plain", "loud"] = knob("plain")

    def tasks(self):
        for number in range(5):
            yield Task(f"Say {self.knobs.word * self.knobs.times} {number}", reference=self.knobs.word)

    def score(self):
        return {"right": self.answer == self.task.reference, "short": 1.0 if len(self.answer) < 9 else -1.0}


class Broken(Environment):
    """Answers what the test asks for."""

    def tasks(self):
        yield Task("x")

    def score(self):
        value = {"nan": math.nan, "inf": math.inf, "none": None, "text": "1.0", "high": 1.5}.get(self.answer)
        if self.answer == "raise":
            return 1 / 0
        if self.answer == "exit":
            raise SystemExit(3)
        return {"score": value}


class Dialogue(Environment):
    """Ends after the third answer, or when told."""

    max_turns = 3

    def tasks(self):
        yield Task([{"role": "system", "content": "Rules"}, {"role": "user", "content": "Begin"}])

    def reset(self, task):
        self.heard = []
        return task.prompt

    def step(self, text):
        self.heard.append(text)
        if text == "odd":
            return "not a pair"
        return ("" if text == "silent" else None if text == "mute" else f"heard {text}"), text == "end"

    def score(self):
        return len(self.heard) / 3


def ready(environment: type[Environment], **settings: Any) -> Environment:
    return configure(environment(), **settings)


def rollout_of(environment: Environment) -> Rollout:
    rollout = Rollout(environment, next(iter(environment.tasks())))
    rollout.begin()
    return rollout


def test_outcome_has_fields_of_records() -> None:
    outcome = play(Echo, ["a"])
    recorded = [field.name for field in msgspec.structs.fields(groups.Outcome)]
    assert [field.name for field in fields(Outcome)] == [name for name in recorded if name != "verdicts"]
    assert groups.Outcome(**asdict(outcome)) == groups.Outcome(
        reward=1.5, parts={"right": 1.0, "short": 1.0}, success=True
    )


def test_reward_is_weighted_sum() -> None:
    environment = ready(Echo, reward_weights={"short": 2.0})
    turn = rollout_of(environment).advance("wrong but short"[:5])
    assert turn.outcome is not None
    assert turn.outcome.reward == 2.0 and not turn.outcome.success
    assert Scoring(environment.parts).max_reward == 3.0 and Scoring(environment.parts).min_reward == -2.0
    assert Echo.parts["short"].weight == 0.5  # the class is as it was


@pytest.mark.parametrize("weights", [{"rihgt": 1.0}, {"right": math.nan}, {"right": "1"}, {"right": 0, "short": 0}])
def test_invalid_weights_are_refused(weights: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        ready(Echo, reward_weights=weights)
    assert "right" in str(refusal.value) or "always 0" in str(refusal.value)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("nan", "not finite"),
        ("inf", "not finite"),
        ("none", "not a number"),
        ("text", "not a number"),
        ("high", "outside its range"),
        ("raise", "ZeroDivisionError"),
        ("exit", "sys.exit(3)"),
    ],
)
def test_invalid_score_is_an_outcome(answer: str, said: str) -> None:
    outcome = play(Broken, [answer])
    assert outcome.reward == 0.0 and not outcome.success
    assert outcome.error is not None and said in outcome.error


def test_score_exception_names_its_line() -> None:
    outcome = play(Broken, ["raise"])
    assert outcome.error is not None and "test_environment.py:" in outcome.error and "in score" in outcome.error


@pytest.mark.parametrize("name", ["", "a\x1b[2J", "two\nlines", "a" * 101, 5])
def test_part_names_must_be_printable(name: Any) -> None:
    with pytest.raises(EnvironmentMistake, match="printable text of at most 100 characters"):
        Scoring.weighted({name: Part()}, {})


def test_missing_and_unknown_parts_are_errors() -> None:
    class Sloppy(Echo):
        def score(self):
            return {"right": 1.0} if self.answer == "few" else {"right": 1.0, "short": 1.0, "more": 1.0}

    for answer in ("few", "many"):
        error = play(Sloppy, [answer]).error
        assert error is not None and "declares right, short" in error


def test_multi_turn_rollout_ends_at_done_or_limit() -> None:
    assert play(Dialogue, ["one", "end"]).turns == 2
    limited = play(Dialogue, ["one", "two", "three", "four"])
    assert limited.turns == 3 and limited.success and not limited.truncated


def test_truncated_answer_ends_rollout() -> None:
    turn = rollout_of(ready(Dialogue)).advance("one", truncated=True)
    assert turn.done and turn.outcome is not None
    assert turn.outcome.truncated and turn.outcome.reward == pytest.approx(1 / 3) and turn.outcome.error is None


def test_max_turns_can_only_be_lowered() -> None:
    assert ready(Dialogue, max_turns=2).max_turns == 2
    assert ready(Dialogue, max_turns=9).max_turns == 3
    with pytest.raises(InvalidRequest):
        ready(Dialogue, max_turns=0)


@pytest.mark.parametrize(("answer", "said"), [("odd", "(messages, done)"), ("mute", "no message")])
def test_invalid_step_result_is_an_outcome(answer: str, said: str) -> None:
    outcome = play(Dialogue, [answer])
    assert outcome.error is not None and said in outcome.error


def test_rollouts_do_not_share_reset_state() -> None:
    environment = ready(Dialogue)
    first, second = rollout_of(environment), rollout_of(environment)
    first.advance("one")
    ended = second.advance("end").outcome
    assert ended is not None and ended.reward == pytest.approx(1 / 3)


def test_rollout_random_depends_on_task_and_seed() -> None:
    task, other = Task("a"), Task("b")
    draws = {
        (seed, each.prompt): copy_for(ready(Echo, seed=seed), each).random.random()
        for seed in (0, 1)
        for each in (task, other)
    }
    assert len(set(draws.values())) == 4
    assert copy_for(ready(Echo, seed=1), other).random.random() == draws[1, "b"]


def test_rollout_goes_on_with_one_generator_that_is_seeded_on_first_use() -> None:
    environment = ready(Echo)
    first, second = copy_for(environment, Task("a")), copy_for(environment, Task("a"))
    assert "random" not in vars(first)
    drawn = [first.random.random() for _ in range(3)]
    assert len(set(drawn)) == 3
    assert [second.random.random() for _ in range(3)] == drawn
    assert environment.random.random() == random.Random("tasks").random()


def test_generator_is_decided_when_the_rollout_is_copied() -> None:
    rollout = copy_for(ready(Echo), Task([{"role": "user", "content": "a"}]))
    rollout.task.prompt[0]["content"] = "changed by reset"
    beside = copy.copy(rollout)
    expected = random.Random(f"0:{Task('a').id}")
    assert [rollout.random.random(), beside.random.random()] == [expected.random(), expected.random()]


def test_threads_that_draw_first_share_one_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    rollout, inner = copy_for(ready(Echo), Task("a")), []

    def seeded(seed: str) -> random.Random:
        if not inner:  # another thread is faster, without a lock on the property
            inner.append(None)
            inner[0] = Echo.random.func(rollout)
        return random.Random(seed)

    monkeypatch.setattr(authoring, "Random", seeded)
    assert rollout.random is inner[0]


def test_generator_before_the_configuration_is_refused_in_words() -> None:
    with pytest.raises(AttributeError, match="before setup"):
        _ = Echo().random


def test_rollouts_of_a_group_are_seeded_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    class Draws(OwnLoop):
        async def rollout(self, session: Any) -> Any:
            return self.random.random()

    monkeypatch.setattr(authoring, "Random", None)
    task, session = Task("a"), SimpleNamespace(timeout_s=9.0)
    played = asyncio.run(Draws().group(task, [session] * 2))
    assert played == [random.Random(f"0:{task.id}:{number}").random() for number in range(2)]


def test_waiting_for_a_turn_is_not_the_rollout_s_time(monkeypatch: pytest.MonkeyPatch) -> None:
    class Queue(OwnLoop):
        async def rollout(self, session: Any) -> Any:
            if session.kind == "refused":
                raise TimeoutError("the server did not answer")
            with off_the_clock():
                await lock.acquire()
            try:
                await asyncio.sleep(session.seconds)
            finally:
                lock.release()

    async def played(*sessions: tuple[str, float]) -> list[str]:
        given = [SimpleNamespace(kind=kind, seconds=seconds, timeout_s=0.5) for kind, seconds in sessions]
        return [str(result) for result in await Queue().group(Task("a"), given)]

    lock = asyncio.Lock()
    assert asyncio.run(played(*[("quick", 0.2)] * 5, ("slow", 9.0), ("quick", 0.1), ("refused", 0.0))) == [
        *["None"] * 5, "the rollout took longer than 0.5 s", "None", "the server did not answer"
    ]  # fmt: skip
    monkeypatch.setattr(env_managed, "_LONGEST_WAIT_S", 0.2)
    lock = asyncio.Lock()
    assert asyncio.run(played(("slow", 0.4), ("quick", 0.1))) == [
        "None", "the rollout waited longer than 0.2 s for its turn"
    ]  # fmt: skip


def test_errors_of_rollouts_end_with_the_host_however_long_they_are() -> None:
    words = "ConnectionError: Couldn't reach 'someone/rows' on the Hub (LocalEntryNotFoundError)"
    long = ConnectionError(f"{'x' * 900} Cannot connect to host data.example.org:443")

    class Caught(OwnLoop):
        async def group(self, task: Any, sessions: Any) -> Any:
            return [Played({}, error=words), Played({}, error="It lost."), long]

    sampled = asyncio.run(sample_group(Caught(), Task("a"), [SimpleNamespace()] * 3))
    caught, plain, raised = [one.error or "" for one in sampled.outcomes]
    assert caught == f"{words}; huggingface.co could not be reached" and plain == "It lost."
    assert raised.startswith("ConnectionError: xxx") and raised.endswith("; data.example.org could not be reached")
    assert len(raised) == 500


def test_task_id_depends_on_content() -> None:
    messages = [{"role": "system", "content": "x"}, {"role": "user", "content": "Add  1\nand 2"}]
    assert Task("add 1 AND 2").id == Task(messages).id == Task("other", key="Add 1 and 2").id
    assert Task("add 1 and 3").id != Task("add 1 and 2").id
    assert Task("Add 1 and 2", reference="3").id == hashlib.sha256(b"add 1 and 2").hexdigest()[:16]


@pytest.mark.parametrize("prompt", [[], [{"role": "robot", "content": "x"}], [{"role": "user"}], 3, None])
def test_invalid_prompt_is_refused(prompt: Any) -> None:
    with pytest.raises(EnvironmentMistake):
        Task(prompt).messages  # noqa: B018 - the property checks


def test_knobs_are_validated_and_described() -> None:
    cards = {card["name"]: card for card in describe_knobs(Echo.Knobs, make_knobs(Echo.Knobs, {"times": 2}))}
    assert cards["times"] == {
        "name": "times", "type": "int", "default": 1, "description": "", "ge": 1, "le": 3, "choices": None, "value": 2
    }  # fmt: skip
    assert cards["style"]["choices"] == ["plain", "loud"] and cards["word"]["description"] == "what to say"


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"tmies": 2}, "Did you mean 'times'?"),
        ({"times": 0}, "between 1 and 3"),
        ({"times": "2"}, "must be int"),
        ({"times": True}, "must be int"),
        ({"times": 1.5}, "must be int"),
        ({"style": "quiet"}, "['plain', 'loud']"),
        ({"word": None}, "must be str"),
    ],
)
def test_invalid_knob_error_names_valid_ones(values: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        make_knobs(Echo.Knobs, values)
    assert said in str(refusal.value)


def test_knobs_convert_json_to_rich_types() -> None:
    class Colour(enum.Enum):
        RED = "red"

    class Rich(Environment):
        class Knobs:
            colour: Any = knob(None)
            day: Any = knob(datetime.date(2000, 1, 1))
            pairs: list = knob([])

    annotations = {"colour": Colour | None, "day": datetime.date, "pairs": list[tuple[float, float]]}
    Rich.Knobs.__annotations__.update(annotations)
    read = make_knobs(Rich.Knobs, {"colour": "red", "day": "2001-02-03", "pairs": [[0, 1]]})
    assert read.colour is Colour.RED and read.day == datetime.date(2001, 2, 3) and read.pairs == [(0.0, 1.0)]
    with pytest.raises(InvalidRequest):
        make_knobs(Rich.Knobs, {"pairs": [[0, 1, 2]]})
    assert make_knobs(Rich.Knobs, {}).pairs is not make_knobs(Rich.Knobs, {}).pairs


def test_inconsistent_knobs_are_refused() -> None:
    class Range(Environment):
        class Knobs:
            low: int = knob(0)
            high: int = knob(9)

            def __post_init__(self) -> None:
                if self.low > self.high:
                    raise ValueError("low exceeds high")

    with pytest.raises(InvalidRequest, match="low exceeds high"):
        make_knobs(Range.Knobs, {"low": 10})


def test_play_reports_missing_task_or_answer() -> None:
    with pytest.raises(InvalidRequest, match="no task 5"):
        play(Echo, ["a"], index=5)
    with pytest.raises(InvalidRequest, match="answers ended"):
        play(Dialogue, ["one"])
    assert play(Echo, ["b"], word="b").success


def test_play_takes_a_task_of_the_authors_own_training_split() -> None:
    class Own(Echo):
        def tasks(self, split: str):  # type: ignore[override]
            yield Task(f"Say {split}", reference=split)

    assert play(Own, ["train"], word="train").success


@pytest.mark.parametrize("method", ["setup", "tasks", "step", "score"])
def test_methods_that_nothing_would_await_are_refused(method: str) -> None:
    async def later(self: Any) -> None: ...

    with pytest.raises(EnvironmentMistake, match=rf"{method}\(\) must not be async"):
        play(type("Later", (Echo,), {method: later}), ["a"])


def test_tool_with_the_name_of_a_method_may_be_async() -> None:
    class Shop(ToolEnvironment):
        def tasks(self):
            yield Task("Close it.", reference="closed")

        @tool
        async def close(self) -> str:
            """Close the shop."""
            return "closed"

    assert configure(Shop()).knobs is not None


def test_long_conversation_keeps_its_answers() -> None:
    long = [{"role": role, "content": word * 30_000} for word in "abcdefghij" for role in ("tool", "assistant")]
    padded = [*long[:2], *[{"role": "user", "content": "x" * 150_000}] * 2, long[3]]

    class Long(OwnLoop):
        async def group(self, task: Any, sessions: Any) -> Any:
            return [Played({"score": 1}, messages=talk) for talk in (long, padded, long * 10)]

    sampled = asyncio.run(sample_group(Long(), Task("a"), [SimpleNamespace()] * 3))
    assert sampled.messages == [long, padded, long * 10], "it is scored as a whole"
    first, second, third = sampled.talks
    assert first[1::2] == long[1::2] and [message["content"] for message in first[::2]] == [" [cut]"] * 10
    assert [len(message["content"]) for message in second] == [30_000, 30_000, 110_006, 6, 30_000]
    assert third == [], "all answers or none"
