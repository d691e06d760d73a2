"""Packages with `load_environment`, for verifiers before 0.2, with a stand-in that has the shape of 0.1.14."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace as Thing
from typing import Any

import httpx
import pytest
from openai import APIConnectionError, AsyncOpenAI, AzureOpenAI, BadRequestError, OpenAI, OpenAIError

from tests.sdk.adapters.conftest import asked_of
from toprope.sdk.adapters import verifiers
from toprope.sdk.adapters._verifiers.judges import rollout_of
from toprope.sdk.adapters._verifiers.load_environment import bounds, is_solved
from toprope.sdk.adapters._verifiers.older_interface import dictionaries, with_dictionaries
from toprope.sdk.authoring.env_managed import OwnLoop, Played, Session
from toprope.sdk.authoring.environment import Part, Scoring
from toprope.sdk.authoring.knobs import describe_knobs
from toprope.sdk.errors import EnvironmentMistake, InvalidRequest, LoadError, MissingKnobs
from toprope.sdk.rollouts import configure

MODULE = '''"""Copies of words."""
import verifiers as vf

def exact(completion, answer): ...

def size(completion): ...

def load_environment(words: list[str], image: bool = False, turns: int = 7, client: object = None,
                     judge_key_var: str = "OPENAI_API_KEY", judge_api_key: str | None = None):
    """Made of words."""
    if not judge_api_key:
        raise ValueError("requires a judge")
    rows = [{"prompt": f"Copy {word}", "answer": word, "task": "route"} for word in words]
    if image:
        rows[0]["prompt"] = [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]
    return vf.SingleTurnEnv(rows, vf.Rubric([exact, size], [2.0, 0.0]))
'''


class Rubric:
    def __init__(self, funcs: list[Any], weights: list[float]) -> None:
        self.funcs, self.weights, self.cleaned = funcs, weights, 0
        self.judge = AsyncOpenAI(base_url="https://judge.example.org/v1", api_key="none", max_retries=0)
        self.judge_at_once = OpenAI(base_url="https://judge.example.org/v1", api_key="none", max_retries=0)

    def _get_reward_func_names(self) -> list[str]:
        return [one.__name__ for one in self.funcs]

    def _get_reward_funcs(self) -> list[Any]:
        return self.funcs

    def _get_reward_weights(self) -> list[float]:
        return self.weights

    async def _call_individual_reward_func(self, func: Any, state: Any) -> float:
        try:
            return float(await func(state) if inspect.iscoroutinefunction(func) else func(state))
        except Exception:
            return 0.0  # it logs the error

    async def _call_group_reward_func(self, func: Any, states: list[Any]) -> list[float]:
        try:
            return list(await func(states) if inspect.iscoroutinefunction(func) else func(states))
        except Exception:
            return [0.0 for _ in states]

    async def score_group(self, states: list[Any]) -> None:
        asked: Any = {"model": "a model elsewhere", "messages": [{"role": "user", "content": "Is it right?"}]}
        verdict = await self.judge.chat.completions.create(**asked)
        again = await asyncio.to_thread(self.judge_at_once.chat.completions.create, **asked)
        assert verdict.choices[0].message.content == again.choices[0].message.content == "yes"
        for state in states:
            right = state["completion"][-1]["content"] == state["input"]["answer"]
            state["metrics"] = {"exact": float(right), "size": 40.0}

    async def cleanup(self, state: Any) -> None:
        self.cleaned += 1


Rubric.score_group.__module__ = "verifiers.rubrics.rubric"


class SingleTurnEnv:
    max_turns = 1

    def __init__(self, rows: list[dict[str, Any]], rubric: Rubric) -> None:
        self.rows, self.rubric = rows, rubric

    def build_dataset(self) -> Any:
        return self.rows

    get_dataset = build_dataset

    async def rollout(self, row: Any, client: Any, model: str, sampling: Any) -> dict[str, Any]:
        assert row.get("task", "route") == "route" and (model, sampling["max_tokens"]) == ("m", 256)
        await client.raise_from_native_response("an empty answer")
        prompt, key = [{"role": "user", "content": row["prompt"]}], client.client.api_key
        if key == "long":
            return {"input": row, "error": None, "trajectory": [], "prompt_too_long": True, "is_truncated": True}
        if key == "broken":
            return {"input": row, "error": ValueError("no room"), "trajectory": []}
        calls = [{"id": "c", "name": "look", "arguments": "{}"}]
        said = [{"role": "assistant", "content": None, "tool_calls": calls}, {"role": "assistant", "content": key}]
        return {"input": row, "error": None, "trajectory": [{}, {}], "prompt": prompt, "completion": said}


@pytest.fixture
def copying(stand_in: Callable[..., None], unled: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OwnLoop:
    stand_in("verifiers", SingleTurnEnv=SingleTurnEnv, Rubric=Rubric, __version__="0.1.14")

    async def refuse(response: Any) -> None:
        raise ValueError(f"Model returned {response}")

    refusing = {"raise_from_native_response": refuse}
    stand_in("verifiers.clients", OpenAIChatCompletionsClient=lambda api: Thing(client=api, **refusing))
    (tmp_path / "copying.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "copying", raising=False)
    monkeypatch.setenv("JUDGE_TEST_KEY", "left")
    monkeypatch.delenv("JUDGE_TEST_KEY")
    return verifiers.make("copying")


def test_verifiers_that_is_too_old_says_so(copying: OwnLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    package: Any = sys.modules["verifiers"]
    monkeypatch.setattr(package, "Environment", SingleTurnEnv, raising=False)
    monkeypatch.setattr(package, "__version__", "0.1.5")
    with pytest.raises(LoadError, match=r"verifiers 0\.1\.5 is too old.* -r 'verifiers>=0\.1\.11,<0\.2'"):
        verifiers.make("copying")


def test_arguments_are_knobs(copying: OwnLoop) -> None:
    knobs = {one["name"]: one for one in describe_knobs(copying.Knobs)}
    assert knobs["environment_turns"]["default"] == 7 and knobs["turns"]["default"] == 0 and "client" not in knobs
    with pytest.raises(MissingKnobs, match=r"words \(list\[str\]"):
        configure(copying)
    assert copying.__doc__ == "Copies of words."


def test_null_is_an_argument_where_the_author_takes_it(
    copying: OwnLoop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taking = MODULE.replace("(words: list[str], ", "(words: Rubric | None, bare, ").replace(
        "import verifiers as vf", ""
    )
    taking = taking.replace("word in words]", "word in words or ['ab']]")
    (tmp_path / "taking.py").write_text(f"import verifiers as vf\nfrom verifiers import Rubric\n{taking}")
    monkeypatch.delitem(sys.modules, "taking", raising=False)
    environment = verifiers.make("taking")
    with pytest.raises(MissingKnobs, match=r"^It needs the knobs words \(.*, bare \("):
        configure(environment)
    assert len(list(configure(environment, knobs={"words": None, "bare": None}).tasks())) == 1


def test_rollouts_are_scored_together_with_the_sessions_keys(copying: OwnLoop) -> None:
    environment = configure(copying, knobs={"words": ["ab", "cd"]})
    assert environment.max_turns == 1
    assert {name: (part.weight, part.high) for name, part in environment.parts.items()} == {
        "exact": (2.0, 1.0),
        "size": (0.0, 1e6),
        "reward_errors": (0.0, 1e6),
    }
    task, _ = environment.tasks()
    assert task.data["row"]["task"] == "route", "authors read it"
    with asked_of("yes") as (url, asked):
        sessions = [Session(url, key, "m", "judge") for key in ("ab", "xy", "broken", "long")]
        right, wrong, broken, long = asyncio.run(environment.group(task, sessions))
    assert asked == [("Bearer judge", "m")] * 2
    assert (
        isinstance(right, Played)
        and right.parts == {"exact": 1.0, "size": 40.0, "reward_errors": 0.0}
        and right.turns == 2
    )
    assert isinstance(wrong, Played) and wrong.parts["exact"] == 0.0 and environment.success(right.parts, 2.0)
    assert right.messages[1]["tool_calls"][0]["function"] == {"name": "look", "arguments": "{}"}
    assert isinstance(broken, Played) and broken.error == "ValueError: no room"
    assert isinstance(long, InvalidRequest) and "no room for an answer" in str(long), "the policy had no turn"
    assert Scoring(environment.parts).max_reward == 2.0, "checks take rewards as shares of it"
    rounded = environment._result_of({"metrics": {"exact": 1.0000002}, "error": None})  # type: ignore[attr-defined]
    assert rounded.parts["exact"] == 1.0
    scaled = {"metrics": {"exact": 60.0}, "error": None}
    with pytest.raises(EnvironmentMistake, match="reward_low and reward_high"):
        environment._result_of(scaled)  # type: ignore[attr-defined]


def test_penalties_need_no_bounds(copying: OwnLoop) -> None:
    """They make no answer solved; larger rewards could."""
    environment = configure(copying, knobs={"words": ["ab"]})
    played = environment._result_of({"metrics": {"exact": -0.3}, "error": None})  # type: ignore[attr-defined]
    assert played.parts["exact"] == -0.3 and not environment.success(played.parts, -0.6)
    assert bounds(environment.knobs, -1.0) == (0.0, 1000.0)
    environment = configure(copying, knobs={"words": ["ab"], "reward_low": 0.0})
    with pytest.raises(EnvironmentMistake, match="reward_low and reward_high"):
        environment._result_of({"metrics": {"exact": -0.3}, "error": None})  # type: ignore[attr-defined]


def test_reward_functions_get_messages_as_dictionaries(copying: OwnLoop) -> None:
    """Until 0.1.13 messages were dictionaries, which many authors' functions ask for."""

    class Model:
        def __init__(self, **fields: Any) -> None:
            self.fields = fields

        def model_dump(self, exclude_none: bool) -> dict[str, Any]:
            return {name: one for name, one in self.fields.items() if one is not None or not exclude_none}

    def size(completion: Any) -> float:
        assert all(isinstance(one, dict) and one["content"] == one.content for one in completion)
        call = completion[0].tool_calls[0]
        assert call.name == call.function.name == call["function"]["name"] and call["type"] == "function"
        return float(call.name == "look" and "missing" not in completion[0] and "name" not in completion[0])

    calls = [{"id": "c", "name": "look", "arguments": "{}"}]
    said = [Model(role="assistant", content=None, tool_calls=calls, name=None)]
    [message] = dictionaries(said)
    assert message["content"] == "", "authors read it as a text"
    assert dictionaries({"role": "user", "content": "x"}).tool_calls is None
    message.content = "cd"
    assert message.model_dump(exclude_none=True, exclude={"tool_calls"}) == {"role": "assistant", "content": "cd"}
    assert message.model_copy(update={"role": "user"})["role"] == "user" != message.role
    size.__module__ = "no_such_module"
    assert asyncio.run(with_dictionaries(size)(completion=said)) == 1.0
    size.__module__ = "verifiers.rubrics.own"
    assert with_dictionaries(size) is size


