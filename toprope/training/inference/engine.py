"""The contract between the inference server and an engine: `Engine`, `SamplingRequest`, `Sample`.

The server speaks HTTP, renders prompts and keeps sessions; an engine samples tokens. `embedded_engine` implements the
contract for a CPU or a small GPU. Another engine must keep these promises, because training relies on them:

- Log-probabilities are those of the distribution that was sampled, with temperature applied, before nucleus sampling.
- All tokens of an answer come from one policy version, which the answer names. New weights may be adopted between
  answers, never within one.
- Requests with the same seed and prompt give the same answers whatever else is sampled, up to rounding.
- `submit` may be called from any thread, and `done` is called exactly once per request, also after a failure or `stop`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol

FinishReason = Literal["stop", "length"]


@dataclass
class SamplingRequest:
    """`n` answers to one prompt of token ids."""

    prompt_ids: list[int]
    n: int = 1
    max_new_tokens: int = 256
    temperature: float = 1.0
    """0 takes the most likely token."""
    top_p: float = 1.0
    """Nucleus sampling (Holtzman et al. 2020); 1 samples from all tokens."""
    stop: list[str] = field(default_factory=list)
    """Texts that end an answer."""
    seed: int | None = None
    """Makes the answers repeatable; None for different answers every time."""


@dataclass
class Sample:
    """One answer."""

    token_ids: list[int]
    """Sampled ids, including an end token and stop texts."""
    logprobs: list[float]
    """Natural logarithms, one per id; at temperature 0 those of the unscaled distribution."""
    version: int
    """Policy version of all its tokens."""
    text: str
    """The answer without special tokens, cut before a stop text."""
    finish_reason: FinishReason


Done = Callable[["list[Sample] | Exception"], object]
"""Receives the `n` samples of a request, or the error; may be called in a thread of the engine."""


class Engine(Protocol):
    """Samples answers for many requests at once."""

    @property
    def max_context(self) -> int:
        """Longest sequence of prompt and answer, in tokens."""

    @property
    def end_ids(self) -> frozenset[int]:
        """Token ids that end an answer."""

    @property
    def version(self) -> int:
        """Policy version of the newest batch."""

    @property
    def batches(self) -> int:
        """Number of decode batches so far."""

    @property
    def rows(self) -> int:
        """Number of answers so far."""

    @property
    def tokens(self) -> int:
        """Number of sampled tokens so far."""

    @property
    def busy_s(self) -> float:
        """Seconds spent sampling so far."""

    def start(self) -> None:
        """Load the trainer's present weights and begin to sample."""

    def stop(self, timeout_s: float = 60.0) -> None:
        """Finish the current batch within `timeout_s` seconds, and answer waiting requests with an error."""

    def is_progressing(self) -> bool:
        """True if the engine is idle, or has advanced since the last call; heartbeats depend on it."""

    def submit(self, request: SamplingRequest, done: Done) -> None:
        """Queue a request; `done` gets its answers."""
