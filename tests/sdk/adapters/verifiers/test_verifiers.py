"""The adapter of verifiers, with a stand-in for the package."""

from __future__ import annotations

import asyncio
import sys
import types
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace as Thing
from typing import Any

import pytest
from openai import AsyncOpenAI
from pydantic import BaseModel, field_validator

from tests.sdk.adapters.conftest import asked_of
from tests.sdk.adapters.verifiers.conftest import Asking, Env, Spec, Strict, episode, reward, sample, trace
from toprope.sdk.adapters import verifiers
from toprope.sdk.adapters._verifiers.harness import HARNESS
from toprope.sdk.authoring.env_managed import OwnLoop, Played, Session, sample_group
from toprope.sdk.authoring.environment import Task
from toprope.sdk.errors import EnvironmentMistake, InvalidRequest, LoadError, MissingKnobs
from toprope.sdk.rollouts import configure
from toprope.sdk.worker.splits import SPLITS, TaskSplits


def test_verifiers_declares_parts_and_reads_episodes(open_taskset: Callable[..., OwnLoop]) -> None:
    one, judge = trace({"exact": (1.0, 0.75), "style": (0.5, 2.0)}), trace({"exact": (0.0, 0.75)}, trainable=False)
    environment = open_taskset(
        rewards=[reward("exact", 0.75, float), reward("several", 1.0, None)],
        metrics=[reward("length", 1, int)],
        episodes=[
            episode(one, judge),
            episode(trace({"exact": (7.0, 0.75)})),
            episode(one, error=Thing(type="TaskError", message="no file")),
        ],
    )
    assert {name: part.weight for name, part in environment.parts.items()} == {
        "exact": 0.75, "several": 1.0, "other": 1.0, "length": 0.0,
    }  # fmt: skip
    found, wide, failed = (sample(environment) for _ in range(3))
    assert isinstance(found, Played)
    assert found.parts == {"exact": 1.0, "several": 0.0, "other": 1.0, "length": 3.0} and found.turns == 1
    assert environment.success(found.parts, 1.75) and not environment.success(found.parts, 1.5)
    assert isinstance(wide, EnvironmentMistake), "on another scale, any answer could count as solved"
    assert isinstance(failed, Played) and failed.error == "TaskError: no file"


def test_weight_that_an_environment_changes_afterwards_counts(open_taskset: Callable[..., OwnLoop]) -> None:
    episodes = [episode(trace({"exact": (1.0, 0.25)}))]
    environment = open_taskset(rewards=[reward("exact", 0.75, float), reward("rest", 1.0, None)], episodes=episodes)
    found = sample(environment)
    assert isinstance(found, Played) and found.parts["exact"] == 1.0 and found.parts["other"] == 0.25 - 0.75


def test_a_conversation_that_exceeds_the_context_is_truncated(open_taskset: Callable[..., OwnLoop]) -> None:
    said = "upstream 400: This model's maximum context length is 9 tokens."
    overflow, other = (
        Thing(error=Thing(type="ProviderError", message=message, status_code=400)) for message in (said, "no such tool")
    )
    full, wrong, unanswered = trace({"exact": (0.5, 1.0)}), trace({"exact": (0.5, 1.0)}), trace({})
    full.calls, wrong.calls = [Thing(error=None), overflow], [Thing(error=None), other]
    unanswered.calls, unanswered.num_turns = [overflow], 0
    episodes = [episode(one) for one in (full, wrong, unanswered)]
    environment = open_taskset(rewards=[reward("exact", 1.0, float)], episodes=episodes)
    found, whole, refused = (sample(environment) for _ in range(3))
    assert isinstance(whole, Played) and not whole.truncated, "another request was wrong"
    assert isinstance(found, Played) and found.truncated and found.parts == {"exact": 0.5} and found.error is None
    assert isinstance(refused, Played) and refused.error == f"ProviderError: {said}"