def test_the_grader_of_the_owner_answers_for_the_policy(copying: OwnLoop) -> None:
    environment = configure(copying, knobs={"words": ["ab"], "judge_key_var": "JUDGE_TEST_KEY"})
    assert os.environ["JUDGE_TEST_KEY"] == "none"
    with asked_of("yes") as (url, asked):
        roles = {"grader": {"base_url": url, "api_key": "owner", "model": "large"}}
        session = Session("http://127.0.0.1:9/v1", "ab", "m", roles=roles)
        [played] = asyncio.run(environment.group(next(iter(environment.tasks())), [session]))
    assert isinstance(played, Played) and asked == [("Bearer owner", "large")] * 2


def test_models_with_a_key_of_the_owner_are_led_to_a_grader_alone(copying: OwnLoop) -> None:
    asked: Any = {"model": "large", "messages": [{"role": "user", "content": "Is it right?"}]}

    def ask(session: Session | None, client: OpenAI) -> None:
        rollout_of.set(session)
        client.chat.completions.create(**asked)

    def asked_in_a_rollout(session: Session | None, client: OpenAI) -> None:
        contextvars.copy_context().run(ask, session, client)

    with asked_of("yes") as (policy, of_policy), asked_of("yes") as (service, of_service):
        keyed = OpenAI(base_url=service, api_key="owner's", max_retries=0)
        azure = AzureOpenAI(azure_endpoint=service, api_version="1", api_key="none", max_retries=0)
        session = Session(policy, "k", "m")
        asked_in_a_rollout(session, keyed)
        asked_in_a_rollout(session, azure)
        assert of_service == [("Bearer owner's", "large")] and of_policy == [("Bearer k", "m")]
        grader = {"grader": {"base_url": policy, "api_key": "graders", "model": "g"}}
        asked_in_a_rollout(Session("http://127.0.0.1:9/v1", "k", "m", roles=grader), keyed)
        assert of_policy[1:] == [("Bearer graders", "g")]
        with pytest.raises(RuntimeError, match="outside any rollout"):
            asked_in_a_rollout(None, azure)
        assert len(of_service) == 1


