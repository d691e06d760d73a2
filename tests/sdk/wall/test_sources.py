"""The files of its sources that a worker can read, and how packages among them are imported."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from tests.sdk.wall.conftest import READS, asked, landlock
from toprope.records.run.specification import EnvironmentSource
from toprope.records.walls import Walls
from toprope.sdk.errors import WorkerError
from toprope.sdk.wall import Wall, kernel, paths, plan
from toprope.sdk.wall.enclosure import Enclosure
from toprope.training.rollouts.workers.walls import environment_wall


@landlock
def test_closed_folder_within_sources_stays_closed_unless_it_is_declared(tmp_path: Path) -> None:
    secret = tmp_path / "home" / "runs" / "secret"
    secret.parent.mkdir(parents=True)
    secret.write_text("secret")
    file = tmp_path / "reads.py"
    file.write_text(READS.format(path=str(secret)))
    closed = Wall(reads=tuple(paths.source_paths(str(file))), closed=(str(tmp_path / "home"),))
    assert asked(closed, file)[0] == "PermissionError"
    assert asked(Wall(reads=(*closed.reads, str(secret)), closed=closed.closed), file)[0] == "secret"
    assert asked(Wall(reads=closed.reads, closed=closed.closed, trusted=True), file)[0] == "secret"


def test_package_that_is_installed_later_in_place_is_within_reach(tmp_path: Path) -> None:
    site = tmp_path / "venv" / "lib" / "python3.11" / "site-packages"
    site.mkdir(parents=True)
    (tmp_path / "venv" / "pyvenv.cfg").touch()
    python = str(tmp_path / "venv" / "bin" / "python")
    assert paths.editable_paths(python) == ()
    (site / "mine.pth").write_text(f"{tmp_path}\n")
    assert paths.editable_paths(python) == (str(tmp_path),)


@landlock
def test_file_in_a_home_imports_what_lies_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    file = tmp_path / "mine.py"
    (tmp_path / "helper.py").write_text("WORD = 'beside'\n")
    file.write_text(
        "import os\nfrom helper import WORD\ndef work():\n    try: return WORD, os.listdir(os.path.dirname(__file__))\n"
        "    except PermissionError: return WORD, 'closed'\n"
    )
    assert asked(environment_wall(Walls(), EnvironmentSource(name="mine", file=str(file))), file)[0] == [
        "beside", "closed"
    ]  # fmt: skip


@landlock
def test_hidden_files_of_sources_stay_closed_unless_they_are_declared(tmp_path: Path) -> None:
    code, names = tmp_path / "code", (".env", "data/.git/config", "data/rows", "data/deep/row", "key", "linked/.netrc")
    for name in names:
        (code / name).parent.mkdir(parents=True, exist_ok=True)
        (code / name).write_text("text")
    (code / "key").unlink()
    (code / "key").symlink_to(code / ".env")
    (code / "out").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").write_text("text")
    file = code / "reads.py"
    file.write_text(
        "import os\ndef work():\n    found = [sorted(os.listdir(os.path.dirname(__file__)))]\n"
        f"    for name in {(*names, 'out')!r}:\n"
        "        try: found.append(open(os.path.join(os.path.dirname(__file__), name)).read())\n"
        "        except PermissionError: found.append('closed')\n    return found\n"
    )
    source = EnvironmentSource(name="reads", file=str(file), attribute="work")
    listed = [".env", "data", "key", "linked", "out", "reads.py"]
    found, _ = asked(environment_wall(Walls(), source), file)
    assert found == [listed, "closed", "closed", "text", "text", "closed", "closed", "closed"]
    declared = Walls(rights={"reads": {"reads": (str(code / ".env"),)}})
    found, _ = asked(environment_wall(declared, source), file)
    assert found == [listed, "text", "closed", "text", "text", "text", "closed", "closed"]
    file.write_text(f"open({str(code / '.env')!r})\ndef work(): pass\n")
    with pytest.raises(WorkerError, match="The wall closes hidden files .* the owner can open it by `reads`"):
        asked(environment_wall(Walls(), source), file)


def test_hidden_files_and_links_beside_a_closed_folder_stay_closed(tmp_path: Path) -> None:
    for name in ("shown", ".hidden/home", ".hidden/other", "home"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / ".env").touch()
    (tmp_path / "out").symlink_to("/etc")
    closed = (str(tmp_path / ".hidden" / "home"), str(tmp_path / "home"))
    made = plan.plan_for(Wall(sources=(str(tmp_path),), closed=closed), sys.executable, {}, [])
    assert [place for place in made.sources if place.startswith(str(tmp_path))] == [str(tmp_path / "shown")]


def test_installed_packages_and_tasks_of_harbor_are_opened_with_hidden_files(tmp_path: Path) -> None:
    for name in ("node_modules/.pnpm/left/index.js", "venv/pyvenv.cfg", "venv/.lock", "game/.libs/libgame.so"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert list(kernel.without_hidden(str(tmp_path))) == [(str(tmp_path), kernel.READ)]
    (tmp_path / "game" / ".netrc").touch()
    opened = [place for place, right in kernel.without_hidden(str(tmp_path)) if right == kernel.READ]
    assert sorted(opened) == [str(tmp_path / name) for name in ("game/.libs", "node_modules", "venv")]
    (tmp_path / "pyvenv.cfg").touch()
    for name in (".env", "lib/python3/.lock", "bin/.links"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    opened = [place for place, right in kernel.without_hidden(str(tmp_path)) if right == kernel.READ]
    own = ("bin", "game/.libs", "lib", "node_modules", "pyvenv.cfg", "venv")
    assert sorted(opened) == [str(tmp_path / name) for name in own], "a project that is its own environment"
    project = {str(tmp_path), str(tmp_path / ".env")}
    python = str(tmp_path / "bin" / "python")
    for opened in (paths.interpreter_paths(python), paths.program_paths(str(tmp_path / "bin"))):
        assert str(tmp_path / "lib") in opened and not project & {*opened}
    tasks, served = (
        environment_wall(Walls(), EnvironmentSource(name="x", adapter=adapter, target=str(tmp_path)))
        for adapter in ("harbor", "openenv")
    )
    assert (tasks.reads, tasks.sources) == (served.sources, served.reads) == ((str(tmp_path),), ())


@landlock
def test_package_of_a_file_is_opened_and_not_what_lies_beside_it(tmp_path: Path) -> None:
    package, other = tmp_path / "projects" / "games", tmp_path / "projects" / "other"
    for folder in (package / "chess", other):
        folder.mkdir(parents=True)
        (folder / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "words.py").write_text("WORD = 'shared'\n")
    (other / "word.py").write_text("WORD = 'of another'\n")
    file = package / "chess" / "env.py"
    file.write_text(
        f"from games.words import WORD\ndef work():\n    try: return WORD, open({str(other / 'word.py')!r}).read()\n"
        "    except OSError as error: return WORD, type(error).__name__\n"
    )
    source = EnvironmentSource(name="chess", file=str(file), attribute="work")
    assert asked(environment_wall(Walls(), source), file)[0] == ["shared", "PermissionError"]
    (tmp_path / "projects" / "pyproject.toml").touch()  # so they are parts of one project
    file.write_text(
        "from games.words import WORD\ndef work():\n    from other import word\n    return WORD, word.WORD\n"
    )
    assert asked(environment_wall(Walls(), source), file)[0] == ["shared", "of another"]


@landlock
def test_file_of_a_repository_imports_by_the_names_of_folders_above_it(tmp_path: Path) -> None:
    root = tmp_path / "home" / "repository"
    file = root / "games" / "chess" / "env.py"
    file.parent.mkdir(parents=True)
    (root / "games" / "shared.py").write_text("WORD = 'shared'\n")
    (root / "private.txt").write_text("the owner's")
    file.write_text(
        "def work():\n    import home, games\n    from games.shared import WORD\n"
        f"    try: open({str(root / 'private.txt')!r})\n    except OSError: return WORD\n"
    )
    assert paths.folders_above(str(file)) == [], "without a repository, names open nothing"
    (root / "pyproject.toml").write_text("[tool.ruff]\nline-length = 100\n")
    assert paths.folders_above(str(file)) == [], "settings of tools are no project"
    (root / "pyproject.toml").write_text("[project]\nname = 'games'\n")
    assert paths.folders_above(str(file)) == [str(root / "games")], "a download of it"
    (root / "pyproject.toml").rename(root.parent / "pyproject.toml")
    (root / "games" / "chess" / ".git").mkdir()
    assert paths.folders_above(str(file)) == [], "a repository within a project"
    (root / "games" / "chess" / ".git").rename(root / ".git")
    assert paths.folders_above(str(file)) == [str(root / "games")]
    file.write_text(file.read_text().replace("import home, games", "pass"))
    assert asked(Wall(reads=tuple(paths.source_paths(str(file)))), file)[0] == "shared"


@landlock
def test_file_of_a_download_imports_by_the_names_of_folders_above_it(tmp_path: Path) -> None:
    file = tmp_path / "download" / "games" / "chess" / "env.py"
    file.parent.mkdir(parents=True)
    (tmp_path / "download" / "pyproject.toml").write_text("[project]\nname = 'games'\n")
    (tmp_path / "download" / "games" / "shared.py").write_text("WORD = 'shared'\n")
    file.write_text("def work():\n    from games.shared import WORD\n    return WORD\n")
    source = EnvironmentSource(name="chess", file=str(file), attribute="work")
    assert asked(environment_wall(Walls(), source), file)[0] == "shared"


def test_only_imported_packages_above_a_file_are_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "services" / "billing" / "env.py"
    file.parent.mkdir(parents=True)
    (tmp_path / ".git").mkdir()
    services = str(tmp_path / "services")
    for text, found in [
        ("import services", []),  # no package, and no module of it is imported
        ("import services.billing.no_module", []),
        ("'''\nimport services.billing.env\n'''", []),
        ("from .services.billing import env", []),
        ("import services.billing.env", [services]),
        ("def later():\n    from services.billing import env", [services]),
    ]:
        file.write_text(text)
        assert paths.folders_above(str(file)) == found, text
        assert (services in paths.source_paths(str(file))) == bool(found)
    file.write_text("")
    (file.parent / "__init__.py").write_text("from services.billing import env")
    assert paths.folders_above(str(file)) == [services], "its package is imported with it"
    (file.parent / "__init__.py").unlink()
    (tmp_path / "services" / "__init__.py").touch()
    file.write_text("import services")
    assert paths.folders_above(str(file)) == [services]
    file.write_text("import services\n" + "#" * (4 << 20))
    assert paths.folders_above(str(file)) == [], "too large to be read"
    file.write_text("\n" * 80_000 + "import services")
    began = time.process_time()
    assert paths.folders_above(str(file)) == [services] and time.process_time() - began < 2
    monkeypatch.setenv("HOME", str(tmp_path))
    assert paths.folders_above(str(file)) == [], "a repository of the whole HOME"


def test_files_saved_in_toprope_s_home_open_nothing_above_them(tmp_path: Path) -> None:
    (tmp_path / "company" / ".git").mkdir(parents=True)
    package = tmp_path / "company" / "work"
    home = package / ".toprope"
    (home / "environments").mkdir(parents=True)
    (package / "__init__.py").touch()
    file = home / "environments" / "saved.py"
    file.write_text("import work")
    walls = Walls(closed=(str(home),))
    for source in (
        EnvironmentSource(name="saved", file=str(file), attribute="Saved"),
        EnvironmentSource(name="saved", adapter="trl", target=json.dumps({"file": str(file)})),
    ):
        assert str(package) not in environment_wall(walls, source).sources
        assert str(package) in environment_wall(Walls(), source).sources


def test_paths_of_sources_and_targets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "env.py").write_text("")
    (tmp_path / ".ssh").mkdir()
    assert set(paths.source_paths(str(tmp_path / "env.py"))) == {str(tmp_path / "env.py")}
    package = tmp_path / "project" / "package"
    package.mkdir(parents=True)
    for file in (package / "__init__.py", package / "env.py", package / "rows.jsonl"):
        file.write_text("")
    assert set(paths.source_paths(str(package / "env.py"))) == {str(package / "env.py"), str(package)}
    target = {"rows": str(package / "rows.jsonl"), "file": "nothing", "deep": [{"command": ["sh", "-c", "true"]}]}
    found = paths.data_paths(json.dumps(target))
    assert str(package / "rows.jsonl") in found and str(tmp_path) not in found
    assert str(package / "env.py") in paths.data_paths(f"{package}/env.py:Name")
    rows = str(package / "rows.jsonl")
    assert paths.data_paths(f"http://127.0.0.1:80#{rows}") == [rows]
    assert paths.data_paths("https://example.org/x") == paths.data_paths(None) == []
    left = paths.without([str(tmp_path)], [str(package)])
    assert set(left) == {str(tmp_path / "env.py"), str(tmp_path / ".ssh")}


def test_bytecode_is_not_kept_where_workers_write(tmp_path: Path) -> None:
    """Python runs bytecode unchecked, so what one worker left in the kept HOME would be the next one's SDK."""
    (tmp_path / "pyvenv.cfg").touch()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").symlink_to(sys.executable)
    made = Enclosure.prepare(Wall(home=str(tmp_path / "home")), [str(tmp_path / "bin/python")], {}, None)
    made.remove()
    assert "PYTHONPYCACHEPREFIX" not in made.variables


def test_server_opens_the_folder_of_its_manifest(tmp_path: Path) -> None:
    (tmp_path / "project" / "server").mkdir(parents=True)
    (file := tmp_path / "project" / "server" / "app.py").touch()
    assert str(tmp_path / "project") not in paths.source_paths(str(file))
    (tmp_path / "project" / "openenv.yaml").touch()
    assert str(tmp_path / "project") in paths.source_paths(str(file)), "its author runs it from there"
    assert str(tmp_path) not in paths.source_paths(str(file))
