"""What authors write against: a `Task`, the `Part`s of a reward, and an `Environment` that hands out and scores tasks.

The smallest environment has two methods:

    class Add(Environment):
        \"\"\"Add two numbers.\"\"\"

        def tasks(self):
            for a in range(100):
                for b in range(100):
                    yield Task(f"What is {a} + {b}?", reference=str(a + b))

        def score(self):
            return self.answer.strip() == self.task.reference

Every rollout plays on its own shallow copy of the environment: what `reset` and `step` set on `self` belongs to that
rollout, what `setup` has set is shared by all of them and should not be changed in place.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from toprope.sdk.authoring.knobs import nearest
from toprope.sdk.errors import EnvironmentMistake, InvalidRequest, sayable

__all__ = ["Environment", "Messages", "Outcome", "Part", "Scoring", "Task", "as_messages", "copy_for"]

Messages = list[dict[str, Any]]
"""Chat messages: `{"role": "system" | "user" | "assistant" | "tool", "content": str}`."""

_ROLES = ("system", "user", "assistant", "tool")
_TOLERANCE = 1e-9
_LONGEST_NAME = 100
"""Of a reward part: its name stands in tables, metrics and errors."""


def as_messages(value: Any, what: str) -> Messages:
    """Messages from what an author gave: a text (one message of the user), messages, or None (no message).

    Args:
        value: What was given.
        what: Who gave it, for the error: `reset()`, `the prompt`.

    Raises:
        EnvironmentMistake: It is none of these.
    """
    if value is None:
        return []
    if isinstance(value, str):
        return [{"role": "user", "content": sayable(value)}]
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, list | tuple):
        raise EnvironmentMistake(f"{what} must be a text or a list of messages, not {type(value).__name__}.")
    messages = []
    for message in value:
        if not isinstance(message, Mapping) or message.get("role") not in _ROLES:
            raise EnvironmentMistake(f"{what} holds {message!r:.80}: a message is a dict with a role of {_ROLES}.")
        if not isinstance(message.get("content"), str):
            raise EnvironmentMistake(f"{what} holds a message whose content is not a text: {message!r:.80}.")
        messages.append({**message, "content": sayable(message["content"])})
    return messages


@dataclass(frozen=True, eq=False)
class Task:
    """What the policy is asked once, and what scoring needs.

    Args:
        prompt: A text, or chat messages.
        reference: The right answer, if there is one that can be given as a text. Shown to people, tried by checks.
        data: Anything else that `reset`, `step` and `score` need.
        key: What makes this task's content, where its prompt does not tell tasks apart. Tasks with equal content
            count as one; splits share none. By default all the user's text of the prompt.
    """

    prompt: str | Messages
    reference: Any = None
    data: dict[str, Any] = field(default_factory=dict)
    key: str | None = None

    @property
    def messages(self) -> Messages:
        """The prompt as new messages.

        Raises:
            EnvironmentMistake: The prompt is empty or of the wrong shape.
        """
        messages = as_messages(self.prompt, "the prompt of a task")
        if not messages:
            raise EnvironmentMistake("A task needs a prompt.")
        return messages

    @property
    def content(self) -> str:
        """The content in a form that ignores case and white space; equal for tasks that count as one."""
        if self.key is not None:
            return " ".join(self.key.casefold().split())
        messages = self.messages
        asked = [message["content"] for message in messages if message["role"] == "user"]
        return " ".join(" ".join(asked or [message["content"] for message in messages]).casefold().split())

    @property
    def id(self) -> str:
        """Hash of the content, 16 hexadecimal digits, the same in every process."""
        return hashlib.sha256(self.content.encode("utf-8", "surrogatepass")).hexdigest()[:16]


@dataclass(frozen=True)
class Part:
    """One named part of a reward.

    Args:
        weight: Its factor in the reward; 0 for what is only shown.
        low: Smallest value that `score` gives it.
        high: Largest value that `score` gives it.
        description: One line for whoever weighs it.
    """

    weight: float = 1.0
    low: float = 0.0
    high: float = 1.0
    description: str = ""


@dataclass
class Outcome:
    """How a rollout ended. Its fields are those of toprope.records.journal.groups.Outcome."""

    reward: float
    parts: dict[str, float] = field(default_factory=dict)
    success: bool = False
    turns: int = 1
    truncated: bool = False
    error: str | None = None


class Environment:
    """Base class. The first line of a subclass's docstring is its description.

    `tasks` and `score` must be written; `setup`, `reset`, `step` and `success` where the defaults do not do.
    """

    name: ClassVar[str] = ""
    """How the environment is listed; by default the name of its file."""
    max_turns: int = 1
    """Answers that the policy may give. `setup` may set it from the knobs."""
    parts: dict[str, Part] = {"score": Part()}  # noqa: RUF012 - authors override it as a plain attribute
    """The named parts of the reward, which is the sum of weight times value."""
    tags: tuple[str, ...] = ()
    guessed_reference: bool = False
    """Whether the tasks' references are somebody else's guess of which column holds the right answer, in which form."""
    packages: tuple[str, ...] = ()
    """Distributions whose versions matter to the tasks; they are recorded with every run."""
    files: tuple[str, ...] = ()
    """Paths of files of the author's beside its own; what they hold is recorded with every run, as a hash."""
    wants_tokens: bool = False
    """Whether `tokens` is filled in. It costs a little at every answer."""

    @dataclass
    class Knobs:
        """Settings, as annotated fields: `length: int = knob(5, ge=1, help="letters in a word")`."""

    knobs: Any
    """The instance of `Knobs` in force."""
    seed: int = 0
    """The run's seed. What happens within rollouts may depend on it; the tasks do not."""
    random: random.Random
    """In `tasks` a generator that is the same in every run; in a rollout one that its task and the seed determine."""
    task: Task
    """In a rollout: what is asked."""
    messages: Messages
    """In a rollout: everything said so far, the newest answer last."""
    answer: str = ""
    """In a rollout: the newest answer."""
    turns: int = 0
    """In a rollout: answers so far."""
    truncated: bool = False
    """In a rollout: whether the newest answer was cut off at its longest."""
    tokens: Sequence[int] = ()
    """In a rollout, with `wants_tokens`: ids of all tokens that the policy sampled in it. Empty where nobody sampled,
    as when a fixed answer is tried."""

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        knobs = cls.__dict__.get("Knobs")
        if isinstance(knobs, type) and "__dataclass_fields__" not in knobs.__dict__:
            cls.Knobs = dataclasses.dataclass(knobs)  # the decorator may be left out

    def setup(self) -> None:
        """Called once, when the knobs are set: load data, choose `max_turns` or `parts`."""

    def tasks(self) -> Iterable[Task]:
        """All tasks, finite or endless, in the same order in every process.

        Write `tasks(self, split)` instead to give `train`, `validation` and `heldout` yourself.
        """
        raise NotImplementedError(f"{type(self).__name__} does not say what its tasks are: write tasks(self).")

    def reset(self, task: Task) -> str | Messages:
        """Begins a rollout; what it returns is what the policy sees first."""
        return task.prompt

    def step(self, text: str) -> tuple[str | Messages | None, bool]:
        """Takes one answer; returns what the policy sees next, and whether the rollout is done."""
        return None, True

    def score(self) -> dict[str, float]:
        """The value of each of `parts`, once the rollout is done. A plain number will do where there is one part."""
        raise NotImplementedError(f"{type(self).__name__} does not score: write score(self).")

    def score_group(self, rollouts: Sequence[Environment]) -> Sequence[Any]:
        """What `score` would return for each of several rollouts of one task, in their order. Overridden where they are
        scored by each other or in one batch: it is then called once for all of a group, when the last of them is done.

        An exception in a rollout's place is the error of that one; one that is raised is the error of all.
        """
        return [rollout.score() for rollout in rollouts]

    def measured(self) -> dict[str, float]:
        """Values of parts that need no judgement, such as what was spent; `score` then leaves these out."""
        return {}

    def solve(self, variant: int = 0) -> str | None:
        """The next answer of someone who can do the task, for demonstrations; None where nobody is there to give it.

        Called in a rollout, after `reset` and after each `step`. Demonstrations of one task differ by their variant.
        By default: the reference, if there is one.
        """
        return None if self.task.reference is None else str(self.task.reference)

    def success(self, parts: dict[str, float], reward: float) -> bool:
        """Whether the rollout counts as solved. By default: whether it has the highest reward there is."""
        return reward >= Scoring.of(self).max_reward - _TOLERANCE


