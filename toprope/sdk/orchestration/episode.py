"""Actions, observations, steps, episodes and states of a policy that uses tools.

An episode converts to plain JSON (`to_dict`) and back (`from_dict`), so that traces can be stored, filtered and trained
on. Units: seconds, USD, joules, watts.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from typing import Any

__all__ = ["Action", "Episode", "Observation", "State", "Step"]


@dataclass(frozen=True)
class Action:
    """The policy's choice: a tool with its input, or the final answer (in `tool_input`)."""

    thought: str = ""
    tool_name: str = ""
    tool_input: str = ""
    is_final_answer: bool = False
    raw_text: str = ""
    """The policy's whole text."""
    confidence: float = 1.0
    problem: str = ""
    """Reason that the text is not an action; empty if it is one."""
    latency_seconds: float = 0.0
    energy_joules: float = 0.0
    """Energy that sampling the text took."""
    tokens: int = 0
    """Tokens that the policy sampled."""
    energy_source: str = "none"
    """As in `Observation`."""


@dataclass(frozen=True)
class Observation:
    """The result of a tool call and its cost."""

    content: str
    latency_seconds: float = 0.0
    cost_usd: float = 0.0
    energy_joules: float = 0.0
    power_watts: float = 0.0
    tokens: int = 0
    energy_source: str = "none"
    """`measured`, `declared`, `estimate` or `none`."""
    failed: bool = False
    """True if the call failed: unknown tool, malformed answer, or an error in the tool."""


@dataclass(frozen=True)
class Step:
    """One turn. Turns count from 1."""

    turn: int
    action: Action
    observation: Observation


@dataclass
class Episode:
    """A whole task with its totals."""

    task_id: str
    initial_prompt: str
    steps: list[Step] = field(default_factory=list)
    final_answer: str = ""
    ground_truth: str = ""
    correct: bool = False
    metadata: dict[str, Any] = field(default_factory=dict)

    def add_step(self, action: Action, observation: Observation) -> Step:
        """Appends the next turn."""
        step = Step(len(self.steps) + 1, action, observation)
        self.steps.append(step)
        return step

    @property
    def num_turns(self) -> int:
        return len(self.steps)

    @property
    def total_latency_seconds(self) -> float:
        return sum(part.latency_seconds for part in self._parts())

    @property
    def total_cost_usd(self) -> float:
        return sum(step.observation.cost_usd for step in self.steps)

    @property
    def total_energy_joules(self) -> float:
        """Energy of the policy and of the tools."""
        return sum(part.energy_joules for part in self._parts())

    @property
    def total_tokens(self) -> int:
        """Tokens that the policy sampled, and those of the observations."""
        return sum(part.tokens for part in self._parts())

    @property
    def max_power_watts(self) -> float:
        return max((step.observation.power_watts for step in self.steps), default=0.0)

    @property
    def intelligence_per_joule(self) -> float:
        """1 / total joules for a right answer; 0 for a wrong one, or if no energy was used."""
        energy = self.total_energy_joules
        return 1.0 / energy if self.correct and energy > 0 else 0.0

    def _parts(self) -> Iterator[Action | Observation]:
        return itertools.chain.from_iterable((step.action, step.observation) for step in self.steps)

    def totals(self) -> dict[str, float]:
        """The totals by name."""
        return {
            "latency_seconds": self.total_latency_seconds,
            "cost_usd": self.total_cost_usd,
            "energy_joules": self.total_energy_joules,
            "max_power_watts": self.max_power_watts,
            "tokens": self.total_tokens,
            "turns": self.num_turns,
            "intelligence_per_joule": self.intelligence_per_joule,
        }

    def to_dict(self) -> dict[str, Any]:
        """The episode as JSON values, totals included."""
        return asdict(self) | {"totals": self.totals()}

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> Episode:
        """The episode that `to_dict` wrote; fields of a newer version are ignored.

        Raises:
            KeyError, TypeError: `value` is not an episode.
        """
        steps = [
            Step(
                step["turn"],
                _from_known_fields(Action, step["action"]),
                _from_known_fields(Observation, step["observation"]),
            )
            for step in value["steps"]
        ]
        episode: Episode = _from_known_fields(cls, value)
        episode.steps = steps
        return episode


@dataclass
class State:
    """The policy's view when it chooses: the task and the turns so far."""

    initial_prompt: str
    history: list[Step] = field(default_factory=list)
    final_answer: str = ""

    def add_turn(self, action: Action, observation: Observation) -> None:
        """Appends the next turn."""
        self.history.append(Step(len(self.history) + 1, action, observation))

    @property
    def num_turns(self) -> int:
        return len(self.history)

    def to_episode(self, task_id: str, ground_truth: str, correct: bool, **metadata: Any) -> Episode:
        """The finished episode."""
        return Episode(
            task_id, self.initial_prompt, list(self.history), self.final_answer, ground_truth, correct, metadata
        )


def _from_known_fields(kind: Any, value: dict[str, Any]) -> Any:
    names = {declared_field.name for declared_field in fields(kind)}
    return kind(**{name: item for name, item in value.items() if name in names})
