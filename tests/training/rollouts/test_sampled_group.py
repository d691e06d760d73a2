"""Groups in the trajectory API's form."""

from __future__ import annotations

from toprope.records.journal.groups import Outcome
from toprope.training.inference.sessions import Turn
from toprope.training.rollouts.sampled_group import SampledGroup


def test_error_earns_no_more_than_the_worst_answer() -> None:
    def scores(*outcomes: Outcome) -> list[float]:
        turns = [[Turn([1], [2], [-0.5], [(0, 1)], "stop")] for _ in outcomes]
        group = SampledGroup("t", [], ["a"] * len(outcomes), list(outcomes), turns, 0.1).to_record("dice", "g")
        assert group.outcomes is not None and [one.reward for one in group.outcomes] == group.scores
        return group.scores

    failed = Outcome(0.0, error="ValueError")
    assert scores(Outcome(-0.2), failed, Outcome(-0.9)) == [-0.2, -0.9, -0.9]
    assert scores(Outcome(0.7), failed) == [0.7, 0.0]
    assert scores(failed, failed) == [0.0, 0.0]
