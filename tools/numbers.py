"""A run's numbers in words, the same wherever they are shown: status, waits, lists, the command line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tools.answers import clip, duration, number, percent

__all__ = ["numbers_line"]


def numbers_line(numbers: Mapping[str, Any]) -> str:
    """Numbers as short text: `step 120/1500, reward 0.43, success 31.0%, 1450 rollouts/s, ETA 52 s`."""
    parts = []
    if "what" in numbers:
        total = f"/{numbers['total']}" if numbers.get("total") else ""
        parts.append(f"{clip(numbers['what'], 60)} {numbers.get('done', 0)}{total}")
    if "best" in numbers:
        parts.append(f"best {number(numbers['best'])}")
    if "step" in numbers:
        total = f"/{numbers['total_steps']}" if numbers.get("total_steps") else ""
        parts.append(f"step {numbers['step']}{total}")
    if "reward" in numbers:
        parts.append(f"reward {number(numbers['reward'])}")
    if "success" in numbers:
        parts.append(f"success {percent(numbers['success'])}")
    if "rollouts_per_second" in numbers:
        parts.append(f"{number(numbers['rollouts_per_second'])} rollouts/s")
    if "elapsed_s" in numbers:
        parts.append(f"{duration(numbers['elapsed_s'])} so far")
    if "eta_s" in numbers:
        parts.append(f"ETA {duration(numbers['eta_s'])}")
    return ", ".join(parts) or "no numbers yet"