def test_judges_of_tasks_are_led_to_the_grader(
    open_taskset: Callable[..., OwnLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    """verifiers gives them the key EMPTY if the owner has none; authors give their own clients none."""
    asking: Any = {"model": "large", "messages": [{"role": "user", "content": "Right?"}]}

    async def ask(env: Env, task: Any, context: Any) -> Any:
        for judge in (AsyncOpenAI(api_key="EMPTY", max_retries=0), AsyncOpenAI(max_retries=0)):
            said = await judge.chat.completions.create(**asking)
        return episode(trace({"exact": (float(said.choices[0].message.content == "yes"), 1.0)}))

    monkeypatch.setattr(Env, "run_episode", ask)
    environment = open_taskset(rewards=[reward("exact", 1.0, float)])
    task = next(iter(environment.tasks()))
    with asked_of("yes") as (url, asked):
        grader = {"grader": {"base_url": url, "api_key": "owner", "model": "strong"}}
        sessions = [Session(url, "k", "m", "judge"), Session("http://127.0.0.1:9/v1", "k", "m", roles=grader)]
        found = asyncio.run(play(environment, task, sessions))
    assert [one.parts for one in found if isinstance(one, Played)] == [{"exact": 1.0}] * 2
    assert asked == [("Bearer judge", "m")] * 2 + [("Bearer owner", "strong")] * 2
    assert "model-roles" in environment.tags, "the owner may name a grader"


async def play(environment: OwnLoop, task: Task, sessions: list[Session]) -> list[Played | BaseException]:
    """Play rollouts one after the other."""
    return [(await environment.group(task, [one]))[0] for one in sessions]


def test_penalties_are_solved_without_one(open_taskset: Callable[..., OwnLoop]) -> None:
    environment = open_taskset(rewards=[reward("exact", 0.5, float)], metrics=[reward("length", 1, int)])
    configure(environment, knobs={"reward_low": -1.0, "reward_high": 0.0})
    assert environment.success({"exact": 0.0}, 0.0) and not environment.success({"exact": -0.5}, -0.25)


def test_rewards_beyond_the_owner_s_bounds_are_refused(open_taskset: Callable[..., OwnLoop]) -> None:
    episodes = [episode(trace({"exact": (score, 1.0)})) for score in (7.0, 4.000001)]
    environment = open_taskset(rewards=[reward("exact", 0.5, float)], episodes=episodes)
    assert environment.success({"exact": 1.0}, 0.5) and not environment.success({"exact": 0.9}, 0.45)
    configure(environment, knobs={"reward_high": 4.0})
    beyond, rounded = sample(environment), sample(environment)
    assert isinstance(rounded, Played) and rounded.parts == {"exact": 4.0}
    assert isinstance(beyond, EnvironmentMistake) and "reward_low and reward_high" in str(beyond)
    assert environment.success({"exact": 4.0}, 2.0) and not environment.success({"exact": 1.0}, 0.5)
    with pytest.raises(InvalidRequest, match=r"reward_low 4 must be below reward_high 4"):
        configure(environment, knobs={"reward_low": 4.0, "reward_high": 4.0})


def test_each_rollout_of_a_zero_sum_game_is_one_seat_with_its_own_reward(open_taskset: Callable[..., OwnLoop]) -> None:
    def seat(name: str, payoff: float) -> Thing:
        one = trace({"payoff": (payoff, 1.0)})
        one.agent.name = name
        return one

    hands = [episode(seat("north", 2.0), seat("south", -2.0)) for _ in range(4)]
    environment = open_taskset(episodes=hands, agents=("north", "south", "referee"))
    [task] = environment.tasks()
    found = asyncio.run(environment.group(task, [Session("http://x/v1", f"k{n}", "m", f"j{n}") for n in range(4)]))
    played = [one for one in found if isinstance(one, Played)]
    assert [(one.seat, one.parts["other"]) for one in played] == [("north", 2.0), ("south", -2.0)] * 2


@pytest.mark.parametrize(("fails", "kept"), [(False, 0), (True, 1)])
def test_one_run_of_an_agent_is_recorded_and_rewarded(
    open_taskset: Callable[..., OwnLoop], monkeypatch: pytest.MonkeyPatch, fails: bool, kept: int
) -> None:
    """verifiers may repeat a failed run; the failed one is then no part of the episode."""
    attempts = [trace({"exact": (score, 1.0)}) for score in (1.0, 0.5, 0.0)]
    keys: list[str] = []

    async def run(env: Any, task: Any, context: Any) -> Any:
        for number, attempt in enumerate(attempts):
            attempt.messages = [{"role": "assistant", "content": str(number)}]
            session = Thing(trace=attempt, ctx=context)
            env._interception.register(session)
            keys.append(session.client.api_key)
            attempt.errors = ["timeout"] if fails and not number else []
        return episode(*reversed([one for one in attempts if not one.errors]))

    monkeypatch.setattr(Env, "run_episode", run)
    environment = open_taskset(rewards=[reward("exact", 1.0, float)])
    [task] = environment.tasks()
    [found] = asyncio.run(environment.group(task, [Session("http://x/v1", "own", "m", "judge")]))
    assert isinstance(found, Played) and found.error is None
    assert keys == ["own"] * (kept + 1) + ["judge"] * (2 - kept)
    assert found.parts == {"exact": 1.0 - 0.5 * kept} and found.turns == 1
    assert found.messages == [{"role": "assistant", "content": str(kept)}]


def test_episode_that_raises_stays_in_its_seat(open_taskset: Callable[..., OwnLoop]) -> None:
    environment = open_taskset(episodes=[], agents=("north", "south"))
    [task] = environment.tasks()
    sessions = [Session("http://x/v1", f"k{n}", "m", f"j{n}") for n in range(4)]
    outcomes = asyncio.run(sample_group(environment, task, sessions)).outcomes
    assert [one.seat for one in outcomes] == ["north", "south"] * 2
    assert all(one.error and one.error.startswith("IndexError: ") for one in outcomes)


def test_limit_of_turns_binds_the_agents_that_learn(
    open_taskset: Callable[..., OwnLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    """verifiers makes the agents of an episode of its configuration."""
    limits: list[dict[str, int]] = []
    stopped = trace({"exact": (0.5, 1.0)})
    stopped.is_truncated, stopped.stop_condition = True, "max_turns"

    async def run(env: Env, task: Any, context: Any) -> Any:
        limits.append({name: agent.max_turns for name, agent in vars(env.config).items()})
        return episode(stopped)

    monkeypatch.setattr(Env, "run_episode", run)
    found = []
    for knobs, most in (({"turns": 2}, None), ({}, 1), ({"turns": 9}, None)):
        environment = open_taskset(rewards=[reward("exact", 1.0, float)], agents=("player", "referee"))
        configure(environment, knobs=knobs, max_turns=most)
        found.append(sample(environment))
    assert [limit["player"] for limit in limits] == [2, 1, 3], "the knob, the run's, the author's"
    assert [limit["referee"] for limit in limits] == [3] * 3, "its author's"
    assert all(isinstance(one, Played) and not one.truncated for one in found)


def test_only_our_harness_is_known_to_end_with_an_answer(
    open_taskset: Callable[..., OwnLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.sdk.adapters.verifiers.conftest.Env", type("SingleAgentEnv", (Env,), {}))
    monkeypatch.setattr(Spec, "harness", Thing(id=HARNESS))
    opened = {"rewards": [reward("exact", 1.0, float)], "agents": ("agent",)}
    assert open_taskset(**opened).max_turns == 1
    monkeypatch.setattr(Spec, "harness", None)
    assert open_taskset(**opened).max_turns == 3, "the taskset's own, which may play a game"


def test_settings_that_a_taskset_requires_are_knobs(open_taskset: Callable[..., OwnLoop]) -> None:
    with pytest.raises(MissingKnobs, match=r"^It needs the knobs words \(list\[str\]: words to copy\), taskset_turns "):
        open_taskset(settings=Asking)
    rest = {"taskset": {"turns": 3, "source": {"path": "x"}}}
    with pytest.raises(MissingKnobs, match=r"^It needs the knob words \("):
        open_taskset(settings=Asking, knobs={"config": rest})
    assert open_taskset(settings=Asking, knobs={"words": ["a"], "config": rest}).knobs.words == ["a"]
    whole = {"words": ["a"], "taskset_turns": 3, "source": {"path": "x"}}
    assert open_taskset(settings=Asking, knobs=whole).knobs.shuffle is False


@pytest.mark.parametrize("nothing", [None, "", []])
def test_a_required_setting_that_is_null_or_empty_is_missing(
    open_taskset: Callable[..., OwnLoop], nothing: object
) -> None:
    rest = {"turns": 3, "source": {"path": "x"}}
    ways: list[dict[str, Any]] = [{"config": {"taskset": {**rest, "words": nothing}}}]
    ways += [] if nothing == "" else [{"words": nothing, "config": {"taskset": rest}}]
    for knobs in ways:
        with pytest.raises(MissingKnobs, match=r"^It needs the knob words \(list\[str\]: words to copy\)"):
            open_taskset(settings=Strict, knobs=knobs)


def test_tasks_with_one_prompt_differ_by_their_data(open_taskset: Callable[..., OwnLoop]) -> None:
    class Data(BaseModel):
        idx: int
        name: str = "game"
        prompt: str = "Guess my word."
        system_prompt: str | None = None
        seed: int

    environment = open_taskset(rewards=[reward("exact", 1.0, float)])
    told_apart = [task.id for task in environment.tasks()]
    taskset = environment._env.taskset  # type: ignore[attr-defined]
    taskset[:] = [Thing(data=Data(idx=number, name=f"game {number}", seed=number % 9)) for number in range(12)]
    splits = TaskSplits(environment)
    splits.survey(99, 60.0)
    assert sum(map(splits.known, SPLITS)) == 9, "the number and the name of a task are not its content"
    taskset[:] = [Thing(data=Data(idx=number, prompt=f"Guess {number}.", seed=1)) for number in range(3)]
    taskset[0].data.prompt = "Copy: x"
    assert next(iter(environment.tasks())).id == told_apart[0]


class Nullable(Asking):
    """Settings of which null is one."""

    limit: int | None

    @field_validator("turns")
    @classmethod
    def some(cls, turns: int) -> int:
        if turns < 1:
            raise ValueError("too few turns")
        return turns


def test_null_is_a_value_of_a_required_setting_that_allows_it(open_taskset: Callable[..., OwnLoop]) -> None:
    given: dict[str, Any] = {"words": ["a"], "source": {"path": "x"}}
    with pytest.raises(InvalidRequest, match="too few turns") as refused:
        open_taskset(settings=Nullable, knobs={"config": {"taskset": {**given, "turns": 0, "limit": None}}})
    assert not isinstance(refused.value, MissingKnobs)
    with pytest.raises(MissingKnobs, match=r"^It needs the knob limit \("):
        open_taskset(settings=Nullable, knobs={"config": {"taskset": {**given, "turns": 1}}})


def test_error_with_a_cause_of_its_own_is_not_put_down_to_an_empty_setting(
    open_taskset: Callable[..., OwnLoop], stand_in: Callable[..., None]
) -> None:
    environment = open_taskset(settings=Asking, knobs={"words": ["a"], "taskset_turns": 3, "source": {"path": "x"}})

    def load(config: Any) -> Any:
        raise ConnectionError("the hub cannot be reached")

    stand_in("verifiers.v1.utils.loaders", load_environment=load)
    with pytest.raises(ConnectionError, match="cannot be reached"):
        configure(environment, knobs={"words": [], "taskset_turns": 3, "source": {"path": "x"}})


def test_keys_of_tasks_depend_on_no_later_task(open_taskset: Callable[..., OwnLoop]) -> None:
    environment = open_taskset(rewards=[reward("exact", 1.0, float)])
    taskset = environment._env.taskset  # type: ignore[attr-defined]

    def ids(**columns: list[Any]) -> list[str]:
        rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        taskset[:] = [
            Thing(data=Thing(idx=n, prompt="Guess.", system_prompt=None, **row)) for n, row in enumerate(rows)
        ]
        return [task.id for task in environment.tasks()]

    [alone] = ids(word=["a"])
    games = ids(word=["a", "b", "b"], game_id=[1, 2, 3])
    assert games[0] == alone and games[1] == games[2] != alone, "numbers are not the content"
    assert len(set(ids(word=["a", "a"], game_id=[1, 2]))) == 2, "nothing but their numbers tells them apart"
    assert len(set(ids(word=[{1j: object}, {2j: object}]))) == 2, "JSON cannot say these"


def test_images_are_named_as_unsupported(open_taskset: Callable[..., OwnLoop], stand_in: Callable[..., None]) -> None:
    environment = open_taskset(rewards=[reward("exact", 1.0, float)])
    stand_in("verifiers.v1.types", content_text=lambda content: "")
    data = environment._env.taskset[0].data  # type: ignore[attr-defined]
    data.prompt = [Thing(role="user", content=[Thing(type="text"), Thing(type="image_url")])]
    with pytest.raises(InvalidRequest, match="content of type image_url"):
        list(environment.tasks())


def test_a_version_with_both_interfaces_plays_tasksets(
    open_taskset: Callable[..., OwnLoop], stand_in: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in("copy_words")
    stand_in("verifiers", SingleTurnEnv=object)
    open_taskset(rewards=[reward("exact", 1.0, float)])
    assert isinstance(verifiers.make("copy_words"), verifiers.Verifiers)
    monkeypatch.setitem(sys.modules, "verifiers.v1.harnesses.utils.mcp", None)  # 0.3 has the loaders, too
    for has_both in (True, False):
        if not has_both:
            monkeypatch.delattr(sys.modules["verifiers"], "SingleTurnEnv")
        with pytest.raises(LoadError, match=r"played by verifiers==0\.4\.\*, not .*-r 'verifiers==0\.4\.\*'"):
            verifiers.make("copy_words")


def test_harness_that_needs_a_container_is_refused_with_the_knob(
    open_taskset: Callable[..., OwnLoop], stand_in: Callable[..., None]
) -> None:
    def agents(config: Any) -> dict[str, Any]:
        spec = Spec()
        spec.harness = Thing(id="boxed")
        return {"solver": spec}

    environment = open_taskset(rewards=[reward("exact", 1.0, float)])
    stand_in("verifiers.v1.configs.agent", agent_config_fields=agents)
    with pytest.raises(InvalidRequest, match=f"boxed of the agent solver needs a container.*knob harness to {HARNESS}"):
        configure(environment)
    configure(environment, knobs={"harness": HARNESS})


def test_null_is_played_in_process_unless_the_owner_names_it(
    open_taskset: Callable[..., OwnLoop], stand_in: Callable[..., None]
) -> None:
    told: list[dict[str, Any]] = []

    class Told(Spec):
        def model_copy(self, update: dict[str, Any]) -> Any:
            told.append(vars(update["harness"]))
            return update["harness"].id

    def agents(config: Any) -> dict[str, Any]:
        return {name: Told() for name in ("player", "other")}

    environment = open_taskset(rewards=[reward("exact", 1.0, float)])
    stand_in("verifiers.v1.configs.agent", agent_config_fields=agents)
    config = Thing(taskset=Thing(id="copy"), model_copy=lambda update: update)
    Told.harness = Thing(id="null", tool_timeout=3600)
    at_home = environment._at_home  # type: ignore[attr-defined]
    assert at_home(config, "auto") == {"player": HARNESS, "other": HARNESS}
    assert told[0] == {"id": HARNESS, "tool_timeout": 3600}
    assert at_home(config, "null") == {"player": "null", "other": "null"}
    Told.harness = Thing(id="pi")
    assert at_home(config, "auto") == {"player": "pi", "other": "pi"}


def test_verifiers_refuses_undeclared_reward(open_taskset: Callable[..., OwnLoop]) -> None:
    environment = open_taskset(rewards=[reward("exact", 1.0, float)], episodes=[episode(trace({"style": (1.0, 1.0)}))])
    assert list(environment.parts) == ["exact"]
    found = sample(environment)
    assert isinstance(found, EnvironmentMistake) and "dict[str, float]" in str(found)


def test_verifiers_refuses_tool_server_that_is_not_a_program(
    open_taskset: Callable[..., OwnLoop], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "served.py"
    made = types.ModuleType("served")
    made.__file__ = str(file)
    monkeypatch.setitem(sys.modules, "served", made)
    server = type("Lookup", (), {"__module__": "served", "_config_cls": classmethod(lambda cls: None)})()
    server.config = Thing(url=None)
    file.write_text("x = 1\n")
    with pytest.raises(InvalidRequest, match=r"Lookup\.run\(\)"):
        open_taskset(tools=[server])
    file.write_text('if __name__ == "__main__":\n    Lookup.run()\n')
    open_taskset(tools=[server])


def test_verifiers_refuses_a_tool_server_that_would_have_no_tools(open_taskset: Callable[..., OwnLoop]) -> None:
    def search(self: Any) -> None:
        """A tool of today."""

    def register(self: Any, mcp: Any) -> None:
        """The one of verifiers."""

    search.tool = True  # type: ignore[attr-defined]
    register.__module__ = module = "verifiers.v1.mcp.toolset"
    of_verifiers = {"register": register, "respond": search, "_config_cls": classmethod(lambda cls: None)}
    base = type("Toolset", (), of_verifiers | {"__module__": module})
    unused = type("Registry", (), {"register": lambda self, name: None})
    before = {"_register": lambda self, mcp: None, "config": Thing(url="http://x/mcp")}
    marked: dict[str, Any] = {"search": search}
    refused: list[dict[str, Any]] = [
        {},
        {"_register": lambda self, server: self.look(server), "Result": type("Result", (), {"tool": "a field"})},
        marked,
        marked | {"_register": lambda self, server: server.add_tool(self.look)},
    ]
    for members in refused:
        with pytest.raises(InvalidRequest, match="Lookup adds tools in `_register`"):
            open_taskset(tools=[type("Lookup", (base, unused), before | members)()])
    unrelated = {"_register": lambda self, tool: self.known.add(tool.name)}
    for today in ({"register": lambda self, mcp: self._register(mcp)}, marked | unrelated):
        open_taskset(tools=[type("Lookup", (base,), before | today)()])


@pytest.mark.parametrize(
    ("exports", "kept"), [("", ["Alias", "Walk", "Races"]), ("__all__ = ['Walk', 'Races']\n", ["Walk", "Races"])]
)
def test_a_file_is_played_with_the_environment_that_it_defines(
    stand_in: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exports: str, kept: list[str]
) -> None:
    for kind in ("Taskset", "Env", "Harness"):
        stand_in(f"verifiers.v1.{kind.lower()}", **{kind: type(kind, (), {})})
    file = tmp_path / "racing_alone.py"
    file.write_text(
        "from verifiers.v1.env import Env\nfrom verifiers.v1.harness import Harness\n"
        "from verifiers.v1.taskset import Taskset\n\n"
        "class Sport(Env): ...\nclass Race(Sport): ...\nAlias = Race\n"  # verifiers refuses two of a kind
        f"class Walk(Harness): ...\nclass Races(Taskset): ...\n{exports}"
    )
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.delitem(sys.modules, "racing_alone", raising=False)
    assert verifiers._taskset(str(file)) == ("racing_alone", str(file))
    assert sys.modules.pop("racing_alone").__all__ == kept
