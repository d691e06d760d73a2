"""Games of TextArena that ask a model themselves: juries and game masters of a stand-in package."""

from __future__ import annotations

import asyncio
import textwrap
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.sdk.adapters.test_textarena import CORE, REAL, REGISTRY, TWO
from tests.support.services.openai_stand_in import OpenAiStandIn
from toprope.sdk.adapters import textarena
from toprope.sdk.worker.client import WorkerClient, worker_environment

AGENTS = """
    import os

    class OpenRouterAgent:
        def __init__(self, model_name, system_prompt="Play well.", verbose=False, **kwargs):
            if "OPENROUTER_API_KEY" not in os.environ:
                raise ValueError("OpenRouter API key not found.")
            self.told = f"{model_name}, {system_prompt}, {os.environ['OPENROUTER_API_KEY']}"

        def __call__(self, observation):
            return f"{self.told}: no"
"""
KEEPING = """
    class Keeping(Wrapper):
        def __deepcopy__(self, memo):
            import copy
            copied = type(self)(copy.deepcopy(self.env, memo))
            copied.seen = list(self.__dict__.get("seen", []))
            return copied

        def get_observation(self):
            player, new = self.env.get_observation()
            self.__dict__.setdefault("seen", []).extend(message for _, message, _ in new)
            return player, " | ".join(self.seen)
"""
DEBATE = """
    import random
    from textarena import agents
    from textarena.envs.Two.env import TwoEnv

    class OpenRouterJury:
        def __init__(self, size):
            make = agents.OpenRouterAgent
            self.jury = [make(model_name="m", system_prompt="Vote.", temperature=0) for _ in range(size)]

        def evaluate(self, question):
            votes = {"A": 0, "B": 0}
            for juror in self.jury:
                try:
                    votes[juror(question)] += 1
                except Exception:
                    pass
            return votes

    class DebateEnv(TwoEnv):
        def __init__(self, jury_size=3):
            self.jury = OpenRouterJury(jury_size)

        def reset(self, num_players, seed=None):
            super().reset(num_players, seed)
            self.before = self.jury.evaluate("before")

        def step(self, action):
            done, info = super().step(action)
            if done:
                after = self.jury.evaluate(f"after {random.random()}")
                gain = after["A"] - self.before["A"]
                self.state.rewards = {0: gain / 3, 1: -gain / 3}
            return done, info
"""
ASKING = """
    from textarena import agents
    from textarena.core import Env, SinglePlayerState

    class AskingEnv(Env):
        def __init__(self, max_turns=4):
            self.max_turns = max_turns
            self.master = agents.OpenRouterAgent(model_name="openai/gpt-4o")

        def reset(self, num_players, seed=None):
            self.state = SinglePlayerState(num_players=num_players, seed=seed, max_turns=self.max_turns)
            self.state.game_state = {}
            self.state.add("Ask, or guess in brackets.")

        def step(self, action):
            self.state.add(action, 0, 2)
            if action == "[guess]":
                self.state.rewards, self.state.done = {0: 1}, True
            else:
                self.state.add(f"The master says: {self.master(action)}")
            return self.state.done, {}
"""
ENVS = """
    from textarena.envs.registration import register_with_versions
    from textarena.core import Keeping
    NONE = {"default": [Keeping]}
    register_with_versions(id="Debate-v0", entry_point="textarena.envs.Debate.env:DebateEnv", wrappers=NONE,
                           jury_size=3)
    register_with_versions(id="Asking-v0", entry_point="textarena.envs.Asking.env:AskingEnv", wrappers=NONE,
                           max_turns=4)
"""


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("asked")
    texts = {
        "core.py": CORE + KEEPING, "__init__.py": "", "agents.py": AGENTS, "envs/__init__.py": ENVS,
        "envs/registration.py": REGISTRY, "envs/Two/env.py": TWO, "envs/Debate/env.py": DEBATE,
        "envs/Asking/env.py": ASKING,
    }  # fmt: skip
    for name, text in texts.items():
        file = folder / "textarena" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text))
    return folder


