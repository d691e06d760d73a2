"""What a run is made of besides its selected environment: others beside it, levels of difficulty, reward functions.

The configuration holds these as plain JSON, so that an agent edits them as it edits any field. Here they are checked
when they are set, and read as value objects by whoever works with them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

if TYPE_CHECKING:
    from toprope.settings.schema import EnvironmentSection

__all__ = [
    "MOST_MEMBERS",
    "Curriculum",
    "MemberPlan",
    "MixtureEntry",
    "RewardFunction",
    "curriculum_of",
    "members_of",
    "mismatches",
    "plain_curriculum",
    "plain_mixture",
    "plain_rewards",
    "rewards_of",
]

MOST_MEMBERS = 32
_MOST_REWARDS = 32
_FORMS = {
    "fn": "not of the form 'file.py:function'",
    "name": "no name of letters, digits and underscores",
    "label": "not of letters, digits, spaces and ./:+-",
}
_NAME = r"^[A-Za-z0-9_][\w .:/+-]{0,79}$"


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class RewardFunction(_Entry):
    """One named, weighted part of a reward that the owner's own function gives."""

    name: str = Field(pattern=r"^[A-Za-z_]\w{0,63}$", description="The part's name.")
    weight: float = Field(1.0, description="Its factor in the reward.")
    fn: str = Field(
        pattern=r"^[^:\x00-\x1f]{1,400}\.py:[A-Za-z_]\w*$",
        description="file.py:function; the file lies in one of the owner's environment folders.",
    )
    low: float = Field(0.0, description="Smallest value that it gives.")
    high: float = Field(1.0, description="Largest value that it gives.")

    @property
    def file(self) -> str:
        return self.fn.rpartition(":")[0]

    @property
    def function(self) -> str:
        return self.fn.rpartition(":")[2]


class Curriculum(_Entry):
    """A knob that moves from level to level as validation tasks of the present one are solved."""

    knob: str = Field(min_length=1, description="Which of the environment's knobs.")
    levels: list[Any] = Field(min_length=2, max_length=64, description="Its values, the easiest first.")
    success: float = Field(0.8, gt=0, le=1, description="Share of validation answers that opens the next level.")
    min_steps: int = Field(
        20, ge=1, le=1_000_000, description="Steps at a level before it is measured, and between measures."
    )
    window: int = Field(32, ge=1, le=10_000, description="Validation tasks that are answered for a measure.")
    earlier_share: float = Field(0.1, ge=0, le=0.9, description="Share of groups that stay at earlier levels.")
    measured_level: int | None = Field(
        None, ge=0, description="Number of the level, from 0, that evaluations measure; null: the last."
    )

    @property
    def measured(self) -> int:
        """The number of the level at which held-out and validation tasks are evaluated."""
        return len(self.levels) - 1 if self.measured_level is None else self.measured_level


class MixtureEntry(_Entry):
    """One environment beside the selected one."""

    name: str = Field(min_length=1, description="As list_environments names it.")
    label: str | None = Field(None, pattern=_NAME, description="What it is called in this run; its name where null.")
    weight: float = Field(1.0, gt=0, le=1e6, description="Share of groups, relative to the others' weights.")
    min_share: float = Field(0.0, ge=0, lt=1, description="Share of groups that it never falls below.")
    knobs: dict[str, Any] = Field(default_factory=dict, description="Its own settings.")
    reward_weights: dict[str, float] = Field(default_factory=dict)
    reward_weights_end: dict[str, float] = Field(default_factory=dict)
    max_turns: int | None = Field(None, ge=1, le=1000, description="null: as environment.max_turns.")
    rewards: list[Any] = Field(default_factory=list, description="As environment.rewards.")
    curriculum: dict[str, Any] = Field(default_factory=dict, description="As environment.curriculum.")


class MemberPlan:
    """One environment of a run, the selected one or another: what it is called, its share, its settings."""

    def __init__(self, name: str, label: str, weight: float, min_share: float, section: EnvironmentSection) -> None:
        self.name, self.label, self.weight, self.min_share = name, label, weight, min_share
        self.section = section
        """As if it were selected alone."""

    @property
    def curriculum(self) -> Curriculum | None:
        return curriculum_of(self.section.curriculum)

    @property
    def rewards(self) -> list[RewardFunction]:
        return rewards_of(self.section.rewards)


def members_of(section: EnvironmentSection) -> list[MemberPlan]:
    """The environments of a run, the selected one first."""
    alone = section.model_copy(update={"mixture": []})
    found = [MemberPlan(section.name, section.name, section.weight, section.min_share, alone)]
    for one in section.mixture:
        entry = MixtureEntry.model_validate(one)
        own = {
            "name": entry.name,
            "knobs": entry.knobs,
            "reward_weights": entry.reward_weights,
            "reward_weights_end": entry.reward_weights_end,
            "max_turns": entry.max_turns or section.max_turns,
            "rewards": entry.rewards,
            "curriculum": entry.curriculum,
        }
        label = entry.label or entry.name
        found.append(MemberPlan(entry.name, label, entry.weight, entry.min_share, alone.model_copy(update=own)))
    return found


