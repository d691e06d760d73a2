"""The owner's models that a configuration names."""

from __future__ import annotations

import re

import pytest

from toprope.settings.environment import EnvironmentSection, helper_names
from toprope.settings.mixture import MixtureEntry, RewardFunction


def test_helpers_are_judges_roles_and_the_opponent_once_each() -> None:
    section = EnvironmentSection(
        name="x",
        model_roles={"grader": "strict", "critic": "kind"},
        opponent="strong",
        rewards=[{"name": "style", "judge": "strict", "rubric": "Is it short?"}],
    )
    assert sorted(helper_names(section)) == ["kind", "strict", "strong"]
    assert helper_names(EnvironmentSection(name="x", opponent="base")) == []


def test_patterns_of_plain_objects_count_no_repetitions() -> None:
    """A counted class of all letters costs every process megabytes; its length is a limit of its own."""
    fields = [field for model in (RewardFunction, MixtureEntry) for field in model.model_fields.values()]
    patterns = [held.pattern for field in fields for held in field.metadata if getattr(held, "pattern", None)]
    assert len(patterns) == 3 and not [pattern for pattern in patterns if re.search(r"\{\d+,", pattern)]
    for name in ("a" * 65, "1x", "ok\n"):
        with pytest.raises(ValueError, match="name"):
            EnvironmentSection(name="x", rewards=[{"name": name, "judge": "strict", "rubric": "Is it short?"}])
