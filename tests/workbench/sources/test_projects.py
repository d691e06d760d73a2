"""Files of projects that were installed: what no package of theirs brings is listed from them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from toprope.workbench.adapters import Adapter, adapters
from toprope.workbench.catalog.catalog import Catalog
from toprope.workbench.interpreters.naming import run_from_folder, target_of
from toprope.workbench.interpreters.registry import Added, Registry

SCRIPT = "from trl import GRPOTrainer\nGRPOTrainer(model='m', reward_funcs=[len], train_dataset=[])\n"
GAME = (
    "class Game:\n    def reset(self, seed=None):\n        return ''\n"
    "    def step(self, action):\n        return '', 0.0, True, {}\n"
)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with a script, whose package was installed with a game."""
    for name, text in (("training/train.py", SCRIPT), ("mine/game.py", GAME), ("notes.py", "def broken(\n")):
        file = tmp_path / "project" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (tmp_path / "project" / "pyproject.toml").write_text('[project]\nname = "mine"\n')
    info = tmp_path / "site" / "mine-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (info / "RECORD").write_text("mine/game.py,,\nmine-1.0.dist-info/RECORD,,\n")
    (info / "direct_url.json").write_text(json.dumps({"url": (tmp_path / "project").as_uri(), "dir_info": {}}))
    return tmp_path / "project"


def test_scripts_of_an_installed_project_are_listed(project: Path, tmp_path: Path) -> None:
    registry = Registry(tmp_path / "environments.json")
    site = str(tmp_path / "site")
    with registry.changing() as entries:
        entries["mine"] = Added(name="mine", kind="packages", given=str(project), python="/py", site_packages=site)
        entries["other"] = Added(name="other", kind="packages", given="project", python="/py", site_packages=site)
    found = [entry for entry in Catalog([], registry=registry).entries() if entry.source == "folder"]
    assert [(entry.name, entry.ecosystem, entry.environment.interpreter) for entry in found] == [
        ("train", "trl", "/py")
    ], "the package's own modules are not told twice"


def test_project_whose_packages_bring_nothing_runs_from_its_files(project: Path, tmp_path: Path) -> None:
    known = [adapter for adapter in adapters() if not adapter.package]
    folder = run_from_folder(target_of(str(project), ()), str(tmp_path / "site"), known)
    assert folder is not None and (folder.kind, folder.requirements) == ("folder", (str(project),))
    (project / "training" / "train.py").unlink()
    assert run_from_folder(target_of(str(project), ()), str(tmp_path / "site"), known) is not None, "the game is left"
    (project / "mine" / "game.py").unlink()
    assert run_from_folder(target_of(str(project), ()), str(tmp_path / "site"), known) is None
    assert run_from_folder(target_of(str(project), ()), str(tmp_path / "site"), list[Adapter]()) is None