def test_embeddings_are_asked_of_their_service_alone(copying: OwnLoop) -> None:
    rollout_of.set(None)
    with asked_of("a vector") as (service, asked):
        for key in ("owner's", "EMPTY"):  # a server of this machine may need none
            with pytest.raises(ValueError, match="No embedding data"):
                OpenAI(base_url=service, api_key=key, max_retries=0).embeddings.create(model="small", input="a")
    assert asked == [("Bearer owner's", "small"), ("Bearer EMPTY", "small")]
    with pytest.raises(RuntimeError, match="embedding model small at example.org needs a key.*OPENAI_API_KEY"):
        OpenAI(base_url="https://example.org/v1", api_key="none").embeddings.create(model="small", input="a")


def test_a_group_of_environments_gives_the_reward_of_the_one_whose_task_it_is(copying: OwnLoop) -> None:
    """Its rubric knows the names of all functions and the weights of none."""

    def style() -> None: ...

    members = {}
    for name, weights in (("one", [2.0, -1.0]), ("two", [0.5, 0.0])):
        members[name] = SingleTurnEnv([{"prompt": "x"}], Rubric([style, test_images_are_named_as_unsupported], weights))
    members["two"].max_turns = 50
    group = SingleTurnEnv([{"prompt": "x"}], Rubric([style], []))
    group.env_map = group.rubric.env_map = members  # type: ignore[attr-defined]
    copying._make = lambda **given: group  # type: ignore[attr-defined]
    environment = configure(copying, knobs={"words": ["ab"], "turns": 4})
    parts = {name: (part.weight, part.low, part.high) for name, part in environment.parts.items()}
    assert parts == {"reward": (1.0, -3000.0, 2.0), "style": (0.0, -1e6, 1e6), "reward_errors": (0.0, 0.0, 1e6)}
    assert environment.max_turns == 4 == members["two"].max_turns
    scored = environment._result_of({"metrics": {"style": 7.0}, "reward": 1.5, "error": None})  # type: ignore[attr-defined]
    assert scored.parts == {"reward": 1.5, "style": 7.0, "reward_errors": 0.0}
    assert not environment.success(scored.parts, 1.5) and environment.success({**scored.parts, "reward": 2.0}, 2.0)
    members["two"].max_turns = 50
    environment = configure(copying, knobs={"words": ["ab"]})
    assert environment.max_turns == 50, "the author's limit holds"


