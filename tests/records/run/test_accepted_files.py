"""The code that is accepted with a run: what environments name, and what that imports."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

from toprope.records.run import digests
from toprope.records.run.digests import accepted_files, changed_files
from toprope.records.run.specification import EnvironmentSource
from toprope.shipped import ENVIRONMENTS


def made(folder: Path, **files: str) -> None:
    for name, text in files.items():
        file = folder / f"{name.replace('__', '/')}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def names(source: EnvironmentSource, folder: Path) -> set[str]:
    return {os.path.relpath(one.file, folder) for one in accepted_files([source])}


def test_packages_beside_an_environment_and_relative_imports_are_accepted(tmp_path):
    made(tmp_path, env="import games.chess, space.deep.one\nimport os.path", space__deep__one="", other="")
    made(tmp_path, games__chess="from . import rules", games__rules="import helper", helper="")
    (tmp_path / "games" / "__init__.py").write_text("")
    source = EnvironmentSource(name="a", file=str(tmp_path / "env.py"), attribute="A")
    expected = {"env.py", "games/__init__.py", "games/chess.py", "games/rules.py", "helper.py", "space/deep/one.py"}
    assert names(source, tmp_path) == expected
    inner = source.model_copy(update={"file": str(tmp_path / "games" / "chess.py")})
    assert names(inner, tmp_path) == {"games/__init__.py", "games/chess.py", "games/rules.py"}


@pytest.mark.parametrize("mark", ["openenv.yaml", "setup.py", ".git", "requirements.txt"])
def test_code_at_the_root_of_a_project_is_accepted(tmp_path, mark):
    made(tmp_path, training__rewards="import server.rules, models", server__rules="", models="", client="")
    source = EnvironmentSource(name="a", file=str(tmp_path / "training" / "rewards.py"), attribute="A")
    assert names(source, tmp_path) == {"training/rewards.py"}
    (tmp_path / mark).touch()
    assert names(source, tmp_path) == {"training/rewards.py", "server/rules.py", "models.py"}


def test_project_with_toprope_in_its_own_environment_is_hashed(tmp_path, monkeypatch):
    packages = tmp_path / ".venv" / "lib" / "python3.12" / "site-packages"
    monkeypatch.setattr(digests, "ENVIRONMENTS", packages / "toprope" / "environments")
    monkeypatch.setattr(digests, "_PACKAGE", packages / "toprope")
    made(tmp_path, training__rewards="import models", models="", setup="")
    source = EnvironmentSource(name="a", file=str(tmp_path / "training" / "rewards.py"), attribute="A")
    assert names(source, tmp_path) == {"training/rewards.py", "models.py"}


def test_toprope_itself_is_no_code_of_its_own_environments():
    [file, *_] = sorted(ENVIRONMENTS.glob("[a-z]*.py"))
    source = EnvironmentSource(name="a", file=str(file), attribute="A")
    assert all(Path(path).is_relative_to(ENVIRONMENTS) for path in digests.code_of([source]))


@pytest.mark.parametrize("shadow", ["helper/__init__.py", "helper.abi3.so", "helper.so", "json.py"])
def test_modules_that_shadow_an_accepted_one_and_removed_ones_are_changes(tmp_path, shadow):
    made(tmp_path, env="import helper, json", helper="")
    source = EnvironmentSource(name="a", file=str(tmp_path / "env.py"), attribute="A")
    accepted = accepted_files([source])
    assert changed_files([source], accepted) == []
    (tmp_path / shadow).parent.mkdir(exist_ok=True)
    (tmp_path / shadow).write_text("")
    assert changed_files([source], accepted) == [str(tmp_path / shadow)]
    (tmp_path / shadow).unlink()
    (tmp_path / "helper.py").unlink()
    assert changed_files([source], accepted) == [str(tmp_path / "helper.py")]


def test_files_that_have_nothing_to_do_with_an_adapters_target_are_not_accepted(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    made(tmp_path, game="import helper", helper="", unrelated="")
    source = EnvironmentSource(name="a", adapter="gymnasium", target=f"{tmp_path}/game.py:Game")
    assert names(source, tmp_path) == {"game.py", "helper.py"}


@pytest.mark.parametrize("installed", ["venv/lib/deep.py", "lib/site-packages/one.py", "node_modules/one.py"])
def test_installations_within_a_package_are_not_accepted(tmp_path, installed):
    made(tmp_path, games__chess="from . import rules", games__rules="")
    for place in ("games/__init__.py", f"games/{installed}", "games/venv/pyvenv.cfg", "games/pyvenv.cfg"):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_text("")
    source = EnvironmentSource(name="a", file=str(tmp_path / "games" / "chess.py"), attribute="A")
    assert names(source, tmp_path) == {"games/__init__.py", "games/chess.py", "games/rules.py"}


def test_installed_environment_is_accepted_without_its_package(tmp_path):
    package = tmp_path / "site-packages" / "games"
    made(package, chess="from . import rules", rules="")
    (package / "__init__.py").write_text("")
    source = EnvironmentSource(name="a", file=str(package / "chess.py"), attribute="A")
    assert names(source, package) == {"chess.py"}


def test_folders_are_read_once_however_many_modules_import_them(tmp_path, monkeypatch):
    many = range(30)
    text = "".join(f"from . import m{number}\nimport games.m{number}\n" for number in many)
    made(tmp_path, **{f"games__m{number}": text for number in many})
    (tmp_path / "games" / "__init__.py").write_text("")
    read: list[str] = []
    real = {"listdir": os.listdir, "walk": os.walk}
    for name, function in real.items():
        monkeypatch.setattr(os, name, lambda place, function=function: read.append(str(place)) or function(place))
    parsed: list[str] = []
    monkeypatch.setattr(digests, "imports_of", lambda file, real=digests.imports_of: parsed.append(file) or real(file))
    sources = [EnvironmentSource(name="a", file=f"{tmp_path}/games/m{number}.py", attribute="A") for number in (1, 2)]
    assert len(accepted_files(sources)) == 31
    assert len(parsed) == 31 and max(Counter(read).values()) <= len(sources)
