"""Near duplicates, splits and augmentation."""

from __future__ import annotations

import itertools
import random

import pytest

from tests.trajectories.synthesis.conftest import WORDS, items, texts
from toprope.errors import InvalidValue
from toprope.records.trained_tasks import content_id
from toprope.trajectories.items import TrajectoryItem
from toprope.trajectories.synthesis.generators import add_noise, swap_io
from toprope.trajectories.synthesis.near_duplicates import (
    Deduplicator,
    deduplicate,
    shingles,
    similarity,
    split_dataset,
)
from toprope.trajectories.synthesis.pipeline import filter_by_score
from toprope.trajectories.synthesis.recipe import parse_recipe


def test_deduplicate_keeps_first_of_near_duplicates():
    made = texts(40)
    near = [one.rsplit(" ", 1)[0] + " other" for one in made[:10]]
    kept, left = deduplicate(items([*made, *near, made[3].upper() + "!"]), 0.7)
    assert left == 11 and [item.state for item in kept] == made
    assert deduplicate(items(near), 1.0)[1] == 0
    with pytest.raises(InvalidValue, match="above 0"):
        Deduplicator(0)


def test_deduplicator_finds_every_pair_above_threshold():
    dice, made = random.Random(3), texts(150, 20)
    for one in list(made):
        said = one.split()
        for _ in range(dice.randrange(1, 6)):
            said[dice.randrange(len(said))] = dice.choice(WORDS)
        made.append(" ".join(said))
    found = Deduplicator(0.6).add(made)
    sets, kept = [shingles(one) for one in made], []
    for words, near in zip(sets, found, strict=True):
        expected = any(similarity(words, other) >= 0.6 for other in kept)
        assert (near is not None) is expected
        if near is None:
            kept.append(words)


def test_shared_template_text_makes_no_duplicates():
    states = [f"Spell this word backward, letter by letter (example: sun becomes nus): {word}" for word in WORDS]
    kept, left = deduplicate(items([*states, *states[:5]]), 0.85)
    assert (len(kept), left) == (len(WORDS), 5)


def test_long_shared_prompt_makes_no_duplicates():
    prompt = " ".join(f"rule{number}" for number in range(80))
    states = [f"{prompt} {one}" for one in texts(300, 3)]
    kept, left = deduplicate(items([*states, *states[:5]]), 0.85)
    assert (len(kept), left) == (300, 5)
    found = Deduplicator(0.85)
    assert [one for size in (0, 150) for one in found.add(states[size : size + 150])] == [None] * 300
    split = split_dataset(items(states), [0.5, 0.5])
    assert [len(held) for held in split.values()] == [150, 150]


def test_many_near_duplicates_of_one_text_are_no_template():
    tasks = texts(8, 40)
    answers = [f"{task} {end}" for task in tasks for end in texts(32, 1)]
    kept, left = deduplicate(items(answers), 0.85)
    assert (len(kept), left) == (8, 248)
    split = split_dataset(items(answers), [0.5, 0.5])
    assert all(len(held) % 32 == 0 for held in split.values())


def test_restored_texts_are_known_though_a_template_was_not_yet():
    prompt = " ".join(f"rule{number}" for number in range(80))
    states = [f"{prompt} {one}" for one in texts(120, 3)]
    found = Deduplicator(0.85)
    found.restore(states)
    assert None not in found.add(states)


def test_split_dataset_separates_near_duplicates_and_tasks():
    made = texts(300, 10)
    states = [*made, *(one + " again" for one in made[:100])]
    whole = items(states)
    for number, item in enumerate(whole[200:240]):
        item.metadata = {"task": f"t{number % 4}"}
    ratios = {"train": 0.8, "validation": 0.1, "test": 0.1}
    split = split_dataset(whole, ratios, seed=1, dedup_threshold=0.7)
    assert sum(map(len, split.values())) == 400 and 300 <= len(split["train"]) <= 340
    for one, other in itertools.combinations(split, 2):
        pairs = itertools.product(split[one], split[other])
        assert max(similarity(shingles(a.state), shingles(b.state)) for a, b in pairs) < 0.7
        tasks = ({item.metadata.get("task") for item in split[name]} - {None} for name in (one, other))
        assert not set.intersection(*tasks)
    again = split_dataset(whole, ratios, seed=1, dedup_threshold=0.7)
    assert again == split != split_dataset(whole, ratios, seed=2, dedup_threshold=0.7)
    with pytest.raises(InvalidValue, match="ratio"):
        split_dataset(whole, {"train": 0.0})


