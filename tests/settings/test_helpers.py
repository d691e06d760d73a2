"""The owner's models that a configuration names."""

from __future__ import annotations

from toprope.settings.environment import EnvironmentSection, helper_names


def test_helpers_are_judges_roles_and_the_opponent_once_each() -> None:
    section = EnvironmentSection(
        name="x",
        model_roles={"grader": "strict", "critic": "kind"},
        opponent="strong",
        rewards=[{"name": "style", "judge": "strict", "rubric": "Is it short?"}],
    )
    assert sorted(helper_names(section)) == ["kind", "strict", "strong"]
    assert helper_names(EnvironmentSection(name="x", opponent="base")) == []
