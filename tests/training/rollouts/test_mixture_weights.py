"""Shares of environments in one run: order, minimum shares, curriculum levels, and metrics of each."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from toprope.records.journal.groups import Group, Outcome
from toprope.records.run.curriculum import Curricula
from toprope.records.run.folder import RunFolder
from toprope.settings.changes import apply_changes
from toprope.settings.schema import Config
from toprope.settings.sections.environment import members_of
from toprope.settings.sections.mixture import Curriculum
from toprope.training.rollouts.curriculum import CurriculumProgress
from toprope.training.rollouts.mixture_weights import MixtureEntry, MixtureScheduler, mixture_shares
from toprope.training.trainer.environment_metrics import EnvironmentMetrics

ENTRIES = [MixtureEntry("sums", 3), MixtureEntry("words", 1), MixtureEntry("games", 1, 0.3)]


def order(scheduler: MixtureScheduler, count: int) -> list[str]:
    found = []
    for _ in range(count):
        label = scheduler.choose()
        assert label is not None
        scheduler.finish(label)
        found.append(label)
    return found


def test_shares_hold_at_any_time_and_seed_decides_ties() -> None:
    assert mixture_shares(ENTRIES) == pytest.approx({"sums": 0.525, "words": 0.175, "games": 0.3})
    found = order(MixtureScheduler(ENTRIES), 400)
    for count in range(1, 401):
        for label, share in mixture_shares(ENTRIES).items():
            assert abs(Counter(found[:count])[label] - share * count) <= 1.0 + 1e-9
    assert found == order(MixtureScheduler(ENTRIES), 400)
    even = [MixtureEntry(label) for label in "abcd"]
    starts = {tuple(order(MixtureScheduler(even, seed=seed), 4)) for seed in range(8)}
    assert len(starts) > 1 and all(sorted(start) == list("abcd") for start in starts)


def test_restored_schedule_continues() -> None:
    whole, first = MixtureScheduler(ENTRIES), MixtureScheduler(ENTRIES)
    found = order(whole, 40)
    assert order(first, 17) == found[:17]
    second = MixtureScheduler(ENTRIES)
    second.restore(first.state())
    assert order(second, 23) == found[17:]
    with pytest.raises(KeyError):
        second.restore(MixtureScheduler([MixtureEntry("others")]).state())


def test_slow_environment_leaves_room_down_to_its_minimum() -> None:
    def begun(entries: list[MixtureEntry], groups: int) -> Counter[str]:
        scheduler, found = MixtureScheduler(entries, places=16), []
        while len(found) < groups and (label := scheduler.choose()) is not None:
            found.append(label)
            if label != "slow":  # its groups do not end
                scheduler.finish(label)
        return Counter(found)

    free = begun([MixtureEntry("a"), MixtureEntry("b"), MixtureEntry("slow")], 500)
    assert sum(free.values()) == 500 and free["slow"] < 16
    held = begun([MixtureEntry("a"), MixtureEntry("b"), MixtureEntry("slow", min_share=0.25)], 500)
    assert sum(held.values()) < 500 and held["slow"] / sum(held.values()) == pytest.approx(0.25, abs=0.03)


def test_environment_below_minimum_is_chosen_more_often() -> None:
    scheduler = MixtureScheduler([MixtureEntry("a"), MixtureEntry("b", min_share=0.4)])
    draw, trained = random.Random(0), Counter({"a": 1})
    for _ in range(60):
        for label in order(scheduler, 20):
            trained[label] += label == "a" or draw.random() < 0.4  # six of ten groups of b carry no signal
        total = sum(trained.values())
        scheduler.adjust({label: count / total for label, count in trained.items()})
        trained = Counter({label: count // 2 for label, count in trained.items()})
    assert trained["b"] / sum(trained.values()) == pytest.approx(0.4, abs=0.1)
    hopeless = MixtureScheduler([MixtureEntry("a"), MixtureEntry("b", min_share=0.4)])
    for _ in range(100):
        hopeless.adjust({"a": 1.0})
    assert hopeless.shares == pytest.approx({"a": 0.25, "b": 0.75})
    for _ in range(100):
        hopeless.adjust({"a": 0.5, "b": 0.5})
    assert hopeless.shares == pytest.approx({"a": 0.5, "b": 0.5})


def test_uncounted_turn_is_given_back() -> None:
    scheduler, counted = MixtureScheduler([MixtureEntry("a"), MixtureEntry("b")]), Counter()
    for number in range(60):
        label = scheduler.choose()
        assert label is not None
        lost = label == "a" and number % 3 == 0
        scheduler.finish(label, counts=not lost)
        counted[label] += not lost
    assert abs(counted["a"] - counted["b"]) <= 3


def group(environment: str, *rewards: float) -> Group:
    outcomes = [Outcome(reward, success=reward >= 1) for reward in rewards]
    return Group([[1]], [[1]], [0.0], environment=environment, outcomes=outcomes)


def test_step_has_metrics_of_each_environment() -> None:
    metrics = EnvironmentMetrics(["sums", "words", "games"])
    seen = [group("sums", 1, 0), group("sums", 0, 0), group("words", 1, 1)]
    numbers = metrics.add_step(seen, seen[:1])
    assert numbers["environments/sums/reward"] == numbers["environments/sums/success"] == 0.25
    assert numbers["environments/sums/frac_reward_zero_std"] == 0.5
    assert numbers["environments/words/frac_reward_zero_std"] == 1.0
    shown = {name: value for name, value in numbers.items() if name.endswith("/share")}
    assert shown == {"environments/sums/share": 1, "environments/words/share": 0, "environments/games/share": 0}
    assert metrics.add_step(seen, seen[2:] * 3)["environments/words/share"] == 0.75
    assert EnvironmentMetrics(["sums"]).add_step(seen, seen) == {}


def test_levels_open_on_success_and_earlier_ones_stay() -> None:
    curriculum = Curriculum(knob="digits", levels=[1, 2, 4], success=0.75, min_steps=10, window=8, earlier_share=0.25)
    progress = CurriculumProgress(curriculum)
    assert {progress.next_level() for _ in range(20)} == {0} and not progress.is_due(9) and progress.is_due(10)
    assert not progress.add_measure(10, 5, 8).moved and not progress.is_due(19)
    assert progress.add_measure(20, 6, 8).moved and progress.level == 1 and progress.record.value == 2
    levels = Counter(progress.next_level() for _ in range(40))
    assert levels == {1: 30, 0: 10}
    assert progress.add_measure(30, 8, 8).moved and progress.at_last_level and not progress.is_due(1000)
    assert Counter(progress.next_level() for _ in range(80)) == {2: 60, 0: 10, 1: 10}
    again = CurriculumProgress(curriculum, progress.record)
    assert again.level == 2
    # Levels reached after the checkpoint are closed again; changed levels begin anew.
    assert (
        CurriculumProgress(curriculum, progress.record.at(25)).level == 1
        and CurriculumProgress(curriculum, progress.record.at(19)).level == 0
    )
    assert CurriculumProgress(curriculum, progress.record.at(25)).is_due(30) and not CurriculumProgress(
        curriculum, progress.record.at(25)
    ).is_due(29)
    assert CurriculumProgress(curriculum.model_copy(update={"levels": [1, 3]}), progress.record).level == 0


def test_curricula_file_round_trip(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert Curricula.read(folder) is None
    progress = CurriculumProgress(Curriculum(knob="digits", levels=["a", "b"]))
    progress.add_measure(20, 32, 32)
    Curricula(environments={"sums": progress.record}).write(folder)
    found = Curricula.read(folder)
    assert found is not None and found.environments == {"sums": progress.record}


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("mixture", [{"nme": "a"}], "entry 1: name is missing; there is no 'nme'; it has name, label, weight"),
        ("mixture", [{"name": "a"}, {"name": "a"}], "the label 'a' is there twice"),
        ("mixture", [{"name": "a", "weight": 0}], "weight: Input should be greater than 0"),
        ("mixture", [{"name": "a", "curriculum": {"knob": "k", "levels": [1]}}], "entry 1 (a): the curriculum: levels"),
        ("curriculum", {"knob": "k", "levels": [1, 1]}, "levels holds a value twice"),
        ("curriculum", {"knob": "k", "levels": [3, 1e309]}, "the curriculum: every number must be finite"),
        ("mixture", [{"name": "a", "knobs": {"k": [1e309]}}], "entry 1: every number must be finite"),
        ("curriculum", {"knob": "k", "levels": [1, 2], "measured_level": 2}, "measured_level 2 is not one of 0 to 1"),
        ("rewards", [{"name": "x", "fn": "x.py"}], "entry 1: fn is not of the form 'file.py:function'"),
        ("rewards", [{"name": "x", "fn": "x.py:f", "low": 2}], "low 2 is above high 1"),
    ],
)
def test_invalid_mixture_is_refused_with_its_place(field: str, value: object, says: str) -> None:
    with pytest.raises(Exception) as refused:
        apply_changes(Config(), {f"environment.{field}": value})
    assert says in str(refused.value) and "Value error" not in str(refused.value)


def test_mixture_entries_have_own_settings_and_possible_shares() -> None:
    config = Config()
    config.environment.name = "sums"
    given = [{"name": "words", "weight": 2, "max_turns": 3, "knobs": {"k": 1}}, {"name": "sums", "label": "more sums"}]
    config, _ = apply_changes(config, {"environment.mixture": given, "environment.call_timeout_s": 5})
    first, words, more = members_of(config.environment)
    assert [one.label for one in (first, words, more)] == ["sums", "words", "more sums"]
    assert (words.weight, words.section.max_turns, words.section.knobs) == (2, 3, {"k": 1})
    assert words.section.call_timeout_s == 5 and more.section.max_turns is None and not words.section.mixture
    with pytest.raises(Exception, match="add up to 1.2"):
        apply_changes(
            config, {"environment.min_share": 0.6, "environment.mixture": [{"name": "words", "min_share": 0.6}]}
        )
    with pytest.raises(Exception, match="give the entry a label"):
        apply_changes(config, {"environment.mixture": [{"name": "sums"}]})