def played(packages: Path, target: str, sessions: list[dict[str, Any]], show: str = "new", **variables: str) -> Any:
    async def main() -> Any:
        env = worker_environment({"PYTHONPATH": str(packages), **variables})
        async with await WorkerClient.start(env=env, timeout=60) as link:
            card = await link.call("open", source={"adapter": "textarena", "target": target}, knobs={"show": show})
            return await link.call("run", timeout=30, concurrent=True, split="train", index=0, sessions=sessions), card

    return asyncio.run(main())


def session_of(policy: OpenAiStandIn, number: int, **more: Any) -> dict[str, Any]:
    own = {"base_url": policy.url, "api_key": f"seat {number}", "model": "p", "judge_key": "unrecorded"}
    return own | {"stop": ["."]} | more


def test_jury_is_the_owners_grader_and_votes_before_and_after_a_game(packages: Path) -> None:
    policy = OpenAiStandIn(lambda question: "a bid")
    judge = OpenAiStandIn(lambda question: "A" if question.startswith("after") else "B")
    try:
        roles = {"grader": {"base_url": judge.url, "api_key": "of the judge", "model": "large"}}
        answer, card = played(packages, "Debate-v0", [session_of(policy, n, roles=roles, seed=7) for n in range(4)])
        assert "model-roles" in card["tags"] and "self-play" in card["tags"]
        assert [one["error"] for one in answer["outcomes"]] == [None] * 4
        assert [one["reward"] for one in answer["outcomes"]] == [1.0, -1.0, 1.0, -1.0]
        assert len(policy.seen) == 4 and len(judge.seen) == 12, "three votes before and three after each of two games"
        assert {(key, body["model"], body["temperature"]) for _, key, body in judge.seen} == {
            ("Bearer of the judge", "large", 0)
        }
        asked = [body["messages"] for _, _, body in judge.seen]
        assert asked[0][0] == {"role": "system", "content": "Vote."} and "stop" not in judge.seen[0][2]
        luck = {one[1]["content"] for one in asked if one[1]["content"] != "before"}
        assert len(luck) == 1, "a step that is tried again has the same luck"
        assert {body["max_tokens"] for _, _, body in judge.seen} == {1024}, "a verdict needs more room than an answer"
        assert Counter(body["seed"] for _, _, body in judge.seen) == {7: 4, 8: 4, 9: 4}, "the same in both games"
    finally:
        policy.close()
        judge.close()


def test_game_master_without_a_grader_is_the_policy_unrecorded(packages: Path) -> None:
    policy = OpenAiStandIn(lambda question: "[guess]" if "master says" in question else "Is it blue?")
    try:
        answer, card = played(packages, "Asking-v0", [session_of(policy, n) for n in range(2)])
        assert "self-play" not in card["tags"]
        assert [(one["reward"], one["success"], one["turns"]) for one in answer["outcomes"]] == [(1.0, True, 2)] * 2
        keys = sorted(str(key) for _, key, _ in policy.seen)
        assert keys == [*(["Bearer seat 0"] * 2), *(["Bearer seat 1"] * 2), *(["Bearer unrecorded"] * 2)]
        assert [message["role"] for message in answer["talks"][0]] == ["user", "assistant", "user", "assistant"]
        assert answer["talks"][0][2]["content"] == "The master says: Is it blue?"
    finally:
        policy.close()


def test_game_that_asks_is_copied_with_what_its_wrappers_keep(packages: Path) -> None:
    policy = OpenAiStandIn(lambda question: "[guess]" if "master says" in question else "Is it blue?")
    try:
        answer, _ = played(packages, "Asking-v0", [session_of(policy, 0)], show="whole")
        assert answer["outcomes"][0]["success"]
        seen = "Ask, or guess in brackets. | Is it blue? | The master says: Is it blue?"
        assert answer["talks"][0][2]["content"] == seen
    finally:
        policy.close()


