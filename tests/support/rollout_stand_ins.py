"""A scripted policy, and an environment set around one sampler."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from toprope.records.worker_messages import Card, RewardPart
from toprope.training.inference.client import Answer, PromptTooLong, Sampling
from toprope.training.inference.sessions import Turn
from toprope.training.rollouts.environment_set import EnvironmentSet
from toprope.training.rollouts.group_sampler import GroupSampler

SAMPLING = Sampling(1.0, 1.0, 16)


class ScriptedPolicy:
    """Answers by a function of the conversation; tokens are characters' code points."""

    def __init__(self, answer: Callable[[list[dict[str, Any]], int], str], context: int = 10_000) -> None:
        self.answer, self.context = answer, context
        self.requests: list[tuple[str, int]] = []
        self.closed: list[str] = []

    async def chat(
        self, messages: list[dict[str, Any]], sampling: Sampling, *, n: int = 1, session: str = ""
    ) -> list[Answer]:
        self.requests.append((session, n))
        prompt = [ord(letter) for message in messages for letter in message["content"] + "\n"]
        if len(prompt) >= self.context:
            raise PromptTooLong("no room for an answer")
        answers = []
        for index in range(n):
            text = self.answer(messages, index)
            ids = [ord(letter) for letter in text + "\n"]
            turn = Turn(prompt, ids, [-0.1] * len(ids), [(3, len(ids))], "stop")
            answers.append(Answer(text, False, turn))
        return answers

    async def close_session(self, session: str) -> None:
        self.closed.append(session)


def only_environment(sampler: GroupSampler) -> EnvironmentSet:
    """An environment set whose only environment is sampled by `sampler`."""
    host: Any = SimpleNamespace(
        label="only",
        card=Card("only", "", 1, [], {"reward": RewardPart(1.0, 0.0, 1.0)}, 1.0, {}),
        sizes={},
        shares_tasks=False,
        sampler=lambda policy: sampler,
        number=lambda split, place: place,
    )
    policy: Any = None
    return EnvironmentSet([host], policy)
