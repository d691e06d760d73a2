"""Makes groups with environments that play their rollouts themselves.

The worker's code talks to inference under a key a rollout; what was sampled is read back from there. Trained is the
chain of turns that the rollout's outcome rests on: an answer that the environment asked for twice (a retry of which the
client got no answer) counts in its last form, and one that its conversation does not contain (an abandoned branch) not.

A model at an endpoint plays through a relay in this process, since the worker's code is not to see its key.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from msgspec.structs import replace

from toprope.errors import ComponentFailed
from toprope.records.worker_messages import SampledGroup
from toprope.sdk.errors import WorkerError
from toprope.training.inference.client import PolicyClient, Sampling
from toprope.training.inference.sessions import UNRECORDED, Turn
from toprope.training.inference.tool_calls import answer_id
from toprope.training.rollouts.endpoint_client import EndpointClient
from toprope.training.rollouts.endpoint_proxy import Relay
from toprope.training.rollouts.environment_worker import EnvironmentWorker
from toprope.training.rollouts.group_sampler import Made, RolloutMaker, told

__all__ = ["OwnLoopMaker", "chain_of"]

_GRACE_S = 10.0
"""Seconds beyond a rollout's own time limit after which the worker that plays it counts as hung."""


class OwnLoopMaker(RolloutMaker):
    """A `RolloutMaker` whose rollouts are played by the environment.

    Args (beside those of RolloutMaker):
        rollout_timeout_s: How long one rollout may take, the policy's time included.
    """

    rollout_timeout_s: float = 600.0
    deaths_allowed = 1
    """Which of the groups beside each other ended a worker nobody can tell: each is tried once more."""

    async def _play(
        self, link: EnvironmentWorker, split: str, index: int, size: int, sampling: Sampling, variant: str
    ) -> Made:
        began, sampling = time.monotonic(), sampling.at(split, index)
        if isinstance(self._policy, EndpointClient):
            answer, recorded = await self._relayed(self._policy, link, split, index, size, sampling, variant)
        else:
            answer, recorded = await self._recorded(self._policy, link, split, index, size, sampling, variant)
        outcomes = answer.outcomes
        if len(outcomes) != size:
            raise WorkerError("raised", "EnvironmentMistake", f"{len(outcomes)} outcomes came for {size} rollouts")
        turns = [chain_of(one, talk) for one, talk in zip(recorded, answer.talks, strict=True)]
        if isinstance(self._policy, EndpointClient):  # whose tokens nobody knows
            turns = [[replace(turn, prompt_ids=[]) for turn in one] for one in turns]
        return Made(
            task_id=answer.task_id,
            messages=answer.messages,
            texts=[_last_answer(kept, talk) for kept, talk in zip(turns, answer.talks, strict=True)],
            outcomes=outcomes,
            turns=turns,
            seconds=time.monotonic() - began,
            talks=[_talk(kept, talk) for kept, talk in zip(turns, answer.talks, strict=True)],
        )

    async def _recorded(
        self,
        policy: PolicyClient,
        link: EnvironmentWorker,
        split: str,
        index: int,
        size: int,
        sampling: Sampling,
        variant: str,
    ) -> tuple[SampledGroup, list[list[Turn]]]:
        """What the environment made of a task with the policy, and what inference recorded of each rollout."""
        group = f"g{next(self.numbers)}"
        life = await policy.life()
        url, judge = await policy.url(), policy.key(UNRECORDED)
        names = [f"{group}/{number}" for number in range(size)]
        sessions = [
            self._session(url, policy.key(name), judge, sampling.at(number)) for number, name in enumerate(names)
        ]
        try:
            answer = await self._run(link, split, index, sessions, variant)
            recorded = await policy.recorded(group, life)
        finally:
            with suppress(ComponentFailed):  # it may be going; what went wrong first is what counts
                await policy.close_session(group)
        return answer, [_under(name, recorded) for name in names]

    async def _relayed(
        self,
        client: EndpointClient,
        link: EnvironmentWorker,
        split: str,
        index: int,
        size: int,
        sampling: Sampling,
        variant: str,
    ) -> tuple[SampledGroup, list[list[Turn]]]:
        """The same with a model at an endpoint, whose key stays here."""
        async with Relay(client, size, sampling) as relay:
            sessions = [
                self._session(relay.url, key, relay.judge_key, sampling.at(number))
                for number, key in enumerate(relay.keys)
            ]
            answer = await self._run(link, split, index, sessions, variant)
            relay.raise_failure()
        return answer, relay.turns

    async def _run(
        self, link: EnvironmentWorker, split: str, index: int, sessions: list[dict[str, Any]], variant: str
    ) -> SampledGroup:
        timeout = self.rollout_timeout_s + _GRACE_S
        return await link.run(split, index, sessions, timeout=timeout, weights=self.weights, variant=variant)

    def _session(self, url: str, key: str, judge_key: str, sampling: Sampling) -> dict[str, Any]:
        return {
            "base_url": f"{url}/v1",
            "api_key": key,
            "judge_key": judge_key,
            "model": "policy",
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_tokens": sampling.max_new_tokens,
            "stop": list(sampling.stop),
            "seed": sampling.seed,
            "timeout_s": self.rollout_timeout_s,
        }


def chain_of(turns: Sequence[Turn], messages: Sequence[dict[str, Any]]) -> list[Turn]:
    """The recorded turns that a rollout's outcome rests on, in their order.

    Args:
        turns: Everything that was sampled under the rollout's key, oldest first.
        messages: The rollout's conversation; empty where the environment gave none.
    """
    kept = [
        turn
        for place, turn in enumerate(turns)
        if not any(later.prompt_ids == turn.prompt_ids for later in turns[place + 1 :])
    ]
    said = [message for message in messages if message.get("role") == "assistant"]
    if not said:
        return kept
    # A prompt that was asked twice may have been answered by either; the conversation tells which.
    chain: list[Turn] = []
    left = list(turns)
    for message in said:
        found = next((turn for turn in reversed(left) if _says(turn, message)), None)
        if found is not None:
            left = [turn for turn in left if turn is not found and turn.prompt_ids != found.prompt_ids]
            chain.append(found)
    # An environment may word its conversation otherwise than the policy did: what cannot be told apart is kept.
    return chain if len(chain) == len(said) else kept


def _under(name: str, recorded: Mapping[str, list[Turn]]) -> list[Turn]:
    """What was sampled in a rollout: several answers to one question (`n`) lie in sub-sessions of its session."""
    below = f"{name}/"
    return [turn for key, turns in recorded.items() if key == name or key.startswith(below) for turn in turns]


def _says(turn: Turn, message: dict[str, Any]) -> bool:
    if calls := message.get("tool_calls"):
        made = answer_id(turn.prompt_ids, turn.completion_ids)
        if any(call["id"].startswith(made) for call in calls):
            return True
    text = message["content"].strip()
    return bool(text) and text in turn.completion_text


def _last_answer(turns: list[Turn], messages: list[dict[str, Any]]) -> str:
    said = [message["content"] for message in messages if message.get("role") == "assistant"]
    return said[-1] if said else (turns[-1].completion_text if turns else "")


def _talk(turns: list[Turn], messages: list[dict[str, Any]]) -> str:
    answers = [place for place, message in enumerate(messages) if message.get("role") == "assistant"]
    if answers:
        return told(messages[answers[0] :])
    return told([{"role": "assistant", "content": turn.completion_text} for turn in turns])
