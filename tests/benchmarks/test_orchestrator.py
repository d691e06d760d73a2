"""The arithmetic of make bench-orchestrator."""

from __future__ import annotations

import pytest

from benchmarks.orchestrator.means import Measured, compared


def measured(accuracy: float, cost: float) -> Measured:
    return Measured(accuracy, accuracy - 0.05, accuracy + 0.05, 100, {"cost": cost, "energy": 0.1, "latency": 0.1})


def test_what_a_right_answer_costs_is_compared_seed_by_seed():
    figures = compared([measured(0.8, 0.4), measured(1.0, 0.4)], [measured(0.8, 0.2), measured(0.8, 0.2)])
    assert figures["usd_per_correct_fixed"] == [0.05, 0.04] and figures["usd_per_correct_adaptive"] == [0.025, 0.025]
    assert figures["cost_reduction_percent_by_seed"] == [50.0, 37.5]
    assert figures["cost_reduction_percent"] == pytest.approx(43.75)
    assert figures["cost_reduction_percent_low"] < 43.75 < figures["cost_reduction_percent_high"]
    assert figures["accuracy_difference"] == pytest.approx(-0.1) and figures["accuracy_lost"] == 1
    assert measured(0.0, 0.2).usd_per_correct == float("inf")
