"""Searches by Optuna's tree-structured Parzen estimator: each epoch asks for a population, given all scores.

No state is kept between epochs: the study is rebuilt from the measurements, so that a conductor that was killed
continues where it was. Only the conductor imports Optuna.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from toprope.errors import ComponentFailed
from toprope.extras import install_command
from toprope.sdk.evolution import RandomSearch


class OptunaSearch(RandomSearch):
    """A strategy; see `toprope.sdk.evolution.Evolution`. The first population is spread over the space."""

    def advance(
        self, epoch: int, survivors: Sequence[dict[str, Any]], history: Sequence[Mapping[str, Any]]
    ) -> list[Any]:
        """Return the population of an epoch after the first. See `Evolution.advance`.

        Raises:
            ComponentFailed: Optuna is not installed.
        """
        try:
            import optuna
        except ImportError as error:
            raise ComponentFailed(
                f"The strategy optuna needs a package that is not installed: {error}.",
                hint=f"Install it ({install_command()}), or choose another strategy.",
            ) from None
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        kinds = {name: _distribution(optuna, one) for name, one in self.space.dimensions.items()}
        startup = min(10, self.population)
        sampler = optuna.samplers.TPESampler(
            seed=self.chance("optuna", epoch).randrange(2**31), n_startup_trials=startup, constant_liar=True
        )
        study = optuna.create_study(direction="maximize", sampler=sampler)
        for one in history:
            if one.get("score") is None:
                state, value = optuna.trial.TrialState.FAIL, None
            else:
                state, value = optuna.trial.TrialState.COMPLETE, float(one["score"])
            params = {name: _index(dimension, one["values"][name]) for name, dimension in self.space.dimensions.items()}
            study.add_trial(optuna.trial.create_trial(params=params, distributions=kinds, value=value, state=state))
        found = []
        for _ in range(self.population):
            asked = study.ask(kinds).params
            values = {name: _value(one, asked[name]) for name, one in self.space.dimensions.items()}
            found.append({"values": values, "steps": self.steps, "parent": None, "continues": None})
        return found


def _distribution(optuna: Any, one: Mapping[str, Any]) -> Any:
    """Return the distribution of a dimension. For choices it draws an index, because values may be lists."""
    if one.get("choices"):
        return optuna.distributions.CategoricalDistribution(list(range(len(one["choices"]))))
    if one.get("integer"):
        return optuna.distributions.IntDistribution(int(one["low"]), int(one["high"]), log=bool(one.get("log")))
    return optuna.distributions.FloatDistribution(float(one["low"]), float(one["high"]), log=bool(one.get("log")))


def _index(one: Mapping[str, Any], value: Any) -> Any:
    return one["choices"].index(value) if one.get("choices") else value


def _value(one: Mapping[str, Any], asked: Any) -> Any:
    if one.get("choices"):
        return one["choices"][asked]
    if one.get("integer"):
        return int(asked)
    rounded = float(f"{asked:.6g}")
    return rounded if one["low"] <= rounded <= one["high"] else asked
