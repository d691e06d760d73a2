"""Tokens are sampled from exactly the distribution of the logits."""

from __future__ import annotations

import pytest
import torch

from toprope.training.inference.engine import SamplingRequest
from toprope.training.inference.sampling import TokenSampler


def _sampler(*requests: SamplingRequest, seed: int = 0) -> TokenSampler:
    rows = [(request, number) for request in requests for number in range(request.n)]
    return TokenSampler(rows, torch.device("cpu"), torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.6, 1.0), (1.5, 0.8)])
def test_frequencies_follow_the_reference_distribution(temperature: float, top_p: float) -> None:
    """A chi-squared test over 200,000 tokens; its threshold has a probability of 1e-6."""
    draws, size = 200_000, 12
    logits = torch.linspace(-2, 2, size)[torch.randperm(size, generator=torch.Generator().manual_seed(4))]
    probabilities = torch.softmax(logits.double() / temperature, -1)
    order = probabilities.argsort(descending=True)
    before = probabilities[order].cumsum(0) - probabilities[order]
    expected = torch.zeros(size, dtype=torch.float64)
    expected[order] = torch.where(before < top_p, probabilities[order], 0.0)
    expected *= draws / expected.sum()
    request = SamplingRequest([1], n=draws, temperature=temperature, top_p=top_p)
    token, logprob = _sampler(request).sample(logits.expand(draws, size))
    counts = torch.bincount(token, minlength=size).double()
    assert not counts[expected == 0].any()
    used = expected > 0
    statistic = float(((counts - expected)[used] ** 2 / expected[used]).sum())
    assert statistic < 55  # 11 degrees of freedom
    assert torch.allclose(logprob.double(), probabilities.log()[token], atol=1e-5)


def test_token_without_weight_is_never_sampled() -> None:
    """Not even if the random number is at an end of its range."""
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]])
    for number, expected in ((0.0, 1), (0.5, 3), (1.0 - 2**-53, 3)):
        sampler = _sampler(SamplingRequest([1]))
        sampler._uniform = lambda rows, number=number: torch.full((rows, 1), number, dtype=torch.float64)  # type: ignore[method-assign]
        assert int(sampler.sample(logits)[0]) == expected


def test_unlikely_tokens_of_a_large_vocabulary_keep_their_probability() -> None:
    """Half of the mass is spread over 100,000 tokens of 5e-6 each, which sums in float32 would distort."""
    logits = torch.cat([torch.tensor([0.0]), torch.full((100_000,), -torch.log(torch.tensor(100_000.0)).item())])
    request = SamplingRequest([1], n=64)
    sampler = _sampler(request)
    tokens = torch.cat([sampler.sample(logits.expand(64, -1))[0] for _ in range(40)])
    share = float((tokens == 0).double().mean())
    assert abs(share - 0.5) < 5 * (0.25 / len(tokens)) ** 0.5
    tail = tokens[tokens > 0].double()
    assert abs(float(tail.mean()) - 50_000) < 5 * 28_868 / len(tail) ** 0.5


def test_seeded_rows_draw_the_same_numbers_in_any_batch() -> None:
    logits = torch.randn(300, 8, 50)
    seeded = SamplingRequest([1], n=2, seed=5)
    alone, others = (
        _sampler(seeded),
        _sampler(SamplingRequest([2], n=3), seeded, SamplingRequest([3], n=1, seed=9), seed=1),
    )
    for step in range(300):
        places = [3, 4]
        if step == 7:
            order = [3, 1, 4]
            others.keep(torch.tensor(order), order)
        rows = logits[step][:6] if step < 7 else logits[step][[3, 1, 4]]
        places = [3, 4] if step < 7 else [0, 2]
        assert alone.sample(logits[step][3:5])[0].tolist() == others.sample(rows)[0][places].tolist()


def test_logits_that_are_not_finite_are_refused() -> None:
    with pytest.raises(RuntimeError, match="not finite"):
        _sampler(SamplingRequest([1])).sample(torch.tensor([[0.0, torch.nan]]))