@pytest.mark.parametrize("number", [20, 60, 127, 128])
def test_template_of_few_texts_leaves_no_split_empty(number):
    prompt = "Spell this word backward, letter by letter (example: sun becomes nus):"
    split = split_dataset(items([f"{prompt} {word}" for word in texts(number, 1)]), [0.8, 0.1, 0.1])
    for share, held in zip((0.8, 0.1, 0.1), split.values(), strict=True):
        assert abs(len(held) - share * number) < 2


def test_near_duplicates_among_few_texts_stay_together():
    tasks = texts(4, 40)
    split = split_dataset(items([f"{task} {end}" for task in tasks for end in texts(8, 1)]), [0.5, 0.5])
    assert [len(held) for held in split.values()] == [16, 16]
    for held in split.values():
        assert len({item.state.rsplit(" ", 1)[0] for item in held}) == 2


def test_ratios_may_be_a_list():
    whole = items(texts(40))
    split = split_dataset(whole, [0.8, 0.1, 0.1], seed=1)
    assert split == split_dataset(whole, {"train": 0.8, "validation": 0.1, "test": 0.1}, seed=1)
    assert [len(split[name]) for name in ("train", "validation", "test")] == [32, 4, 4]
    assert list(split_dataset(whole, [0.5, 0, 0.5])) == ["train", "test"]
    assert parse_recipe({"split": [0.9, 0.1]}).split == {"train": 0.9, "validation": 0.1}
    for wrong in ([0.1] * 4, ["a"], []):
        with pytest.raises(InvalidValue, match="split"):
            parse_recipe({"split": wrong}) if wrong else split_dataset(whole, wrong)


def test_split_dataset_keeps_derived_items_together():
    seeds = [TrajectoryItem(state, f"answer {state}", 1.0) for state in texts(60, 10)]
    made = add_noise(seeds, 0.5)
    split = split_dataset([*seeds, *made, *swap_io(made)], {"train": 0.5, "validation": 0.5}, seed=3)
    firsts = {name: {one.metadata.get("made_from", one.id) for one in held} for name, held in split.items()}
    assert [len(held) for held in split.values()] == [90, 90] and not firsts["train"] & firsts["validation"]


def test_add_noise_changes_given_share_of_questions_only():
    [plain] = items(["The quick brown fox jumps over the lazy dog again and again"])
    assert add_noise([plain], 0.0)[0].state == plain.state
    [noisy] = add_noise([plain], 0.2, seed=1)
    assert noisy.state != plain.state and noisy.action == "yes" and abs(len(noisy.state) - len(plain.state)) < 12
    assert add_noise([plain], 0.2, seed=1) == [noisy]
    talk = TrajectoryItem([{"role": "system", "content": "S" * 30}, {"role": "user", "content": "ab" * 20}], "x", 1.0)
    [both] = add_noise([talk], 0.5)
    assert both.state[0] == talk.state[0] and both.state[1] != talk.state[1]
    with pytest.raises(InvalidValue, match="from 0 to 1"):
        add_noise([plain], 1.5)


def test_swap_io_drops_score():
    metadata = {"score": 1, "task": "t", "success": True, "index": 3, "tools": [{}]}
    [swapped] = swap_io([TrajectoryItem("2+2?", "4", 1.0, metadata)])
    assert (swapped.state, swapped.action, swapped.reward) == ("4", "2+2?", 0.0)
    first = TrajectoryItem("2+2?", "4", 1.0).id
    prompt = content_id([{"role": "user", "content": "2+2?"}])
    of_first = {"made_from": first, "first_prompt": prompt, "first_task": "t"}
    assert swapped.metadata == {"origin": "swap_io", "unscored": True, **of_first}
    assert add_noise([swapped], 0.5)[0].metadata.items() >= of_first.items()
    assert filter_by_score([swapped, TrajectoryItem("a", "b", 0.4)], 0.3)[0].state == "a"
