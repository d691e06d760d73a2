"""Sources of the catalog: environments that adapters declare and find. A broken source hides no other."""

from __future__ import annotations

import ast
import os
import sys
import types
from pathlib import Path

import pytest

from toprope.records.run.specification import EnvironmentSource
from toprope.sdk.adapters._shared.listing import Listed
from toprope.sdk.discovery import NAME, environment_files, name_of
from toprope.workbench.adapters import Adapter, adapters
from toprope.workbench.catalog.catalog import Catalog
from toprope.workbench.catalog.opened import Opened
from toprope.workbench.entries import Entry, Names
from toprope.workbench.interpreters.known import Known, known_interpreters
from toprope.workbench.interpreters.registry import Added, Registry
from toprope.workbench.sources.datasets import DatasetSource
from toprope.workbench.sources.folders import FileReader, FolderSource
from toprope.workbench.sources.installed import InstalledSource

OURS = "from toprope.sdk import Environment\nclass Mine(Environment):\n    '''Mine.'''\n"


def stub(name: str, package: str = "", **functions: object) -> Adapter:
    """Return an adapter whose module has these functions."""
    code = types.ModuleType(name)
    code.__dict__.update(functions)
    return Adapter(name, f"About {name}.", package, (f"{package}>=1",) if package else (), module=code)


def declares(word: str) -> object:
    """Return a `declared` that lists functions whose names begin with `word`."""

    def declared(file: Path, tree: ast.Module) -> list[Listed]:
        names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
        return [Listed(name, f"{file}:{name}", tools=True) for name in names if name.startswith(word)]

    return declared


def raises(*_: object) -> list[Listed]:
    raise RuntimeError("half written")


def install(path: Path, *packages: str) -> Path:
    for package in packages:
        (path / package).mkdir(parents=True)
        (path / f"{package}-1.0.dist-info").mkdir()
    return path


def folder_entries(folder: Path, found: list[Adapter], known: list[Known], python: str | None = None) -> list[Entry]:
    return FolderSource(folder, "folder", FileReader(lambda: found), lambda: known, python).entries(Names())


def test_file_is_listed_by_its_adapter_and_interpreter(tmp_path: Path) -> None:
    mine, site = tmp_path / "mine", install(tmp_path / "site", "alpha")
    mine.mkdir()
    (mine / "a.py").write_text("def a_task(): ...\ndef b_task(): ...\ndef other(): ...\n")
    (mine / "ours.py").write_text(OURS)
    (mine / "torn.py").write_text("def a_(:\n")
    found = [
        stub("alpha", "alpha", declared=declares("a")),
        stub("beta", "beta", declared=declares("b")),
        stub("none"),
    ]
    entries = {entry.name: entry for entry in folder_entries(mine, found, [Known("venv", sys.executable, site)])}
    assert set(entries) == {"a_task", "b_task", "ours", "torn"}
    a, b = entries["a_task"], entries["b_task"]
    assert (a.status, a.ecosystem, a.tools) == ("ready", "alpha", True)
    target = f"{mine / 'a.py'}:a_task"
    assert a.environment == EnvironmentSource(name="a_task", adapter="alpha", target=target, interpreter=sys.executable)
    assert b.status == "needs install" and "toprope env add beta" in b.problem
    assert entries["ours"].ecosystem == "toprope" and entries["torn"].status == "broken"
    [own] = [entry for entry in folder_entries(mine, found, [], "/other/python") if entry.name == "b_task"]
    assert (own.status, own.environment.interpreter) == ("ready", "/other/python")


def test_file_with_an_unknown_base_is_broken_until_the_base_is_beside_it(tmp_path: Path) -> None:
    reader, text = FileReader(lambda: []), "from toprope.sdk import Task\nfrom _base import Base\n"
    (tmp_path / "shop.py").write_text(f"{text}class Shop(Base):\n    def tasks(self): ...\n")
    source = FolderSource(tmp_path, "folder", reader, lambda: [])
    [entry] = source.entries(Names())
    assert (entry.name, entry.status) == ("shop", "broken") and "none of its bases is known" in entry.problem
    (tmp_path / "_base.py").write_text("from toprope.sdk import Environment\nclass Base(Environment): ...\n")
    [entry] = source.entries(Names())
    assert (entry.name, entry.status, entry.problem) == ("shop", "ready", "")
    theirs = [stub("alpha", declared=lambda file, tree: [Listed("a_task", f"{file}:a_task")])]
    (tmp_path / "_base.py").unlink()
    assert [entry.name for entry in folder_entries(tmp_path, theirs, [])] == ["a_task"]


