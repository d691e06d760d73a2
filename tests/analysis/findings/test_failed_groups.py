"""Groups that come to nothing are told when that begins, when it gets worse, and when it is over."""

from __future__ import annotations

from toprope.analysis.findings.failed_groups import FailedGroups


def test_a_share_of_the_newest_groups_is_told_by_reason() -> None:
    failed_groups = FailedGroups()
    assert failed_groups.take(10, {"the environment failed": 5}) is None  # too few to say
    found = failed_groups.take(
        40, {"the environment failed": 5, "training had ended": 9}, {"ValueError": 12, "KeyError": 3}
    )
    assert found is not None and (found.rule, found.level) == ("groups_given_up", "warning")
    assert "12% of the last 40 groups" in found.what and "the environment failed (5)" in found.what
    assert "check_environment" in found.next and failed_groups.kinds()[0] == ("ValueError", 12)
    worse = failed_groups.take(60, {"the environment failed": 5, "the environment hung": 20})
    assert worse is not None and worse.level == "critical"
    assert failed_groups.take(2000, {"the environment failed": 5, "the environment hung": 20}) is None  # long ago


def test_what_nobody_is_guilty_of_and_a_new_life_count_for_nothing() -> None:
    failed_groups = FailedGroups()
    assert failed_groups.take(100, {"inference was started again": 50}) is None
    assert failed_groups.take(5, {}) is None
    long = failed_groups.take(105, {"the prompt left no room": 60})
    assert long is not None and "policy.max_context" in long.next


def test_what_was_told_is_over_only_when_it_is_clearly_better() -> None:
    failed_groups = FailedGroups()
    told = [failed_groups.take(begun, {"the environment failed": begun // 18}) for begun in range(20, 400, 10)]
    first = next(place for place, one in enumerate(told) if one is not None)
    assert all(one is not None for one in told[first:])
