"""Environments in folders of the owner's folders: they are found, and named by their place."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from toprope.sdk.discovery import EARLIER, NAME
from toprope.workbench.catalog.catalog import Catalog
from toprope.workbench.catalog.describe import WorkerOptions
from toprope.workbench.entries import Entry
from toprope.workbench.interpreters.registry import Added, Registry
from toprope.workbench.sources.folders import placed_name

CODE = '''
from toprope.sdk import Environment, Task
{more}

class Mine(Environment):
    """Says it."""

    def tasks(self):
        for n in range(60):
            yield Task(f"Say {{n}}", reference=str(n))

    def score(self):
        return self.answer == self.task.reference
'''


def write(place: Path, text: str = CODE.format(more="")) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(text)


def named(name: str) -> str:
    return CODE.format(more="").replace('    """Says', f'    name = "{name}"\n    """Says')


def own(*folders: Path, registry: Registry | None = None) -> dict[str, Entry]:
    """The entries of files below these folders, by name."""
    entries = Catalog(folders, registry=registry).entries()
    found = [one for one in entries if one.source in ("folder", "dataset") and one.name != "dataset"]
    assert len({one.name for one in found}) == len(found)
    return {one.name: one for one in found}


def test_folders_are_searched_and_names_say_where_a_file_lies(tmp_path: Path) -> None:
    for place in ("env.py", "chess/env.py", "chess/chess_fast.py", "go/go.py", "a/b/env.py", "My Games/Tic Tac.py"):
        write(tmp_path / place)
    for place in (".git/env.py", "_old/env.py", "tests/env.py", f"{EARLIER}/env-1.py", "python/lib/env.py"):
        write(tmp_path / place)
    (tmp_path / "python" / "pyvenv.cfg").touch()
    write(tmp_path / "go/large.py", named("go-large"))
    found = own(tmp_path)
    assert {name: one.environment.file for name, one in found.items()} == {
        name: str(tmp_path / place)
        for name, place in {
            "env": "env.py", "a-b-env": "a/b/env.py", "chess-env": "chess/env.py",
            "chess-chess_fast": "chess/chess_fast.py", "go-go": "go/go.py", "go-large": "go/large.py",
            "my-games-tic-tac": "My Games/Tic Tac.py",
        }.items()
    }  # fmt: skip
    assert {one.status for one in found.values()} == {"ready"}
    write(tmp_path / "aaa/env.py")
    assert own(tmp_path)["chess-env"] == found["chess-env"], "another file changes no name"


def test_an_environment_of_a_folder_loads_with_the_files_beside_it(tmp_path: Path) -> None:
    write(tmp_path / "games/echo.py", CODE.format(more="from helper import NUMBER\nassert NUMBER == 7"))
    write(tmp_path / "games/helper.py", "NUMBER = 7\n")
    catalog = Catalog([tmp_path])
    described = asyncio.run(catalog.describe(catalog.find("games-echo"), WorkerOptions()))
    assert described.entry.name == "games-echo" and described.examples[0].scores["reference"].success


def test_a_chosen_name_that_is_taken_and_a_torn_file_are_told(tmp_path: Path) -> None:
    write(tmp_path / "a/one.py", named("chess"))
    write(tmp_path / "b/two.py", named("chess"))
    write(tmp_path / "c/torn.py", "from toprope.sdk import Environment\ndef (")
    write(tmp_path / "c/template.py", "def {{ name }}(")
    write(tmp_path / "c/python2.py", "print 'toprop'\n")
    entries = [one for one in Catalog([tmp_path]).entries() if one.source == "folder"]
    assert [(one.name, one.status) for one in entries] == [
        ("chess", "ready"), ("chess", "broken"), ("c-torn", "broken")
    ]  # fmt: skip
    assert f"taken by {tmp_path}/a/one.py" in entries[1].problem and "invalid syntax" in entries[2].problem


def test_yaml_files_count_directly_in_the_owners_folder_alone(tmp_path: Path) -> None:
    (tmp_path / "secret.jsonl").write_text('{"prompt": "Who?", "answer": "I"}\n')
    text = "adapter: dataset\npath: ../secret.jsonl\n"
    write(tmp_path / "own/mine.yaml", text)
    write(tmp_path / "own/cloned/theirs.yaml", text)
    write(tmp_path / "own/cloned/sums.yml", "adapter: reasoning_gym\ninterpreter: /x/python\ntasks: [{name: gcd}]\n")
    write(tmp_path / "own/cloned/env.py")
    assert sorted(own(tmp_path / "own")) == ["cloned-env", "mine"]


@pytest.mark.parametrize("other", ["own/chess.py", "second/chess.py", "own/chess.yaml", "added/chess.py"])
def test_a_file_in_a_folder_takes_no_name_from_another_source(tmp_path: Path, other: str) -> None:
    write(tmp_path / "own/backup/x.py", named("chess"))
    if other.endswith(".py"):
        write(tmp_path / other)
    else:
        write(tmp_path / other, "adapter: dataset\npath: rows.jsonl\n")
        (tmp_path / "own/rows.jsonl").write_text('{"prompt": "Who?", "answer": "I"}\n')
    registry = Registry(tmp_path / "environments.json")
    with registry.changing() as entries:
        entries["added"] = Added(name="added", kind="folder", given="added", path=str(tmp_path / "added"))
    (tmp_path / "added").mkdir(exist_ok=True)
    found = [
        one for one in Catalog([tmp_path / "own", tmp_path / "second"], registry=registry).entries()
        if one.name == "chess"
    ]  # fmt: skip
    assert sorted(one.status for one in found) == ["broken", "ready"]
    [taken] = [one for one in found if one.status == "broken"]
    assert f"taken by {tmp_path / other}" in taken.problem and "backup/x.py" in taken.problem


def test_places_of_one_name_are_told_and_files_named_after_their_folder_differ(tmp_path: Path) -> None:
    for place in ("go.py", "go/go.py", "x/go.py", "x/go/go.py", "a/b-c.py", "a-b/c.py"):
        write(tmp_path / place)
    entries = [one for one in Catalog([tmp_path]).entries() if one.source == "folder"]
    assert {one.name: one.environment.file for one in entries if one.status == "ready"} == {
        "go": str(tmp_path / "go.py"), "go-go": str(tmp_path / "go/go.py"), "x-go": str(tmp_path / "x/go.py"),
        "x-go-go": str(tmp_path / "x/go/go.py"), "a-b-c": str(tmp_path / "a/b-c.py"),
    }  # fmt: skip
    [taken] = [one for one in entries if one.status != "ready"]
    assert taken.environment.file == str(tmp_path / "a-b/c.py") and f"taken by {tmp_path}/a/b-c.py" in taken.problem


def test_a_task_of_a_terminal_in_a_folder_is_one_environment(tmp_path: Path) -> None:
    write(tmp_path / "count/task.toml", "")
    write(tmp_path / "count/instruction.md", "Count.")
    write(tmp_path / "count/tests/test.sh", "true")
    [entry] = own(tmp_path).values()
    assert (entry.name, entry.ecosystem, entry.environment.target) == ("count", "harbor", str(tmp_path / "count"))


def test_folders_with_a_source_of_their_own_are_listed_once(tmp_path: Path) -> None:
    for place in ("games/env.py", "added/own.py", "deep/added/other.py", "kept/env.py"):
        write(tmp_path / place)
    registry = Registry(tmp_path / "environments.json")
    for name, place in (("added", "added"), ("deep", "deep/added")):
        with registry.changing() as entries:
            entries[name] = Added(name=name, kind="folder", given=place, path=str(tmp_path / place))
    found = own(tmp_path, tmp_path / "games", registry=registry)
    assert {name: one.environment.file for name, one in found.items()} == {
        "kept-env": str(tmp_path / "kept/env.py"), "env": str(tmp_path / "games/env.py"),
        "own": str(tmp_path / "added/own.py"), "other": str(tmp_path / "deep/added/other.py"),
    }  # fmt: skip


def test_folders_are_told_apart_by_their_real_place_and_projects_too(tmp_path: Path) -> None:
    for place in ("real/added/own.py", "real/project/env.py", "real/kept/env.py", "real/games/game.py"):
        write(tmp_path / place)
    for place in ("real/tasks/one", "real/tasks/two", "real/sets/a", "real/sets/b"):
        write(tmp_path / place / "task.toml", "")
        write(tmp_path / place / "instruction.md", "Count.")
        write(tmp_path / place / "tests/test.sh", "true")
    write(tmp_path / "real/sets/b/solution.py", "x = 1\n")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    real, link = tmp_path / "real", tmp_path / "link"
    registry = Registry(tmp_path / "environments.json")
    with registry.changing() as entries:
        given = f"{link}/kept/../added"
        entries["added"] = Added(name="added", kind="folder", given=given, path=given)
        entries["one"] = Added(name="one", kind="folder", given=f"{real}/tasks/one", path=f"{real}/tasks/one")
        entries["project"] = Added(name="project", kind="packages", given=f"{real}/project")
    found = {one.name: one.environment for one in Catalog([link, real, real / "games"], registry=registry).entries()
             if one.source == "folder"}  # fmt: skip
    assert {name: one.file or one.target for name, one in found.items()} == {
        "game": f"{real}/games/game.py", "own": f"{given}/own.py", "one": f"{real}/tasks/one",
        "kept-env": f"{link}/kept/env.py", "tasks-two": f"{link}/tasks/two", "sets": f"{link}/sets",
        "env": f"{real}/project/env.py",
    }  # fmt: skip


def test_a_folder_named_earlier_is_left_out_directly_in_an_owners_folder_alone(tmp_path: Path) -> None:
    for place in (f"{EARLIER}/env.py", f"games/{EARLIER}/env.py"):
        write(tmp_path / "own" / place)
    write(tmp_path / "added" / EARLIER / "env.py")
    registry = Registry(tmp_path / "environments.json")
    with registry.changing() as entries:
        entries["added"] = Added(name="added", kind="folder", given="added", path=str(tmp_path / "added"))
    found = own(tmp_path / "own", registry=registry)
    assert sorted(found) == ["env", "games-earlier-env"]


def test_one_search_of_all_the_owners_folders_ends_after_a_thousand_folders_or_files(tmp_path: Path) -> None:
    for number in range(1200):
        (tmp_path / "folders" / "ab"[number % 2] / f"n{number:04d}").mkdir(parents=True)
    (tmp_path / "folders/a/n0000/loop").symlink_to(tmp_path)
    for place in ("a/n0000/deep", "a/n1198", "b/n0799", "b/n0801"):  # the 1001st, 600th, 1000th and 1001st
        write(tmp_path / "folders" / place / "env.py")
    assert sorted(own(tmp_path / "folders/a", tmp_path / "folders/b")) == ["n0799-env", "n1198-env"]
    for number in range(999):
        write(tmp_path / f"files/a/one/f{number:03d}.py", "x = 1\n")
    for place in ("a/two", "b/three"):  # the 1000th and 1001st
        write(tmp_path / "files" / place / "env.py")
    assert sorted(own(tmp_path / "files/a", tmp_path / "files/b")) == ["two-env"]


@pytest.mark.parametrize(
    ("place", "name", "placed"),
    [("a/b.py", "b", "a-b"), ("a/a.py", "a", "a-a"), ("b.py", "b", "b"), ("x/A/a.py", "a", "x-a-a"),
     (f"{'long/' * 20}b.py", "b", None)],
)  # fmt: skip
def test_placed_names_are_valid_and_short(place: str, name: str, placed: str | None) -> None:
    found = placed_name(Path("/own"), Path("/own") / place, name)
    assert NAME.fullmatch(found) and (placed is None or found == placed)