def test_what_solves_a_task_is_the_part_of_the_largest_weight(copying: OwnLoop) -> None:
    """Rewards of a format, and penalties, are not all at their best in a right answer."""
    environment = configure(copying, knobs={"words": ["ab"]})
    parts = {"right": Part(1.0), "form": Part(0.2), "length": Part(-0.5, 0.0, 1000.0), "shown": Part(0.0)}
    knobs = environment.knobs
    assert is_solved(knobs, parts, {"right": 1.0, "form": 0.0, "length": 2.0}, 0.0)
    assert not is_solved(knobs, parts, {"right": 0.9, "form": 1.0}, 1.1)
    assert is_solved(knobs, {"length": parts["length"]}, {"length": 0.0}, 0.0)
    assert not is_solved(knobs, {"length": parts["length"]}, {"length": 1.0}, -0.5)
    tied = {"form": Part(1.0), "right": Part(1.0)}
    assert not is_solved(knobs, tied, {"form": 1.0, "right": 0.0}, 1.0), "both have the largest weight"
    assert is_solved(knobs, {**parts, "move_penalty": Part(1.0)}, {"right": 1.0, "move_penalty": 0.0}, 1.0)
    assert not is_solved(knobs, {"right_with_penalty": Part(1.0), "form": Part(0.2)}, {"form": 1.0}, 0.2)
    assert not is_solved(knobs, parts, {"right": 0.0, "form": 1.0}, 1.1, ["right"])
    assert is_solved(knobs, parts, {"right": 0.0, "form": 0.2}, 1.2, ["right"]), "its rewards have names of their own"
    knobs = replace(knobs, success_reward=1.1)
    assert is_solved(knobs, parts, {"right": 0.9, "form": 1.0}, 1.1) and not is_solved(
        knobs, parts, {"right": 1.0}, 1.0
    )


