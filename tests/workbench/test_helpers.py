"""The owner's models that judge answers or play as the opponent: resolved by name, with keys for the driver alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from toprope.errors import InvalidValue, NotFound
from toprope.settings.endpoints import Endpoint
from toprope.settings.owner import OwnerSettings
from toprope.settings.sections.environment import EnvironmentSection, helper_names
from toprope.workbench.endpoints import resolve_helpers

JUDGE = {"name": "style", "judge": "grader", "rubric": "Be kind."}
FILE = Path("settings.yaml")


def settings(**variables: str) -> OwnerSettings:
    models = {
        "grader": Endpoint(base_url="http://127.0.0.1:1/v1", model="g", key="GRADER_KEY"),
        "rival": Endpoint(base_url="http://127.0.0.1:2/v1", model="r"),
    }
    return OwnerSettings(models=models, variables={"models": variables} if variables else {})


def test_judges_of_all_environments_and_the_opponent_are_named_once() -> None:
    section = EnvironmentSection(
        rewards=[JUDGE, {**JUDGE, "name": "tone"}],
        mixture=[{"name": "other", "rewards": [{**JUDGE, "judge": "rival"}]}],
        opponent="rival",
    )
    assert helper_names(section) == ["grader", "rival"]
    for own in ("", "base", "run:add-1"):
        assert helper_names(EnvironmentSection(opponent=own)) == []


def test_helpers_resolve_to_models_whose_keys_are_there() -> None:
    section = EnvironmentSection(rewards=[JUDGE], opponent="rival")
    found = resolve_helpers(section, settings(GRADER_KEY="sk"), [], FILE)
    assert {name: one.endpoint.model for name, one in found.items() if one.endpoint} == {"grader": "g", "rival": "r"}
    with pytest.raises(InvalidValue, match="GRADER_KEY"):
        resolve_helpers(section, settings(), [], FILE)
    with pytest.raises(NotFound, match="'nobody'"):
        resolve_helpers(EnvironmentSection(opponent="nobody"), settings(), [], FILE)
    judged_by_itself = EnvironmentSection(rewards=[{**JUDGE, "judge": "base"}])
    with pytest.raises(InvalidValue, match="not a single model at an endpoint"):
        resolve_helpers(judged_by_itself, settings(), [], FILE)
