"""The catalog: listing without running user code, and descriptions by real workers."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

import toprope.workbench.catalog.describe as describing
from toprope.errors import EnvironmentFailed, InvalidValue, NotFound, TopropeError
from toprope.records.run.specification import EnvironmentSource, RewardSource
from toprope.records.walls import Walls
from toprope.sdk.errors import WorkerError, WorkerFailure, WorkerTimeout
from toprope.shipped import ENVIRONMENTS
from toprope.training.rollouts.workers.environment_worker import EnvironmentWorker
from toprope.workbench.catalog.catalog import Catalog, Description, Entry
from toprope.workbench.catalog.describe import WorkerOptions

Children = Callable[[], set[int]]

HEAD = "import os, sys, time\nfrom toprope.sdk import Environment, Part, Task, knob\n"
TASKS = "    def tasks(self):\n        for n in range(60): yield Task(f'Say {n}', reference=str(n))\n"

GOOD = (
    HEAD
    + """print("noise")
class Good(Environment):
    '''Say the number.'''
    tags = ("talk",)
    parts = {"right": Part(), "polite": Part(weight=0.0)}
    class Knobs:
        size: int = knob(3, ge=1, le=9, help="how large")
"""
    + TASKS
    + "    def score(self): return {'right': self.answer == self.task.reference, 'polite': 0}\n"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "good.py").write_text(GOOD)
    return tmp_path


def failed(entry: Entry, failure: WorkerFailure, **walls: Any) -> TopropeError:
    return describing.failed(entry, failure, Walls(**walls))


def described(folder: Path, text: str, examples: int = 3, **options: Any) -> Description:
    (folder / "mine.py").write_text(HEAD + "class Mine(Environment):\n" + text)
    catalog = Catalog([folder])
    return asyncio.run(catalog.describe(catalog.find("mine"), WorkerOptions(**options), examples=examples))


def by_name(entries: list[Entry]) -> dict[str, Entry]:
    return {entry.name: entry for entry in entries}


def test_catalog_lists_every_source_without_importing(folder: Path) -> None:
    entries = by_name(Catalog([folder, folder, folder / "nowhere"]).entries())
    assert len(entries) > 105
    assert (entries["number_guess"].source, entries["sort_letters"].source) == ("shipped", "shipped")
    good, spell = entries["good"], entries["reasoning_gym/spell_backward"]
    assert (good.source, good.status, good.turns, good.tags) == ("folder", "ready", 1, ("talk",))
    assert good.environment.model_dump(exclude_defaults=True) == {
        "name": "good", "file": str(folder / "good.py"), "attribute": "Good", "turns": 1
    }  # fmt: skip
    assert (spell.environment.adapter, spell.environment.target) == ("reasoning_gym", "spell_backward")
    assert entries["number_guess"].turns == 6 and all(
        entry.status == "ready" or (entry.source, entry.status) == ("installed", "needs install")
        for entry in entries.values()
    )
    assert "good" not in sys.modules


def test_catalog_follows_changed_and_deleted_files(folder: Path) -> None:
    catalog = Catalog([folder])
    assert catalog.find("good").description == "Say the number."
    (folder / "good.py").write_text(GOOD.replace("Say the number.", "Say another."))
    assert catalog.find("good").description == "Say another."
    (folder / "good.py").unlink()
    with pytest.raises(NotFound):
        catalog.find("good")


def test_catalog_lists_broken_files_with_reason(folder: Path) -> None:
    (folder / "torn.py").write_text("class A(:\n")
    (folder / "twin.py").write_text(GOOD.replace("class Good", "class Twin").replace("tags =", "name = 'good'; tags ="))
    catalog = Catalog([folder])
    torn = catalog.find("torn")
    assert torn.status == "broken" and f"{folder / 'torn.py'}:1" in torn.problem
    twins = [entry for entry in catalog.entries() if entry.name == "good"]
    assert [entry.status for entry in twins] == ["ready", "broken"] and "taken by" in twins[1].problem
    assert catalog.find("good") == twins[0]
    with pytest.raises(EnvironmentFailed, match="broken"):
        asyncio.run(catalog.describe(torn))


def test_draft_finds_its_class_after_another_one_has_changed_the_name(folder: Path) -> None:
    catalog = Catalog([folder])
    source = catalog.find("good").environment
    with (folder / "good.py").open("a") as file:
        file.write("class Other(Good):\n    pass\n")
    with pytest.raises(NotFound):
        catalog.find("good")
    assert catalog.of_source(source).environment == source
    with pytest.raises(NotFound):
        catalog.of_source(source.model_copy(update={"attribute": "Gone"}))


def test_owners_file_of_an_ecosystem_is_to_be_fixed(folder: Path) -> None:
    source = EnvironmentSource(name="sums", adapter="trl", target='{"file": "rewards.py"}')
    entry = Entry("sums", "", "folder", "ready", "", 1, source, ecosystem="trl")
    answer = failed(entry, WorkerError("load", "LoadError", "rewards.py has no 'brif'."))
    assert answer.hint == "sums was not loaded. Fix this first."
    rows = replace(
        entry, environment=EnvironmentSource(name="sums", adapter="dataset", target="{}"), ecosystem="toprope"
    )
    assert failed(rows, WorkerError("load", "LoadError", "Install it")).hint == answer.hint
    mistaken = failed(rows, WorkerError("raised", "EnvironmentMistake", "Row 1 has an image."))
    assert (mistaken.hint or "").startswith("Mend the rows of its file")


def test_missing_ecosystem_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toprope.sdk.adapters._reasoning_gym.loading.PACKAGE", "reasoning_gym_of_no_machine")
    entry = Catalog().find("reasoning_gym")
    assert entry.status == "needs install" and "toprope env add reasoning_gym" in entry.problem
    with pytest.raises(EnvironmentFailed, match="not installed"):
        asyncio.run(Catalog().describe(entry))


def test_unknown_environment_names_the_nearest(folder: Path) -> None:
    catalog = Catalog([folder])
    for wrong, right in [("spell_backward", "reasoning_gym/spell_backward"), ("goood", "good")]:
        with pytest.raises(NotFound) as refusal:
            catalog.find(wrong)
        nearest = refusal.value.hint.split(":", 1)[1].split(".")[0].split(",")
        assert nearest[0].strip() == right and len(nearest) <= 3


def test_search_requires_every_word_and_ranks_names_first(folder: Path) -> None:
    catalog = Catalog([folder])
    assert catalog.search("BACKWARD spell")[0].name == "reasoning_gym/spell_backward"
    assert [entry.name for entry in catalog.search("talk")] == ["good"]
    sudoku = [entry.name for entry in catalog.search("sudoku")]
    assert sudoku[0] in ("reasoning_gym/mini_sudoku", "reasoning_gym/sudoku") and len(sudoku) >= 2
    assert catalog.search("no such words at all") == [] and len(catalog.search()) == len(catalog.entries())


@pytest.mark.parametrize("query", ["reversing words", "reverse", "backwards", "Reversed spelling"])
def test_search_finds_words_of_same_root_and_meaning(folder: Path, query: str) -> None:
    names = [entry.name for entry in Catalog([folder]).search(query)]
    assert "reasoning_gym/spell_backward" in names[:10] and "reasoning_gym/sudoku" not in names


def test_describe_returns_card_and_examples_and_ends_worker(folder: Path, children: Children) -> None:
    catalog, before = Catalog([folder]), children()
    description = asyncio.run(catalog.describe(catalog.find("good"), WorkerOptions({"size": 5}), examples=2))
    card = description.card
    assert (card.name, card.description, card.max_reward) == ("good", "Say the number.", 1.0)
    assert msgspec.structs.asdict(card.knobs[0]) == {
        "name": "size", "type": "int", "default": 3, "description": "how large", "ge": 1, "le": 9, "choices": None,
        "value": 5,
    }  # fmt: skip
    assert card.parts["polite"].weight == 0.0 and "python" in card.versions
    first, _ = description.examples
    assert first.messages[0]["content"] == f"Say {first.reference}"
    assert {label: outcome.reward for label, outcome in first.scores.items()} == {
        "reference": 1, "empty": 0, "junk": 0, "near_miss": 0
    }  # fmt: skip
    assert first.scores["reference"].success and description.remarks == ()
    sizes = description.splits
    assert sum(size.known for size in sizes.values()) == 60 and all(size.exhausted for size in sizes.values())
    assert 0 < description.load_seconds < 20
    assert children() == before


def test_describe_deletes_files_of_environment(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    text = "    def setup(self): open('left.csv', 'w').close(); self.tags = (os.getcwd(),)\n"
    [place] = described(folder, text + TASKS + "    def score(self): return 0\n").card.tags
    assert place != str(folder) and not Path(place).exists() and not (folder / "left.csv").exists()


def test_describe_names_the_folders_that_imports_open(tmp_path: Path) -> None:
    folder = tmp_path / "games" / "mine"
    folder.mkdir(parents=True)
    (tmp_path / ".git").mkdir()
    (tmp_path / "games" / "__init__.py").touch()
    remarks = described(folder, "    import games\n    def tasks(self): return []\n", examples=0).remarks
    assert f"can read all of {tmp_path / 'games'}," in remarks[-1]


def test_describe_without_examples_survives_failing_tasks(folder: Path) -> None:
    alone = described(folder, '    """Mine."""\n    def tasks(self): raise OSError\n', examples=0)
    assert alone.card.description == "Mine." and (alone.examples, alone.splits, alone.remarks) == ((), {}, ())
    none = described(folder, "    def tasks(self): return []\n")
    assert none.remarks == ("The train split has no tasks.",)


def test_cancelled_description_leaves_no_process(folder: Path, children: Children) -> None:
    (folder / "mine.py").write_text(HEAD + "class Mine(Environment):\n    while True: pass\n")
    catalog, before = Catalog([folder]), children()

    async def body() -> None:
        with anyio.move_on_after(0.5) as scope:
            await catalog.describe(catalog.find("mine"))
        assert scope.cancelled_caught
        deadline = time.monotonic() + 30
        while children() - before:
            assert time.monotonic() < deadline, "the worker is still there"
            await anyio.lowlevel.checkpoint()
        pending = asyncio.all_tasks() - {asyncio.current_task()}
        if pending:
            await asyncio.wait(pending, timeout=30)

    anyio.run(body)


def test_describe_remarks_on_scorer_that_rewards_junk_or_raises(folder: Path) -> None:
    fooled = described(folder, TASKS + "    def score(self): return 1.0 if self.answer else 0.5\n")
    assert any("junk succeeds" in remark for remark in fooled.remarks)
    assert not any("judges itself" in remark for remark in fooled.remarks)
    asking = described(folder, TASKS + '    tags = ("model-roles",)\n    def score(self): return 1.0\n')
    assert any("the policy in training judges itself unless" in remark for remark in asking.remarks)
    assert any("empty is rewarded with up to 0.5" in remark for remark in fooled.remarks)
    raising = described(folder, TASKS + "    def score(self): return float(int(self.answer) < 0)\n")
    assert any("junk answer raises: ValueError" in remark for remark in raising.remarks)
    assert any("reference answer does not succeed" in remark for remark in raising.remarks)


def test_describe_names_tasks_that_were_left_out(folder: Path) -> None:
    scored = "    def score(self): return 0.0\n"
    empty = described(folder, "    def tasks(self): return []\n" + scored)
    assert empty.refused == empty.remarks[-1] == "The train split has no tasks."
    same = described(folder, "    def tasks(self, split): return [Task(f'Say {n}') for n in range(9)]\n" + scored)
    assert same.refused == empty.refused and any("It gives 18 tasks to two splits" in said for said in same.remarks)
    equal = described(folder, "    def tasks(self): return [Task('Say', str(n)) for n in range(300)]\n" + scored)
    assert any("299 tasks are left out as copies" in said for said in equal.remarks) and not equal.refused


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("    raise OSError('gone')\n", ["OSError: gone", "mine.py:4"]),
        ("    sys.exit(1)\n", ["sys.exit(1)", "mine.py:4"]),
        ("    os._exit(5)\n", ["exit code 5", "os._exit"]),
        (
            "    print('waiting for x')\n    while True: pass\n",
            ["'open' within 2 s", "last: «waiting for x»", "endless"],
        ),
        ("    def tasks(self): raise KeyError('x')\n", ["raised KeyError: «'x'»", "mine.py:4 in tasks"]),
        ("    def tasks(self):\n        while True: pass\n", ["'tasks' within 2.5 s"]),
        ("    pass\n", ["NotImplementedError", "define tasks(self)"]),
    ],
)
def test_failing_environment_says_why_and_leaves_no_process(
    folder: Path, text: str, said: list[str], children: Children
) -> None:
    before = children()
    limit = 2.0 if "within" in said[0] else 30.0
    with pytest.raises(EnvironmentFailed) as failure:
        described(folder, text, load_timeout_s=limit, call_timeout_s=limit / 4)
    for words in said:
        assert words in str(failure.value)
    assert failure.value.hint and children() == before


def test_describe_refuses_invalid_knobs_and_weights(folder: Path) -> None:
    catalog = Catalog([folder])
    for knobs, weights, said in [
        ({"sise": 1}, {}, "'size'"),
        ({"size": 10}, {}, "between 1 and 9"),
        ({}, {"r": 1}, "right"),
    ]:
        with pytest.raises(InvalidValue) as refusal:
            asyncio.run(catalog.describe(catalog.find("good"), WorkerOptions(knobs or {}, weights or {})))
        assert said in str(refusal.value)


def test_one_slow_task_does_not_end_the_survey_of_the_others(folder: Path) -> None:
    slow = TASKS.replace("range(60): ", "range(60):\n            time.sleep(4 * (n == 40)); ")
    found = described(folder, slow + "    def score(self): return 0.0\n", call_timeout_s=2.0)
    assert sum(size.known for size in found.splits.values()) == 41


def test_describe_passes_given_variables_but_no_secrets(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SOME_API_KEY", "UNLISTED"):
        monkeypatch.setenv(name, "canary")
    text = (
        "    def setup(self):\n        found = [os.environ.get(name) for name in ('SOME_API_KEY', 'UNLISTED')]\n"
        "        raise OSError(('nothing' if found == [None] * 2 else str(found)) + os.environ.get('OTHER', ''))\n"
    )
    with pytest.raises(EnvironmentFailed, match="nothing and this"):
        described(folder, text, variables={"OTHER": " and this"})


def test_shipped_folder_holds_the_template() -> None:
    assert (ENVIRONMENTS / "template.py").is_file()


@pytest.mark.parametrize(
    ("told", "cure"),
    [
        (
            "miniwob is no namespace (e.g., pip install browsergym-miniwob).",
            "asks for browsergym-miniwob. If the owner",
        ),
        ("Run `pip install -U 'camel-ai[tools]'` first", "asks for «camel-ai[tools]»."),
        ("No module named 'camel.toolkits'", "asks for the package of camel.toolkits."),
        ("No module named 'src.eval'", "imports src, as many projects name a folder of their own"),
        (
            "No module named 'games.text'; the installed games 0.1.14 lacks it",
            "another version of games than 0.1.14. If the owner agrees, they repeat its toprope env add with "
            "--requirement 'games==VERSION'",
        ),
        (
            "No module named 'gem.old'; the installed gem-llm 0.1.0 lacks it",
            "another version of gem-llm than 0.1.0, which Toprope plays: adapt it in a copy",
        ),
        (
            "No module named 'verifiers.old'; the installed verifiers 0.4.1 lacks it",
            "another version of verifiers than 0.4.1. If the owner agrees",  # of another ecosystem than the entry
        ),
        ("the game is over", "the same toprope env add, with --requirement PACKAGE"),
    ],
)
def test_errors_of_other_authors_name_the_package_that_is_missing(told: str, cure: str, tmp_path: Path) -> None:
    source = EnvironmentSource(name="far", adapter="gem", target="far.py:app")
    entry = Entry("gem/far", "", "installed", "not tried", "", None, source, ecosystem="gem")
    answer = failed(entry, WorkerError("raised", "ModuleNotFoundError", told))
    assert told[:20] in answer.message and cure in answer.hint
    shut_out = ("[Errno 30] Read-only: '/w'", "mkdir: cannot create directory '/w': Permission denied")
    for refusal in (*shut_out, "OperationalError: attempt to write a readonly database"):
        shut = failed(entry, WorkerError("raised", "EnvironmentMistake", f"{told}: {refusal}"))
        assert "environment: {gem/far: {writes: [FOLDER]}}" in shut.hint
    other = failed(entry, WorkerError("raised", "RuntimeError", told))
    assert "asks for" not in (other.hint or ""), "any text can say pip install"
    named = failed(entry, WorkerError("raised", "LoadError", f"Could not import far.game. Error: {told}"))
    assert cure in named.hint
    ended = failed(entry, WorkerError("load", "LoadError", f"The server ended: ModuleNotFoundError: {told}"))
    assert cure in ended.hint
    told = "FACTORY_ERROR (from FileNotFoundError: [Errno 2] No such file or directory: 'sumo')"
    assert "looks for sumo. If that" in failed(entry, WorkerError("raised", "EnvironmentMistake", told)).hint
    told = "[Errno 2] No such file or directory: 'a.csv'"
    assert "looks for" not in failed(entry, WorkerError("raised", "FileNotFoundError", told)).hint
    told = "No such task. Make sure the benchmark package is installed (e.g., pip install far-tasks)."
    assert "asks for far-tasks" in failed(entry, WorkerError("raised", "EnvironmentMistake", told)).hint
    for lack in ("builder is required but was not found on PATH.", "The package builder is not installed."):
        told = f"RuntimeError: {lack} Install with `pip install builder`."
        assert "asks for builder. If the owner agrees" in failed(entry, WorkerError("load", "LoadError", told)).hint
    told = "ImportError: far is not installed. Run `pip install https://a.example/far.git`."
    assert "asks for" not in failed(entry, WorkerError("load", "LoadError", told)).hint, "it names no package"
    keyed = failed(entry, WorkerError("raised", "ValueError", "Missing key. Set FAR_API_KEY"))
    assert "settings.yaml gives it to environments, variables: {environment: {FAR_API_KEY: ...}}" in keyed.hint
    for name in ("HF_TOKEN", "MY_ACCESS_TOKEN", "CLIENT_SECRET"):
        assert f"{{{name}: ...}}" in failed(entry, WorkerError("raised", "KeyError", f"'{name}'")).hint
    for name in ("PAD_TOKEN", "EOS_TOKEN", "MAX_NEW_TOKEN", "INVALID_API_KEY", "ERROR_INVALID_API_KEY"):
        assert "asks for a key" not in failed(entry, WorkerError("raised", "KeyError", f"'{name}'")).hint
    for kind in ("invalid", "raised"):
        risky = failed(
            entry, WorkerError(kind, "InvalidRequest", "Risky! Set FAR_RISKS=1 in your environment to proceed.")
        )
        assert "asks for a variable. If the owner agrees" in risky.hint and "{FAR_RISKS: ...}" in risky.hint
    for told in ("Set LENGTH to 3.", "Reset FAR_RISKS=1"):
        assert "asks for" not in failed(entry, WorkerError("invalid", "InvalidRequest", told)).hint
    unreached = failed(entry, WorkerError("raised", "OSError", "rows not found; a.example could not be reached"))
    assert "environment.network: allow" in unreached.hint and unreached.hint.startswith("It needs data from there")
    assert "HOME" not in unreached.hint, "that of a worker without a home is not kept"
    variables = (
        "a.example could not be reached (/a/b.py:3 in <module>). Its files read the variables A: the knob sets it."
    )
    assert "It needs data from there." in (failed(entry, WorkerError("raised", "OSError", variables)).hint or "")
    for asked in ("ConnectError at POST https://a.example/v1; a.example", "refused; api.a.example"):
        service = failed(entry, WorkerError("raised", "OSError", f"{asked} could not be reached"), homes=str(tmp_path))
        assert "asks a service" in (service.hint or "") and "keeps what it loads" not in (service.hint or "")
    closed = WorkerError("raised", "OSError", "a.example could not be reached")
    kept = failed(entry, closed, homes=str(tmp_path))
    assert f"Its HOME, {tmp_path / source.name}, keeps what it loads: `toprope env try {entry.name}`" in kept.hint
    reward = RewardSource(name="mine", file=str(tmp_path / "mine.py"), attribute="mine")
    rewarded = replace(entry, environment=source.model_copy(update={"rewards": (reward,)}))
    by_agent = failed(rewarded, closed, homes=str(tmp_path), agents=(str(tmp_path),)).hint
    assert f"{source.name}@agent, keeps" in by_agent and "env try" not in by_agent, "that has no such reward"
    rights, tasks = {source.name: {"trust": True}}, source.model_copy(update={"adapter": "harbor"})
    for served in (replace(entry, source="server"), replace(entry, environment=tasks)):
        assert "HOME" not in failed(served, closed, homes=str(tmp_path)).hint
    assert "HOME" not in failed(entry, closed, homes=str(tmp_path), rights=rights).hint, "it has the owner's"
    beside = failed(
        entry, WorkerError("raised", "RuntimeError", "bad name ''; besides, a.example could not be reached")
    )
    assert "environment.network: allow" in beside.hint and "settings may be at fault" in beside.hint
    empty = failed(entry, WorkerError("invalid", "InvalidRequest", "no tasks; besides, a.example could not be reached"))
    assert "environment.network: allow" in empty.hint and "knobs=" in empty.hint
    late = failed(entry, WorkerTimeout("The worker did not answer 'open' within 120 s and was killed."))
    assert "load_timeout_s" in late.hint and "choose another environment" in late.hint
    slow = failed(entry, WorkerTimeout("The worker did not answer 'advance' within 60 s and was killed."))
    assert "wait for a download or a server. " in slow.hint and "timeout_s" not in slow.hint, "its limit is no setting"


def test_survey_gets_what_the_first_tasks_left_of_the_time_to_load(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = []

    async def survey(worker: EnvironmentWorker, limit: int, seconds: float, *, timeout: float) -> dict[str, Any]:
        limits.append(timeout)
        return {}

    monkeypatch.setattr(EnvironmentWorker, "survey", survey)
    tasks = "    def tasks(self):\n        time.sleep(2)\n        for n in range(60): yield Task(f'Say {n}')\n"
    described(folder, tasks + "    def score(self): return 1.0\n", load_timeout_s=60.0, call_timeout_s=20.0)
    assert 21.0 < limits[0] < 21.0 + 58.0
