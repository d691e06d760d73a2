"""Plans of sweeps: fields, bounds, the owner's locks, strategies and the highest possible cost."""

from __future__ import annotations

import anyio
import pytest

from toprope.errors import ComponentFailed, InvalidValue, LockedField, NotFound
from toprope.records.run.specification import EnvironmentSource
from toprope.records.sweep_journal import Candidate, Measured
from toprope.settings.locks import Lock, Locks
from toprope.settings.schema import Config
from toprope.sweeps.planning import make_plan, measured_differently
from toprope.sweeps.strategy_runner import StrategyRunner
from toprope.workbench.drafts import Draft

RATE = {"optimizer.learning_rate": {"min": 1e-5, "max": 1e-2, "log": True}}
KNOB = {"name": "length", "type": "int", "default": 3, "ge": 1, "le": 9}
OWN = """
from toprope.sdk.evolution import Evolution

class Sure(Evolution):
    def evaluate(self, candidate, measured):
        return measured["accuracy"] + candidate["values"]["optimizer.learning_rate"]

class Bare:
    def select(self, population, scores):
        return population[-1:]

    def mutate(self, candidate):
        return {"values": {"optimizer.learning_rate": candidate["values"]["optimizer.learning_rate"] / 2}}

class Astray(Evolution):
    def start(self):
        return [{"values": {"optimizer.learning_rate": 0.5}}]
"""


def planned(tmp_path, space=RATE, locks=None, config=None, **changes):
    draft = Draft("draft-1", EnvironmentSource(name="dice"), "", config or Config(), [KNOB], 1, 0.0, 0.0)
    given = {
        "strategy": "evolution",
        "population": 4,
        "epochs": 3,
        "selection_ratio": 0.5,
        "mutation_rate": 0.3,
        "steps": 20,
        "evaluate": "train",
    }
    return make_plan(draft, locks or Locks({}), space=space, strategies=tmp_path, **{**given, **changes})


def test_plan_counts_runs_and_steps(tmp_path):
    plan = planned(tmp_path)
    assert (plan.runs, plan.total_steps) == (4 + 2 + 2 + 1, 8 * 20)
    assert planned(tmp_path, strategy="halving").total_steps == 4 * 20 + 2 * 20 + 40
    assert planned(tmp_path, steps=None).steps == Config().budget.steps
    tested = planned(tmp_path, {"environment.knobs.length": {"choices": ["2", 4]}}, evaluate="test")
    assert tested.total_steps == 0 and tested.space["environment.knobs.length"].choices == [2, 4]
    assert measured_differently(tested) == ["environment.knobs.length"]
    sampling = {"rollout.temperature": [0.5, 1.0], **RATE}
    assert measured_differently(planned(tmp_path, sampling)) == []
    assert measured_differently(planned(tmp_path, sampling, evaluate="test")) == ["rollout.temperature"]


@pytest.mark.parametrize(
    "space, error, says",
    [
        ({}, InvalidValue, "empty"),
        ({"optimizer.lerning_rate": {"min": 1, "max": 2}}, NotFound, "optimizer.learning_rate"),
        ({"optimizer.learning_rate": {"min": 1e-3, "max": 1e-4}}, InvalidValue, "min must be below max"),
        ({"optimizer.learning_rate": {"min": 0.1, "max": 7}}, InvalidValue, "<= 1"),
        ({"optimizer.weight_decay": {"min": 0, "max": 1, "log": True}}, InvalidValue, "min above 0"),
        ({"algorithm.loss_type": {"min": 0, "max": 1}}, InvalidValue, "give choices"),
        ({"algorithm.loss_type": ["dapo", "nonsense"]}, InvalidValue, "nonsense"),
        ({"algorithm.loss_type": ["dapo", "dapo"]}, InvalidValue, "twice"),
        ({"budget.steps": {"min": 1, "max": 2}}, InvalidValue, "steps of start_sweep"),
        ({"evaluation.heldout_tasks": [1, 2]}, InvalidValue, "winner"),
        ({"environment.knobs.length": [2, 4]}, InvalidValue, "tasks of its own, and the easiest would win"),
        ({"environment.max_turns": [2, 4]}, InvalidValue, "tasks of its own"),
        ({"environment.reward_weights": [{"style": 0.1}, {"style": 1.0}]}, InvalidValue, "measured by rewards"),
    ],
)
def test_invalid_space_is_refused(tmp_path, space, error, says):
    with pytest.raises(error, match=says):
        planned(tmp_path, space)


