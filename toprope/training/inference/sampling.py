"""Sampling of tokens by inversion: the cumulative sum of the weights, and a search for a uniform number in it.

It draws from exactly the distribution that `torch.multinomial` draws from, with one number per row instead of one per
entry of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from toprope.training.inference.engine import SamplingRequest

DRAWN = 128
"""Uniform numbers that a seeded row draws at a time."""


class TokenSampler:
    """Samples the next tokens of a batch of rows, each with the settings of its request.

    Args:
        requests: The request of each row, and the number of the row among its answers.
        device: The device of the logits.
        generator: Source of random numbers for requests without a seed.
    """

    def __init__(
        self, requests: Sequence[tuple[SamplingRequest, int]], device: torch.device, generator: torch.Generator
    ) -> None:
        self._device, self._generator = device, generator
        self._temperature, self._greedy, self._top_p = row_settings([request for request, _ in requests], device)
        self._seeded = [seeded_generator(request, number, device) for request, number in requests]
        self._any_seeded = any(row_generator is not None for row_generator in self._seeded)
        self._drawn, self._used = torch.empty(0), DRAWN

    def keep(self, index: torch.Tensor, order: Sequence[int]) -> None:
        """Reduce the batch to some of its rows, in that order; both arguments name them."""
        if self._temperature is not None:
            self._temperature = self._temperature[index]
        if self._greedy is not None:
            self._greedy = self._greedy[index]
        if self._top_p is not None:
            self._top_p = self._top_p[index]
        if self._any_seeded:
            self._seeded = [self._seeded[place] for place in order]
            self._drawn = self._drawn[index]

    def sample(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Sample the next token of each row; see `choose_tokens`."""
        return choose_tokens(logits, self._uniform(len(logits)), self._temperature, self._greedy, self._top_p)

    def _uniform(self, rows: int) -> torch.Tensor:
        """(rows, 1): numbers from 0 to below 1, for each row from its own source."""
        if not self._any_seeded:
            return _draw((rows, 1), self._generator)
        if self._used == DRAWN:
            self._drawn, self._used = _draw((rows, DRAWN), self._generator), 0
            for place, row_generator in enumerate(self._seeded):
                if row_generator is not None:
                    self._drawn[place] = _draw((DRAWN,), row_generator)
        self._used += 1
        return self._drawn[:, self._used - 1 : self._used]


def row_settings(
    requests: Sequence[SamplingRequest], device: torch.device
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Temperature, greedy rows and nucleus of the request of each row, as `choose_tokens` takes them."""
    temperatures, nuclei = [request.temperature for request in requests], [request.top_p for request in requests]

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, device=device).unsqueeze(1)

    return (
        column([value or 1.0 for value in temperatures]) if any(value != 1 for value in temperatures) else None,
        torch.tensor([value == 0 for value in temperatures], device=device) if 0 in temperatures else None,
        column(nuclei) if any(value < 1 for value in nuclei) else None,
    )


def choose_tokens(
    logits: torch.Tensor,
    uniform: torch.Tensor,
    temperature: torch.Tensor | None = None,
    greedy: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the next token of each row.

    Args:
        logits: (rows, vocabulary).
        uniform: (rows, 1): numbers from 0 to below 1, float64.
        temperature: (rows, 1), above 0; None for 1.
        greedy: (rows,): rows that take the most likely token; None for none.
        top_p: (rows, 1): mass of the nucleus; None for all tokens.

    Returns:
        Tokens and their log-probabilities before nucleus sampling, both (rows,).

    Raises:
        RuntimeError: The logits are not finite, as after diverged training.
    """
    logits = logits.float()
    if temperature is not None:
        logits = logits / temperature
    peak = logits.amax(-1, keepdim=True)
    weights = (logits - peak).exp_()
    if top_p is None:
        cumulative = weights.cumsum(-1, dtype=torch.float64)
        mass = total = cumulative[:, -1:]
    else:
        total = weights.sum(-1, keepdim=True, dtype=torch.float64)
        cumulative = _nucleus(weights, total * top_p).cumsum(-1, dtype=torch.float64)
        mass = cumulative[:, -1:]
    if not bool(total.isfinite().all()):
        raise RuntimeError("the policy's logits are not finite numbers")
    # Below the mass, so that the search ends at an entry that adds to the sum: one with a weight above 0.
    point = torch.minimum(uniform * mass, mass.nextafter(torch.zeros_like(mass)))
    token = torch.searchsorted(cumulative, point, right=True)
    if greedy is not None:
        token = torch.where(greedy.unsqueeze(1), logits.argmax(-1, keepdim=True), token)
    logprob = logits.gather(1, token) - peak - total.log().float()
    return token.squeeze(1), logprob.squeeze(1)


def seeded_generator(request: SamplingRequest, number: int, device: torch.device) -> torch.Generator | None:
    """The source of random numbers of a request's row `number`; None for a request without a seed."""
    if request.seed is None:
        return None
    return torch.Generator(device=device).manual_seed((request.seed * 1_000_003 + number) % 2**63)


def _draw(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.rand(shape, generator=generator, dtype=torch.float64, device=generator.device)


def _nucleus(weights: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
    """Zero all but the smallest set of tokens whose weight reaches `mass` (Holtzman et al. 2020).

    `weights` is (rows, vocabulary), `mass` (rows, 1).
    """
    ordered, order = weights.sort(-1, descending=True)
    outside = ordered.cumsum(-1, dtype=torch.float64) - ordered >= mass
    return weights.masked_fill(outside.scatter(-1, order, outside), 0.0)
