"""The most that a run's calls to models at endpoints cost, by the owner's prices per token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from toprope.records.run.specification import Specification
from toprope.settings.endpoints import Endpoint
from toprope.settings.sections.hosted import HostedPrices

_SINGLE_TURN = frozenset({"dataset", "score", "trl", "reasoning_gym"})
"""Adapters whose environments ask once."""


@dataclass(frozen=True)
class TokenCosts:
    """Costs of calls to endpoints."""

    most_usd: float | None
    """None if unknown: a price is missing, or nobody knows how often the environment asks."""
    unpriced: tuple[str, ...] = ()
    """Names of the models without a price."""

    @property
    def free(self) -> bool:
        """True if the calls surely cost nothing."""
        return self.most_usd == 0


def unpriced(endpoints: Mapping[str, Endpoint]) -> tuple[str, ...]:
    """Return the names of the models without a price."""
    return tuple(
        name for name, endpoint in endpoints.items() if endpoint.prompt_usd is None or endpoint.completion_usd is None
    )


def token_costs(specification: Specification) -> TokenCosts:
    """Compute the costs of a run's calls.

    The bound assumes prompts of `policy.max_context` tokens (`sft.max_length` for a teacher) and the longest answers.
    The run's account holds each call against it, so a run with longer prompts stops asking; it never spends more.
    """
    costs = _endpoint_costs(specification)
    if not specification.config.is_hosted or costs.most_usd is None:
        return costs
    prices = specification.hosted
    if prices is None:
        return TokenCosts(None, (specification.config.policy.model,))
    turns = _turns(specification)
    if turns is None and (prices.prompt_usd or prices.completion_usd):
        return TokenCosts(None)
    return TokenCosts(costs.most_usd + _hosted_usd(specification, prices, turns or 1))


def _hosted_usd(specification: Specification, prices: HostedPrices, turns: int) -> float:
    """The most that a service costs if every sampled group is trained on; the account holds what is sampled beyond."""
    config, kind = specification.config, specification.run_kind
    rollout, evaluation, test = config.rollout, config.evaluation, specification.test
    context = config.policy.max_context
    answers = 0
    trained = steps = 0
    if specification.ask is not None:
        answers = len(specification.ask.conversations) * specification.ask.answers
    elif test is not None:
        answers = test.tasks * test.group_size * (1 if test.models else 1 + (test.heldout and evaluation.greedy))
    elif kind.trains:
        answers = 2 * (evaluation.heldout_tasks * (1 + evaluation.greedy) + evaluation.examples)
        steps = steps_of(specification)
        if evaluation.every_steps:
            answers += steps // evaluation.every_steps * evaluation.validation_tasks
        if kind.demonstrates:
            trained = steps * config.sft.batch_size * config.sft.max_length
        else:
            sequences = steps * rollout.groups_per_step * rollout.group_size
            answers += sequences
            trained = sequences * context
    sampled = answers * turns * prices.of_sampling(context, rollout.max_new_tokens)
    return sampled + trained * prices.train_usd / 1e6 + steps * prices.step_usd


def _endpoint_costs(specification: Specification) -> TokenCosts:
    """The costs of calls to models that run elsewhere."""
    config, test = specification.config, specification.test
    endpoints = {model.name: model.endpoint for model in (test.models if test else []) if model.endpoint is not None}
    answers, prompt, longest = 0, config.policy.max_context, config.rollout.max_new_tokens
    if test is not None:
        answers, longest = test.tasks * test.group_size, test.max_new_tokens or longest
    teacher = specification.teacher
    if teacher is not None and teacher.endpoint is not None:
        sft = config.sft
        endpoints[teacher.name] = teacher.endpoint
        answers, prompt, longest = sft.tasks * sft.traces_per_task * sft.attempts, sft.max_length, sft.max_new_tokens
    if missing := unpriced(endpoints):
        return TokenCosts(None, missing)
    helpers = {name: model.endpoint for name, model in specification.helpers.items() if model.endpoint is not None}
    if missing := unpriced(helpers):
        return TokenCosts(None, missing)
    if any(model.prompt_usd or model.completion_usd for model in helpers.values()):
        return TokenCosts(None)  # how long judged answers and games get is unknown; each call is held against the limit
    per_call = sum(
        prompt * (model.prompt_usd or 0.0) + longest * (model.completion_usd or 0.0) for model in endpoints.values()
    )
    turns = _turns(specification)
    if per_call and turns is None:
        return TokenCosts(None)
    return TokenCosts(answers * (turns or 1) * per_call / 1e6)


def _turns(specification: Specification) -> int | None:
    """Calls in one rollout; None if unknown."""
    ask = specification.ask
    if specification.mixture or (ask is not None and not ask.conversations):
        return None
    if specification.config.environment.max_turns is not None:
        return specification.config.environment.max_turns
    return 1 if specification.environment.adapter in _SINGLE_TURN else specification.environment.turns


def steps_of(specification: Specification) -> int:
    """Return the most optimizer steps of a run: of its demonstrations and epochs, or of its budget; 0 if nothing is
    trained."""
    config, kind = specification.config, specification.run_kind
    if not kind.demonstrates:
        return config.budget.steps if kind.trains or kind.starts_runs else 0
    section, dataset = config.sft, specification.dataset
    rows = section.tasks * section.traces_per_task if dataset is None else dataset.items
    return -(-rows * section.epochs // section.batch_size)
