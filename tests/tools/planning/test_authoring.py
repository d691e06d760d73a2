"""Environments that agents write: saved with the owner's permission, checked without being run."""

from __future__ import annotations

import pytest
from toprope_tools.planning.authoring import save_environment
from toprope_tools.planning.config import edit_config
from toprope_tools.planning.environments import describe_environment, list_environments, select_environment
from toprope_tools.resources.documentation import listing, page

from tests.support.tools_house import do, make_workshop
from toprope.errors import InvalidValue, LockedField, NotFound, NotPossibleNow
from toprope.records.walls import Walls
from toprope.training.rollouts.workers.walls import environment_wall
from toprope.workbench.authored import MOST_BYTES

CODE = """\
from toprope.sdk import Environment, Part, Task


class Twice(Environment):
    \"\"\"Double a number.\"\"\"

    parts = {"right": Part()}

    def tasks(self):
        for number in range(1000):
            yield Task(f"Twice {number}?", reference=str(2 * number))

    def score(self):
        return {"right": self.answer.strip() == self.task.reference}
"""


@pytest.fixture
def shop(tmp_path):
    made, launcher = make_workshop(tmp_path)
    made.home.configuration.mkdir(parents=True)
    made.home.settings_file.write_text("saves: allow\n")
    yield made
    launcher.close()


def test_saved_environment_is_listed_loaded_and_can_be_selected(shop):
    answer = do(save_environment, shop, name="twice", code=CODE)
    path = shop.home.agent_environments / "twice.py"
    assert path.read_text() == CODE and answer.data.environments == ["twice"]
    assert 'check_environment(name="twice")' in answer.text
    assert "twice [not tried]" in do(list_environments, shop, query="twice").text
    assert "Twice " in do(describe_environment, shop, name="twice").text
    assert do(select_environment, shop, name="twice").data.environment == "twice"
    again = do(save_environment, shop, name="twice", code=CODE.replace("1000", "2000"))
    assert "version before is kept" in again.text and "2000" in path.read_text()
    assert [file.read_text() for file in (path.parent / "earlier").iterdir()] == [CODE]
    assert do(list_environments, shop, query="twice").data.total == 1


def test_code_is_not_run_where_it_is_saved_or_listed(shop, tmp_path):
    proof = tmp_path / "proof"
    do(save_environment, shop, name="twice", code=f"open({str(proof)!r}, 'w')\n{CODE}")
    do(list_environments, shop)
    assert not proof.exists()


def test_without_permission_the_file_is_for_the_person_to_save(shop):
    shop.home.settings_file.write_text("")
    with pytest.raises(NotPossibleNow) as refused:
        do(save_environment, shop, name="twice", code=CODE)
    assert str(shop.home.configuration / "environments" / "twice.py") in refused.value.hint
    assert not shop.home.agent_environments.exists()


@pytest.mark.parametrize(
    ("name", "code", "why"),
    [
        ("../twice", CODE, "not a valid name"),
        ("json", CODE, "hide a module"),
        ("_twice", CODE, "name"),
        ("twice", "class Twice(Environment:", "not valid Python in line 1"),
        ("twice", "x = 1\n", "no environment"),
        ("twice", f"{CODE}#{'x' * MOST_BYTES}", "bytes"),
        ("twice", CODE + "\0", "not valid Python"),
        ("other", CODE.replace("parts", 'name = "number_guess"\n    parts'), "already"),
        ("other", CODE.replace("parts", 'name = "standard-tasks"\n    parts'), "reserved"),
        ("other", CODE.replace("parts", 'name = "corpus"\n    parts'), "reserved"),
    ],
)
def test_wrong_file_is_refused_and_nothing_is_saved(shop, name, code, why):
    shop.home.settings_file.write_text("saves: allow\nenvironment: {corpus: {trust: yes}}\n")
    with pytest.raises(InvalidValue, match=why):
        do(save_environment, shop, name=name, code=code)
    assert not shop.home.agent_environments.exists()


def test_locks_hold_for_saved_environments(shop):
    do(save_environment, shop, name="twice", code=CODE)
    (shop.home.configuration / "locks.yaml").write_text("locks: [{field: budget.steps, max: 5, reason: a test}]")
    draft = do(select_environment, shop, name="twice").data.draft_id
    assert shop.drafts.get(draft).config.budget.steps == 5
    with pytest.raises(LockedField, match="a test"):
        do(edit_config, shop, draft_id=draft, changes={"budget.steps": 6})


def test_saved_environment_gets_no_rights_by_its_name(shop):
    do(save_environment, shop, name="twice", code=CODE)
    shop.home.settings_file.write_text("saves: allow\nenvironment: {twice: {trust: yes}}\n")
    wall = environment_wall(Walls.of_home(shop.home), shop.catalog.find("twice").environment)
    assert not wall.trusted and wall.home == str(shop.home.worker_homes / "twice@agent")


def test_saved_environment_gets_no_variables_of_the_owner(shop):
    shop.home.settings_file.write_text("saves: allow\nvariables: {environment: {BRAVE_API_KEY: sesame}}\n")
    shows = CODE.replace("Twice {number}?", "{os.environ.get('BRAVE_API_KEY', 'none')[::-1]}: twice {number}?")
    do(save_environment, shop, name="twice", code=f"import os\n{shows}")
    assert "enon: twice 0?" in do(describe_environment, shop, name="twice").text
    path = shop.home.configuration / "environments" / "thrice.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"import os\n{shows.replace('Twice', 'Thrice')}")
    assert "emases: twice 0?" in do(describe_environment, shop, name="thrice").text


def test_saved_reward_functions_are_for_saved_environments(shop):
    """They run in the worker that scores held-out tasks: they could change its verdicts, and print its tasks later."""
    code = f"{CODE}\n\ndef brief(answer):\n    return 0.0\n"
    do(save_environment, shop, name="twice", code=code)
    changes = {"environment.rewards": [{"name": "brief", "weight": 0.1, "fn": "twice.py:brief"}]}
    saved, other = (do(select_environment, shop, name=name).data.draft_id for name in ("twice", "sort_letters"))
    do(edit_config, shop, draft_id=saved, changes=changes)
    with pytest.raises(InvalidValue, match="file that an agent saved.*sort_letters") as refused:
        do(edit_config, shop, draft_id=other, changes=changes)
    assert "save_environment" in refused.value.hint
    mixture = [{"name": "sort_letters", "rewards": changes["environment.rewards"]}]
    with pytest.raises(InvalidValue, match="file that an agent saved"):
        do(edit_config, shop, draft_id=saved, changes={"environment.mixture": mixture})
    (shop.home.configuration / "environments").mkdir(exist_ok=True)
    (shop.home.configuration / "environments" / "mine.py").write_text("def brief(answer):\n    return 0.0\n")
    changes["environment.rewards"][0]["fn"] = "mine.py:brief"
    do(edit_config, shop, draft_id=other, changes=changes)


def test_saved_files_are_no_strategies(shop):
    folders = shop.home.strategy_folders(shop.settings())
    assert shop.home.agent_environments not in folders
    assert shop.home.agent_environments in shop.home.environment_folders(shop.settings())


def test_every_page_of_the_documentation_is_a_resource():
    names = [line for line in ("environments", "settings", "tools", "environment-template", "environment-example")]
    for name in names:
        text, kind = page(name)
        assert len(text) > 500 and kind in ("text/markdown", "text/x-python")
        assert f"toprope://docs/{name}" in listing()
    with pytest.raises(NotFound, match="no page 'enviroments'"):
        page("enviroments")
