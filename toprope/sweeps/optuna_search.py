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
        kinds = {name: _distribution(optuna, dimension) for name, dimension in self.space.dimensions.items()}
        startup = min(10, self.population)
        sampler = optuna.samplers.TPESampler(
            seed=self.chance("optuna", epoch).randrange(2**31), n_startup_trials=startup, constant_liar=True
        )
        study = optuna.create_study(direction="maximize", sampler=sampler)
        for record in history:
            if record.get("score") is None:
                state, value = optuna.trial.TrialState.FAIL, None
            else:
                state, value = optuna.trial.TrialState.COMPLETE, float(record["score"])
            params = {
                name: _index(dimension, record["values"][name]) for name, dimension in self.space.dimensions.items()
            }
            study.add_trial(optuna.trial.create_trial(params=params, distributions=kinds, value=value, state=state))
        candidates = []
        for _ in range(self.population):
            suggested = study.ask(kinds).params
            values = {name: _value(dimension, suggested[name]) for name, dimension in self.space.dimensions.items()}
            candidates.append({"values": values, "steps": self.steps, "parent": None, "continues": None})
        return candidates


def _distribution(optuna: Any, dimension: Mapping[str, Any]) -> Any:
    """Return the distribution of a dimension. For choices it draws an index, because values may be lists."""
    if dimension.get("choices"):
        return optuna.distributions.CategoricalDistribution(list(range(len(dimension["choices"]))))
    if dimension.get("integer"):
        return optuna.distributions.IntDistribution(
            int(dimension["low"]), int(dimension["high"]), log=bool(dimension.get("log"))
        )
    return optuna.distributions.FloatDistribution(
        float(dimension["low"]), float(dimension["high"]), log=bool(dimension.get("log"))
    )


def _index(dimension: Mapping[str, Any], value: Any) -> Any:
    return dimension["choices"].index(value) if dimension.get("choices") else value


def _value(dimension: Mapping[str, Any], suggested: Any) -> Any:
    if dimension.get("choices"):
        return dimension["choices"][suggested]
    if dimension.get("integer"):
        return int(suggested)
    rounded = float(f"{suggested:.6g}")
    return rounded if dimension["low"] <= rounded <= dimension["high"] else suggested