def test_functions_of_one_name_are_one_part(copying: OwnLoop) -> None:
    def style() -> None: ...

    one = SingleTurnEnv([{"prompt": "x"}], Rubric([style, style], [1.0, 0.5]))
    copying._make = lambda **given: one  # type: ignore[attr-defined]
    assert configure(copying, knobs={"words": ["ab"]}).parts["reward"].high == 1.5


def test_a_rubric_that_scores_by_itself_gives_its_own_reward(copying: OwnLoop) -> None:
    """Authors gate or compute the reward in `score_group`; what the functions weigh is then not it."""

    class Own(Rubric):
        async def score_group(self, states: list[Any]) -> None:
            for state in states:
                state["reward"], state["metrics"] = 0.25, {"style": 1.0}

    def style() -> None: ...

    def parts_with(rubric: Rubric) -> Any:
        one = SingleTurnEnv([{"prompt": "x"}], rubric)
        copying._make = lambda **given: one  # type: ignore[attr-defined]
        parts = configure(copying, knobs={"words": ["ab"], "reward_low": 0.0}).parts
        return {name: (part.weight, part.low, part.high) for name, part in parts.items() if part.weight}

    group = Rubric([style], [1.0])
    group.rubrics = [Rubric([style], [1.0]), Own([], [])]  # type: ignore[attr-defined]
    assert parts_with(group) == {"reward": (1.0, 0.0, 2.0)}
    assert parts_with(Own([], [])) == {"reward": (1.0, 0.0, 1.0)}, "no function tells the bounds"
    assert parts_with(Own([style], [0.5])) == {"reward": (1.0, 0.0, 0.5)}
    environment = configure(copying, knobs={"words": ["ab"]})
    [played] = asyncio.run(environment.group(next(environment.tasks()), [Session("http://127.0.0.1:9/v1", "ab", "m")]))
    assert isinstance(played, Played) and played.parts == {"reward": 0.25, "style": 1.0, "reward_errors": 0.0}


def test_images_are_named_as_unsupported(copying: OwnLoop) -> None:
    environment = configure(copying, knobs={"words": ["ab"], "image": True})
    with pytest.raises(InvalidRequest, match="content of type image_url.*without images or sound"):
        list(environment.tasks())


