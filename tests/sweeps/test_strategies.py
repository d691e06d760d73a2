"""Strategies are functions of their seed: the candidates they draw, keep and change, within their plan."""

from __future__ import annotations

import math

import pytest

from toprope.sdk.evolution import STRATEGIES, Evolution, Halving, PopulationBased, Space

SPACE = {
    "optimizer.learning_rate": {"low": 1e-5, "high": 1e-2, "log": True},
    "rollout.groups_per_step": {"low": 2, "high": 16, "integer": True},
    "algorithm.loss_type": {"choices": ["dapo", "grpo", "bnpo"]},
}


def made(kind=Evolution, **changes):
    given = {"population": 8, "epochs": 3, "selection_ratio": 0.25, "mutation_rate": 0.5, "steps": 10, "seed": 3}
    return kind(SPACE, **{**given, **changes})


def within(values):
    assert 1e-5 <= values["optimizer.learning_rate"] <= 1e-2
    assert isinstance(values["rollout.groups_per_step"], int) and 2 <= values["rollout.groups_per_step"] <= 16
    assert values["algorithm.loss_type"] in SPACE["algorithm.loss_type"]["choices"]


def lived(strategy, score):
    """Run all epochs of a strategy like the conductor; return the new candidates of each epoch, and all scores."""
    known, history, news = {}, [], []
    population = []
    for epoch in range(1, strategy.epochs + 1):
        survivors = strategy.select(population, [known[one["id"]] for one in population]) if epoch > 1 else []
        answer = strategy.start() if epoch == 1 else strategy.advance(epoch, survivors, history)
        population, new = [], []
        for one in answer:
            if one.get("id") in known:
                population.append(one)
                continue
            one = {**one, "id": f"c{len(known) + 1:03d}"}
            known[one["id"]] = score(one)
            history.append({**one, "score": known[one["id"]], "epoch": epoch})
            population.append(one)
            new.append(one)
        news.append(new)
    return news, known


def closeness(one):
    return -abs(math.log10(one["values"]["optimizer.learning_rate"]) + 3)


@pytest.mark.parametrize("kind", STRATEGIES.values())
def test_strategy_stays_in_space_and_plan(kind):
    news, known = lived(made(kind), closeness)
    for epoch, (new, (runs, steps)) in enumerate(zip(news, made(kind).plan(), strict=True), 1):
        assert len(new) == runs, epoch
        for one in new:
            within(one["values"])
            assert one["steps"] == steps and (one["continues"] is None or one["continues"] in known)
    assert lived(made(kind), closeness) == (news, known)
    assert lived(made(kind, seed=4), closeness)[0] != news


@pytest.mark.parametrize("kind", STRATEGIES.values())
def test_strategy_draws_new_candidates_if_all_failed(kind):
    news, _ = lived(made(kind), lambda one: None)
    assert [len(new) for new in news] == [runs for runs, _ in made(kind).plan()]
    assert all(one["continues"] is None for new in news for one in new)


def test_evolution_keeps_best_and_mutates():
    strategy = made(population=4, selection_ratio=0.5)
    population = [{**one, "id": f"c{place}"} for place, one in enumerate(strategy.start())]
    survivors = strategy.select(population, [0.1, None, 0.7, 0.4])
    assert [one["id"] for one in survivors] == ["c2", "c3"]
    following = strategy.advance(2, survivors, [])
    assert following[:2] == survivors and [one["parent"] for one in following[2:]] == ["c2", "c3"]
    for child, parent in zip(following[2:], survivors, strict=True):
        assert child["values"] != parent["values"]
    still = made(mutation_rate=0.0)
    assert still.mutate(population[0], 2, 0)["values"] == population[0]["values"]


def test_evolution_improves_on_first_population():
    strategy = made(epochs=6, mutation_rate=0.6)
    news, known = lived(strategy, closeness)
    assert max(known.values()) > max(known[one["id"]] for one in news[0])


def test_population_based_training_continues_weights():
    strategy = made(PopulationBased, population=4, selection_ratio=0.5, mutation_rate=0.0)
    population = [{**one, "id": f"c{place}"} for place, one in enumerate(strategy.start())]
    following = strategy.advance(2, [population[2], population[0]], [])
    assert [one["continues"] for one in following[:2]] == ["c2", "c0"]
    assert [one["values"] for one in following[:2]] == [population[2]["values"], population[0]["values"]]
    for child in following[2:]:
        parent = population[int(child["continues"][1:])]["values"]["optimizer.learning_rate"]
        factor = child["values"]["optimizer.learning_rate"] / parent
        assert any(factor == pytest.approx(one, rel=1e-4) for one in (0.8, 1.2)) or parent * 1.2 > 1e-2


def test_halving_gives_survivors_more_steps():
    strategy = made(Halving, population=9, epochs=3, selection_ratio=1 / 3)
    assert strategy.plan() == [(9, 10), (3, 20), (1, 60)]  # 10, 30 and 90 in all
    news, known = lived(strategy, closeness)
    best = max(known, key=known.get)
    assert news[2][0]["values"] == news[0][int(best[1:]) - 1]["values"]
    assert news[2][0]["continues"] == news[1][[one["values"] for one in news[1]].index(news[2][0]["values"])]["id"]


def test_first_population_covers_space_evenly():
    values = Space(SPACE).spread(8, made().chance("x"))
    places = sorted(int((math.log10(one["optimizer.learning_rate"]) + 5) / 3 * 8) for one in values)
    assert places == list(range(8))
    assert {one["algorithm.loss_type"] for one in values} == {"dapo", "grpo", "bnpo"}


def test_optuna_improves_with_history():
    from toprope.sweeps.optuna_search import OptunaSearch

    strategy = made(OptunaSearch, epochs=4)
    news, known = lived(strategy, closeness)
    for new in news:
        assert len(new) == 8
        for one in new:
            within(one["values"])
    assert lived(strategy, closeness) == (news, known)
    assert max(known[one["id"]] for one in news[3]) > max(known[one["id"]] for one in news[0])
