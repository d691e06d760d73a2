"""Environments in folders of the owner's folders: they are found, and named by their place."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from toprope.sdk.discovery import EARLIER, NAME, folders_below
from toprope.workbench.catalog.catalog import Catalog
from toprope.workbench.catalog.describe import WorkerOptions
from toprope.workbench.entries import Entry
from toprope.workbench.interpreters.registry import Added, Registry
from toprope.workbench.sources.placed import placed_name

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
    named = CODE.format(more="").replace('    """Says', '    name = "go-large"\n    """Says')
    write(tmp_path / "go/large.py", named)
    found = own(tmp_path)
    assert {name: one.environment.file for name, one in found.items()} == {
        name: str(tmp_path / place)
        for name, place in {
            "env": "env.py", "a-b-env": "a/b/env.py", "chess-env": "chess/env.py", "chess_fast": "chess/chess_fast.py",
            "go": "go/go.py", "go-large": "go/large.py", "my-games-tic-tac": "My Games/Tic Tac.py",
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
    named = CODE.format(more="").replace('    """Says', '    name = "chess"\n    """Says')
    write(tmp_path / "a/one.py", named)
    write(tmp_path / "b/two.py", named)
    write(tmp_path / "c/torn.py", "def (")
    entries = [one for one in Catalog([tmp_path]).entries() if one.source == "folder"]
    assert [(one.name, one.status) for one in entries] == [
        ("chess", "ready"), ("chess", "broken"), ("c-torn", "broken")
    ]  # fmt: skip
    assert f"taken by {tmp_path}/a/one.py" in entries[1].problem and "invalid syntax" in entries[2].problem


def test_yaml_files_in_folders_count_if_they_name_an_adapter(tmp_path: Path) -> None:
    write(tmp_path / "geo/capitals.yaml", "adapter: dataset\npath: capitals.csv\nreference: capital\n")
    write(tmp_path / "geo/capitals.csv", "prompt,capital\nFrance,Paris\n")
    write(tmp_path / "sums/plain.yml", 'description: Sums.\nadapter: "reasoning_gym"\ntasks: [{name: gcd}]\n')
    write(tmp_path / "repository/configs/lora.yaml", "adapter: lora\nrank: 8\n")
    write(tmp_path / "repository/task.yaml", "instruction: Do it.\n")
    write(tmp_path / "other.yaml", "path: x\n")
    found = own(tmp_path)
    assert {name: one.status for name, one in found.items()} == {
        "geo-capitals": "ready", "sums-plain": "ready", "other": "broken"
    }  # fmt: skip
    assert str(tmp_path / "geo/capitals.csv") in str(found["geo-capitals"].environment.target)


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


def test_a_search_ends_in_a_folder_of_any_size(tmp_path: Path) -> None:
    for number in range(1500):
        (tmp_path / f"n{number:04d}").mkdir()
    (tmp_path / "n0000" / "loop").symlink_to(tmp_path)
    assert sum(1 for _ in folders_below(tmp_path)) == 1000


@pytest.mark.parametrize(
    ("place", "name", "placed"),
    [("a/b.py", "b", "a-b"), ("a/a.py", "a", "a"), ("a/a_b.py", "a_b", "a_b"), ("a/ab.py", "ab", "a-ab"),
     ("b.py", "b", "b"), ("x/A/a.py", "a", "x-a"), (f"{'long/' * 20}b.py", "b", None)],
)  # fmt: skip
def test_placed_names_are_valid_and_short(place: str, name: str, placed: str | None) -> None:
    found = placed_name(Path("/own"), Path("/own") / place, name)
    assert NAME.fullmatch(found) and (placed is None or found == placed)