def test_a_judge_that_does_not_answer_is_no_reward_of_zero(copying: OwnLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rubrics log what a reward function raises and go on with 0."""

    async def asks(state: Any) -> float:
        if state["completion"][-1]["content"] == "ab":
            return 1.0
        try:
            raise APIConnectionError(request=httpx.Request("POST", "http://localhost:8000/v1/chat/completions"))
        except APIConnectionError as error:
            raise RuntimeError("Judge model API error") from error

    def parses(state: Any) -> float:
        return float(state["completion"][-1]["content"])

    def ranks(states: list[Any]) -> list[float]:
        raise KeyError(len(states))

    async def score(rubric: Rubric, states: list[Any]) -> None:
        for state in states:
            scores = [await rubric._call_individual_reward_func(func=one, state=state) for one in (asks, parses)]
            state["metrics"] = dict(zip(("exact", "size"), scores, strict=True))
        await rubric._call_group_reward_func(ranks, states)

    score.__module__ = "verifiers.rubrics.rubric"
    monkeypatch.setattr(Rubric, "score_group", score)
    environment = configure(copying, knobs={"words": ["ab"]})
    task = next(iter(environment.tasks()))
    sessions = [Session("http://127.0.0.1:9/v1", key, "m") for key in ("ab", "cd")]
    answered, unanswered = asyncio.run(environment.group(task, sessions))
    assert isinstance(answered, Played) and answered.error is None
    assert answered.parts == {"exact": 1.0, "size": 0.0, "reward_errors": 2.0}
    assert isinstance(unanswered, Played) and "at http://localhost:8000: RuntimeError: Judge" in str(unanswered.error)


def test_a_judge_that_refuses_the_answer_has_judged_it(copying: OwnLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy could avoid a low reward by answers that are too long for the judge."""

    async def asks(state: Any) -> float:
        response = httpx.Response(400, request=httpx.Request("POST", "http://127.0.0.1:9/v1"))
        try:
            raise BadRequestError("This model's maximum context length is 9 tokens.", response=response, body=None)
        except BadRequestError as error:
            raise RuntimeError("Judge model API error") from error

    played = asyncio.run(scored_by(copying, monkeypatch, [asks], [1.0]))
    assert played.error is None and played.parts == {"asks": 0.0, "reward_errors": 1.0}


def test_a_metric_that_fails_is_no_failed_reward(copying: OwnLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    async def unanswered(state: Any) -> float:
        raise OpenAIError("no answer")

    def exact(state: Any) -> float:
        return 1.0

    played = asyncio.run(scored_by(copying, monkeypatch, [exact, unanswered], [1.0, 0.0]))
    assert played.error is None and played.parts == {"exact": 1.0, "unanswered": 0.0, "reward_errors": 0.0}


async def scored_by(
    environment: OwnLoop, monkeypatch: pytest.MonkeyPatch, funcs: list[Any], weights: list[float]
) -> Played:
    """One rollout with the rewards of a rubric of these functions."""

    async def score(rubric: Rubric, states: list[Any]) -> None:
        for state in states:
            scores = [await rubric._call_individual_reward_func(one, state) for one in rubric.funcs]
            state["metrics"] = dict(zip(rubric._get_reward_func_names(), scores, strict=True))

    score.__module__ = "verifiers.rubrics.rubric"
    monkeypatch.setattr(Rubric, "score_group", score)
    environment._make = lambda **given: SingleTurnEnv([{"prompt": "x"}], Rubric(funcs, weights))  # type: ignore[attr-defined]
    configured = configure(environment, knobs={"words": ["ab"]})
    [task] = configured.tasks()
    [played] = await configured.group(task, [Session("http://127.0.0.1:9/v1", "ab", "m")])
    assert isinstance(played, Played)
    return played


def test_a_row_with_an_image_is_left_out_of_others(copying: OwnLoop, capsys: pytest.CaptureFixture[str]) -> None:
    environment = configure(copying, knobs={"words": ["ab", "cd", "ef"], "image": True})
    assert [task.reference for task in environment.tasks()] == ["cd", "ef"]
    assert "1 of 1 tasks so far are left out. Prompts have content of type image_url" in capsys.readouterr().err
