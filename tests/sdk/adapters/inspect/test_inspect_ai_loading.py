"""Loading tasks of inspect-ai: their parameters, and a Hub that is not reached."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import SimpleNamespace as Thing
from typing import Any

import pytest

from tests.sdk.adapters.inspect.conftest import sample
from toprope.sdk.adapters import inspect_ai
from toprope.sdk.adapters._inspect_ai.loading import load
from toprope.sdk.authoring.env_managed import OwnLoop
from toprope.sdk.authoring.knobs import describe_knobs
from toprope.sdk.errors import InvalidRequest, LoadError
from toprope.sdk.rollouts import configure


def harm(data: str, /, subset: str = "safe", solver: Any = print, prompt: str = "a" * 99) -> None:
    """A task's function."""


def test_parameters_of_a_task_are_told_and_others_refused(inspect: Callable[..., OwnLoop]) -> None:
    environment = inspect([sample("a")], maker=harm)
    [help_text] = [one["description"] for one in describe_knobs(environment.Knobs) if one["name"] == "args"]
    assert "task: data, subset='safe', solver=..., prompt='aaa" in help_text and len(help_text) < 150
    configure(environment, knobs={"args": {"subset": "unsafe"}, "turns": 3})
    assert environment.max_turns == 3, "the other knobs stay"
    with pytest.raises(InvalidRequest, match=r"sums has no parameter subsett. Its parameters: data, subset='safe',"):
        configure(environment, knobs={"args": {"subsett": "unsafe"}})
    configure(inspect([sample("a")]), knobs={"args": {"any": 1}})
    with pytest.raises(InvalidRequest, match="no parameter any. Its parameters: none"):
        configure(inspect([sample("a")], maker=lambda: None), knobs={"args": {"any": 1}})


def test_tools_about_which_a_person_is_asked_are_approved(
    inspect: Callable[..., OwnLoop], capsys: pytest.CaptureFixture[str]
) -> None:
    """Also those of an agent, whose policies no task shows."""
    inspect([])
    asking = sys.modules["inspect_ai.approval._human.approver"]
    for _ in range(2):
        assert asking.console_approval("run", view=None, choices=["reject"]).decision == "approve"
    assert capsys.readouterr().err.count("package/sums asks a person before tools run") == 1


def test_parameters_without_a_default_are_asked_for(inspect: Callable[..., OwnLoop]) -> None:
    missing = "sums() missing 1 required positional argument: 'data'"
    with pytest.raises(InvalidRequest, match=r"^It needs the knob args \(dict: .*\. sums\(\) missing .*'data'$"):
        inspect([], failure=TypeError(missing))
    with pytest.raises(InvalidRequest, match=r"^inspect does not load package/sums: made\(\) missing"):
        inspect([], failure=TypeError(missing.replace("sums", "made")))


