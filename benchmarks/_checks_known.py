"""What is known of reasoning-gym's tasks (0.1.25): defects that were found by hand, and why others are rightly flagged.

Each reason was confirmed by reading the task's code, or by running it.
"""

from __future__ import annotations

__all__ = ["EXPLAINED", "NAMED"]

_HASH = {"tasks depend on PYTHONHASHSEED": ("hash_seed",)}
_ORACLE = {"the oracle scores 0": ("reference_fails", "never_varies")}

NAMED: dict[str, dict[str, tuple[str, ...]]] = {
    "game_of_life_halting": {"any junk is rewarded": ("junk_rewarded",)},
    "prime_factorization": {"junk raises": ("scoring_raises",)},
    "boxnet": {"junk raises": ("scoring_raises", "never_varies"), **_ORACLE},
    "graph_color": _ORACLE,
    "propositional_logic": _ORACLE,
    "rubiks_cube": _ORACLE,
    "rush_hour": _ORACLE,
    "isomorphic_strings": _HASH,
    "polynomial_multiplication": _HASH,
    "ransom_note": _HASH,
    "word_ladder": _HASH,
    "knight_swap": {"a task takes 410 ms": ("slow",)},
}
"""By task: the defect, and the rules that may name it."""

EXPLAINED: dict[tuple[str, str], str] = {}
