"""How sure an accuracy is: intervals of proportions, and when one is said to have risen.

Accuracies here come from some hundred tasks and are often near 0 or 1, where the textbook's normal interval is wrong
(it is empty at 0 of n). Wilson's score interval is good there (Brown, Cai and DasGupta, Interval Estimation for a
Binomial Proportion, Statistical Science 16, 2001).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

from toprope.errors import InvalidValue

__all__ = ["Proportion", "rose", "wilson"]


@dataclass(frozen=True)
class Proportion:
    """A share of n with its interval, all within [0, 1]; `low` <= `value` <= `high`."""

    value: float
    low: float
    high: float
    n: int


def wilson(successes: float, n: int, confidence: float = 0.95) -> Proportion:
    """Wilson's score interval of a proportion.

    Args:
        successes: How many of n; may be fractional where each trial is itself a mean.
        n: Independent trials, at least 1.
        confidence: Probability that the interval covers the true share, within (0, 1).

    Raises:
        InvalidValue: The numbers are no proportion.
    """
    if n < 1 or not 0 <= successes <= n or not 0 < confidence < 1:
        raise InvalidValue(
            f"{successes} of {n} at confidence {confidence} is no proportion.",
            hint="0 <= successes <= n, n >= 1, 0 < confidence < 1.",
        )
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    share = successes / n
    scale = 1 + z * z / n
    centre = (share + z * z / (2 * n)) / scale
    half = z / scale * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    # At 0 and n the bound is exact in theory; rounding must not push it past the share.
    return Proportion(share, min(max(0.0, centre - half), share), max(min(1.0, centre + half), share), n)


def rose(before: Proportion, after: Proportion) -> bool:
    """Whether a share rose by more than both intervals: they do not meet. Stricter than a test of the difference."""
    return after.low > before.high