def test_package_that_does_not_import_is_told_from_one_without_the_task(
    inspect: Callable[..., OwnLoop], stand_in: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """inspect only logs why its entry point fails, and then knows no tasks of it."""
    inspect([])
    stand_in("inspect_ai._eval.loader", load_tasks=lambda targets, arguments: [], load_module=None)
    info = tmp_path / "games-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: games\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[inspect_ai]\ngames = registry_of_games\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    registry = tmp_path / "registry_of_games.py"
    registry.write_text("from typing import no_such_name\n")
    with pytest.raises(LoadError, match="The package of games/golf does not import: ImportError: cannot import name"):
        load("games/golf", {})
    registry.write_text("import no_such_module\n\n")
    with pytest.raises(LoadError, match="games/golf needs .* it imports no_such_module.* -r no-such-module$"):
        load("games/golf", {})
    registry.write_text("")
    with pytest.raises(InvalidRequest, match=r"games/golf names 0 tasks"):
        load("games/golf", {})


def test_file_imports_relatively_and_from_the_root_of_its_repository(
    inspect: Callable[..., OwnLoop], stand_in: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """inspect runs a file in no package, so that these imports fail."""
    inspect([])
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / ".git").mkdir()
    folder = tmp_path / "evals_of_this_test" / "golf_of_this_test"
    folder.mkdir(parents=True)
    (folder / "holes.py").write_text("HOLES = 18\n")
    file = folder / "task.py"
    file.write_text(
        "from evals_of_this_test.golf_of_this_test import holes\nfrom .holes import HOLES\nBOTH = HOLES + holes.HOLES\n"
    )
    loaded: list[Any] = []

    def load_module(path: Path, code: Any = None) -> Any:
        spec = importlib.util.spec_from_loader(str(path), SourceFileLoader(str(path), str(path)))
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    def load_tasks(targets: list[str], arguments: dict[str, Any]) -> list[Any]:
        loaded.append(sys.modules["inspect_ai._eval.loader"].load_module(file, None))
        return [Thing(dataset=[])]

    stand_in("inspect_ai._eval.loader", load_tasks=load_tasks, load_module=load_module)
    load(f"{file}@golf", {})
    assert loaded[0].BOTH == 36 and loaded[0].__package__ == "golf_of_this_test"
    file.write_text("import no_such_module\n\n\n")
    with pytest.raises(LoadError, match="it imports no_such_module"):
        load(f"{file}@golf", {})


def test_interpreter_of_a_project_gets_the_client(tmp_path: Path) -> None:
    assert inspect_ai.more_requirements(tmp_path) == ()
    (tmp_path / "inspect_ai").mkdir()
    assert inspect_ai.more_requirements(tmp_path) == ("openai",)
    (tmp_path / "openai").mkdir()
    assert inspect_ai.more_requirements(tmp_path) == ()


def test_task_of_the_hub_has_a_revision_alone(inspect: Callable[..., OwnLoop], stand_in: Callable[..., None]) -> None:
    inspect([sample("a")])

    def unregistered(task: Any) -> None:
        raise ValueError("no registry info")

    stand_in("inspect_ai._util.registry", registry_info=unregistered, registry_lookup=None)
    assert load("hf/owner/data", {"revision": "v2"}).parameters == "revision='main'"
    with pytest.raises(InvalidRequest, match="no parameter split"):
        load("hf/owner/data", {"split": "test"})


def test_retries_do_not_wait_for_a_hub_that_is_not_reached(
    inspect: Callable[..., OwnLoop], stand_in: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their three minutes end a load as one that hangs, without its reason."""
    inspect([])
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    file = tmp_path / "nap.py"
    file.write_text("import time\n\ndef sleep(seconds):\n    time.sleep(seconds)\n")
    spec = importlib.util.spec_from_file_location("tenacity.nap", file)
    assert spec is not None and spec.loader is not None
    nap = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(nap)
    hub = Thing(HF_HUB_OFFLINE=False)
    monkeypatch.setitem(sys.modules, "huggingface_hub.constants", hub)  # type: ignore[arg-type]

    def load_tasks(targets: list[str], arguments: dict[str, Any]) -> None:
        nap.sleep(1)
        hub.HF_HUB_OFFLINE = True
        time.sleep(2)
        nap.sleep(4)
        raise FileNotFoundError("not in the cache")

    stand_in("inspect_ai._eval.loader", load_tasks=load_tasks, load_module=None)
    with pytest.raises(InvalidRequest, match="not in the cache"):
        load("package/sums", {})
    nap.sleep(8)
    assert waits == [1, 2, 8], "only those of a retry, while a task is loaded and the Hub is not reached"


def test_tasks_that_draw_from_numpy_are_the_same_in_every_process(tmp_path: Path) -> None:
    for module, text in {
        "": "",
        "dataset": "class MemoryDataset:\n    shuffle_choices = None\n",
        "_eval": "",
        "_eval/loader": "load_module=0\ndef load_tasks(*given): raise ValueError(__import__('numpy').random.rand())\n",
        "_util": "",
        "_util/error": "class PrerequisiteError(Exception): ...\n",
    }.items():
        file = tmp_path / "inspect_ai" / module / "__init__.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    code = "import sys\nfrom toprope.sdk.adapters._inspect_ai.loading import load\n"
    code += "assert 'numpy' not in sys.modules\ntry: load('sums', {})\nexcept Exception as error: print(error)\n"
    words, variables = (sys.executable, "-P", "-c", code), os.environ | {"PYTHONPATH": str(tmp_path)}
    drawn = [subprocess.run(words, capture_output=True, text=True, env=variables, check=True).stdout for _ in range(2)]
    assert drawn[0] == drawn[1] and "does not load sums: 0." in drawn[0]
