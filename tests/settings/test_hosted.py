"""Settings that exclude a service that trains, and the most that it costs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support import records
from toprope.errors import InvalidValue
from toprope.records.run.specification import Specification
from toprope.settings.changes import apply_changes
from toprope.settings.owner import OwnerSettings
from toprope.settings.schema import Config
from toprope.settings.sections.hosted import HostedPrices
from toprope.training.hosted.policy import HostedPolicy
from toprope.workbench.launch.budgets.token_costs import token_costs
from toprope.workbench.launch.hosted import with_service

HOSTED = {"trainer.backend": "tinker", "policy.model": "vendor/model", "policy.lora": True}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"policy.lora": False}, "policy.lora is False"),
        ({"policy.model": "embedded"}, "name a model of the service"),
        ({"rollout.temperature": 0.5}, "trains at temperature 1"),
        ({"algorithm.beta": 0.1}, "no KL term"),
        ({"algorithm.name": "dr_grpo"}, "trainer.loss names the service's loss"),
        ({"policy.lora_alpha": 64}, "policy.lora_alpha is 64"),
        ({"policy.load_in_4bit": True}, "the service holds the weights"),
        ({"optimizer.eight_bit": True}, "the service has the optimizer"),
        ({"algorithm.name": "ppo"}, "trainer.loss"),
        ({"algorithm.importance_sampling_mode": "token_truncate"}, "importance_sampling_mode is token_truncate"),
        ({"algorithm.deterministic": True}, "algorithm.deterministic"),
        ({"launcher.device": "cuda"}, "the service computes"),
        ({"environment.opponent": "base"}, "second policy"),
    ],
)
def test_what_a_service_cannot_follow_is_refused(changes: dict[str, Any], said: str) -> None:
    apply_changes(Config(), HOSTED)
    with pytest.raises(InvalidValue, match=said):
        apply_changes(Config(), HOSTED | changes)


def frozen(config: Config, **given: Any) -> Specification:
    return records.specification(config=config, **given)


def test_costs_have_a_bound_by_the_owners_prices() -> None:
    config, _ = apply_changes(Config(), HOSTED | {"environment.max_turns": 1, "evaluation.greedy": False})
    config.evaluation.heldout_tasks = config.evaluation.examples = 0
    assert token_costs(frozen(config)).unpriced == ("vendor/model",)
    prices = HostedPrices(prompt_usd=1, completion_usd=10, train_usd=100, step_usd=0.5)
    sequences = config.budget.steps * config.rollout.groups_per_step * config.rollout.group_size
    context, longest = config.policy.max_context, config.rollout.max_new_tokens
    expected = sequences * (context * 1 + longest * 10 + context * 100) / 1e6 + config.budget.steps * 0.5
    assert token_costs(frozen(config, hosted=prices)).most_usd == pytest.approx(expected)
    config.environment.max_turns = None
    unknown = frozen(config, hosted=prices)
    assert token_costs(unknown).most_usd is None, "its author says how long it is when it is opened"
    known = unknown.model_copy(update={"environment": unknown.environment.model_copy(update={"turns": 1})})
    assert token_costs(known).most_usd == pytest.approx(expected)


def test_prices_follow_the_model_and_weights_stay_where_they_are(tmp_path: Path) -> None:
    prices = {"prompt_usd": 1, "completion_usd": 1, "train_usd": 1}
    settings = OwnerSettings.model_validate({"tinker": {"prices": {"vendor/model": prices}}})
    HostedPolicy(base_model="vendor/model", sampler="tinker://a/b").write(tmp_path)
    config, _ = apply_changes(Config(), HOSTED | {"policy.model": str(tmp_path)})
    assert with_service(frozen(config), settings).hosted == HostedPrices(**prices)
    local = config.model_copy(deep=True)
    local.trainer.backend = "local"
    with pytest.raises(InvalidValue, match="are at a service"):
        with_service(frozen(local), settings)
    config.policy.model = str(tmp_path / "elsewhere")
    with pytest.raises(InvalidValue, match="was trained on this machine"):
        with_service(frozen(config, base_run="run-b"), settings)
