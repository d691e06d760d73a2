"""A reward that balances accuracy against money, energy, time and power.

    alpha * accuracy - beta_cost * cost / 0.1 USD - beta_energy * energy / 100 J
                     - gamma_latency * latency / 30 s - gamma_power * power / 200 W

Each part is a `toprope.sdk.Part` with a name in every metric and rollout, so a schedule can move its weight over a run
as in any environment.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from toprope.sdk.authoring.environment import Part
from toprope.sdk.orchestration.episode import Episode

__all__ = [
    "ADAPTIVE_END",
    "ADAPTIVE_START",
    "AdaptiveWeights",
    "Scales",
    "Weights",
    "compute",
    "compute_with_breakdown",
    "declared",
    "parts_of",
]

_MOST = 100.0
"""Cap of a cost, in units of its scale, so that one runaway call cannot drown all other rewards."""


@dataclass(frozen=True)
class Weights:
    """Weight of each part."""

    alpha: float = 0.4
    beta_cost: float = 0.15
    beta_energy: float = 0.15
    gamma_latency: float = 0.15
    gamma_power: float = 0.15

    def by_part(self) -> dict[str, float]:
        """Weights by name of the reward part; costs are negative."""
        return {
            "accuracy": self.alpha,
            "cost": -self.beta_cost,
            "energy": -self.beta_energy,
            "latency": -self.gamma_latency,
            "power": -self.gamma_power,
        }


@dataclass(frozen=True)
class Scales:
    """Size of one unit of each cost."""

    energy_joules: float = 100.0
    cost_usd: float = 0.1
    latency_seconds: float = 30.0
    power_watts: float = 200.0


ADAPTIVE_START = Weights(0.6, 0.1, 0.1, 0.1, 0.1)
ADAPTIVE_END = Weights(0.3, 0.15, 0.2, 0.15, 0.2)


@dataclass(frozen=True)
class AdaptiveWeights:
    """Weights that move linearly from accuracy to economy."""

    start: Weights = ADAPTIVE_START
    end: Weights = ADAPTIVE_END
    total_steps: int = 10_000

    def at(self, step: int) -> Weights:
        """The weights at a step; `end` from `total_steps` on."""
        share = min(max(step / self.total_steps, 0.0), 1.0) if self.total_steps > 0 else 1.0
        return Weights(
            **{
                weight.name: getattr(self.start, weight.name)
                + share * (getattr(self.end, weight.name) - getattr(self.start, weight.name))
                for weight in fields(Weights)
            }
        )


def parts_of(episode: Episode, scales: Scales = Scales()) -> dict[str, float]:  # noqa: B008 - frozen
    """Unweighted parts of an episode: accuracy 0 or 1, costs in units of their scale."""
    spent = {
        "cost": episode.total_cost_usd / scales.cost_usd,
        "energy": episode.total_energy_joules / scales.energy_joules,
        "latency": episode.total_latency_seconds / scales.latency_seconds,
        "power": episode.max_power_watts / scales.power_watts,
    }
    return {"accuracy": float(episode.correct)} | {name: min(value, _MOST) for name, value in spent.items()}


def declared(weights: Weights) -> dict[str, Part]:
    """The parts in the form that an environment declares."""
    ranges = {
        "accuracy": (1.0, "1 for a right final answer"),
        "cost": (_MOST, "money spent on tools, in units of 0.1 USD"),
        "energy": (_MOST, "energy used by tools, in units of 100 J"),
        "latency": (_MOST, "time spent in tools, in units of 30 s"),
        "power": (_MOST, "highest power drawn by a tool, in units of 200 W"),
    }
    return {
        name: Part(weight=weight, low=0.0, high=ranges[name][0], description=ranges[name][1])
        for name, weight in weights.by_part().items()
    }


def compute(episode: Episode, weights: Weights = Weights(), scales: Scales = Scales()) -> float:  # noqa: B008
    """The reward of an episode."""
    return compute_with_breakdown(episode, weights, scales)["reward"]


def compute_with_breakdown(
    episode: Episode,
    weights: Weights = Weights(),  # noqa: B008
    scales: Scales = Scales(),  # noqa: B008
) -> dict[str, float]:
    """The reward and the contribution of each part: `reward`, `accuracy`, `cost`, `energy`, `latency`, `power`."""
    by_part, parts = weights.by_part(), parts_of(episode, scales)
    added = {name: by_part[name] * value for name, value in parts.items()}
    return {"reward": sum(added.values()), **added}
