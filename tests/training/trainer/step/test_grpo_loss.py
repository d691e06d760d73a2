"""Losses, gradients and metrics of the GRPO family against TRL's GRPOTrainer."""

from __future__ import annotations

import itertools
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from tests.support.trainer_stand_ins import small_config
from toprope.settings.changes import apply_changes
from toprope.settings.schema import Config
from toprope.settings.sections.algorithms import ALGORITHMS
from toprope.training.policy.loading import load_model, load_tokenizer
from toprope.training.trainer.batch_source import TrainingRow
from toprope.training.trainer.collate import collate
from toprope.training.trainer.grpo import _sample_of_others
from toprope.training.trainer.step.forward import PolicyForward
from toprope.training.trainer.step.grpo_loss import GrpoMetrics, StepSize, grpo_loss

NAMES = [one.name for one in ALGORITHMS.values() if one.program.endswith(":GrpoRun") and one.name != "rloo"]


def some_rows(per_token: bool = False) -> list[TrainingRow]:
    """Seven rows of three prompts, some with equal first tokens, with tokens of the environment and
    log-probabilities off the policy's."""
    choose = random.Random(3)
    rows = []
    for number in range(7):
        prompt = [5, 6, 10 + number // 3, *[7] * (number // 3)]
        length = choose.randint(2, 6)
        completion = [choose.randrange(3, 200) for _ in range(length)]
        if number % 3:
            completion[: number % 3 + 1] = rows[-1].completion[: number % 3 + 1]
            length = len(completion)
        trained = [place == 0 or choose.random() < 0.8 for place in range(length)]
        rows.append(
            TrainingRow(
                prompt=prompt,
                completion=completion,
                trained=trained,
                logprobs=[choose.uniform(-6.5, -4.5) if kept else 0.0 for kept in trained],
                advantage=choose.uniform(-1, 1),
                truncated=False,
                token_advantages=[choose.uniform(-1, 1) for _ in completion] if per_token else None,
                rollout=number,
            )
        )
    return rows


def trl_batch(rows: list[TrainingRow]) -> dict[str, torch.Tensor]:
    """The rows as TRL reads them: prompts padded on the left, answers on the right."""
    prompts, answers = max(len(row.prompt) for row in rows), max(len(row.completion) for row in rows)

    def right(values: list[Any]) -> list[Any]:
        return values + [0] * (answers - len(values))

    tensors = collate(rows, None)
    tool_mask = torch.tensor([right([int(kept) for kept in row.trained]) for row in rows])
    advantages = tensors.advantages if tensors.advantages.size(1) > 1 else tensors.advantages.squeeze(1)
    return {
        "prompt_ids": torch.tensor([[0] * (prompts - len(row.prompt)) + row.prompt for row in rows]),
        "prompt_mask": torch.tensor([[0] * (prompts - len(row.prompt)) + [1] * len(row.prompt) for row in rows]),
        "completion_ids": torch.tensor([right(row.completion) for row in rows]),
        "completion_mask": torch.tensor([right([1] * len(row.completion)) for row in rows]),
        "tool_mask": tool_mask,
        "advantages": advantages,
        "num_items_in_batch": tool_mask.sum().float(),
        "old_per_token_logps": tensors.sampled,
        "sampling_per_token_logps": tensors.sampled,
    }


@pytest.fixture(scope="module")
def trl_trainer(tiny_policy: Path, tmp_path_factory: pytest.TempPathFactory) -> GRPOTrainer:
    return GRPOTrainer(
        model=load_model(tiny_policy, small_config()),
        reward_funcs=lambda completions, **columns: [0.0] * len(completions),
        args=GRPOConfig(
            output_dir=str(tmp_path_factory.mktemp("trl")),
            max_completion_length=small_config().rollout.max_new_tokens,
            use_cpu=True,
            bf16=False,
            activation_checkpointing=False,
            report_to=[],
            temperature=0.8,
        ),
        train_dataset=Dataset.from_dict({"prompt": ["a"]}),
        processing_class=load_tokenizer(tiny_policy),
    )


def of_trl(
    trainer: GRPOTrainer, config: Config, rows: list[TrainingRow], reference: torch.Tensor | None
) -> tuple[float, dict[str, torch.Tensor], dict[str, float]]:
    """Loss, gradients and metrics of TRL."""
    section = config.algorithm
    trainer.loss_type, trainer.importance_sampling_level = section.loss_type, section.importance_sampling_level
    trainer.epsilon_low, trainer.epsilon_high, trainer.beta = section.epsilon, section.epsilon_high, section.beta
    trainer.current_gradient_accumulation_steps = trainer.args.steps_per_generation = 1
    trainer.model.train()
    trainer.model.zero_grad()
    trainer._metrics["train"].clear()
    batch = trl_batch(rows) | ({} if reference is None else {"ref_per_token_logps": reference})
    loss = trainer._compute_loss(trainer.model, batch)
    loss.backward()
    metrics = {name: values[0] for name, values in trainer._metrics["train"].items()}
    return float(loss.detach()), _gradients(trainer.model), metrics


def of_ours(
    model: Any, config: Config, rows: list[TrainingRow], reference: torch.Tensor | None, *, shared: bool, micro: int = 7
) -> tuple[float, dict[str, torch.Tensor], dict[str, float | None]]:
    """Loss, gradients and metrics of ours, in micro-batches."""
    forward = PolicyForward(model, 0, temperature=0.8, share_prompts=shared, short=shared)
    if shared:
        assert forward.shares_prompts and forward._short is not None
        forward._per_pair = 0  # so few tokens would not be worth it
    model.train()
    model.zero_grad()
    whole, found = collate(rows, None), GrpoMetrics()
    size = StepSize(len(rows), whole.tokens, config.rollout.max_new_tokens)
    for start in range(0, len(rows), micro):
        numbers = list(range(len(rows)))[start : start + micro]
        part = whole.part(numbers)
        scores = forward([rows[number] for number in numbers], whole.columns)
        assert scores is not None
        own = None if reference is None else reference[numbers]
        loss = grpo_loss(
            scores.logps, scores.entropies, part.sampled, part.advantages, part.mask, own, config.algorithm, size
        )
        loss.total.backward()
        found.add(loss, loss.total)
    metrics = found.read()
    loss_value = metrics.pop("loss")
    assert loss_value is not None
    return loss_value, _gradients(model), metrics


def _gradients(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.grad.clone() for name, value in model.named_parameters()}


@pytest.mark.parametrize("per_token", [False, True], ids=["row", "token"])
@pytest.mark.parametrize("name", NAMES)
def test_loss_gradient_and_metrics_are_trls(
    trl_trainer: GRPOTrainer, tiny_policy: Path, name: str, per_token: bool
) -> None:
    config, _ = apply_changes(small_config(), {"algorithm.name": name})
    rows = some_rows(per_token)
    model = load_model(tiny_policy, config)
    torch.manual_seed(1)
    sampled = collate(rows, None).sampled
    references: list[torch.Tensor | None] = [None, sampled + 0.3 * torch.randn_like(sampled)]
    for reference in references:
        config.algorithm.beta = 0.0 if reference is None else 0.2
        loss, gradients, metrics = of_trl(trl_trainer, config, rows, reference)
        scale = max(float(value.abs().max()) for value in gradients.values())
        assert scale > 1e-3, "there is something to compare"
        for shared, micro in ((False, 7), (True, 7), (True, 3)):
            found_loss, found, found_metrics = of_ours(model, config, rows, reference, shared=shared, micro=micro)
            assert found_loss == pytest.approx(loss, rel=1e-4, abs=1e-6)
            for key, value in gradients.items():
                assert torch.allclose(found[key], value, rtol=1e-3, atol=1e-5 * scale), (key, shared, micro)
            assert found_metrics.keys() == metrics.keys()
            for key, number in metrics.items():
                assert found_metrics[key] == pytest.approx(number, rel=1e-4, abs=1e-6), (key, shared, micro)


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_weights_against_the_sampler_are_trls(
    trl_trainer: GRPOTrainer, tiny_policy: Path, mode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, rows, model = small_config(), some_rows(), load_model(tiny_policy, small_config())
    section, tensors = config.algorithm, collate(rows, None)
    section.importance_sampling_mode = mode
    whole = mode.startswith("sequence")
    section.importance_sampling_clip_min, section.importance_sampling_clip_max = (0.5, 2.0) if whole else (0.8, 1.25)
    scores = PolicyForward(model, 0, temperature=0.8)(rows, tensors.columns)
    assert scores is not None
    before = scores.logps.detach()
    weights = torch.zeros_like(tensors.sampled[:, :1] if whole else tensors.sampled)
    seen = set()
    for place, row in enumerate(rows):
        own = [
            float(before[place, column]) - row.logprobs[column] if kept else 0.0
            for column, kept in enumerate(row.trained)
        ]
        for column, difference in enumerate([sum(own)] if whole else own):
            ratio = math.exp(difference)
            low, high = section.importance_sampling_clip_min, section.importance_sampling_clip_max
            seen.add((ratio < low) - (ratio > high))
            inside = min(max(ratio, low), high)
            weights[place, column] = inside if mode.endswith("truncate") or inside == ratio else 0.0
    assert seen >= {0} and len(seen) > 1, "some weights are inside of the bounds, and some are not"
    for name in ("use_vllm", "vllm_importance_sampling_correction"):
        monkeypatch.setattr(trl_trainer, name, True)
    original = globals()["trl_batch"]
    given = {"importance_sampling_ratio": weights, "old_per_token_logps": before}
    monkeypatch.setitem(globals(), "trl_batch", lambda rows: original(rows) | given)
    loss, gradients, _ = of_trl(trl_trainer, config, rows, None)
    scale = max(float(value.abs().max()) for value in gradients.values())
    for shared, micro in ((False, 7), (True, 3)):
        found_loss, found, metrics = of_ours(model, config, rows, None, shared=shared, micro=micro)
        assert found_loss == pytest.approx(loss, rel=1e-4, abs=1e-6)
        for key, value in gradients.items():
            assert torch.allclose(found[key], value, rtol=1e-3, atol=1e-5 * scale), key
        kept = weights if whole else weights[tensors.mask]
        told = [metrics[f"sampling/importance_sampling_ratio/{kind}"] for kind in ("min", "mean", "max")]
        assert told == pytest.approx([float(kept.min()), float(kept.mean()), float(kept.max())], rel=1e-4)


def test_rloo_is_trls(tiny_policy: Path, tmp_path: Path) -> None:
    """One ratio per answer: TRL sums the log-probabilities of an answer, and averages over answers."""
    config, _ = apply_changes(small_config(), {"algorithm.name": "rloo"})
    rows, model = some_rows(), load_model(tiny_policy, config)
    for row in rows:  # TRL's loss has no tokens of the environment, and its clip would hide the gradient
        row.trained[:] = [True] * len(row.trained)
        row.logprobs[:] = [-5.3 - 0.01 * place for place in range(len(row.trained))]
    trainer = RLOOTrainer(
        model=load_model(tiny_policy, config),
        reward_funcs=lambda completions, **columns: [0.0] * len(completions),
        args=RLOOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, activation_checkpointing=False,
                        report_to=[], temperature=0.8, epsilon=config.algorithm.epsilon),
        train_dataset=Dataset.from_dict({"prompt": ["a"]}),
        processing_class=load_tokenizer(tiny_policy),
    )  # fmt: skip
    assert trainer.epsilon_low == config.algorithm.epsilon and trainer.epsilon_high == config.algorithm.epsilon_high
    trainer.model.train()
    trainer.model.zero_grad()
    expected = trainer._compute_loss(
        trainer.model, trl_batch(rows) | {"old_logps": collate(rows, None).sampled.sum(-1)}
    )
    expected.backward()
    gradients = _gradients(trainer.model)
    metrics = {name: values[0] for name, values in trainer._metrics["train"].items()}
    scale = max(float(value.abs().max()) for value in gradients.values())
    assert scale > 1e-3, "there is something to compare"
    for shared, micro in ((False, 7), (True, 3)):
        loss, found, found_metrics = of_ours(model, config, rows, None, shared=shared, micro=micro)
        assert loss == pytest.approx(float(expected.detach()), rel=1e-4, abs=1e-6)
        assert all(torch.allclose(found[key], one, rtol=1e-3, atol=1e-5 * scale) for key, one in gradients.items())
        assert found_metrics == pytest.approx(metrics, rel=1e-4, abs=1e-6)


def test_other_logprobs_of_the_sampler_change_the_loss(tiny_policy: Path) -> None:
    config, rows = small_config(), some_rows()
    model = load_model(tiny_policy, config)
    honest, _, _ = of_ours(model, config, rows, None, shared=True)
    for row in rows:
        row.logprobs[:] = [value - 1.0 if value else 0.0 for value in row.logprobs]
    assert of_ours(model, config, rows, None, shared=True)[0] != pytest.approx(honest, abs=1e-2)


def test_rows_without_a_token_add_nothing(tiny_policy: Path) -> None:
    config, rows = small_config(), some_rows()
    model = load_model(tiny_policy, config)
    _, expected, _ = of_ours(model, config, rows, None, shared=True)
    silent = TrainingRow([5], [9], [False], [0.0], 1.0, True)
    _, found, metrics = of_ours(model, config, [*rows, silent], None, shared=True, micro=8)
    assert all(torch.allclose(found[key], value, atol=1e-7) for key, value in expected.items())
    assert metrics["clip_ratio/low_min"] is not None


def few_rows(config: Config, counts: list[list[float]] | None = None, **changed: torch.Tensor) -> dict[str, Any]:
    """Gradient, loss and metrics of a row with an advantage and a shorter one without."""
    logps = torch.full((2, 4), -1.0, requires_grad=True)
    given = {"sampled": torch.full((2, 4), -1.5), "entropies": torch.ones(2, 4)} | changed
    loss = grpo_loss(
        logps, given["entropies"], given["sampled"], torch.tensor([[1.0], [0.0]]),
        torch.tensor([[True] * 4, [True, True, False, False]]), None, config.algorithm, StepSize(4, 10.0, 4),
        None if counts is None else torch.tensor(counts),
    )  # fmt: skip
    loss.total.backward()
    found = GrpoMetrics()
    found.add(loss, loss.total)
    assert logps.grad is not None
    return {"gradient": logps.grad, **found.read()}


@pytest.mark.parametrize("name", [*NAMES, "rloo"])
def test_segments_of_an_answer_move_the_policy_as_one_row(name: str) -> None:
    """Two answers of six and three tokens: in a row each, or the first one in two."""
    config, _ = apply_changes(small_config(), {"algorithm.name": name})
    gradients, losses = [], []
    for beta, segments in itertools.product((0.0, 0.1), (([6, 3], [1.0, -1.0]), ([2, 4, 3], [1.0, 1.0, -1.0]))):
        config.algorithm.beta, (lengths, advantages) = beta, segments
        tokens = torch.full((9,), -1.0, requires_grad=True)
        starts = torch.tensor(lengths).cumsum(0) - torch.tensor(lengths)
        mask = torch.arange(6) < torch.tensor(lengths).unsqueeze(1)
        logps = tokens[torch.where(mask, starts.unsqueeze(1) + torch.arange(6), 0)]
        reference = logps.detach() - 0.5
        loss = grpo_loss(
            logps, torch.ones_like(logps), logps.detach(), torch.tensor(advantages).unsqueeze(1), mask, reference,
            config.algorithm, StepSize(2, 9.0, 6), None, torch.tensor([6.0] * (len(lengths) - 1) + [3.0]),
        )  # fmt: skip
        loss.total.backward()
        gradients.append(tokens.grad)
        losses.append(float(loss.total.detach()))
    assert gradients[0].abs().max() > 0.01 and torch.allclose(*gradients[:2])
    # In RLOO the ratio of a segment, which weights the divergence, is not the answer's.
    assert name == "rloo" or torch.allclose(*gradients[2:])
    divergences = losses[2] - losses[0], losses[3] - losses[1]
    assert divergences[0] > 0.001 and divergences[1] == pytest.approx(divergences[0], rel=1e-4)


@pytest.mark.parametrize("name", [*NAMES, "rloo"])
def test_row_without_an_advantage_has_no_gradient_even_if_its_ratio_overflows(name: str) -> None:
    config, _ = apply_changes(small_config(), {"algorithm.name": name})
    far = few_rows(config, sampled=torch.tensor([[-1.0] * 4, [-200.0] * 4]))
    near = few_rows(config, sampled=torch.full((2, 4), -1.0))
    assert torch.equal(far["gradient"], near["gradient"]) and not far["gradient"][1].any()
    assert far["gradient"][0].abs().sum() > 0
    assert far["loss"] == near["loss"] and math.isfinite(near["loss"])


def test_row_that_stands_for_others_counts_by_tokens_or_by_rows() -> None:
    """The second row has 2 tokens and stands for 3 rows of 6 tokens, or for 12 tokens."""
    entropies = torch.tensor([[1.0] * 4, [2.0] * 4])
    for name, mean in (("grpo", 4 / 16), ("gspo", 1 / 4)):  # one ratio per token, and one per row
        config, _ = apply_changes(small_config(), {"algorithm.name": name})
        found = few_rows(config, [[1.0, 1.0], [6.0, 3.0]], entropies=entropies)
        assert found["clip_ratio/high_mean"] == pytest.approx(mean), name
        assert found["entropy"] == pytest.approx((4 + 2 * 12) / 16), name


def test_sample_of_rows_that_do_not_move_stands_for_their_tokens_and_for_their_number() -> None:
    rows = some_rows()
    chosen, (tokens, number) = _sample_of_others(rows, [0], 2)
    assert chosen == [3] and number == 6
    assert tokens == sum(sum(row.trained) for row in rows[1:]) / sum(rows[3].trained) != number
