"""Engines in interpreters of their own: installed, found by runs, kept while used, removed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.workbench.interpreters.conftest import make_wheel
from toprope.errors import InvalidValue, NotFound
from toprope.settings.owner import Home
from toprope.workbench.interpreters import engines
from toprope.workbench.interpreters.adding import Interpreters
from toprope.workbench.interpreters.engines import Build, add_engine, engine_python, engines_of, remove_engine
from toprope.workbench.interpreters.installing import Wanted

LOOK = "from importlib import metadata; print(metadata.version('tinyengine'), metadata.requires('tinyengine'))"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    build = Build(("tinyengine_cpu==1.0",), "any", frozenset({"tinyheavy"}), ("tinyengine-cpu", "tinyengine"))
    monkeypatch.setattr(engines, "ENGINES", {"tinyengine": (build, build)})
    wheels = tmp_path / "wheels"
    make_wheel(wheels, "tinyengine_cpu", requires=("tinycore", "tinyheavy"))
    make_wheel(wheels, "tinycore")
    make_wheel(wheels, "tinyheavy")
    return Home(tmp_path / "home", tmp_path / "config")


def test_engine_is_installed_under_its_own_name_and_kept_until_removed(home: Home) -> None:
    with pytest.raises(InvalidValue, match="was not added"):
        engine_python(home, "tinyengine")
    assert engine_python(home, "embedded") is None
    wanted = Wanted((), find_links=(str(home.path.parent / "wheels"),), offline=True)
    with pytest.MonkeyPatch.context() as patch:  # the wheel has a module of another name than the engine's
        patch.setattr("toprope.workbench.interpreters.adding.require_import", lambda *_: None)
        outcome = add_engine(home, "tinyengine", wanted=wanted)
    python = engine_python(home, "tinyengine")
    assert python is not None and python == outcome.added.python
    assert outcome.made is not None and {pin.split("==")[0] for pin in outcome.made.pins} == {
        "tinyengine_cpu", "tinycore"
    }  # fmt: skip
    said = subprocess.run([python, "-I", "-c", LOOK], capture_output=True, text=True, check=True).stdout
    assert said.split() == ["1.0+cpu", "None"]
    assert Interpreters(home).collect() == [] and Path(python).exists(), "an engine's interpreter is in use"
    assert Interpreters(home).registry.read() == {}, "and is no environment"
    remove_engine(home, "tinyengine")
    assert not Path(python).exists()
    with pytest.raises(NotFound):
        remove_engine(home, "tinyengine")


def test_unknown_engine_and_lost_interpreter_are_named(home: Home, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no engine sglang"):
        add_engine(home, "sglang")
    with pytest.raises(InvalidValue, match="not a Python"):
        add_engine(home, "tinyengine", python=str(tmp_path / "none"))
    with pytest.raises(InvalidValue, match="does not hold what tinyengine needs"):
        add_engine(home, "tinyengine", python=sys.executable)
    assert engines_of(home).read() == {}