def test_locked_space_is_refused_with_reason(tmp_path):
    bounded = Locks({"optimizer.learning_rate": Lock("optimizer.learning_rate", "it diverges", max=1e-3)})
    with pytest.raises(LockedField, match="it diverges"):
        planned(tmp_path, locks=bounded)
    narrower = {"optimizer.learning_rate": {"min": 1e-5, "max": 1e-3, "log": True}}
    assert planned(tmp_path, narrower, locks=bounded).space["optimizer.learning_rate"].high == 1e-3


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"strategy": "annealing"}, "evolution, pbt"),
        ({"strategy": "mine:Sure"}, "There is no mine.py"),
        ({"population": 0}, "population must be"),
        ({"population": 1, "epochs": 1}, "compares nothing"),
        ({"selection_ratio": 0.0}, "selection_ratio"),
        ({"strategy": "pbt", "evaluate": "test"}, "weights"),
        ({"strategy": "../x:Y"}, "no strategy"),
    ],
)
def test_invalid_numbers_and_strategies_are_refused(tmp_path, changes, says):
    with pytest.raises((InvalidValue, NotFound), match=says):
        planned(tmp_path, **changes)


def test_candidates_can_begin_with_the_weights_of_earlier_ones(tmp_path):
    beside_vllm = Config()
    beside_vllm.policy.lora, beside_vllm.inference.engine = True, "vllm"
    for strategy in ("pbt", "halving"):
        with pytest.raises(InvalidValue, match="vLLM begins with a whole model"):
            planned(tmp_path, config=beside_vllm, strategy=strategy)
    with pytest.raises(InvalidValue, match="vLLM begins with a whole model"):
        both = {"policy.lora": [True, False], "inference.engine": ["vllm", "embedded"]}
        planned(tmp_path, both, strategy="halving")
    planned(tmp_path, config=beside_vllm)
    ranks = {"policy.lora_rank": [8, 16]}
    with pytest.raises(InvalidValue, match="lora_rank cannot be varied by pbt"):
        planned(tmp_path, ranks, strategy="pbt")
    planned(tmp_path, ranks, strategy="halving")


def test_own_strategy_runs_in_worker(tmp_path):
    (tmp_path / "mine.py").write_text(OWN)
    known = {"c001": Candidate(id="c001", values={"optimizer.learning_rate": 1e-3}, steps=20)}

    async def work():
        found = {}
        for name in ("Sure", "Bare", "Astray"):
            plan = planned(tmp_path, strategy=f"mine:{name}", population=2)
            assert plan.file == str(tmp_path / "mine.py") and plan.total_steps == 2 * 3 * 20
            runner = await StrategyRunner.open(plan)
            try:
                first = runner.candidates(await runner.start(), {}, 9) if name != "Astray" else None
                found[name] = first, await runner.evaluate(known["c001"], Measured(accuracy=0.5))
                if name == "Bare":
                    assert await runner.select(first, [0.1, 0.9]) == [first[1].id]
                    answer = await runner.advance(2, list(known.values()), [])
                    [same, child] = runner.candidates(answer, known, 9)
                    assert same == known["c001"] and child.values == {"optimizer.learning_rate": 5e-4}
                    assert child.parent == "c001" and child.id == "c002"
                if name == "Astray":
                    with pytest.raises(ComponentFailed, match="outside its space"):
                        runner.candidates(await runner.start(), {}, 9)
            finally:
                await runner.close()
        return found

    found = anyio.run(work)
    assert len(found["Sure"][0]) == 2 and found["Sure"][1] == pytest.approx(0.501)
    assert found["Bare"][1] == 0.5