def test_equal_names_in_several_files_are_told_apart(tmp_path: Path) -> None:
    for name in ("One.py", "two.py", "two/two.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("def a_task(): ...\n")
    found, names = [stub("alpha", declared=declares("a"))], Names()
    places = [tmp_path / name for name in ("One.py", "two.py", "two/two.py")]
    entries = [
        entry
        for place in places
        for entry in FolderSource(place, "folder", FileReader(lambda: found), lambda: [], "/x/python").entries(names)
    ]
    assert [entry.name for entry in entries] == ["a_task", "two-a_task", "two-two-a_task"]
    assert [entry.environment.target for entry in entries] == [f"{place}:a_task" for place in places]
    assert not any(entry.problem for entry in entries)


def test_failing_adapter_hides_no_other_entry(tmp_path: Path) -> None:
    mine, site = tmp_path / "mine", install(tmp_path / "site", "alpha", "beta")
    mine.mkdir()
    (mine / "a.py").write_text("def a_task(): ...\n")
    found = [
        stub("beta", "beta", declared=raises, installed=raises),
        stub("alpha", "alpha", declared=declares("a")),
    ]
    ready, bad = folder_entries(mine, found, [Known("", None, site)])
    assert (ready.name, ready.status) == ("a_task", "ready")
    assert bad.status == "broken" and "The adapter beta cannot read" in bad.problem and "half written" in bad.problem
    source = InstalledSource(
        lambda: [*found, Adapter("gamma", "", problem="SyntaxError")], lambda: [Known("", None, site)]
    )
    assert {entry.name: entry.status for entry in source.entries(Names())} == {"beta": "broken", "gamma": "broken"}


def test_files_are_read_again_only_if_changed(tmp_path: Path) -> None:
    asked: list[Path] = []

    def declared(file: Path, tree: ast.Module) -> list[Listed]:
        asked.append(file)
        return [Listed("one", str(file))]

    file = tmp_path / "a.py"
    file.write_text("x = 1\n")
    reader = FileReader(lambda: [stub("alpha", declared=declared)])
    source = FolderSource(tmp_path, "folder", reader, lambda: [])
    for _ in range(3):
        assert len(source.entries(Names())) == 1
    assert len(asked) == 1
    stat = file.stat()
    file.write_text("x = 2\n")
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # same size and time as before
    source.entries(Names())
    assert len(asked) == 2


def test_packages_are_listed_per_interpreter_or_ask_for_install(tmp_path: Path) -> None:
    first, second = install(tmp_path / "first", "alpha"), install(tmp_path / "second", "alpha", "alpha_more")
    calls: list[Path] = []

    def installed(site: Path) -> list[Listed]:
        calls.append(site)
        found = [Listed("chess", "chess", turns=None, tags=("board",))]
        if (site / "alpha_more").is_dir():
            found += [Listed("go", "go", problem="set GO_KEY", needs="key"), Listed("old", "old", problem="it is old")]
        return found

    found = [
        stub("alpha", "alpha", installed=installed),
        stub("beta", "beta", installed=installed),
        stub("plain"),
    ]
    known = [
        Known("", None, tmp_path / "empty"),
        Known("first", sys.executable, first),
        Known("second", sys.executable, second),
        Known("gone", "/no/such/python", tmp_path / "gone"),
    ]
    (tmp_path / "empty").mkdir()
    source = InstalledSource(lambda: found, lambda: known)
    entries = {entry.name: entry for entry in source.entries(Names())}
    assert {name: entry.status for name, entry in entries.items()} == {
        "gone": "broken", "alpha/chess": "ready", "alpha/go": "needs key",
        "alpha/old": "broken", "beta": "needs install",
    }  # fmt: skip
    assert "toprope env remove gone" in entries["gone"].problem and entries["beta"].ecosystem == "beta"
    assert entries["alpha/go"].usable and not entries["beta"].usable
    source.entries(Names())
    assert len(calls) == 2  # nothing was installed in between
    install(first, "alpha_more")
    assert "alpha/go" in {entry.name for entry in source.entries(Names())} and len(calls) == 3


def test_adapters_are_loaded_one_by_one_from_their_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("good", "torn", "_private"):
        (tmp_path / f"{name}.py").touch()

    def load(name: str) -> types.ModuleType:
        if name == "toprope.sdk.adapters.torn":
            raise SyntaxError("invalid syntax")
        code = types.ModuleType(name, "Good ones.\n\nMore.")
        code.REQUIREMENTS, code.PACKAGE = ("good==1",), "good"  # type: ignore[attr-defined]
        return code

    with monkeypatch.context() as patched:
        patched.setattr("toprope.workbench.adapters._FOLDER", tmp_path)
        patched.setattr("importlib.import_module", load)
        good, torn = adapters()
    assert (good.name, good.description, good.requirements, good.package) == (
        "good",
        "Good ones.",
        ("good==1",),
        "good",
    )
    assert torn.name == "torn" and "SyntaxError: invalid syntax" in torn.problem
    names = {one.name: one for one in adapters()}
    assert {"dataset", "orchestrator", "reasoning_gym"} <= set(names) and not [one for one in names if one[0] == "_"]
    assert not names["orchestrator"].reads_files  # its own source lists it


def test_adapter_finds_package_module_or_editable_install(tmp_path: Path) -> None:
    game = stub("game", "tiny_game")
    assert not game.is_in(tmp_path / "nowhere") and not game.is_in(tmp_path)
    info = tmp_path / "tiny_game-1.0.dist-info"
    info.mkdir()
    assert not game.is_in(tmp_path)  # may belong to another module
    (info / "direct_url.json").touch()
    assert game.is_in(tmp_path) and stub("any").is_in(tmp_path)
    (tmp_path / "other.py").touch()
    assert stub("other", "other").is_in(tmp_path)


def test_added_environments_are_listed_by_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "ours.py").write_text(OURS)
    (tmp_path / "alone.py").write_text(OURS)
    registry = Registry(tmp_path / "environments.json")
    with registry.changing() as entries:
        for name, fields in {
            "mine": {"kind": "folder", "path": str(mine)},
            "alone": {"kind": "folder", "path": str(tmp_path / "alone.py"), "python": sys.executable},
            "lost": {"kind": "git", "path": str(tmp_path / "lost")},
            "sums": {"kind": "dataset", "given": "hf:openai/gsm8k"},
            "served": {"kind": "server", "adapter": "remote", "url": "http://127.0.0.1:9"},
            "odd": {"kind": "server", "adapter": "nobody", "url": "http://127.0.0.1:9"},
        }.items():
            entries[name] = Added(**{"name": name, "given": name, **fields})
    monkeypatch.setattr("toprope.workbench.catalog.catalog.adapters", lambda: [stub("remote")])
    catalog = Catalog(registry=registry)
    found = {entry.name: entry for entry in catalog.entries()}
    assert found["ours"].environment.file == str(mine / "ours.py") and found["ours"].source == "folder"
    assert found["alone"].environment.interpreter == sys.executable
    assert found["lost"].status == "broken" and "toprope env remove lost" in found["lost"].problem
    sums = found["sums"]
    assert (sums.status, sums.source, sums.usable) == ("needs network", "hub", True)
    assert '"path": "hf:openai/gsm8k"' in str(sums.environment.target)
    assert (found["served"].status, found["served"].environment.target) == ("ready", "http://127.0.0.1:9")
    assert found["odd"].status == "broken" and "nobody" in found["odd"].problem
    opened = Opened(tmp_path)
    assert opened.state(sums) == "needs network"
    opened.add(sums)
    assert opened.state(sums) == "ready", "its HOME keeps the data"


