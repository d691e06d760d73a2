"""Plays the same tasks with several models, each by itself: none that fails hides what the others do.

The run's own policy is one of them where it was asked for; the others are at endpoints. All of them play at the same
time, since they wait for different machines.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from toprope.errors import TopropeError
from toprope.records.run.specification import ModelUnderTest, TestPlan
from toprope.records.run.tested_models import TestedModel
from toprope.sdk.errors import WorkerError
from toprope.training.evaluation.evaluator import example_of, tally, unplayed
from toprope.training.inference.client import PolicyClient, PromptTooLong, Sampling
from toprope.training.rollouts.endpoint_client import EndpointClient, ModelFailed, Unanswered
from toprope.training.rollouts.environment_set import Players
from toprope.training.rollouts.group_sampler import Made

__all__ = ["best_of", "contest"]

_GROUPS_AT_ONCE = 16
_EXAMPLES = 6
_MOST_UNANSWERED = 0.1
"""A model that leaves a larger share of the tasks unanswered counts as failed: the rest may be the easy ones."""
_GIVE_UP_AFTER = 8
"""Unanswered tasks, without one that was answered, after which the others are not tried."""

Player = PolicyClient | EndpointClient
PlayersOf = Callable[[Player], Players]


async def contest(
    plan: TestPlan,
    tasks: int,
    sampling: Sampling,
    *,
    policy_name: str,
    policy: Callable[[], Awaitable[PolicyClient]],
    keys: dict[str, str],
    players_of: PlayersOf,
    progress: Callable[[str, int, int], None],
) -> list[TestedModel]:
    """Tests every model of a plan.

    Args:
        plan: The models, how many rollouts, how long each may take.
        tasks: How many validation tasks there are of those that were asked for.
        sampling: How answers are sampled.
        policy_name: What the run's own policy is called.
        policy: Connects to it once it is there; raises TopropeError where it will not come.
        keys: Keys of endpoints, by the names that the endpoints have for them.
        players_of: The environments with a player.
        progress: Called with what, done and total over all models.

    Returns:
        The models in the plan's order.

    Raises:
        toprope.sdk.errors.WorkerFailure: The environment's worker is gone.
    """
    done = [0] * len(plan.models)

    async def one(place: int, model: ModelUnderTest) -> TestedModel:
        def played() -> None:
            done[place] += 1
            progress("testing", sum(done), tasks * len(plan.models))

        async def player() -> Player:
            if model.endpoint is None:
                return await policy()
            return EndpointClient(model.endpoint, keys.get(model.endpoint.key or ""))

        return await _Attempt(model, plan, tasks, sampling, policy_name, played).run(player, players_of)

    return list(await asyncio.gather(*(one(place, model) for place, model in enumerate(plan.models))))


class _Attempt:
    """One model's test."""

    def __init__(
        self,
        model: ModelUnderTest,
        plan: TestPlan,
        tasks: int,
        sampling: Sampling,
        policy_name: str,
        played: Callable[[], None],
    ) -> None:
        self._model, self._plan, self._tasks, self._sampling = model, plan, tasks, sampling
        self._policy_name, self._played = policy_name, played
        self._groups: dict[int, Made] = {}
        self._unanswered: list[str] = []

    async def run(self, player_of: Callable[[], Awaitable[Player]], players_of: PlayersOf) -> TestedModel:
        began = time.monotonic()
        player: Player | None = None
        error: str | None = None
        try:
            async with asyncio.timeout(self._plan.seconds_per_model):
                player = await player_of()
                await self._play(players_of(player))
        except TimeoutError:
            error = (
                f"The time limit of {self._plan.seconds_per_model:g} s was over when {len(self._groups)} of "
                f"{self._tasks} tasks were answered."
            )
        except TopropeError as failure:
            error = str(failure)
        finally:
            if player is not None:
                await player.close()
        if error is None and len(self._unanswered) > _MOST_UNANSWERED * self._tasks:
            error = f"{len(self._unanswered)} of {self._tasks} tasks were not answered. {self._unanswered[0]}"
        return self._tested(player, error, time.monotonic() - began)

    async def _play(self, players: Players) -> None:
        limit = asyncio.Semaphore(_GROUPS_AT_ONCE)

        async def one(index: int) -> None:
            async with limit:
                try:
                    made = await players.make("validation", index, self._plan.group_size, self._sampling)
                except Unanswered as failure:
                    self._unanswered.append(str(failure))
                    if not self._groups and len(self._unanswered) >= _GIVE_UP_AFTER:
                        raise ModelFailed(f"No task was answered. {failure}") from None
                    return
                except (WorkerError, PromptTooLong) as failure:
                    made = unplayed(
                        index, self._plan.group_size, str(failure), players.environment_of("validation", index)
                    )
            self._groups[index] = made
            self._played()

        try:
            async with asyncio.TaskGroup() as group:
                for index in range(self._tasks):
                    group.create_task(one(index))
        except BaseExceptionGroup as failures:
            cause: BaseException = failures
            while isinstance(cause, BaseExceptionGroup):
                cause = cause.exceptions[0]
            raise cause from None

    def _tested(self, player: Player | None, error: str | None, seconds: float) -> TestedModel:
        endpoint = self._model.endpoint
        groups = [self._groups[index] for index in sorted(self._groups)]
        spent: dict[str, Any] = {}
        if isinstance(player, EndpointClient) and endpoint is not None:
            usage = player.usage
            spent = {
                "retries": usage.retries,
                "prompt_tokens": usage.prompt_tokens,
                "completion_tokens": usage.completion_tokens,
                "cost_usd": usage.cost(endpoint),
            }
        elif groups:
            turns = [turn for made in groups for rollout in made.turns for turn in rollout]
            spent = {
                "prompt_tokens": sum(len(turn.prompt_ids) for turn in turns),
                "completion_tokens": sum(len(turn.completion_ids) for turn in turns),
            }
        if error is None and not groups:
            error = "No task was answered."
        return TestedModel(
            name=self._model.name,
            model=endpoint.model if endpoint else self._policy_name,
            error=error,
            sampled=None if error else {"split": "validation"} | tally(groups, self._plan.group_size),
            examples=[] if error else [example_of(made) for made in groups[:_EXAMPLES]],
            seconds=round(seconds, 3),
            answered=len(groups),
            unanswered=len(self._unanswered),
            **spent,
        )


def best_of(models: Sequence[TestedModel]) -> TestedModel | None:
    """The measured model with the highest accuracy, then reward; None where none was measured."""
    measured = [model for model in models if model.sampled is not None]

    def rank(model: TestedModel) -> tuple[float, float]:
        assert model.sampled is not None
        return model.sampled["accuracy"], model.sampled["reward_mean"]

    return max(measured, key=rank, default=None)
