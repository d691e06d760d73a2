"""Compares models on the same tasks; a model that fails does not affect the others.

The run's own policy is one of them if it was requested; the others are at endpoints. All are sampled at the same time,
because they wait for different machines.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from toprope.errors import TopropeError
from toprope.records.purse import Purse
from toprope.records.run.specification import ModelUnderTest, TestPlan
from toprope.records.run.tested_models import TestedModel, best_model
from toprope.sdk.errors import WorkerError, first_of
from toprope.training.evaluation.evaluator import (
    example_record,
    failed_group,
    scores_by_task,
    summarize_test,
)
from toprope.training.inference.client import PolicyClient, PromptTooLong, Sampling
from toprope.training.rollouts.endpoint_client import EndpointClient, ModelFailed, Unanswered
from toprope.training.rollouts.environment_set import EnvironmentSet
from toprope.training.rollouts.group_sampler import Policy
from toprope.training.rollouts.sampled_group import SampledGroup

_GROUPS_AT_ONCE = 16
_EXAMPLES = 6
_MAX_UNANSWERED = 0.1
"""A model that leaves a larger share of the tasks unanswered counts as failed: the rest may be the easy ones."""
_GIVE_UP_AFTER = 8
"""Unanswered tasks, without an answered one, after which the others are not tried."""

EnvironmentsWith = Callable[[Policy], EnvironmentSet]
"""The run's environments with a policy."""


async def compare_models(
    plan: TestPlan,
    tasks: int,
    sampling: Sampling,
    *,
    policy_name: str,
    connect_policy: Callable[[], Awaitable[PolicyClient]],
    keys: dict[str, str],
    purse: Purse | None,
    environments_with: EnvironmentsWith,
    progress: Callable[[str, int, int], None],
) -> list[TestedModel]:
    """Tests every model of a plan.

    Args:
        plan: The models, the number of rollouts, and the time limit of each model.
        tasks: Number of validation tasks to sample.
        sampling: Sampling parameters.
        policy_name: Name of the run's own policy.
        connect_policy: Connects to the run's own policy once it serves; raises TopropeError if it will not.
        keys: API keys by the names that endpoints have for them.
        purse: Pays the calls to endpoints.
        environments_with: Returns the environments with a policy.
        progress: Called with what is done, and how many of how many groups over all models are.

    Returns:
        The models in the plan's order.

    Raises:
        toprope.sdk.errors.WorkerFailure: The environment's worker ended for good.
    """
    done = [0] * len(plan.models)

    async def test(place: int, model: ModelUnderTest) -> TestedModel:
        def on_group() -> None:
            done[place] += 1
            progress("testing", sum(done), tasks * len(plan.models))

        async def connect() -> Policy:
            if model.endpoint is None:
                return await connect_policy()
            return EndpointClient(model.endpoint, keys.get(model.endpoint.key or ""), purse)

        return await _ModelTest(model, plan, tasks, sampling, policy_name, on_group).run(connect, environments_with)

    return list(await asyncio.gather(*(test(place, model) for place, model in enumerate(plan.models))))


class _ModelTest:
    """The test of one model."""

    def __init__(
        self,
        model: ModelUnderTest,
        plan: TestPlan,
        tasks: int,
        sampling: Sampling,
        policy_name: str,
        on_group: Callable[[], None],
    ) -> None:
        self._model, self._plan, self._tasks, self._sampling = model, plan, tasks, sampling
        self._policy_name, self._on_group = policy_name, on_group
        self._groups: dict[int, SampledGroup] = {}
        self._split = "validation"
        self._apart: frozenset[str] = frozenset()
        """Environments that the figures leave out, because they hold no tasks out."""
        self._unanswered: list[str] = []

    async def run(self, connect: Callable[[], Awaitable[Policy]], environments_with: EnvironmentsWith) -> TestedModel:
        began = time.monotonic()
        policy: Policy | None = None
        error: str | None = None
        try:
            async with asyncio.timeout(self._plan.seconds_per_model):
                policy = await connect()
                await self._sample(environments_with(policy))
        except TimeoutError:
            error = (
                f"The time limit of {self._plan.seconds_per_model:g} s was over when {len(self._groups)} of "
                f"{self._tasks} tasks were answered."
            )
        except TopropeError as failure:
            error = str(failure)
        finally:
            if policy is not None:
                await policy.close()
        if error is None and len(self._unanswered) > _MAX_UNANSWERED * self._tasks:
            error = f"{len(self._unanswered)} of {self._tasks} tasks were not answered. {self._unanswered[0]}"
        return self._result(policy, error, time.monotonic() - began)

    async def _sample(self, environments: EnvironmentSet) -> None:
        limit, size = asyncio.Semaphore(_GROUPS_AT_ONCE), self._plan.group_size
        self._split, self._apart = environments.measured_split("validation"), environments.count_apart()

        async def sample(index: int) -> None:
            async with limit:
                try:
                    group = await environments.sample("validation", index, size, self._sampling)
                except Unanswered as failure:
                    self._unanswered.append(str(failure))
                    if not self._groups and len(self._unanswered) >= _GIVE_UP_AFTER:
                        raise ModelFailed(f"No task was answered. {failure}") from None
                    return
                except (WorkerError, PromptTooLong) as failure:
                    group = failed_group(index, size, str(failure), environments.environment_of("validation", index))
            self._groups[index] = group
            self._on_group()

        try:
            async with asyncio.TaskGroup() as tasks:
                for index in range(self._tasks):
                    tasks.create_task(sample(index))
        except BaseExceptionGroup as failures:
            raise first_of(failures) from None

    def _result(self, policy: Policy | None, error: str | None, seconds: float) -> TestedModel:
        endpoint = self._model.endpoint
        groups = [self._groups[index] for index in sorted(self._groups)]
        counted = [group for group in groups if group.environment not in self._apart]
        costs: dict[str, Any] = {}
        if isinstance(policy, EndpointClient) and endpoint is not None:
            usage = policy.usage
            costs = {
                "retries": usage.retries,
                "prompt_tokens": usage.prompt_tokens,
                "completion_tokens": usage.completion_tokens,
                "cost_usd": usage.cost(endpoint),
            }
        elif groups:
            turns = [turn for group in groups for rollout in group.turns for turn in rollout]
            costs = {
                "prompt_tokens": sum(len(turn.prompt_ids) for turn in turns),
                "completion_tokens": sum(len(turn.completion_ids) for turn in turns),
            }
        if error is None and not counted:
            error = "No task was answered."
        elif error is None and all(outcome.unjudged for group in counted for outcome in group.outcomes):
            error = f"No answer could be judged. {counted[0].outcomes[0].error}"
        return TestedModel(
            name=self._model.name,
            model=endpoint.model if endpoint else self._policy_name,
            error=error,
            sampled=None if error else {"split": self._split} | summarize_test(counted, self._plan.group_size),
            scores=[] if error else scores_by_task(counted),
            examples=[] if error else [example_record(group) for group in groups[:_EXAMPLES]],
            seconds=round(seconds, 3),
            unanswered=len(self._unanswered),
            **costs,
        )


def models_summary(models: Sequence[TestedModel]) -> dict[str, Any]:
    """Return the part of a test of models that goes into the run's status: the best one's figures."""
    summary: dict[str, Any] = {
        "split": "validation",
        "models": {model.name: model.sampled and model.sampled["accuracy"] for model in models},
    }
    if (best := best_model(models)) is not None and best.sampled is not None:
        keys = ("split", "accuracy", "tasks", "successes", "rollouts", "reward_mean", "errors")
        summary |= {"best": best.name} | {key: best.sampled[key] for key in keys}
    return summary
