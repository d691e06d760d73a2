"""Games of TextArena that ask a model themselves: juries and game masters of a stand-in package."""

from __future__ import annotations

import asyncio
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.sdk.adapters.test_textarena import CORE, REGISTRY, TWO
from tests.support.services.openai_stand_in import OpenAiStandIn
from toprope.sdk.adapters import textarena
from toprope.sdk.worker.client import WorkerClient, worker_environment

AGENTS = """
    class OpenRouterAgent:
        def __init__(self, model_name, system_prompt="Play well.", verbose=False, **kwargs):
            raise ValueError("OpenRouter API key not found.")
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
    NONE = {"default": []}
    register_with_versions(id="Debate-v0", entry_point="textarena.envs.Debate.env:DebateEnv", wrappers=NONE,
                           jury_size=3)
    register_with_versions(id="Asking-v0", entry_point="textarena.envs.Asking.env:AskingEnv", wrappers=NONE,
                           max_turns=4)
"""


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("asked")
    texts = {
        "core.py": CORE, "__init__.py": "", "agents.py": AGENTS, "envs/__init__.py": ENVS,
        "envs/registration.py": REGISTRY, "envs/Two/env.py": TWO, "envs/Debate/env.py": DEBATE,
        "envs/Asking/env.py": ASKING,
    }  # fmt: skip
    for name, text in texts.items():
        file = folder / "textarena" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text))
    return folder


def played(packages: Path, target: str, sessions: list[dict[str, Any]], **variables: str) -> Any:
    async def main() -> Any:
        env = worker_environment({"PYTHONPATH": str(packages), **variables})
        async with await WorkerClient.start(env=env, timeout=60) as link:
            card = await link.call("open", source={"adapter": "textarena", "target": target})
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
        answer, card = played(packages, "Debate-v0", [session_of(policy, n, roles=roles) for n in range(4)])
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


def test_judge_that_refuses_is_an_error_of_the_game(packages: Path) -> None:
    policy = OpenAiStandIn(lambda question: "a bid")
    try:
        roles = {"grader": {"base_url": "http://127.0.0.1:9/v1", "api_key": "k", "model": "m"}}
        answer, _ = played(packages, "Debate-v0", [session_of(policy, n, roles=roles) for n in range(2)])
        assert all("cannot be reached" in one["error"] for one in answer["outcomes"])
    finally:
        policy.close()


def test_games_that_ask_a_model_are_listed_as_such(packages: Path) -> None:
    listed = {one.name: one for one in textarena.installed(packages)}
    assert not any(one.problem or one.needs for one in listed.values())
    assert all("a model as master or jury" in one.description for one in listed.values())
    assert "model-roles" in listed["Asking-v0"].tags and "self-play" in listed["Debate-v0"].tags
