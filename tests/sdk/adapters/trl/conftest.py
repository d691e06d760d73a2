"""Shared by the tests of TRL: scripts that sample their rollouts, and a policy that answers them."""

from __future__ import annotations

import asyncio
import json
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from toprope.sdk.adapters import trl
from toprope.sdk.adapters._trl import trainer as stand_in
from toprope.sdk.adapters._trl.rollouts import TrlRollouts
from toprope.sdk.authoring.env_managed import Session, sample_group
from toprope.sdk.authoring.environment import Outcome, Task
from toprope.sdk.rollouts import configure

HEAD = """
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer
    from trl.experimental.openenv import generate_rollout_completions

    tokenizer = AutoTokenizer.from_pretrained("no/such-model")
    rows = [{"prompt": f"What is {n}+1?", "solution": str(n + 1)} for n in range(40)]

    def asked(trainer, *contents):
        messages = [{"role": "user", "content": content} for content in contents]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return generate_rollout_completions(trainer, [text])[0]

    def one(answer, **more):
        fields = {name: [answer[name]] for name in ("prompt_ids", "completion_ids", "logprobs")}
        return fields | {name: [value] for name, value in more.items()}

    def reward(completions, env_reward, **columns):
        return env_reward
"""
TAIL = """
    GRPOTrainer(model="m", processing_class=tokenizer, reward_funcs=reward, train_dataset=rows,
                args=GRPOConfig(num_generations=8, use_vllm=False, temperature=0.3), rollout_func=rollout_func)
"""


class Policy:
    """Answers what `answer` gives for the messages and settings of each request, after `delay_s`."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, list[dict[str, Any]], dict[str, Any]]] = []
        """Key, messages and settings of each request."""
        self.answer: Callable[[list[dict[str, Any]]], Any] = lambda messages: "yes"
        self.delay_s = 0.0

    async def ask(self, session: Session, messages: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        self.requests.append((session.api_key, messages, more))
        await asyncio.sleep(self.delay_s)
        said = self.answer(messages)
        if isinstance(said, Exception):
            raise said
        return {"role": "assistant", "content": said, "finish_reason": "stop"}


@pytest.fixture
def policy(monkeypatch: pytest.MonkeyPatch) -> Policy:
    made = Policy()
    monkeypatch.setattr(stand_in, "ask", made.ask)
    return made


@pytest.fixture
def made(tmp_path: Path) -> Callable[..., TrlRollouts]:
    """A function that makes the environment of a script with this rollout function between `HEAD` and `TAIL`."""

    def make(function: str, tail: str = TAIL, **knobs: Any) -> TrlRollouts:
        file = tmp_path / "sampling.py"
        file.write_text("".join(map(textwrap.dedent, (HEAD, function, tail))))
        environment = configure(trl.make(json.dumps({"file": str(file), "script": True})), knobs=knobs)
        assert isinstance(environment, TrlRollouts)
        return environment

    return make


def session_of(number: int = 0, **more: Any) -> Session:
    return Session(**{"base_url": "http://none/v1", "api_key": str(number), "model": "m", "timeout_s": 20.0, **more})


def task_of(environment: TrlRollouts, number: int = 0) -> Task:
    return list(environment.tasks())[number]


async def played(environment: TrlRollouts, size: int = 1, task: int = 0, **session: Any) -> list[Outcome]:
    sessions = [session_of(number, **session) for number in range(size)]
    return (await sample_group(environment, task_of(environment, task), sessions)).outcomes


def outcomes(environment: TrlRollouts, size: int = 1, task: int = 0, **session: Any) -> list[Outcome]:
    return asyncio.run(played(environment, size, task, **session))
