"""An agent names objects of an owner's file: nothing but the file's own definitions may be reached that way."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from toprope.sdk.authoring.definitions import CALL, definition_problem, fitting_definitions
from toprope.sdk.errors import WorkerError
from toprope.training.rollouts.workers.environment_worker import EnvironmentWorker

HONEST = '''
"""An owner's honest file."""
import contextlib
import functools
import os
import subprocess as processes
from os import *
from subprocess import Popen
from subprocess import Popen as Shell

from helper import Scorer


class Right:
    command = Popen

    def score(self, item):
        return 1.0


class Longer(Right):
    pass


class Derived(Scorer):
    pass


class Worker:
    def __init__(self, command):
        Popen(command, shell=True)

    def run(self, item):
        return 0.0


class Aliased:
    score = Popen


def score(item):
    return 1.0


@functools.cache
def cached(item):
    return 1.0


def __getattr__(name):
    return Popen


def rebound(item):
    return 1.0


def install():
    global rebound
    rebound = Popen


def chosen(item):
    return 1.0


if True:
    chosen = os.system
right = Right()
short = lambda item: 1.0
alias = Popen
partial = functools.partial(Popen, shell=True)
made = Popen(["true"])
called = os.system
first, second = Popen, Popen
listed = [walrus := Popen]
with contextlib.nullcontext(Popen) as opened:
    pass
for looped in [Popen]:
    pass
'''
OWN = ("Right", "Longer", "right", "score", "cached", "short")
FOREIGN = (
    *("Popen", "Shell", "processes", "os", "system", "popen", "execv", "Scorer", "alias", "partial", "made", "called"),
    *("first", "walrus", "opened", "looped", "rebound", "chosen", "anything", "__builtins__", "__loader__", "eval"),
    *("Worker", "Aliased", "contextlib", "functools"),
)


@pytest.fixture
def honest(tmp_path: Path) -> Path:
    (tmp_path / "helper.py").write_text("class Scorer:\n    def score(self, item):\n        return 0.5\n")
    (tmp_path / "honest.py").write_text(HONEST)
    return tmp_path / "honest.py"


@pytest.mark.parametrize("name", FOREIGN)
def test_imports_aliases_and_attributes_are_not_definitions(honest: Path, name: str) -> None:
    assert definition_problem(honest, name, ("score", CALL))


@pytest.mark.parametrize("name", OWN)
def test_own_definitions_are_found(honest: Path, name: str) -> None:
    assert definition_problem(honest, name, ("score", CALL)) == ""


def test_a_star_import_after_a_definition_may_replace_it(tmp_path: Path) -> None:
    file = tmp_path / "replaced.py"
    file.write_text("def system(item):\n    return 1.0\n\n\nfrom os import *\n")
    assert "import *" in definition_problem(file, "system", (CALL,))


def test_a_class_needs_one_of_the_wanted_methods(honest: Path) -> None:
    assert "has no method generate" in definition_problem(honest, "Right", ("generate",))
    assert "is a function" in definition_problem(honest, "score", ("generate",))
    assert fitting_definitions(honest, ("score", CALL)) == [
        "Right",
        "Longer",
        "Derived",
        "score",
        "cached",
        "install",
        "right",
        "short",
    ]


def test_a_worker_runs_nothing_that_the_file_does_not_define(honest: Path, tmp_path: Path) -> None:
    """The attack: a recipe names Popen with arguments, and a class of the owner's without the wanted method."""
    trace = tmp_path / "trace"

    async def attack() -> list[str]:
        link = await EnvironmentWorker.start(timeout=60)
        said = []
        try:
            for name, arguments in (
                ("Popen", {"args": f"touch {trace}", "shell": True}),
                ("alias", {"args": f"touch {trace}", "shell": True}),
                ("Worker", {"command": f"touch {trace}"}),
            ):
                with pytest.raises(WorkerError) as refused:
                    await link.make(str(honest), name, arguments, wanted=("score", CALL), timeout=60)
                said.append(refused.value.message)
            for name in ("Right", "Derived", "right", "short"):
                made = await link.make(str(honest), name, {}, wanted=("score", CALL), timeout=60)
                method = "score" if "score" in made.methods else "call"
                assert await link.invoke(made.handle, method, [[{}]], timeout=60) in ([1.0], [0.5])
        finally:
            await link.close()
        return said

    said = asyncio.run(attack())
    assert "imports 'Popen'" in said[0] and "no method score" in said[2]
    assert not trace.exists()
