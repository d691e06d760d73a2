"""Training scripts that sample their rollouts themselves, by the `rollout_func` of TRL's trainer.

The function is called with one prompt per rollout, as TRL 1.16 calls it, `(prompts, trainer)`, or TRL 0.24, `(prompts,
args, processing_class)`. `trainer` stands in for TRL's: see `toprope.sdk.adapters._trl.trainer`. What it returns beside
the ids of tokens goes to the reward functions, which are called once for a group.

Differences from TRL:
- Tokenizers are of bytes, so texts have about four times as many tokens, and limits that a script sets on `len(ids)`
  are met sooner. Log-probabilities are 0. Training uses the tokens that the policy's server recorded.
- All answers of a rollout are trained on: an answer whose prompt continues the one before it is in one sequence with
  it, others are sequences of their own with the same reward. Of answers to one and the same prompt the last counts.
- The policy samples by the run's settings: `args` has its temperature and its limit of tokens, num_generations is 1.
- `state.global_step` is the number of the task, and random numbers are equal within a group.
- Rollouts of a process run one after another. `environments` and `tools` beside the function are refused.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from toprope.sdk.adapters._shared.chatml import tokenizer_of_bytes
from toprope.sdk.adapters._shared.random_state import OwnRandom
from toprope.sdk.adapters._shared.rows import is_chat
from toprope.sdk.adapters._trl.placeholders import PRESENT, placeholders
from toprope.sdk.adapters._trl.script import ROLLOUT, Recorded
from toprope.sdk.adapters._trl.trainer import NoAnswer, StandIn, Talk
from toprope.sdk.adapters._trl.turns import Turns
from toprope.sdk.adapters._trl.user_rewards import UserRewards
from toprope.sdk.authoring.env_managed import OwnLoop, Played, Session
from toprope.sdk.authoring.environment import Task
from toprope.sdk.errors import EnvironmentMistake, LoadError

__all__ = ["TrlRollouts"]

_LISTS = ("prompt_ids", "completion_ids", "logprobs")
"""The fields that TRL requires."""
_MASK = "env_mask"
_OLDER = 3
"""Number of parameters of a rollout function of TRL 0.24."""


@dataclass
class _Sampled(Played):
    """A rollout before it is scored."""

    completion_ids: list[int] = field(default_factory=list)
    columns: dict[str, Any] = field(default_factory=dict)
    """The columns that its reward functions get: those of its row, and the function's own."""