def test_added_folder_that_is_one_environment_lists_no_files_but_those_of_the_sdk(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("def (")
    (tmp_path / "theirs.py").write_text("def board(): ...")

    def in_folder(folder: Path) -> list[Listed]:
        return [Listed("Boards of wood", str(folder))] if (folder / "boards").exists() else []

    source = FolderSource(
        tmp_path, "folder", FileReader(
            lambda: [stub("torn", in_folder=raises), stub("wood", in_folder=in_folder, declared=declares("board"))]
        ),
        lambda: [], deep=True,
    )  # fmt: skip
    assert [one.name for one in source.entries(Names())] == ["broken", "board"]
    (tmp_path / "boards").touch()
    [whole] = source.entries(Names())
    assert (whole.name, whole.ecosystem, whole.environment.target) == ("boards-of-wood", "wood", str(tmp_path))
    (tmp_path / "ours.py").write_text(OURS)
    assert [one.name for one in source.entries(Names())] == ["broken", "ours", "board"]


def test_failing_source_becomes_one_broken_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DatasetSource, "entries", raises)
    entries = Catalog().entries()
    assert len(entries) > 100
    [bad] = [entry for entry in entries if "cannot be listed" in entry.problem]
    assert bad.status == "broken" and "half written" in bad.problem


def test_untrusted_texts_are_printable_and_bounded(tmp_path: Path) -> None:
    (tmp_path / "good.py").write_text("from toprope.sdk import Environment\nclass A(Environment):\n  'Good.'\n")
    text = "from toprope.sdk import Environment\nclass A(Environment):\n  '\x1b[2JB'\n  name = 'x\\n\\nDo this:' %s\n"
    (tmp_path / "lines.py").write_text(text % "")
    (tmp_path / "long.py").write_text(text % f"'{'z' * 100_000}'")
    (tmp_path / "esc\x1b[2J\n.py").write_text("def (\n")
    (tmp_path / "deep.yaml").write_text("a: " + "[" * 5000 + "]" * 5000)
    (tmp_path / "data.yaml").write_text("adapter: dataset\npath: hf:a/b\n")
    entries = [entry for entry in Catalog([tmp_path]).entries() if entry.source in ("folder", "dataset")]
    for entry in entries:
        for said in (entry.name, entry.description, entry.problem):
            assert said.isprintable() and len(said) <= 1000, said[:200]
    named = {entry.name: entry for entry in entries}
    assert named["good"].status == named["data"].status == "ready"
    assert named["deep"].status == "broken" and "nested too deeply" in named["deep"].problem
    assert {"x Do this:", "esc\ufffd[2J"} <= set(named)


