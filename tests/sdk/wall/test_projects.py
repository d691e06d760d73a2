"""The project of a file that the owner added: what its code may read, and what opens nothing."""

from __future__ import annotations

import json
import os
import struct
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.sdk.wall.conftest import asked, landlock
from toprope.records.run.specification import EnvironmentSource
from toprope.records.walls import Walls
from toprope.sdk.wall import plan
from toprope.sdk.wall.projects import project_root
from toprope.settings.owner import Home
from toprope.training.rollouts.workers.walls import code_wall, environment_wall
from toprope.workbench.interpreters.registry import Added, Registry


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project whose script lies in a folder of it, in a folder of the owner."""
    root = tmp_path / "code" / "project"
    (root / "training").mkdir(parents=True)
    (root / "pyproject.toml").touch()
    (root / "training" / "train.py").touch()
    return root


def opened(walls: Walls, file: Path, adapter: str | None = None) -> list[str]:
    """The folders that the wall of an environment opens to its code, as planned."""
    target = json.dumps({"file": str(file)}) if adapter else None
    source = EnvironmentSource(name="train", file=None if adapter else str(file), adapter=adapter, target=target)
    return plan.plan_for(environment_wall(walls, source), sys.executable, {}, []).sources


@landlock
def test_code_of_an_added_project_imports_and_reads_from_its_root(project: Path, tmp_path: Path) -> None:
    for name in ("shared_by_all/rules.py", "rows/row", ".env", ".git/config", "../other/row", "../beside"):
        (project / name).parent.mkdir(exist_ok=True)
        (project / name).write_text("WORD = 'right'\n")
    (project / "out").symlink_to(project.parent / "other")
    file = project / "training" / "train.py"
    file.write_text(
        "import os\nfrom shared_by_all.rules import WORD\ndef work():\n    found = [WORD]\n"
        "    for name in ('rows/row', '.env', '.git/config', 'out/row', '../other/row', '../beside'):\n"
        f"        try: found.append(open(os.path.join({str(project)!r}, name)).read()[-8:-2])\n"
        "        except PermissionError: found.append('closed')\n"
        f"    try: open({str(project / 'new')!r}, 'w')\n    except OSError: found.append('read only')\n"
        "    return found\n"
    )
    source = EnvironmentSource(name="train", file=str(file), attribute="work")
    walls = Walls(added=(str(tmp_path / "code"),))
    expected = ["right", "'right", "closed", "closed", "closed", "closed", "closed", "read only"]
    assert asked(environment_wall(walls, source), file)[0] == expected
    assert str(project) not in environment_wall(Walls(), source).sources, "the owner did not add it"


def test_root_is_the_nearest_project_within_the_added_folder(project: Path, tmp_path: Path) -> None:
    file, added = project / "training" / "train.py", str(tmp_path / "code")
    assert project_root(str(file), [added]) == project_root(str(file), [str(project)]) == str(project)
    assert project_root(str(file), [str(file.parent)]) == "", "it would lie above the added folder"
    assert project_root(str(file), [f"{added}/proj"]) == project_root(str(file), []) == ""
    (project / "training" / "setup.py").touch()
    assert project_root(str(file), [added]) == str(file.parent), "a project within a project"
    (project / "training" / "setup.py").unlink()
    (project / "pyproject.toml").unlink()
    assert project_root(str(file), [added]) == project_root(str(file), [str(project)]) == ""
    (project / "requirements.txt").touch()
    assert project_root(str(file), [added]) == "", "other environments may lie in that folder"
    assert project_root(str(file), [str(project)]) == str(project)


def test_pyproject_in_a_home_opens_no_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "envs" / "games").mkdir(parents=True)
    (file := tmp_path / "envs" / "games" / "chess.py").touch()
    for added in (tmp_path / "envs", tmp_path, Path("/")):
        assert project_root(str(file), [str(added)]) == ""
    (tmp_path / "envs" / "setup.py").touch()
    assert project_root(str(file), [str(tmp_path)]) == str(tmp_path / "envs")


def test_links_and_installed_packages_open_no_project(project: Path, tmp_path: Path) -> None:
    (elsewhere := tmp_path / "elsewhere").mkdir()
    (elsewhere / "env.py").touch()
    (project / "linked.py").symlink_to(elsewhere / "env.py")
    (project / "link").symlink_to(elsewhere)
    (project / "venv" / "lib" / "site-packages").mkdir(parents=True)
    (project / "venv" / "pyvenv.cfg").touch()
    (project / ".tox" / "lib").mkdir(parents=True)
    added = [str(project)]
    for name in ("linked.py", "link/env.py", "venv/env.py", "venv/lib/site-packages/env.py", ".tox/lib/env.py"):
        (project / name).touch()
        assert project_root(str(project / name), added) == "", name
    (tmp_path / "code" / "alias").symlink_to(project)
    (outside := tmp_path / "code" / "outside").symlink_to(elsewhere)
    (elsewhere / "setup.py").touch()
    assert project_root(str(outside / "env.py"), [str(tmp_path / "code")]) == "", "what a link leads to was not added"
    assert project_root(str(tmp_path / "code" / "alias" / "training" / "train.py"), [str(tmp_path / "code" / "alias")])


def test_project_that_contains_toprope_s_home_opens_nothing_of_it(project: Path) -> None:
    home = project / "home"
    for name in ("environments/saved.py", "runs/secret", "checkouts/theirs/games/env.py", "checkouts/theirs/setup.py"):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).touch()
    walls = Walls(closed=(str(home),), agents=(str(home / "environments"),), added=(str(project),))
    places = opened(walls, project / "training" / "train.py")
    assert str(project / "pyproject.toml") in places and not any(place.startswith(str(home)) for place in places)
    for adapter in (None, "trl"):
        saved = opened(walls, home / "environments" / "saved.py", adapter)
        assert str(project / "pyproject.toml") not in saved and str(project) not in saved
    assert project_root(str(home / "environments" / "saved.py"), walls.added, walls.closed) == ""
    theirs = str(home / "checkouts" / "theirs")
    assert project_root(f"{theirs}/games/env.py", [theirs], walls.closed) == theirs, "the owner added that by name"


@landlock
@pytest.mark.parametrize("right", ["sources", "reads", "writes"])
def test_link_above_toprope_s_home_in_a_project_opens_nothing_there(project: Path, right: str) -> None:
    """The folder of the home is left out by naming what lies beside it, and a link is one of these."""
    (project / "home").mkdir()
    (project / "rows").write_text("'row'")
    (project.parent / "other").mkdir()
    (project.parent / "other" / "row").write_text("'row'")
    (project / "up").symlink_to("..")
    (project / "out").symlink_to(project.parent / "other")
    (project / "within").symlink_to(project / "training")
    file = project / "training" / "train.py"
    file.write_text(
        "import os\ndef work():\n    found = []\n"
        "    for name in ('rows', 'within/train.py', 'up/other/row', 'out/row', '../other/row'):\n"
        f"        try: found.append(bool(open(os.path.join({str(project)!r}, name)).read()))\n"
        "        except PermissionError: found.append('closed')\n    return found\n"
    )
    walls = Walls(closed=(str(project / "home"),), added=(str(project),))
    if right != "sources":
        walls = replace(walls, rights={"train": {right: [str(project)]}}, added=())
    source = EnvironmentSource(name="train", file=str(file), attribute="work")
    expected = [True, True, "closed", "closed", "closed"]
    assert asked(environment_wall(walls, source), file)[0] == expected


def test_agent_that_describes_a_project_in_its_own_folder_opens_nothing(project: Path, tmp_path: Path) -> None:
    """Also if the owner added the folder, by mistake or because its name is that of another."""
    agents = project / "training"
    walls = Walls(agents=(str(agents),), added=(str(project),))
    for name in ("pyproject.toml", ".git", "requirements.txt", "openenv.yaml"):
        (agents / name).touch()
    for adapter in (None, "trl"):
        assert str(project) not in opened(walls, agents / "train.py", adapter)
    (project / "rewards").mkdir()
    (reward := project / "rewards" / "reward.py").touch()
    walls = Walls(agents=(str(tmp_path / "saved"),), added=(str(project),))
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "env.py").touch()
    source = EnvironmentSource.model_validate(
        {"name": "x", "file": str(tmp_path / "saved" / "env.py"), "rewards": [
            {"name": "r", "file": str(reward), "attribute": "r"}]}
    )  # fmt: skip
    assert str(project) not in environment_wall(walls, source).sources, "one process runs both"
    assert str(project) not in code_wall(walls, [str(reward)]).sources


@pytest.mark.parametrize("name", [".", "training", "training/train.py"])
def test_project_that_another_user_can_write_is_not_opened(project: Path, name: str) -> None:
    file, place = project / "training" / "train.py", project / name
    mode = place.stat().st_mode & 0o755
    place.chmod(mode | 0o002)
    assert project_root(str(file), [str(project)]) == ""
    place.chmod(mode)
    assert project_root(str(file), [str(project)]) == str(project)
    place.chmod(mode | 0o020)
    is_own = os.getgid() == os.getuid()
    assert project_root(str(file), [str(project)]) == (str(project) if is_own else ""), "the group may have others"
    if os.getuid() == 0:
        os.chown(place, 0, 12345)
        assert project_root(str(file), [str(project)]) == ""
        place.chmod(mode)
        os.chown(place, 12345, 12345)
        assert project_root(str(file), [str(project)]) == "", "another user wrote it"


@pytest.mark.parametrize("name", [".", "training", "training/train.py"])
def test_project_that_a_list_lets_another_user_write_is_not_opened(project: Path, name: str) -> None:
    """The bits of a group that is the user's own then speak of the others on the list."""
    nobody, owner, user, group, mask, other = 0xFFFFFFFF, 1, 2, 4, 16, 32
    entries = [(owner, 7, nobody), (user, 7, 12345), (group, 5, nobody), (mask, 7, nobody), (other, 5, nobody)]
    packed = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)
    try:
        os.chown(project / name, -1, os.getuid())
        os.setxattr(project / name, "system.posix_acl_access", packed)
    except (AttributeError, OSError):
        pytest.skip("this user has no group of its own, or this file system no lists")
    assert project_root(str(project / "training" / "train.py"), [str(project)]) == ""


def test_walls_of_a_home_name_the_folders_that_the_owner_added(project: Path, tmp_path: Path) -> None:
    home = Home(tmp_path / "home", tmp_path / "configuration")
    assert Walls.of_home(home).added == ()
    registry = Registry(home.environments_file)
    file = str(project / "training" / "train.py")
    with registry.changing() as entries:
        entries["a"] = Added(name="a", kind="folder", given="x", path=f"{project}/../project")
        entries["b"] = Added(name="b", kind="packages", given=str(project.parent))
        entries["c"] = Added(name="c", kind="packages", given="verifiers")
        entries["d"] = Added(name="d", kind="folder", given=file, path=file)
    walls = Walls.of_home(home)
    assert walls.added == (str(project), str(project.parent)), "a file is no folder"
    assert Walls.from_variables({"TOPROPE_WALLS": walls.encode()}) == walls
    home.environments_file.write_text("[]")
    assert Walls.of_home(home).added == ()