class TrlRollouts(UserRewards, OwnLoop):
    """A training script of TRL with a rollout function."""

    takes_turns = True
    samples = True

    @property
    def _is_played(self) -> bool:
        return True

    def _take(self, recorded: Recorded | None) -> None:
        assert recorded is not None  # a script alone has such a function
        name = self._user.path.name
        if recorded.environment is not None or recorded.tools:
            raise LoadError(f"{name} gives its trainer {ROLLOUT} beside tools or environment_factory: leave out one.")
        if not callable(recorded.rollout_func):
            raise LoadError(f"{name}: {ROLLOUT} is {type(recorded.rollout_func).__name__}, which cannot be called.")
        try:
            of_bytes = tokenizer_of_bytes()
        except ImportError as error:
            raise LoadError(
                f"{name} samples by {ROLLOUT}, which needs a tokenizer: install transformers in its interpreter "
                f"({error})."
            ) from error
        # The script's own is one of bytes, too, which it may have set.
        has_own = type(recorded.processing_class).__module__.startswith("transformers.")
        self._tokenizer = recorded.processing_class if has_own else of_bytes
        self._function, self._settings, self._turns = recorded.rollout_func, recorded.settings, Turns()

    async def group(self, task: Task, sessions: Sequence[Session]) -> list[Played | BaseException]:
        results = await super().group(task, sessions)
        sampled = [result for result in results if isinstance(result, _Sampled) and result.error is None]
        if sampled:
            for result, scored in zip(sampled, await self._scores(task, sampled), strict=True):
                if isinstance(scored, BaseException):
                    result.error = scored
                else:
                    result.parts = scored
        return results

    async def rollout(self, session: Session) -> Played:
        async with self._turns.turn():
            talk, sampled = Talk(session, asyncio.get_running_loop(), self.max_turns), _Sampled({})
            try:
                returned = await self._turns.run(lambda: self._returned(talk), lambda: talk.fail(_over()))
                fields = _fields_of(returned)
                if not talk.turns:
                    raise EnvironmentMistake(f"{ROLLOUT} asked the policy for no answer")
                sampled.completion_ids = [int(token) for token in fields.pop("completion_ids")]
                sampled.columns = self.task.data["row"] | fields
            except (Exception, NoAnswer, SystemExit) as error:
                sampled.error = error
            sampled.error = talk.failure or sampled.error  # of which the script may have made another one, or nothing
            sampled.turns, sampled.truncated = talk.turns, talk.truncated
            return sampled

    def _returned(self, talk: Talk) -> Any:
        """Call the script's function, in its thread."""
        trainer = StandIn(talk, self._settings, self._tokenizer, self.task.data.get("number", 0))
        prompts = [copy.deepcopy(self.task.data["row"].get("prompt"))]
        luck = OwnRandom(f"{self.seed}:{self.task.id}")  # equal within a group, whose rollouts get the same task
        before = PRESENT.set(trainer)
        try:
            with placeholders(self._user.module, shlex.split(self._arguments), of_bytes=True), luck:
                if _takes_settings(self._function):
                    return self._function(prompts, trainer.args, self._tokenizer)
                return self._function(prompts, trainer)
        finally:
            PRESENT.reset(before)

    async def _scores(self, task: Task, sampled: Sequence[_Sampled]) -> list[dict[str, float] | BaseException]:
        """Call the reward functions, in a thread without a running event loop: some run coroutines themselves."""

        def called() -> dict[str, list[Any]]:
            luck = OwnRandom(f"{self.seed}:{task.id}:score")
            with placeholders(self._user.module, shlex.split(self._arguments), of_bytes=True), luck:
                return self._rewards_of([result.columns for result in sampled], **self._told(task, sampled))

        try:
            async with self._turns.turn():
                values = await self._turns.run(called, lambda: None)
        except (asyncio.CancelledError, KeyboardInterrupt):
            raise
        except BaseException as error:  # an author's function may raise anything
            return [error] * len(sampled)
        return [self._result({name: given[place] for name, given in values.items()}) for place in range(len(sampled))]

    def _told(self, task: Task, sampled: Sequence[_Sampled]) -> dict[str, list[Any]]:
        prompt = task.data["row"].get("prompt")
        ids = [result.completion_ids for result in sampled]
        texts = [self._tokenizer.decode(one, skip_special_tokens=True) for one in ids]
        completions = [[{"role": "assistant", "content": text}] for text in texts] if is_chat(prompt) else texts
        return {
            "prompts": [copy.deepcopy(prompt) for _ in sampled], "completions": completions, "completion_ids": ids
        }  # fmt: skip


def _over() -> EnvironmentMistake:
    return EnvironmentMistake("the rollout is over: it ran out of time or was given up")


def _takes_settings(function: Any) -> bool:
    """Return True for a function of TRL 0.24, which takes settings and a tokenizer in place of a trainer."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [one for one in parameters if one.kind in plain and one.default is one.empty]
    return len(required) == _OLDER


def _fields_of(returned: Any) -> dict[str, Any]:
    """Return the one entry of each field that a rollout function returned.

    Raises:
        EnvironmentMistake: It returned something else than TRL expects for one prompt.
    """
    expected = f"{ROLLOUT} must return a dictionary with {', '.join(_LISTS)}, each a list with one entry per prompt"
    if not isinstance(returned, Mapping):
        raise EnvironmentMistake(f"{expected}; {type(returned).__name__} came")
    for name in _LISTS:
        if name not in returned:
            raise EnvironmentMistake(f"{expected}; {', '.join(map(str, returned)) or 'nothing'} came")
        values = returned[name]
        if name == "logprobs" and values is None:  # which TRL takes
            continue
        if not hasattr(values, "__len__") or len(values) != 1:
            count = f"{len(values)} entries" if hasattr(values, "__len__") else type(values).__name__
            raise EnvironmentMistake(f"{expected}; of {name} came {count} for 1 prompt, as num_generations is 1 here")
    fields = {name: value for name, value in returned.items() if name not in (*_LISTS, _MASK)}
    of_one = {
        name: value[0] if isinstance(value, list) else value
        for name, value in fields.items()
        if not isinstance(value, list) or value
    }
    return {**of_one, "completion_ids": returned["completion_ids"][0]}
