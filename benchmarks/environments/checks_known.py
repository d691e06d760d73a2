"""Known defects of reasoning-gym's tasks (0.1.25), and confirmed reasons for other flags.

Each reason was confirmed by reading the task's code, or by running it.
"""

from __future__ import annotations

__all__ = ["EXPLAINED", "NAMED"]

_HASH = {"tasks depend on PYTHONHASHSEED": ("hash_seed",)}
_ORACLE = {"the oracle scores 0": ("reference_fails", "never_varies", "no_reference")}

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

EXPLAINED: dict[tuple[str, str], str] = {
    ("codeio", "not_repeatable"): "245 of the 3,002 programs that make its answers draw from the global random",
    ("coin_flip", "few_tasks"): "260 distinct questions in all",
    ("complex_arithmetic", "junk_rewarded"): "min(1.0, exp(-nan)) is 1.0: the answer nan is right",
    ("game_of_life", "scoring_raises"): "a JSON answer that is not a list of lists raises KeyError",
    ("game_of_life_halting", "wrong_rewarded"): "the same defect: every answer is right",
    ("intermediate_integration", "slow"): "sympy integrates for 0.1 s and more a task",
    ("knight_swap", "hangs"): "single tasks take many seconds to find",
    ("knight_swap", "hash_seed"): "answers are searched over sets: other moves under another hash seed",
    ("list_functions", "not_repeatable"): "a generator uses random.randint, not the generator that it is given",
    ("number_sequence", "hangs"): "task 163 alone takes 29 s: its numbers grow without bounds",
    ("prime_factorization", "no_reference"): "its answer is None, as boxnet's is",
    ("puzzle24", "wrong_rewarded"): "any four numbers that make 24 are right, not only those that were given",
    ("string_synthesis", "few_tasks"): "216 distinct questions in all",
    ("time_intervals", "lenient"): "of `9 days` the 9 is read, and nothing behind it",
    ("tower_of_hanoi", "few_tasks"): "90 distinct questions in all",
}
