"""Keepers that wait for a run with PyTorch imported: they take it over, and none is left otherwise."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.run_harness import RunHarness, eventually, until
from toprope.errors import ComponentFailed
from toprope.records.run.folder import RunFolder
from toprope.settings.schema import Config
from toprope.settings.sections.hosted import ADDRESS
from toprope.supervisor.environment_variables import component_variables, library_part, library_variables
from toprope.supervisor.keeper.preloading import MODULE, can_preload
from toprope.supervisor.launchers import local, standby
from toprope.supervisor.launchers.local import LocalLauncher
from toprope.supervisor.launchers.standby import Standby
from toprope.supervisor.runs.manager import RunManager

pytestmark = pytest.mark.skipif(not can_preload(), reason="programs are forked on Linux without a GPU only")


def usual() -> dict[str, str]:
    return library_variables(Config(), {})


@pytest.fixture
def standing() -> Iterator[Callable[..., Standby]]:
    """Makes standbys, and checks at the end that their keepers have ended."""
    made: list[Standby] = []

    def make(seconds: float = 60.0) -> Standby:
        made.append(Standby(lambda: seconds, rest_s=0.0))
        return made[-1]

    yield make
    for one in made:
        process = keeper_of(one) if waits(one) else None
        one.close()
        assert process is None or gone(process)


def waits(one: Standby) -> bool:
    """True if a keeper waits."""
    with one._lock:
        return one._waiting is not None and one._waiting.is_there


def keeper_of(one: Standby) -> psutil.Process:
    """The keeper that waits."""
    eventually(lambda: one._waiting)
    with one._lock:
        assert one._waiting is not None
        said = Path(f"/proc/self/fdinfo/{one._waiting.process}").read_text()
    return psutil.Process(int(re.findall(r"Pid:\s*(\d+)", said)[0]))


def gone(*processes: psutil.Process) -> bool:
    """True if all of them end; one that this process adopted stays a zombie."""

    def ended(process: psutil.Process) -> bool:
        try:
            return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    return bool(eventually(lambda: all(map(ended, processes))))


def importing(keeper: psutil.Process) -> list[psutil.Process]:
    """Its processes that import; a fork of one leads a session only when it shows other arguments."""
    found = []
    for process in psutil.process_iter():
        try:
            if MODULE in process.cmdline() and process.ppid() == keeper.pid and os.getsid(process.pid) == process.pid:
                found.append(process)
        except (psutil.Error, ProcessLookupError):
            continue
    return found


def manager(path: Path, one: Standby) -> RunManager:
    return RunManager(path / "runs", LocalLauncher(standby=one), lambda: RunHarness(path).machine)


@pytest.mark.parametrize("kind", ["train", "test"])
def test_keeper_that_waits_takes_the_run(
    standing: Callable[..., Standby], tmp_path: Path, harness: RunHarness, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf-very-secret-token")
    specification = harness.specification(kind)
    one = standing()
    one.expect(usual)
    keeper = keeper_of(one)
    [before] = eventually(lambda: importing(keeper))
    if os.geteuid() == 0:  # others cannot read it at all
        assert "HF_TOKEN" not in keeper.environ() and "HF_TOKEN" not in before.environ()
    runs = manager(tmp_path, one)
    folder = runs.start(specification)
    harness.started.append(folder)
    assert harness.keeper(folder) == keeper and one._waiting is None
    shown = keeper.cmdline()
    assert shown[1:5] == ["-P", "-m", "toprope.supervisor.keeper", str(folder.path)], "lists of processes name the run"
    seen: set[psutil.Process] = set()

    def over() -> bool:
        seen.update(importing(keeper))
        return runs.status(folder.run_id).ended

    eventually(over)
    failure = runs.status(folder.run_id).failure
    assert failure is not None and failure.component in ("environment", "policy"), "as without a standby: no such file"
    assert seen <= {before}, "nothing is imported twice"
    harness.check_nothing_left(folder)
    assert gone(keeper, before)


@pytest.mark.parametrize("other", ["kind", "seed", "version"])
def test_run_that_has_no_use_for_the_keeper_leaves_it_alone(
    standing: Callable[..., Standby], tmp_path: Path, harness: RunHarness, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    one, specification = standing(), harness.specification("sweep" if other == "kind" else "train")
    specification.config.algorithm.seed += other == "seed"
    one.expect(usual)
    eventually(lambda: one._waiting)
    if other == "version":
        monkeypatch.setattr(standby, "_installed", lambda: (1,))
    keeper = keeper_of(one)
    runs = manager(tmp_path, one)
    folder = runs.start(specification)
    harness.started.append(folder)
    assert harness.keeper(folder) != keeper and keeper_of(one) == keeper
    until(runs, folder, "failed")


def test_another_edit_begins_the_wait_anew(standing: Callable[..., Standby]) -> None:
    one = standing(4.0)
    one.expect(usual)
    keeper, began = keeper_of(one), time.monotonic()
    while time.monotonic() < began + 6.0:
        one.expect(usual)
        time.sleep(0.5)
    assert keeper_of(one) == keeper and waits(one)
    assert gone(keeper), "nobody expects a run any more"


@pytest.mark.parametrize("how", ["closed", "too long", "killed", "its process killed"])
def test_run_starts_without_the_keeper_that_waited(
    standing: Callable[..., Standby], tmp_path: Path, harness: RunHarness, how: str
) -> None:
    one = standing(1.0 if how == "too long" else 60.0)
    one.expect(usual)
    keeper = keeper_of(one)
    [process] = eventually(lambda: importing(keeper))
    if how == "closed":
        one.close()
    elif how != "too long":
        (keeper if how == "killed" else process).kill()
    assert gone(keeper, process)
    if how in ("too long", "killed"):
        one.expect(usual)
        eventually(lambda: waits(one))
        assert keeper_of(one) != keeper, "the one that ended was replaced"
        one.close()
    runs = manager(tmp_path, one)
    folder = runs.start(harness.specification())
    harness.started.append(folder)
    assert harness.keeper(folder) != keeper
    until(runs, folder, "failed")


def test_latest_variables_count(standing: Callable[..., Standby]) -> None:
    one = standing()
    one.expect(usual)
    first = keeper_of(one)
    one.expect(lambda: usual() | {"XDG_OTHER": "1"})
    eventually(lambda: keeper_of(one) != first)
    second = keeper_of(one)
    one.expect(lambda: usual() | {"XDG_OTHER": "1"})
    assert gone(first) and keeper_of(one) == second
    one.close()
    one.expect(usual)
    assert one.take(usual()) is None, "what was expected before a run is given up"
    assert gone(second)


def test_nothing_waits_where_the_owner_wants_none(standing: Callable[..., Standby]) -> None:
    one, asked = standing(0.0), list[int]()
    one.expect(lambda: asked.append(1) or usual())  # type: ignore[func-returns-value]
    one._start(usual, one._latest)
    assert one._waiting is None and not asked


def test_keeper_that_does_not_answer_is_replaced(
    standing: Callable[..., Standby], tmp_path: Path, harness: RunHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = standing()
    one.expect(usual)
    keeper = keeper_of(one)
    keeper.suspend()
    launcher, limits = LocalLauncher(standby=one), iter([0.5, 20.0, 20.0])
    answers = launcher._read_answer

    def read_answer(ready: int) -> bytes:
        monkeypatch.setattr(local, "_READY_WITHIN_S", next(limits))
        return answers(ready)

    monkeypatch.setattr(launcher, "_read_answer", read_answer)
    runs = RunManager(tmp_path / "runs", launcher, lambda: harness.machine)
    folder = runs.start(harness.specification())
    harness.started.append(folder)
    assert gone(keeper) and harness.keeper(folder) != keeper
    until(runs, folder, "failed")


def test_run_whose_keeper_was_killed_too_late_has_failed(
    standing: Callable[..., Standby], tmp_path: Path, harness: RunHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = standing()
    one.expect(usual)
    keeper_of(one)
    launcher, answers = LocalLauncher(standby=one), iter([b"", b"locked 1\n"])
    monkeypatch.setattr(launcher, "_read_answer", lambda ready: next(answers))
    runs = RunManager(tmp_path / "runs", launcher, lambda: harness.machine)
    specification = harness.specification()
    with pytest.raises(ComponentFailed, match="did not start in time"):
        runs.start(specification)
    assert runs.status(specification.run_id).state == "failed"


def test_variables_for_libraries_are_those_of_a_trainer_without_keys(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, harness: RunHarness
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf-very-secret-token")
    monkeypatch.setenv("TMPDIR", "/somewhere")
    everyone = {"MY_API_KEY": "sk-very-secret", "HTTPS_PROXY": "http://proxy"}
    owners = {"*": everyone, "trainer": {"OWN": "1", "OMP_NUM_THREADS": "8"}, "environment": {"THEIRS": "1"}}
    of_member = component_variables(
        "trainer",
        folder=tmp_path,
        specification=harness.specification(),
        attempt=1,
        secret="s" * 20,
        owners=owners,
        surroundings=dict(os.environ),
    )
    prepared = library_variables(Config(), owners | {"trainer": owners["trainer"] | {ADDRESS: "https://service"}})
    assert not [name for name, value in prepared.items() if "secret" in value]
    assert prepared == {name: value for name, value in library_part(of_member).items() if "secret" not in value}
    assert prepared["HTTPS_PROXY"] == "http://proxy" and prepared["OMP_NUM_THREADS"] == "8"


def test_message_that_is_too_long_is_not_handed_over(standing: Callable[..., Standby], tmp_path: Path) -> None:
    one = standing()
    one.expect(usual)
    eventually(lambda: one._waiting)
    waiting = one.take(usual())
    assert waiting is not None
    assert not waiting.hand_over(RunFolder(tmp_path), {"LONG": "x" * standby.MOST_BYTES}, [0, 1])
    assert waiting.is_there
    waiting.kill()
    assert not waiting.fits(usual())
    waiting.close()
