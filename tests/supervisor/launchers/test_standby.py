"""Keepers that wait for a run with PyTorch imported: they take it over, and none is left otherwise."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.run_harness import RunHarness, eventually, until
from toprope.records.run.specification import Specification
from toprope.settings.schema import Config
from toprope.supervisor.environment_variables import component_variables, library_part, library_variables
from toprope.supervisor.keeper.preloading import MODULE, can_preload
from toprope.supervisor.launchers.local import LocalLauncher
from toprope.supervisor.launchers.standby import Standby
from toprope.supervisor.runs.manager import RunManager

pytestmark = pytest.mark.skipif(not can_preload(), reason="programs are forked on Linux without a GPU only")


@pytest.fixture
def standby(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., Standby]]:
    """Makes standbys whose keepers carry this test's mark, and ends them."""
    made: list[Standby] = []
    monkeypatch.setenv("XDG_STANDBY_TEST", str(tmp_path))

    def make(seconds: float = 60.0) -> Standby:
        made.append(Standby(lambda: seconds, after_s=0.0))
        return made[-1]

    yield make
    for one in made:
        one.close()
    eventually(lambda: not marked(tmp_path))


def marked(path: Path) -> dict[int, str]:
    """Processes of this test by id: the last word of the module that they began with."""
    found = {}
    for process in psutil.process_iter():
        try:
            if process.environ().get("XDG_STANDBY_TEST") == str(path) and process.pid != os.getpid():
                found[process.pid] = next((w for w in process.cmdline() if w.startswith("toprope.")), "")
        except psutil.Error:
            continue
    return found


def waiting(path: Path) -> tuple[int, int]:
    """Ids of the keeper that waits and of the process that imports for it."""

    def both() -> tuple[int, int] | None:
        by_module = {module: pid for pid, module in marked(path).items()}
        pair = by_module.get("toprope.supervisor.keeper", 0), by_module.get(MODULE, 0)
        return pair if all(pair) and psutil.Process(pair[0]).ppid() != os.getpid() else None

    found: tuple[int, int] = eventually(both)
    return found


def manager(path: Path, one: Standby) -> RunManager:
    return RunManager(path / "runs", LocalLauncher(standby=one), lambda: RunHarness(path).machine)


@pytest.mark.parametrize("fitting", [True, False])
def test_keeper_that_waits_takes_the_run(
    standby: Callable[..., Standby], tmp_path: Path, harness: RunHarness, fitting: bool
) -> None:
    specification = harness.specification()
    one, config = standby(), specification.config.model_copy(deep=True)
    if not fitting:
        config.algorithm.seed += 1
    one.expect(lambda: library_variables(config, {}))
    keeper, importing = waiting(tmp_path)
    runs = manager(tmp_path, one)
    folder = runs.start(specification)
    harness.started.append(folder)
    seen = set()

    def over() -> bool:
        seen.update(pid for pid, module in marked(tmp_path).items() if module == MODULE)
        return runs.status(folder.run_id).ended

    assert harness.keeper(folder).pid == keeper
    shown = psutil.Process(keeper).cmdline()
    assert shown[1:5] == ["-P", "-m", "toprope.supervisor.keeper", str(folder.path)], "lists of processes name the run"
    eventually(over)
    failure = runs.status(folder.run_id).failure
    assert failure is not None and failure.component == "environment", "as without a standby: there is no such file"
    assert (seen == {importing}) == fitting, "another process imports what this one has imported otherwise"
    harness.check_nothing_left(folder)
    eventually(lambda: not marked(tmp_path))


@pytest.mark.parametrize("how", ["closed", "too long", "killed", "other variables"])
def test_run_starts_without_the_keeper_that_waited(
    standby: Callable[..., Standby], tmp_path: Path, harness: RunHarness, how: str
) -> None:
    one = standby(1.0 if how == "too long" else 60.0)
    one.expect(lambda: library_variables(Config(), {}))
    keeper, importing = waiting(tmp_path)
    if how == "closed":
        one.close()
    elif how == "killed":
        os.kill(keeper, 9)
        os.kill(importing, 9)
    elif how == "other variables":
        one.expect(lambda: library_variables(Config(), {"*": {"XDG_OTHER": "1"}}))
    eventually(lambda: not {keeper, importing} & marked(tmp_path).keys())
    if how == "other variables":
        assert waiting(tmp_path) != (keeper, importing)
        return
    runs = manager(tmp_path, one)
    folder = runs.start(harness.specification())
    harness.started.append(folder)
    assert harness.keeper(folder).pid != keeper
    until(runs, folder, "failed")


def test_nothing_waits_where_the_owner_wants_none(standby: Callable[..., Standby], tmp_path: Path) -> None:
    one = standby(0.0)
    one.expect(lambda: library_variables(Config(), {}))
    eventually(lambda: one._timer is not None and not one._timer.is_alive())
    assert not marked(tmp_path) and one._waiting is None


def test_variables_for_libraries_are_those_of_a_member_without_keys(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, harness: RunHarness
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf-very-secret-token")
    owners = {"*": {"MY_API_KEY": "sk-very-secret", "HTTPS_PROXY": "http://proxy"}, "trainer": {"OWN": "1"}}
    specification: Specification = harness.specification()
    of_member = component_variables(
        "inference",
        folder=tmp_path,
        specification=specification,
        attempt=1,
        secret="s" * 20,
        owners=owners,
        surroundings=dict(os.environ),
    )
    prepared = library_variables(specification.config, owners)
    assert not [name for name, value in prepared.items() if "secret" in value]
    assert prepared == {name: value for name, value in library_part(of_member).items() if "secret" not in value}
    assert prepared["HTTPS_PROXY"] == "http://proxy" and "OWN" not in prepared
