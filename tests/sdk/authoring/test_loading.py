"""Loading users' files leaves nothing behind."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from toprope.sdk.authoring.loading import module_of
from toprope.sdk.errors import LoadError

PROGRAM = """
import os, sys, tempfile
from pathlib import Path
from toprope.sdk.authoring.loading import module_of
files = [Path(name) for name in sys.argv[1:]]
sizes = []
for _ in range(3):
    words = [module_of(file).WORD for file in files]
    sizes.append(len(sys.path))
if os.fork() == 0:
    sys.exit()
os.wait()
print(words, len(set(sizes)), os.listdir(tempfile.gettempdir()), all(os.path.isdir(place) for place in sys.path[-2:]))
"""


def test_files_loaded_again_leave_no_folder_and_no_longer_path(tmp_path: Path) -> None:
    files = []
    for name in ("one", "other"):
        folder = tmp_path / name / "games" / name
        folder.mkdir(parents=True)
        (tmp_path / name / ".git").mkdir()
        (tmp_path / name / "games" / f"shared_{name}.py").write_text(f"WORD = {name!r}\n")
        files.append(folder / "env.py")
        files[-1].write_text(f"def later():\n    from games.shared_{name} import WORD\nWORD = {name!r}\n")
    files[0].write_text("from games.shared_one import WORD\n")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    command = [sys.executable, "-P", "-c", PROGRAM, *map(str, files)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env={**os.environ, "TMPDIR": str(scratch)}
    )
    words, rest = done.stdout.strip().split("] ", 1) if done.returncode == 0 else ("", done.stderr)
    assert words == "['one', 'other'" and rest.startswith("1 ['above-") and rest.endswith("'] True"), rest
    assert list(scratch.iterdir()) == []


def test_file_of_a_package_imports_its_neighbours_relatively(tmp_path: Path) -> None:
    folder = tmp_path / "played" / "words"
    folder.mkdir(parents=True)
    for file, text in {
        folder.parent / "__init__.py": "",
        folder / "__init__.py": "",
        folder / "said.py": "from ..shared import WORD\n",
        folder.parent / "shared.py": "WORD = 'hello'\n",
        folder / "env.py": "from .said import WORD\nprint(__name__)\n",
        tmp_path / "alone.py": "from .said import WORD\n",
    }.items():
        file.write_text(text)
    code = "import sys; from toprope.sdk.authoring.loading import module_of; from pathlib import Path\n"
    code += "print(module_of(Path(sys.argv[1])).WORD); module_of(Path(sys.argv[2]))"
    command = [sys.executable, "-P", "-c", code, str(folder / ".." / "words" / "env.py"), str(tmp_path / "alone.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["played.words.env", "hello"], done.stderr
    assert "An environment's file stands alone" in done.stderr


def test_package_of_the_same_name_is_not_loaded_instead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for root, text in (("installed", "WORD = 'theirs'\n"), ("own", "from . import WORD\n")):
        folder = tmp_path / root / "same_named_games"
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text("WORD = 'own'\n")
        (folder / "env_of_games.py").write_text(text)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "installed"), *sys.path])
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    file = tmp_path / "own" / "same_named_games" / "env_of_games.py"
    assert module_of(file).WORD == "own", "its project is installed, too"
    for name in [name for name in sys.modules if name.startswith(("same_named_games", "env_of_games"))]:
        del sys.modules[name]
    importlib.import_module("same_named_games.env_of_games")
    with pytest.raises(LoadError, match=r"taken by .*installed.*: rename it"):
        module_of(file)
    assert "env_of_games" not in sys.modules


@pytest.mark.parametrize("mark", ["openenv.yaml", "pyproject.toml", ".git", "requirements.txt"])
def test_folder_where_others_can_write_is_no_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mark: str) -> None:
    """Where no wall stands, their modules would have all rights of the user who loads the file."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    (tmp_path / "training").mkdir()
    (tmp_path / mark).touch()
    (tmp_path / "left_by_others.py").touch()
    file = tmp_path / "training" / "rewards_of_one.py"
    file.write_text("import left_by_others\n")
    tmp_path.chmod(0o1777)
    with pytest.raises(LoadError, match="left_by_others"):
        module_of(file)
    tmp_path.chmod(0o755)
    module_of(file)


def test_package_may_change_where_imports_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    (tmp_path / "setup.py").touch()
    (folder := tmp_path / "tidy_games").mkdir()
    (folder / "__init__.py").write_text(
        f"import sys\nsys.path[:] = [place for place in sys.path if place != {str(tmp_path)!r}]\nWORD = 'found'\n"
    )
    (folder / "tidy_env.py").write_text("from . import WORD\n")
    assert module_of(folder / "tidy_env.py").WORD == "found"


def test_link_to_a_file_says_why_its_neighbours_are_missing(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "env_of_link.py").write_text("import beside_the_target\n")
    (tmp_path / "env_of_link.py").symlink_to(tmp_path / "elsewhere" / "env_of_link.py")
    with pytest.raises(LoadError, match="This file is a link") as failed:
        module_of(tmp_path / "env_of_link.py")
    assert "Install the package" not in str(failed.value)


@pytest.mark.parametrize("mark", ["openenv.yaml", "pyproject.toml", ".git", "requirements.txt"])
def test_file_in_a_folder_of_a_project_imports_from_its_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mark: str
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "training").mkdir()
    (tmp_path / "rules_at_the_root.py").write_text("RIGHT = 'yes'\n")
    file = tmp_path / "training" / "rewards_below_it.py"
    file.write_text("from rules_at_the_root import RIGHT\n")
    with pytest.raises(LoadError, match="rules_at_the_root"):
        module_of(file)
    (tmp_path / mark).touch()
    assert module_of(file).RIGHT == "yes"
    sys.modules.pop("rules_at_the_root")
