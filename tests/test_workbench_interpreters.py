"""Interpreters of environments: made whole or not at all, shared where they are equal, gone when nobody needs them.

Everything is installed for real, by pip, from wheels that are made on the spot.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tiny_wheels import make_wheel
from tools_house import become, make_workshop

from toprope.errors import Corrupt, EnvironmentFailed, InvalidValue, NotFound, NotPossibleNow, TooNew
from toprope.records.interpreters import packages_in, site_packages_of
from toprope.records.specification import EnvironmentSource, Specification
from toprope.settings.owner import Home
from toprope.settings.schema import Config
from toprope.workbench.catalog import Catalog
from toprope.workbench.interpreters.adding import Interpreters, Order
from toprope.workbench.interpreters.installing import Pin, Wanted, digest_of, satisfied
from toprope.workbench.interpreters.naming import target_of
from toprope.workbench.sources.adapters import Adapter

GAME = "def main():\n    print('scripts work')\n"


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheels")
    make_wheel(folder, "tinygame", "1.0", requires=("tinyrules>=1",), code=GAME)
    make_wheel(folder, "tinygame", "2.0", requires=("tinyrules>=1",), code=GAME)
    make_wheel(folder, "tinyrules", "1.5")
    make_wheel(folder, "tinytorn", "1.0", code="raise OSError('no such library')\n")
    make_wheel(folder, "tinyalone", "1.0", requires=("tinynowhere==9",))
    make_wheel(folder, "tinyold", "1.0", python="<3.0")
    return folder


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home", tmp_path / "config")


def adapter(name: str, package: str, *requirements: str) -> Adapter:
    return Adapter(name, f"Environments of {name}", package, requirements, module=types.ModuleType(name))


def order(given: str, wheels: Path, **fields: object) -> Order:
    wanted = Wanted((), find_links=(str(wheels),), offline=True)
    return Order(given, wanted=wanted, **fields)  # type: ignore[arg-type]


def left_in(home: Home) -> list[str]:
    folder = home.interpreters
    return sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []


def test_an_environment_is_made_pinned_recorded_and_works(home: Home, wheels: Path) -> None:
    news: list[str] = []
    found = [adapter("tinygame", "tinygame", "tinygame>=1")]
    outcome = Interpreters(home, lambda: found).add(order("tinygame", wheels), news.append)
    added, made = outcome.added, outcome.made
    assert made is not None and not outcome.shared and added.adapter == "tinygame"
    assert made.pins == ["tinygame==2.0", "tinyrules==1.5"] and made.bytes > 0
    assert (home.interpreters / str(added.lock) / "lock.txt").read_text() == "tinygame==2.0\ntinyrules==1.5\n"
    says = [str(added.python), "-I", "-c", "import tinyrules, sys; print(tinyrules.VERSION, sys.prefix)"]
    told = subprocess.run(says, capture_output=True, text=True, check=True, timeout=60).stdout
    assert told.split() == ["1.5", str(home.interpreters / str(added.lock))]
    script = Path(str(added.python)).with_name("tinygame-says")  # it was made elsewhere: its first line is mended
    assert subprocess.run([script], capture_output=True, text=True, timeout=60).stdout == "scripts work\n"
    site = site_packages_of(str(added.python))
    assert site is not None and packages_in(site) == {"tinygame": "2.0", "tinyrules": "1.5"}
    assert any(word.startswith("resolving") for word in news) and "importing tinygame" in news
    stored = json.loads(home.environments_file.read_text())
    assert stored["version"] == 1 and stored["environments"]["tinygame"]["lock"] == added.lock


def test_equal_locks_share_one_and_the_last_one_to_leave_takes_it_along(home: Home, wheels: Path) -> None:
    here = Interpreters(home, lambda: [])
    first = here.add(order("tinyrules", wheels)).added
    second = here.add(order("tinyrules==1.5", wheels, name="again"))
    assert second.shared and second.added.lock == first.lock and left_in(home) == [first.lock]
    without = here.add(Order("tinyrules>=1.2", name="third", wanted=Wanted((), offline=True)))
    assert without.shared and without.added.lock == first.lock  # no index and no folder: what is there will do
    for name in ("tinyrules", "third"):
        here.remove(name)
        assert left_in(home) == [first.lock]
    here.remove("again")
    assert left_in(home) == [] and here.registry.read() == {}
    with pytest.raises(NotFound):
        here.remove("again")


def test_two_at_once_make_one(home: Home, wheels: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        made = list(
            pool.map(lambda name: Interpreters(home, lambda: []).add(order("tinyrules", wheels, name=name)), "ab")
        )
    assert made[0].added.lock == made[1].added.lock and left_in(home) == [made[0].added.lock]
    assert sorted(one.shared for one in made) == [False, True]
    assert set(Interpreters(home).registry.read()) == {"a", "b"}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("tinynothing==3", "tinynothing==3"),
        ("tinyalone", "tinynowhere==9"),
        ("tinyrules<1", "tinyrules<1"),
        ("tinyold", "tinyold"),
    ],
)
def test_a_failed_installation_names_the_requirement_and_leaves_nothing(
    home: Home, wheels: Path, given: str, said: str
) -> None:
    with pytest.raises(EnvironmentFailed) as refusal:
        Interpreters(home, lambda: []).add(order(given, wheels))
    message = refusal.value.message
    assert f"requirement {said}" in message and "ERROR:" in message and "nothing was kept" in message
    assert refusal.value.hint and left_in(home) == [] and not home.environments_file.exists()


def test_what_installs_and_does_not_import_is_not_kept(home: Home, wheels: Path) -> None:
    found = [adapter("torn", "tinytorn", "tinytorn")]
    with pytest.raises(EnvironmentFailed, match="no such library"):
        Interpreters(home, lambda: found).add(order("torn", wheels))
    assert left_in(home) == [] and not home.environments_file.exists()


def test_one_that_is_given_up_leaves_nothing(home: Home, wheels: Path) -> None:
    over = threading.Event()
    over.set()
    with pytest.raises(NotPossibleNow, match="given up"):
        Interpreters(home, lambda: []).add(order("tinyrules", wheels), given_up=over)
    assert left_in(home) == []


def test_an_interpreter_of_the_owners_is_looked_at(home: Home, tmp_path: Path) -> None:
    found = [adapter("yaml", "yaml", "pyyaml"), adapter("tinygame", "tinygame", "tinygame")]
    here = Interpreters(home, lambda: found)
    brought = here.add(Order("yaml", python=sys.executable)).added
    assert (brought.python, brought.lock) == (sys.executable, None)
    assert brought.site_packages is not None and (Path(brought.site_packages) / "yaml").is_dir()
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no >&2; exit 3\n")
    broken.chmod(0o755)
    for python, said in [(str(tmp_path / "none"), "no working Python"), (str(broken), "no working Python")]:
        with pytest.raises(InvalidValue, match=said):
            here.add(Order("yaml", name="other", python=python))
    with pytest.raises(InvalidValue, match="does not hold what tinygame needs"):
        here.add(Order("tinygame", python=sys.executable))
    assert set(here.registry.read()) == {"yaml"}


def test_what_toprope_has_itself_is_not_installed_again(home: Home) -> None:
    found = [adapter("yaml", "yaml", "pyyaml>=5")]
    outcome = Interpreters(home, lambda: found).add(Order("yaml"))
    assert outcome.own and outcome.added.python is None and left_in(home) == []
    assert satisfied(["pyyaml>=5"], {"PyYAML": "6.0"}) and not satisfied(["pyyaml>=7"], {"PyYAML": "6.0"})
    assert not satisfied(["./folder"], {}) and not satisfied([], {})


def test_what_a_run_uses_stays_until_the_run_has_ended(tmp_path: Path, wheels: Path) -> None:
    shop, launcher = make_workshop(tmp_path)
    here = Interpreters(shop.home, lambda: [])
    added = here.add(order("tinyrules", wheels)).added
    source = EnvironmentSource(name="tiny", adapter="dataset", target="{}", interpreter=added.python)
    run = Specification(
        run_id="tiny-1", kind="train", created_at=0, toprope_version="0", environment=source, config=Config(),
        policy_cache=str(shop.home.policies),
    )  # fmt: skip
    folder = shop.runs.start(run)
    try:
        here.remove("tinyrules")
        assert left_in(shop.home) == [added.lock]
        become(folder, "completed", ended_at=1.0)
        launcher.leave("tiny-1")
        assert [path.name for path in here.collect()] == [added.lock] and left_in(shop.home) == []
    finally:
        launcher.close()


def test_what_a_crash_left_goes_and_what_is_being_made_stays(home: Home) -> None:
    here = Interpreters(home, lambda: [])
    left = home.interpreters / ".making-old"
    left.mkdir(parents=True)
    os.utime(left, (1, 1))
    with here.store.aside() as busy:
        os.utime(busy, (1, 1))
        assert here.collect() == [left] and busy.is_dir()
    assert not busy.exists()


def test_a_registry_that_cannot_be_read_is_left_alone_and_told(home: Home) -> None:
    home.path.mkdir(parents=True)
    for text, error in [("{", Corrupt), ('{"version": 99}', TooNew), ('{"environments": {"a": {}}}', Corrupt)]:
        home.environments_file.write_text(text)
        here = Interpreters(home, lambda: [])
        with pytest.raises(error):
            here.add(Order("pyyaml", name="a"))
        assert home.environments_file.read_text() == text
        entries = Catalog(registry=here.registry).entries()
        assert len(entries) > 100
        [told] = [entry for entry in entries if entry.source == "registered"]
        assert told.status == "broken" and "environments.json" in told.problem


def test_folders_and_checkouts_are_listed_with_their_interpreter(home: Home, wheels: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "ruled.py").write_text(
        "import tinyrules\nfrom toprope.sdk import Environment, Task\nclass Ruled(Environment):\n"
        "    '''Rules.'''\n    packages = ('tinyrules',)\n    def tasks(self): yield Task(f'Say {tinyrules.VERSION}', "
        "reference=tinyrules.VERSION)\n    def score(self): return self.answer == self.task.reference\n"
    )
    (folder / "requirements.txt").write_text("tinyrules  # the rules\n")
    git = ["git", "-C", str(folder), "-c", "user.name=x", "-c", "user.email=x@example.org"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "x"]):
        subprocess.run([*git, *words], check=True, capture_output=True)
    here = Interpreters(home, lambda: [])
    added = here.add(order(str(folder), wheels)).added
    catalog = Catalog(registry=here.registry)
    entry = catalog.find("ruled")
    assert (entry.source, entry.environment.interpreter) == ("folder", added.python)
    described = asyncio.run(catalog.describe(entry))
    assert described.card.versions["tinyrules"] == "1.5" and described.examples[0].reference == "1.5"
    here.remove("mine")
    cloned = here.add(order(f"file://{folder}/.git", wheels, name="cloned")).added
    assert cloned.kind == "git" and len(str(cloned.commit)) == 40 and cloned.lock == added.lock
    assert Catalog(registry=here.registry).find("ruled").environment.file == f"{home.checkouts}/cloned/ruled.py"
    assert [path.name for path in home.checkouts.iterdir()] == ["cloned"]
    here.remove("cloned")
    assert list(home.checkouts.iterdir()) == [] and folder.is_dir()
    with pytest.raises(EnvironmentFailed, match="was not cloned"):
        here.add(order(f"file://{tmp_path}/nowhere.git", wheels))
    assert list(home.checkouts.iterdir()) == []


def test_names_of_things_are_told_apart() -> None:
    found = [adapter("game", "game", "game>=1"), Adapter("plain", "")]
    for given, kind, name in [
        ("game", "packages", "game"),
        ("verifiers[all]==0.4", "packages", "verifiers"),
        ("hf:openai/gsm8k", "dataset", "gsm8k"),
        ("https://example.org/a/b.git", "git", "b"),
        ("git+https://example.org/a/b@v1", "git", "b"),
        ("git@example.org:a/b.git", "git", "b"),
    ]:
        target = target_of(given, found)
        assert (target.kind, target.name) == (kind, name)
    assert target_of("git+https://example.org/a/b@v1", found).ref == "v1"
    server = target_of("http://127.0.0.1:9000/", found, "game")
    assert (server.kind, server.given, server.name) == ("server", "http://127.0.0.1:9000", "127-0-0-1-9000")
    for wrong, error in [
        ("http://127.0.0.1:9000", InvalidValue),
        ("https://me:secret@example.org/x.git", InvalidValue),
        ("plain", InvalidValue),
        ("--what is this", NotFound),
    ]:
        with pytest.raises(error) as refusal:
            target_of(wrong, found)
        assert "secret" not in str(refusal.value)


def test_the_digest_is_of_what_is_installed() -> None:
    one, other = Pin("A", "A==1"), Pin("b_c", "b_c==2")
    same = [Pin("b-c", "b-c==2"), Pin("a", "a==1")]
    assert digest_of([one, other], "p") == digest_of(same, "p") != digest_of([one], "p")
    assert digest_of([one], "p") != digest_of([one], "q") != digest_of([Pin("A", "A==1", "x")], "q")
