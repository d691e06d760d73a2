"""Finding environments in files without running them."""

from __future__ import annotations

from pathlib import Path

from toprope.sdk.discovery import DeclaredKnob, Found, discover_file, environment_files


def found_in(folder: Path, text: str, name: str = "mine.py") -> list[Found]:
    file = folder / name
    file.write_text(text)
    return discover_file(file)


def test_discovery_never_runs_a_file(tmp_path: Path) -> None:
    [found] = found_in(
        tmp_path,
        """
import nothing_of_that_name
raise SystemExit
from toprope.sdk import Environment, knob
class Mine(Environment):
    \"\"\"Do it.

    And more.\"\"\"
    max_turns = 4
    tags = ("a", "b")
    class Knobs:
        size: int = knob(3, ge=1, help="how many")
        name: str = "x"
        other: list[int] = knob(default=compute())
""",
    )
    assert (found.name, found.attribute, found.description) == ("mine", "Mine", "Do it.")
    assert (found.max_turns, found.tags, found.problem, found.line) == (4, ("a", "b"), "", 5)
    assert found.knobs == (
        DeclaredKnob("size", "int", 3, "how many"),
        DeclaredKnob("name", "str", "x"),
        DeclaredKnob("other", "list[int]", None),
    )


SETS = """
from toprope.sdk import Environment
class Set(Environment):
    def setup(self): self.max_turns = self.knobs.guesses
"""


def test_discovery_resolves_import_aliases(tmp_path: Path) -> None:
    found = found_in(
        tmp_path,
        """
import toprope.sdk as t
from toprope.sdk import Environment as E, OwnLoop
class A(E): name = "first"
class B(t.Environment): max_turns = compute()
class _Base(E): pass
class C(_Base): pass
class Other: pass
class D(OwnLoop): pass
class F(t.OwnLoop): pass
""",
    )
    names = [("first", 1), ("mine_b", None), ("mine_c", 1), ("mine_d", 1), ("mine_f", 1)]
    assert [(each.name, each.max_turns) for each in found] == names
    assert [each.decides_turns for each in found] == [True, False, True, True, True]
    assert found_in(tmp_path, SETS)[0].decides_turns


def test_discovery_finds_tool_environments_and_bases_of_files_beside(tmp_path: Path) -> None:
    sdk = "from toprope.sdk.tooled import ToolEnvironment as T\n"
    [shop] = found_in(tmp_path, f"{sdk}class Shop(T):\n    def tasks(self): ...\n", "shop.py")
    assert (shop.name, shop.max_turns, shop.decides_turns, shop.problem) == ("shop", 10, True, "")
    (tmp_path / "_base.py").write_text(
        "from mine import X\nfrom toprope.sdk import Environment\nclass Base(Environment): max_turns = 7\n"
        "class Deep(Base): max_turns = f()\n"
    )
    [x, y] = found_in(
        tmp_path, "from _base import Base\nfrom ._base import Deep as D\nclass X(Base): ...\nclass Y(D): ...\n"
    )
    assert [(each.attribute, each.max_turns, each.problem) for each in (x, y)] == [("X", 7, ""), ("Y", None, "")]
    assert found_in(tmp_path, "from _base import missing\nclass X(missing): ...\n") == []


def test_class_with_tasks_and_an_unknown_base_is_a_problem(tmp_path: Path) -> None:
    text = "from theirs import Base\nfrom toprope.sdk import Task\nclass X(Base):\n    def tasks(self): ...\n"
    [found] = found_in(tmp_path, text)
    assert (found.name, found.attribute, found.line) == ("mine", "", 3)
    assert found.problem.startswith("X defines tasks(), but none of its bases is known") and ":3)" in found.problem
    helpers = "from toprope.sdk import Task\nclass Row: ...\ndef read(): ...\nclass _X:\n    def tasks(self): ...\n"
    assert found_in(tmp_path, helpers) == []
    assert found_in(tmp_path, text.replace("toprope.sdk", "gym")) == []
    assert found_in(tmp_path, "from toprope.sdk import Task\nclass Rows:\n    def tasks(self): ...\n") == []


def test_discovery_ignores_other_libraries(tmp_path: Path) -> None:
    assert found_in(tmp_path, "from gym import Environment\nclass A(Environment): pass\n") == []
    assert found_in(tmp_path, "def helper(): pass\n") == []
    tried = "try:\n    from openenv.core import Environment\nexcept ImportError:\n    Environment = object\n"
    assert found_in(tmp_path, f"{tried}class Maze(Environment): ...\n") == []


def test_unparsable_file_is_listed_with_line(tmp_path: Path) -> None:
    [found] = found_in(tmp_path, "x = 1\ndef f(:\n  pass\n")
    assert found.name == "mine" and found.attribute == ""
    assert found.problem and f"{tmp_path / 'mine.py'}:2" in found.problem
    (tmp_path / "bytes.py").write_bytes(b"\x00\xff")
    assert discover_file(tmp_path / "bytes.py")[0].problem


def test_huge_file_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "huge.py"
    with file.open("wb") as out:
        out.truncate(1 << 34)  # a hole: 16 GB that nobody wrote
    [found] = discover_file(file)
    assert found.name == "huge" and "larger than 4 MB" in found.problem


def test_parser_warnings_are_dropped(tmp_path: Path) -> None:
    assert found_in(tmp_path, 'class A:\n  x = "\\d"\n') == []


def test_invalid_environment_name_is_a_problem(tmp_path: Path) -> None:
    text = "from toprope.sdk import Environment\nclass A(Environment): name = 'My Env/1'\n"
    [found] = found_in(tmp_path, text)
    assert "My Env/1" in found.problem and ":2" in found.problem


def test_discovery_skips_helpers(tmp_path: Path) -> None:
    for name in ("b.py", "a.py", "_helper.py", "__init__.py", "notes.txt"):
        (tmp_path / name).write_text("")
    assert [file.name for file in environment_files(tmp_path)] == ["a.py", "b.py"]
    assert environment_files(tmp_path / "nowhere") == []


def test_entry_that_cannot_be_looked_at_hides_no_other(tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / "mine.py").write_text("")
    for link in (tmp_path / "odd.py", inner / "pyvenv.cfg"):
        link.symlink_to("x" * 300)  # no file has such a long name, so to follow it fails, also for root
    assert environment_files(tmp_path, deep=True) == [inner / "mine.py"]
