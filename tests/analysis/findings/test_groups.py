"""Findings about groups that failed or were dropped."""

from __future__ import annotations

from toprope.analysis.findings.failed_groups import FailedGroups
from toprope.analysis.findings.standstill import LEAST_GROUPS, standstill
from toprope.records.run.status import Finding
from toprope.settings.schema import Config


def test_failed_groups_are_reported_with_share_and_reasons() -> None:
    failed_groups = FailedGroups()
    assert failed_groups.take(10, {"the environment failed": 5}) is None  # too few to say
    found = failed_groups.take(40, {"the environment failed": 5, "training had ended": 9})
    assert found is not None and (found.rule, found.level) == ("groups_given_up", "warning")
    assert "12% of the last 40 groups" in found.what and "the environment failed (5)" in found.what
    assert "check_environment" in found.next
    worse = failed_groups.take(60, {"the environment failed": 5, "the environment hung": 20})
    assert worse is not None and worse.level == "critical"
    assert failed_groups.take(2000, {"the environment failed": 5, "the environment hung": 20}) is None  # long ago


def test_failed_groups_ignore_restarts_and_new_attempts() -> None:
    failed_groups = FailedGroups()
    assert failed_groups.take(100, {"inference was started again": 50}) is None
    assert failed_groups.take(5, {}) is None
    long = failed_groups.take(105, {"the prompt left no room": 60})
    assert long is not None and "policy.max_context" in long.next


def test_failed_groups_finding_ends_only_if_clearly_better() -> None:
    failed_groups = FailedGroups()
    findings = [failed_groups.take(begun, {"the environment failed": begun // 18}) for begun in range(20, 400, 10)]
    first = next(place for place, one in enumerate(findings) if one is not None)
    assert all(one is not None for one in findings[first:])


def test_dropped_groups_without_steps_are_a_standstill() -> None:
    made = Config()
    made.rollout.groups_per_step = 4
    enough = LEAST_GROUPS * 4
    assert standstill({"zero_signal": enough - 1}, made) is None

    def found(**dropped: int) -> Finding:
        accuracy = dropped.pop("accuracy", None)
        finding = standstill(dropped, made, accuracy=accuracy)
        assert finding is not None and finding.level == "critical" and finding.next
        return finding

    assert found(zero_signal=enough).rule == "no_signal"
    assert found(zero_signal=enough, accuracy=0).rule == "all_wrong"
    assert found(zero_signal=enough, accuracy=1).rule == "all_right"
    stale = found(stale=enough, zero_signal=2)
    assert stale.rule == "dropped_stale" and stale.observed["dropped_stale"] == enough
    later = standstill({"zero_signal": enough}, made, step=50, accuracy=0.0)
    assert later is not None and later.rule == "no_signal" and "since step 50" in later.what
