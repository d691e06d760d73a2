"""A run's numbers in words, the same wherever they are shown: status, waits, lists, the command line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toprope_tools.answers.base import clip, duration, number, percent

__all__ = ["numbers_line"]


_MOST = 8
"""Environments of which a line tells."""


def _environment(label: str, own: Mapping[str, Any]) -> str:
    """One of several environments: `sums success 31.0% (a third of the groups)`."""
    said = f"success {percent(own['success'])}" if "success" in own else ""
    said = said or (f"reward {number(own['reward'])}" if "reward" in own else "")
    share = f"share {percent(own['share'])}" if "share" in own else ""
    return f"{clip(label, 60)} {' '.join(filter(None, (said, share)))}".strip()


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
    parts += [_environment(label, one) for label, one in list((numbers.get("environments") or {}).items())[:_MOST]]
    for label, one in list((numbers.get("curricula") or {}).items())[:_MOST]:
        parts.append(f"{clip(label, 60)} at level {one.get('level', 0) + 1}/{one.get('levels')}")
    if "elapsed_s" in numbers:
        parts.append(f"{duration(numbers['elapsed_s'])} so far")
    if "eta_s" in numbers:
        parts.append(f"ETA {duration(numbers['eta_s'])}")
    return ", ".join(parts) or "no numbers yet"