def curriculum_of(value: Mapping[str, Any]) -> Curriculum | None:
    """The curriculum that a field holds, None where it is empty."""
    return Curriculum.model_validate(value) if value else None


def rewards_of(value: Sequence[Any]) -> list[RewardFunction]:
    """The reward functions that a field holds."""
    return [RewardFunction.model_validate(one) for one in value]


def plain_rewards(value: list[Any]) -> list[Any]:
    """Checks environment.rewards; every entry with all its fields.

    Raises:
        ValueError: It is wrong; the message says where and what is expected.
    """
    if len(value) > _MOST_REWARDS:
        raise ValueError(f"{len(value)} reward functions are more than {_MOST_REWARDS}")
    entries = [_read(RewardFunction, one, f"entry {number}") for number, one in enumerate(value, 1)]
    _unlike([entry.name for entry in entries], "name")
    for number, entry in enumerate(entries, 1):
        if entry.low > entry.high:
            raise ValueError(f"entry {number}: low {entry.low:g} is above high {entry.high:g}")
    return [entry.model_dump(mode="json") for entry in entries]


def plain_curriculum(value: dict[str, Any]) -> dict[str, Any]:
    """Checks environment.curriculum; with all its fields, or empty. Raises: ValueError."""
    if not value:
        return {}
    curriculum = _read(Curriculum, value, "the curriculum")
    if curriculum.measured >= len(curriculum.levels):
        raise ValueError(f"measured_level {curriculum.measured} is no number of its {len(curriculum.levels)} levels")
    if any(curriculum.levels[place] in curriculum.levels[:place] for place in range(len(curriculum.levels))):
        raise ValueError("levels holds a value twice")
    return curriculum.model_dump(mode="json")


def plain_mixture(value: list[Any]) -> list[Any]:
    """Checks environment.mixture; every entry with all its fields. Raises: ValueError."""
    if len(value) >= MOST_MEMBERS:
        raise ValueError(f"a run has at most {MOST_MEMBERS} environments")
    entries = []
    for number, one in enumerate(value, 1):
        entry = _read(MixtureEntry, one, f"entry {number}")
        try:
            own = {"rewards": plain_rewards(entry.rewards), "curriculum": plain_curriculum(entry.curriculum)}
        except ValueError as problem:
            raise ValueError(f"entry {number} ({entry.name}): {problem}") from None
        entries.append(entry.model_copy(update=own))
    _unlike([entry.label or entry.name for entry in entries], "label")
    return [entry.model_dump(mode="json") for entry in entries]


def mismatches(section: EnvironmentSection) -> list[str]:
    """Sentences about environments that do not fit each other; empty where they do."""
    members, found = members_of(section), []
    for other in members[1:]:
        if other.label == section.name:
            found.append(
                f"environment.mixture has {section.name}, which is the selected environment: give the entry a label of "
                "its own, or set environment.weight."
            )
    claimed = sum(member.min_share for member in members)
    if claimed > 1:
        found.append(f"The minimum shares of the environments add up to {claimed:.3g}, which is more than 1.")
    curriculum = members[0].curriculum
    if curriculum is not None and section.knobs and curriculum.knob not in section.knobs:
        known = ", ".join(section.knobs)
        found.append(f"environment.curriculum moves {curriculum.knob!r}, no knob of {section.name}, which has {known}.")
    return found


_Model = TypeVar("_Model", bound=BaseModel)


def _read(model: type[_Model], value: Any, where: str) -> _Model:
    """The object; what is wrong in words, with the fields there are."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{where} must be an object with {', '.join(model.model_fields)}")
    try:
        return model.model_validate(value)
    except ValidationError as error:
        told = []
        for problem in error.errors(include_url=False, include_input=False):
            place = ".".join(map(str, problem["loc"]))
            if problem["type"] == "extra_forbidden":
                told.append(f"there is no {place!r}; it has {', '.join(model.model_fields)}")
            elif problem["type"] == "missing":
                told.append(f"{place} is missing")
            elif problem["type"] == "string_pattern_mismatch":
                told.append(f"{place} is {_FORMS.get(place, 'not of the right form')}")
            else:
                told.append(f"{place}: {problem['msg']}")
        raise ValueError(f"{where}: {'; '.join(told)}") from None


def _unlike(names: Sequence[str], what: str) -> None:
    twice = next((name for place, name in enumerate(names) if name in names[:place]), None)
    if twice is not None:
        raise ValueError(f"the {what} {twice!r} is there twice")
