"""Paired sign-flip test: do two policies differ on the same tasks?

Both runs are measured on the same held-out tasks, so the difficulty of the tasks cancels out. Under the null hypothesis
each task's difference has either sign with equal probability (Fisher, The Design of Experiments, 1935, section 21).
With one answer per task on each side this is the exact form of McNemar's test (Psychometrika 12, 1947).
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence

_MOST_WORK = 2_000_000
"""Additions above which the distribution is sampled instead; half a second of Python."""
_SAMPLES = 10_000


def sign_flip(differences: Sequence[int]) -> float:
    """Compute the two-sided p-value of the paired sign-flip test.

    Args:
        differences: One per task, as whole numbers in a common unit; zeros carry no information.

    Returns:
        The probability of a sum at least as large in magnitude. Exact if that is quick, otherwise from 10,000 draws
        with a fixed seed, counted as in Phipson and Smyth (SAGMB 9, 2010), so never 0.
    """
    sizes = [abs(difference) for difference in differences if difference]
    observed = abs(sum(differences))
    if not sizes or not observed:
        return 1.0
    unit = math.gcd(*sizes)
    sizes, observed = [size // unit for size in sizes], observed // unit
    total = sum(sizes)
    if len(set(sizes)) == 1:
        return _binomial(len(sizes), (len(sizes) + observed // sizes[0]) // 2)
    if len(sizes) * total <= _MOST_WORK:
        return _exact(sizes, observed, total)
    return _by_sampling(sizes, observed)


def _binomial(n: int, wins: int) -> float:
    """Return the two-sided binomial tail at `wins` of n for a fair coin."""
    tail = sum(math.comb(n, count) for count in range(wins, n + 1))
    return float(min(1.0, 2 * tail / 2**n))


def _exact(sizes: Sequence[int], observed: int, total: int) -> float:
    """Count by the distribution of the positive part: sum = 2 * positive - total."""
    chances = [0.0] * (total + 1)
    chances[0], reached = 1.0, 0
    for size in sizes:
        reached += size
        for place in range(reached, size - 1, -1):
            chances[place] = 0.5 * (chances[place] + chances[place - size])
        for place in range(min(size, reached + 1)):
            chances[place] *= 0.5
    tail = math.fsum(chances[(total + observed + 1) // 2 :])
    return min(1.0, 2 * tail)


def _by_sampling(sizes: Sequence[int], observed: int) -> float:
    draw, counts = random.Random(0), Counter(sizes)
    hits = 0
    for _ in range(_SAMPLES):
        # The bits of one random number are the signs of all differences of equal size.
        total = sum(size * (2 * draw.getrandbits(count).bit_count() - count) for size, count in counts.items())
        hits += abs(total) >= observed
    return (hits + 1) / (_SAMPLES + 1)
