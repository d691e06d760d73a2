"""Tools and data that the owner lends: a stored source has no more of them than settings.yaml names now."""

from __future__ import annotations

import json

import pytest
import yaml

from toprope.errors import LockedField, NotPossibleNow
from toprope.records.run.specification import EnvironmentSource, Specification
from toprope.settings.owner import Home
from toprope.settings.schema import Config
from toprope.workbench.catalog.catalog import Catalog
from toprope.workbench.launch.lent import renewed


@pytest.fixture
def home(tmp_path):
    made = Home(tmp_path / "home", tmp_path / "config")
    (made.configuration / "environments").mkdir(parents=True)
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "a.jsonl").write_text('{"prompt": "1", "answer": "1"}\n')
    settle(made, tools={"wiki": {"url": "http://127.0.0.1:9/mcp"}}, datasets=[str(tmp_path / "rows")])
    return made


def settle(home, **settings):
    home.settings_file.write_text(yaml.safe_dump(settings))


def stored(home, name, **knobs):
    """A specification as it was frozen under the present settings."""
    config = Config.model_validate({"environment": {"name": name, "knobs": knobs}})
    return Specification(
        run_id="run-a", kind="train", created_at=0.0, toprope_version="0", config=config, policy_cache="/nowhere",
        environment=Catalog.of_home(home).find(name).environment.model_copy(update={"split_rule": 3}),
    )  # fmt: skip


def test_withdrawn_tool_is_refused_where_it_is_used_and_gone_elsewhere(home):
    uses, other = (stored(home, "orchestrator", tools=tools) for tools in (["wiki", "think"], ["think"]))
    assert renewed([uses], home) == [uses]
    settle(home)
    with pytest.raises(LockedField, match="does not lend the tool 'wiki'"):
        renewed([uses], home)
    [now] = renewed([other], home)
    assert json.loads(now.environment.target)["tools"] == {} and now.environment.split_rule == 3


@pytest.mark.parametrize("name", ["orchestrator", "dataset"])
def test_file_in_a_withdrawn_folder_is_refused(home, name):
    uses, other = stored(home, name, path="a.jsonl"), stored(home, name, path="hf:a/b")
    settle(home)
    with pytest.raises(LockedField, match=r"does not lend 'a\.jsonl'"):
        renewed([uses], home)
    [now] = renewed([other], home)
    assert str(home.configuration.parent / "rows") not in json.loads(now.environment.target)["folders"]


def test_members_of_a_mixture_are_renewed(home):
    source = EnvironmentSource(name="dice", file="/nowhere/dice.py", attribute="Dice")
    alone = stored(home, "orchestrator")
    config = alone.config.model_copy(deep=True)
    config.environment.mixture = [{"name": "orchestrator", "knobs": {"tools": ["wiki"]}}]
    mixed = alone.model_copy(update={"environment": source, "mixture": [alone.environment], "config": config})
    assert renewed([mixed], home) == [mixed]
    settle(home)
    with pytest.raises(LockedField, match="'wiki'"):
        renewed([mixed], home)


def test_removed_data_set_does_not_start(home):
    file = home.configuration / "environments" / "sums.yaml"
    file.write_text(f"adapter: dataset\npath: {home.configuration.parent / 'rows' / 'a.jsonl'}\n")
    made = stored(home, "sums")
    assert renewed([made], home) == [made]
    file.unlink()
    with pytest.raises(NotPossibleNow, match="'sums'. The owner has removed it"):
        renewed([made], home)
