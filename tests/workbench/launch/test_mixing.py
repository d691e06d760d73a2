"""Freezing a draft with a mixture and reward functions: their files are found, allowed and hashed."""

from __future__ import annotations

from pathlib import Path

import pytest

from toprope.analysis.reports.report import build
from toprope.errors import InvalidValue, LockedField, NotFound
from toprope.records.run.digests import measurement_digests
from toprope.records.run.specification import EnvironmentSource, Specification, TrainPlan
from toprope.records.run.status import Status
from toprope.records.walls import Walls
from toprope.settings.locks import Lock, Locks
from toprope.settings.presets import Preset
from toprope.settings.sections.mixture import RewardFunction
from toprope.workbench.catalog.catalog import Catalog
from toprope.workbench.drafts import Draft, Drafts
from toprope.workbench.launch.freeze import freeze, freeze_again
from toprope.workbench.launch.mixture_sources import blend, reward_source

NONE = Locks({})
KNOBS = [{"name": "length", "type": "int", "default": 3, "ge": 1, "le": 9}]
REWARDS = "async def brevity(answer):\n    return 1.0\n\nasync def exact(answer):\n    return 1.0\n\nLIMIT = 3\n"
BRIEF = {"name": "brevity", "weight": 0.5, "fn": "more.py:brevity"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    own = tmp_path / "environments"
    own.mkdir()
    (own / "more.py").write_text(REWARDS)
    (tmp_path / "elsewhere.py").write_text(REWARDS)
    (own / "out.py").symlink_to(tmp_path / "elsewhere.py")
    (own / "broken_env.py").write_text("from toprope.sdk import Environment\nclass Broken(Environment):\n  def (")
    return own


def draft(drafts: Drafts, **section: object) -> Draft:
    source = EnvironmentSource(name="mine", file="/nowhere.py", attribute="Mine")
    made = drafts.create(source, Preset("p", "", {}, {}), KNOBS, NONE)[0]
    return drafts.edit(made.id, {f"environment.{name}": value for name, value in section.items()}, NONE)[0]


def frozen(made: Draft, folder: Path, locks: Locks = NONE) -> Specification:
    ingredients = blend(made, Catalog([folder]).find, [folder], Walls())
    return freeze(made, locks, TrainPlan(), policy_cache="", ingredients=ingredients)


def test_freeze_records_mixture_sources_and_reward_files(drafts: Drafts, folder: Path) -> None:
    mixture = [
        {"name": "sort_letters", "weight": 2, "rewards": [BRIEF]},
        {"name": "number_guess", "knobs": {"spare": 2}},
    ]
    spec = frozen(draft(drafts, mixture=mixture, rewards=[{**BRIEF, "fn": f"{folder}/more.py:exact"}]), folder)
    assert [source.name for source in spec.mixture] == ["sort_letters", "number_guess"]
    assert Path(spec.mixture[0].file or "").name == "template.py"
    [own], [added] = spec.environment.rewards, spec.mixture[0].rewards
    assert own.file == added.file == str(folder / "more.py") and (own.attribute, added.attribute) == (
        "exact",
        "brevity",
    )
    assert Specification.model_validate_json(spec.model_dump_json()) == spec
    before = measurement_digests(spec.mixture[0])
    (folder / "more.py").write_text(REWARDS + "# changed\n")
    assert (
        measurement_digests(spec.mixture[0])
        != before
        == before | {"environment": measurement_digests(spec.mixture[0])["environment"]}
    )
    again = freeze_again(spec, NONE, folder)
    assert (again.mixture, again.environment, again.config) == (spec.mixture, spec.environment, spec.config)


@pytest.mark.parametrize(
    ("section", "error", "says"),
    [
        ({"mixture": [{"name": "sort_leters"}]}, NotFound, "The nearest: sort_letters"),
        ({"mixture": [{"name": "mine", "label": "again", "knobs": {"length": 3}}]}, NotFound, "no environment 'mine'"),
        ({"rewards": [{**BRIEF, "fn": "nope.py:brevity"}]}, NotFound, "which does not exist"),
        ({"rewards": [{**BRIEF, "fn": "more.py:brevty"}]}, NotFound, "does not define 'brevty'"),
        ({"rewards": [{**BRIEF, "fn": "../elsewhere.py:brevity"}]}, InvalidValue, "outside the owner's folders"),
        ({"rewards": [{**BRIEF, "fn": "out.py:brevity"}]}, InvalidValue, "outside the owner's folders"),
        ({"rewards": [{**BRIEF, "fn": "/etc/passwd.py:brevity"}]}, InvalidValue, "outside the owner's folders"),
        ({"curriculum": {"knob": "lenght", "levels": [1, 2]}}, InvalidValue, "not a knob of mine; it has length"),
        ({"curriculum": {"knob": "length", "levels": [3, 12]}}, InvalidValue, "environment.knobs.length: 12 is not"),
    ],
)
def test_freeze_refuses_unknown_or_foreign_sources(
    drafts: Drafts, folder: Path, section: dict[str, object], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=".*") as refused:
        frozen(draft(drafts, **section), folder)
    assert says in str(refused.value)


def test_reward_file_outside_own_folders_is_refused(folder: Path) -> None:
    for name in ("out.py", "../elsewhere.py"):
        with pytest.raises(InvalidValue):
            reward_source(RewardFunction(name="x", fn=f"{folder}/{name}:brevity"), [folder])


@pytest.mark.parametrize(
    ("section", "lock", "says"),
    [
        ({"mixture": [{"name": "sort_letters"}]}, Lock("environment.mixture", "one", True, []), "one"),
        (
            {"mixture": [{"name": "sort_letters", "max_turns": 9}]},
            Lock("environment.max_turns", "short", max=8),
            "short",
        ),
        (
            {"mixture": [{"name": "number_guess", "knobs": {"spare": 9}}]},
            Lock("environment.knobs.spare", "few guesses", max=3),
            "number_guess, in environment.mixture: environment.knobs.spare is locked",
        ),
        (
            {"mixture": [{"name": "sort_letters", "rewards": [BRIEF]}]},
            Lock("environment.rewards", "own", True, []),
            "own",
        ),
        ({"curriculum": {"knob": "length", "levels": [2, 7]}}, Lock("environment.knobs.length", "easy", max=5), "easy"),
    ],
)
def test_freeze_applies_locks_to_each_environment_and_level(
    drafts: Drafts, folder: Path, section: dict[str, object], lock: Lock, says: str
) -> None:
    made = draft(drafts, max_turns=4, **section)
    with pytest.raises(LockedField, match=".*") as refused:
        frozen(made, folder, Locks({lock.field: lock}))
    assert says in str(refused.value)
    assert frozen(made, folder).config.environment.max_turns == 4


def test_report_says_which_environments_improved() -> None:
    def evaluation(**wins: int) -> dict[str, object]:
        def measured(tasks: int, won: int) -> dict[str, object]:
            return {"tasks": tasks, "successes": won, "accuracy": won / tasks, "errors": 0}

        each = {name: measured(100, won) for name, won in wins.items()}
        return {"sampled": measured(200, sum(wins.values())) | {"environments": each}}

    spec = Specification(
        run_id="run-a", kind="train", created_at=0.0, toprope_version="0", config={}, policy_cache="",
        environment=EnvironmentSource(name="a"),
    )  # fmt: skip
    status = Status(
        run_id="run-a", kind="train", environment="a", state="completed", created_at=0.0, since=0.0, updated_at=1.0
    )
    found = build(spec, status, {"before": evaluation(a=10, b=50), "after": evaluation(a=80, b=52)}, [])
    assert found.rose and {name: one.verdict for name, one in found.change_each.items()} == {"a": "rose", "b": "none"}
    after = found.evaluations["after"].environments["b"].sampled
    assert after is not None and after.low < after.accuracy == 0.52 < after.high
