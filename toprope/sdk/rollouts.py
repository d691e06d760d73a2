"""Plays rollouts: the loop of reset, step and score that we own, so that authors do not write it.

A bad rollout is data: whatever an author's `step` or `score` raises ends that rollout with an error in its outcome and
a reward of 0, and nothing else.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from toprope.sdk.authoring.environment import Environment, Messages, Outcome, Scoring, Task, as_messages, copy_for
from toprope.sdk.authoring.knobs import make_knobs
from toprope.sdk.authoring.rewards import RewardFunctions, seen_of
from toprope.sdk.errors import EnvironmentMistake, Failure, InvalidRequest

__all__ = ["Rollout", "Turn", "configure", "grouped", "play", "score_together"]

_LONGEST_ERROR = 500


@dataclass(frozen=True)
class Turn:
    """What follows an answer: messages for the policy, and the outcome once the rollout is done."""

    messages: Messages
    done: bool
    outcome: Outcome | None = None


def configure(
    environment: Environment,
    *,
    knobs: Mapping[str, Any] | None = None,
    reward_weights: Mapping[str, float] | None = None,
    max_turns: int | None = None,
    seed: int = 0,
) -> Environment:
    """Makes a fresh instance ready to play, in place.

    Args:
        environment: The instance, as its class or factory made it.
        knobs: Settings by name.
        reward_weights: Weights by part; parts that it does not name keep their own.
        max_turns: Can lower the environment's own limit, never raise it.
        seed: Seed of what happens within rollouts.

    Raises:
        InvalidRequest: A knob, a weight or the limit is wrong.
        EnvironmentMistake: The environment's `parts` or `max_turns` are.
    """
    environment.knobs = make_knobs(environment.Knobs, knobs or {})
    environment.seed = seed
    environment.random = random.Random("tasks")
    environment.setup()
    own = environment.max_turns
    if not isinstance(own, int) or isinstance(own, bool) or own < 1:
        raise EnvironmentMistake(f"max_turns must be a whole number of at least 1, not {own!r}.")
    if max_turns is not None:
        if not isinstance(max_turns, int) or isinstance(max_turns, bool) or max_turns < 1:
            raise InvalidRequest(f"max_turns must be a whole number of at least 1, not {max_turns!r}.")
        environment.max_turns = min(own, max_turns)
    environment.parts = Scoring.weighted(environment.parts, reward_weights or {}).parts
    return environment


class Rollout:
    """One rollout of one task.

    Args:
        environment: A configured environment; it is copied.
        task: The task.
        near: Folder of the environment's code, for error messages.
    """

    def __init__(self, environment: Environment, task: Task, near: str = "") -> None:
        self._environment = copy_for(environment, task)
        self._limit = environment.max_turns
        self._near = near
        self._grouped = grouped(environment)
        self._ending: Outcome | None = None
        self.done = False
        self.functions: RewardFunctions | None = None
        """Reward functions that the outcome does not have in it yet."""

    def seen(self) -> dict[str, Any]:
        """What reward functions see of it."""
        return seen_of(self._environment.task, self._environment.messages)

    def begin(self) -> Messages:
        """Resets and returns what the policy sees first. What `reset` raises is raised.

        Raises:
            EnvironmentMistake: `reset` returned no message or something else.
        """
        environment = self._environment
        first = environment.reset(environment.task)
        messages = as_messages(first, "what reset() returned")
        if not messages:
            raise EnvironmentMistake("reset() must return what the policy sees first; it returned nothing.")
        environment.messages = list(messages)
        return messages

    def advance(
        self, text: str, truncated: bool = False, *, only: bool = False, tokens: Sequence[int] = (), alone: bool = True
    ) -> Turn:
        """Takes one answer.

        Args:
            text: The policy's answer.
            truncated: Whether it was cut off by a limit of length. Such an answer is scored as it stands and ends the
                rollout.
            only: Score after this answer, whatever the environment says.
            tokens: Ids of the answer's tokens, for an environment that wants them.
            alone: Whether to score at once. Otherwise, where the environment scores groups, the turn that ends the
                rollout has no outcome: `score_together` has it.
        """
        environment = self._environment
        environment.answer, environment.truncated = text, truncated
        if tokens:
            environment.tokens = [*environment.tokens, *tokens]
        environment.messages.append({"role": "assistant", "content": text})
        environment.turns += 1
        messages: Messages = []
        try:
            messages, done = self._step(text)
            environment.messages.extend(messages)
            if not (done or truncated or only or environment.turns >= self._limit):
                return Turn(messages, False)
            self.done = True
            if self._grouped and not alone:
                return Turn(messages, True)
            returned = environment.score_group([environment]) if self._grouped else [environment.score()]
            outcome = self._judged(returned, 0, 1)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # an author's code may raise anything, SystemExit too
            outcome = self._ending = self._failed(error)
        self.done = True
        return Turn(messages, True, outcome)

    def solve(self, variant: int) -> str | None:
        """The environment's own next answer, if it has one. What it raises is raised."""
        said = self._environment.solve(variant)
        if said is not None and not isinstance(said, str):
            raise EnvironmentMistake(f"solve() must return a text or None, not {said!r:.80}.")
        return said

    def _step(self, text: str) -> tuple[Messages, bool]:
        returned = self._environment.step(text)
        if not isinstance(returned, tuple) or len(returned) != 2 or not isinstance(returned[1], bool | int):
            raise EnvironmentMistake(f"step() must return (messages, done), not {returned!r:.80}.")
        messages, done = as_messages(returned[0], "what step() returned"), bool(returned[1])
        if not done and not messages:
            raise EnvironmentMistake("step() returned no message for the policy and did not end the rollout.")
        return messages, done

    def _judged(self, returned: Any, place: int, count: int) -> Outcome:
        """The outcome, from what a group of `count` was given; raises what is wrong with it."""
        environment = self._environment
        if not isinstance(returned, list | tuple) or len(returned) != count:
            raise EnvironmentMistake(f"score_group() must return a list of {count} results, one for each rollout.")
        if isinstance(returned[place], BaseException):
            raise returned[place]
        scoring = Scoring(environment.parts)
        parts = scoring.read(returned[place], environment.measured())
        reward = scoring.reward(parts)
        return Outcome(
            reward=reward,
            parts=parts,
            success=bool(environment.success(dict(parts), reward)),
            turns=environment.turns,
            truncated=environment.truncated,
        )

    def _failed(self, error: BaseException) -> Outcome:
        return Outcome(
            reward=0.0,
            turns=self._environment.turns,
            truncated=self._environment.truncated,
            error=Failure.of(error, self._near).line()[:_LONGEST_ERROR],
        )