class Scoring:
    """The arithmetic of a reward: named parts, their weights, and what may go wrong with what `score` returns.

    Args:
        parts: The parts with the weights in force.
    """

    def __init__(self, parts: dict[str, Part]) -> None:
        self.parts = parts
        self.max_reward = sum(max(part.weight * part.low, part.weight * part.high) for part in parts.values())
        self.min_reward = sum(min(part.weight * part.low, part.weight * part.high) for part in parts.values())

    @classmethod
    def of(cls, environment: Environment) -> Scoring:
        """The scoring of an environment with its own weights, or those that were set on this copy of it."""
        return cls(environment.parts)

    @classmethod
    def weighted(cls, parts: Any, weights: Mapping[str, float]) -> Scoring:
        """Scoring with weights of the caller's; parts that they do not name keep their own.

        Raises:
            EnvironmentMistake: The environment's parts are not a dict of `Part`.
            InvalidRequest: A weight names no part, is no finite number, or all weights are zero.
        """
        if not isinstance(parts, Mapping) or not parts or not all(isinstance(p, Part) for p in parts.values()):
            raise EnvironmentMistake("`parts` must be a dict of names and Part(...), with one part at least.")
        for name, part in parts.items():
            if not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= _LONGEST_NAME:
                raise EnvironmentMistake(
                    f"The name of a reward part is a printable text of at most {_LONGEST_NAME} characters, not "
                    f"{name!r:.120}."
                )
            if not all(map(_finite, (part.weight, part.low, part.high))) or part.low > part.high:
                raise EnvironmentMistake(f"Part {name!r} needs finite numbers with low <= high, not {part}.")
        own = dict(parts)
        for name, weight in weights.items():
            if name not in own:
                raise InvalidRequest(f"There is no reward part {name!r}. {nearest(name, own, 'Parts')}")
            if not _finite(weight):
                raise InvalidRequest(f"The weight of reward part {name!r} must be a finite number, not {weight!r}.")
            own[name] = dataclasses.replace(own[name], weight=float(weight))
        scoring = cls(own)
        if scoring.max_reward == scoring.min_reward:
            raise InvalidRequest(
                f"With these weights the reward is always {scoring.max_reward:g}: set one other than 0."
            )
        return scoring

    def read(self, returned: Any, measured: Mapping[str, float] | None = None) -> dict[str, float]:
        """Checks what `score` returned.

        Args:
            returned: A number for each part, or one where there is one part.
            measured: What `measured` returned: parts that `score` may leave out.

        Raises:
            EnvironmentMistake: Parts are missing or unknown, or a value is no finite number within its range.
        """
        judged = [name for name in self.parts if name not in (measured or ())]
        if not isinstance(returned, Mapping):
            if len(judged) > 1 or not _is_number(returned):
                raise EnvironmentMistake(
                    f"score() returned {returned!r:.40}, which is not a number for each of {', '.join(judged)}."
                )
            returned = dict.fromkeys(judged, returned)
        returned = {**(measured or {}), **returned}
        if returned.keys() != self.parts.keys():
            raise EnvironmentMistake(
                f"score() returned the parts {', '.join(map(str, returned)) or 'none'}; "
                f"the environment declares {', '.join(self.parts)}."
            )
        values = {}
        for name, part in self.parts.items():
            value = returned[name]
            if not _is_number(value):
                raise EnvironmentMistake(f"score() gave part {name!r} {value!r:.40}, which is not a number.")
            number = float(value)
            if not math.isfinite(number):
                raise EnvironmentMistake(f"score() gave part {name!r} {number}, which is not finite.")
            if not part.low - _TOLERANCE <= number <= part.high + _TOLERANCE:
                raise EnvironmentMistake(
                    f"score() gave part {name!r} {number:g}, outside its range of {part.low:g} to {part.high:g}; "
                    "Part(low=, high=) declares it."
                )
            values[name] = number
        return values

    def reward(self, values: Mapping[str, float]) -> float:
        """The weighted sum."""
        return sum(part.weight * values[name] for name, part in self.parts.items())


def _is_number(value: Any) -> bool:
    """True for numbers, and for what stands for one number elsewhere (NumPy's and torch's scalars)."""
    return not isinstance(value, str | bytes | complex) and hasattr(type(value), "__float__")


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def copy_for(environment: Environment, task: Task) -> Environment:
    """The shallow copy that one rollout of a task plays on."""
    rollout = copy.copy(environment)
    rollout.task = task
    rollout.messages = []
    rollout.answer = ""
    rollout.turns = 0
    rollout.truncated, rollout.tokens = False, []
    rollout.random = random.Random(f"{environment.seed}:{task.id}")
    return rollout