def test_owners_key_leads_to_the_service_and_a_grader_comes_before_it(packages: Path) -> None:
    policy = OpenAiStandIn(lambda question: "[guess]" if "master says" in question else "Is it blue?")
    judge = OpenAiStandIn(lambda question: "yes")
    try:
        answer, _ = played(packages, "Asking-v0", [session_of(policy, 0)], OPENROUTER_API_KEY="of-the-owner")
        assert answer["talks"][0][2]["content"] == "The master says: openai/gpt-4o, Play well., of-the-owner: no"
        roles = {"grader": {"base_url": judge.url, "api_key": "of the judge", "model": "large"}}
        session = session_of(policy, 0, roles=roles)
        answer, _ = played(packages, "Asking-v0", [session], OPENROUTER_API_KEY="of-the-owner")
        assert answer["talks"][0][2]["content"] == "The master says: yes" and len(judge.seen) == 1
        assert {str(key) for _, key, _ in policy.seen} == {"Bearer seat 0"}
    finally:
        policy.close()
        judge.close()


def test_fixed_opponent_does_not_judge(packages: Path) -> None:
    policy, other = OpenAiStandIn(lambda question: "A"), OpenAiStandIn(lambda question: "bid")
    try:
        fixed = {"opponent": {"base_url": other.url, "api_key": "fixed", "model": "other"}}
        answer, _ = played(packages, "Debate-v0", [session_of(policy, 0, **fixed)])
        assert answer["outcomes"][0]["error"] is None and len(other.seen) == 1
        assert [str(key) for _, key, _ in policy.seen].count("Bearer unrecorded") == 6
    finally:
        policy.close()
        other.close()


def test_judge_that_refuses_is_an_error_of_the_game(packages: Path) -> None:
    policy = OpenAiStandIn(lambda question: "a bid")
    try:
        roles = {"grader": {"base_url": "http://127.0.0.1:9/v1", "api_key": "k", "model": "m"}}
        answer, _ = played(packages, "Debate-v0", [session_of(policy, n, roles=roles) for n in range(2)])
        assert all("the role grader, which gave no answer" in one["error"] for one in answer["outcomes"])
    finally:
        policy.close()


def test_games_that_ask_a_model_are_listed_as_such(packages: Path) -> None:
    listed = {one.name: one for one in textarena.installed(packages)}
    assert not any(one.problem or one.needs for one in listed.values())
    assert all("a model as master or jury" in one.description for one in listed.values())
    assert "model-roles" in listed["Asking-v0"].tags and "self-play" in listed["Debate-v0"].tags


@pytest.mark.engines
@pytest.mark.parametrize(
    ("target", "verdict", "rewards"),
    [
        ("TwentyQuestions-v0", "Yes", [0.0, 0.0]),
        ("GuessWho-v0", "No", [0.0, 0.0]),
        ("Debate-v0", "Affirmative", [0.0, 0.0]),  # as the jury said before the debate
        ("ScenarioPlanning-v0", "Player 1", [-1.0, 1.0]),
        ("ScenarioPlanning-v0", "neither", [0.0, 0.0]),
    ],
)
def test_installed_games_that_ask_a_model_run_to_the_end(target: str, verdict: str, rewards: list[float]) -> None:
    python = REAL / "bin" / "python"
    if not python.exists():
        pytest.skip(f"no TextArena at {REAL}")
    policy, judge = OpenAiStandIn(lambda question: "Is it a plant?"), OpenAiStandIn(lambda question: verdict)
    roles = {"grader": {"base_url": judge.url, "api_key": "of the judge", "model": "large"}}

    async def main() -> Any:
        async with await WorkerClient.start(str(python), timeout=60) as link:
            await link.call("open", source={"adapter": "textarena", "target": target}, timeout=60)
            sessions = [session_of(policy, number, roles=roles) for number in range(2)]
            return await link.call("run", timeout=60, concurrent=True, split="train", index=0, sessions=sessions)

    try:
        outcomes = asyncio.run(main())["outcomes"]
        assert [one["error"] for one in outcomes] == [None, None]
        assert [one["reward"] for one in outcomes] == rewards and judge.seen
    finally:
        policy.close()
        judge.close()