def grouped(environment: Environment) -> bool:
    """Whether an environment scores the rollouts of a group together."""
    return type(environment).score_group is not Environment.score_group


def score_together(rollouts: Sequence[Rollout]) -> list[Outcome]:
    """The outcomes of rollouts of one task that are done and were not scored alone. Those that ended with an error keep
    it and are not scored."""
    waiting = [rollout for rollout in rollouts if rollout._ending is None]
    failure: BaseException | None = None
    returned: Any = []
    if waiting:
        environments = [rollout._environment for rollout in waiting]
        try:
            returned = environments[0].score_group(environments)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # as in advance
            failure = error
    for place, rollout in enumerate(waiting):
        try:
            if failure is not None:
                raise failure
            rollout._ending = rollout._judged(returned, place, len(waiting))
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            rollout._ending = rollout._failed(error)
    return [rollout._ending for rollout in rollouts if rollout._ending is not None]


def play(environment: type[Environment], answers: Iterable[str], *, index: int = 0, **knobs: Any) -> Outcome:
    """Plays one task in this process: for an author's own tests.

    Args:
        environment: The class.
        answers: What the policy says, turn by turn; they may run out when the rollout ends before.
        index: Which of the environment's tasks.
        **knobs: Settings.

    Raises:
        InvalidRequest: There is no such task or knob, or the answers end before the rollout does.
    """
    ready = configure(environment(), knobs=knobs)
    task = next(islice(iter(ready.tasks()), index, None), None)
    if task is None:
        raise InvalidRequest(f"{environment.__name__} has no task {index}.")
    rollout = Rollout(ready, task)
    rollout.begin()
    for answer in answers:
        turn = rollout.advance(answer)
        if turn.outcome is not None:
            return turn.outcome
    raise InvalidRequest("The answers ended before the rollout did.")