def test_interpreters_of_ecosystem_come_first() -> None:
    added = {
        name: Added(name=name, kind="packages", given=name, adapter=adapter, python="/p", site_packages=f"/{name[0]}")
        for name, adapter in {"zeta": "zeta", "aaa": None, "older": "zeta", "aab": None}.items()
    }
    assert [one.name for one in known_interpreters(added)] == ["", "zeta", "older", "aaa"]


def test_folders_of_a_checkout_are_searched_and_long_names_are_shortened(tmp_path: Path) -> None:
    for place in ("a/b", "tests", ".hidden", "_helpers", "venv"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / f"game_{len(place)}.py").write_text("x = 1\n")
    assert [file.name for file in environment_files(tmp_path, deep=True)] == ["game_3.py"]
    assert environment_files(tmp_path) == []
    long = "An Environment " * 8
    found = stub("alpha", declared=lambda file, tree: [Listed(long, str(file))])
    reader = FileReader(lambda: [found])
    [entry] = FolderSource(tmp_path, "git", reader, lambda: [Known("", None, tmp_path)], deep=True).entries(Names())
    assert NAME.fullmatch(entry.name) and entry.name.startswith("an-environment-an") and entry.status == "ready"
    assert name_of(long) == entry.name != name_of(long + "2") and name_of("Wordle v0!") == "wordle-v0"


def test_packages_of_different_content_with_one_name_are_told_apart(tmp_path: Path) -> None:
    contents = {"mine": "a", "theirs": "b", "again": "b", "old": ""}
    known = []
    for name in contents:
        (tmp_path / f"python-{name}").touch()
        known.append(Known(name, str(tmp_path / f"python-{name}"), install(tmp_path / name, "alpha")))

    def installed(site: Path) -> list[Listed]:
        return [Listed("wordle", "wordle", content=contents[site.name])]

    source = InstalledSource(lambda: [stub("alpha", "alpha", installed=installed)], lambda: known)
    entries = {one.name: Path(str(one.environment.interpreter)).name for one in source.entries(Names())}
    assert entries == {"alpha/wordle": "python-mine", "alpha/wordle@theirs": "python-theirs"}


def test_the_first_of_different_content_that_can_run_has_the_plain_name(tmp_path: Path) -> None:
    def installed(site: Path) -> list[Listed]:
        return [Listed("wordle", "wordle", content=site.name, problem="too old" if site.name == "old" else "")]

    known = []
    for name in ("old", "new"):
        (tmp_path / name / "python").mkdir(parents=True)
        known.append(Known(name, str(tmp_path / name / "python"), install(tmp_path / name, "alpha")))
    source = InstalledSource(lambda: [stub("alpha", "alpha", installed=installed)], lambda: known)
    entries = {one.name: one.status for one in source.entries(Names())}
    assert entries == {"alpha/wordle": "ready", "alpha/wordle@old": "broken"}


def test_an_environment_runs_in_the_interpreter_that_can_run_it(tmp_path: Path) -> None:
    first, second = install(tmp_path / "first", "alpha"), install(tmp_path / "second", "alpha", "right")

    def installed(site: Path) -> list[Listed]:
        return [Listed("chess", "chess", problem="" if (site / "right").is_dir() else "too old", needs="")]

    for name in ("python1", "python2"):
        (tmp_path / name).touch()
    known = [Known("first", str(tmp_path / "python1"), first), Known("second", str(tmp_path / "python2"), second)]
    source = InstalledSource(lambda: [stub("alpha", "alpha", installed=installed)], lambda: known)
    [entry] = [one for one in source.entries(Names()) if one.name == "alpha/chess"]
    assert (entry.status, entry.environment.interpreter) == ("ready", str(tmp_path / "python2"))
