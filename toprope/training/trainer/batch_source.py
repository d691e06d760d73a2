"""From delivered groups to training batches: the seam between the trajectory API and any trainer.

Groups that are too old, carry no signal or hold nothing to train on are counted in the step's numbers first, then
passed over and reported to the API with the reason. What is left becomes rows with advantages. Nothing here needs
torch, so other algorithms can stand on it.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from toprope.records.journal.groups import MASKED, Batch, Group
from toprope.settings.algorithms import ALGORITHMS
from toprope.settings.environment import members_of
from toprope.settings.schema import Config
from toprope.training.trainer.environment_metrics import Several, is_flat, rewards_of

__all__ = ["PARSED", "BatchSource", "Ending", "GroupBatch", "GroupReader", "Row", "advantages", "rows_of"]

PARSED = "parsed"
"""The reward part by which an environment says whether it could read an answer at all: 1 or 0."""

_POLL_S = 1.0
_RATE_WINDOW = 50


class Ending(Exception):
    """The run is to end: no further batch will be made."""


class GroupReader(Protocol):
    """What a batch is read from: the trajectory API's synchronous client, or a stand-in."""

    def next_batch(self, cursor: int, sequences: int, wait_s: float) -> Batch:
        """Groups after `cursor`, with about `sequences` rows; `batch` None when the wait ended without."""
        ...

    def dropped(self, items: list[tuple[int, str]]) -> None:
        """Reports (sequence number, reason) of groups that were passed over."""
        ...


@dataclass(frozen=True)
class Row:
    """One sequence of a batch: `prompt` ids, then `completion` ids with what was sampled among them.

    `trained[t]` is False where the environment wrote completion[t]; `logprobs[t]` is the sampler's log-probability, 0.0
    there.
    """

    prompt: list[int]
    completion: list[int]
    trained: list[bool]
    logprobs: list[float]
    advantage: float
    truncated: bool
    version: int | None = None
    """The oldest policy version that sampled a token of it; None where unknown."""
    token_advantages: list[float] | None = None
    """An advantage for each token of the completion, where the environment gave them: then `advantage` is not used."""
    rollout: int = 0
    """Which rollout of the batch it is of: rows that are segments of one share the number, in their order."""
    reward: float = 0.0
    """That rollout's."""


@dataclass
class GroupBatch:
    """Groups of one optimizer step, the cursor after them, and what their making showed."""

    groups: list[Group]
    cursor: int
    metrics: dict[str, float] = field(default_factory=dict)
    version: int | None = None
    """The policy version that is trained on them."""


def advantages(
    rewards: list[float],
    scale: Literal["group", "batch", "none"],
    batch_std: float,
    baseline: Literal["group", "leave_one_out"] = "group",
) -> list[float]:
    """Group-relative advantages: reward minus the group's mean, divided by a standard deviation (Shao et al. 2024).

    Args:
        rewards: One per rollout of a group.
        scale: Divide by the group's own deviation, by `batch_std`, or not (Liu et al. 2025, Dr. GRPO).
        baseline: What is subtracted: the mean of all, or of all others (Ahmadian et al. 2024, RLOO).
    """
    mean = statistics.fmean(rewards)
    if scale == "group":
        deviation = statistics.stdev(rewards) if len(rewards) > 1 else 0.0
    else:
        deviation = batch_std
    divisor = 1.0 if scale == "none" else deviation + 1e-4
    if baseline == "leave_one_out" and len(rewards) > 1:
        divisor *= (len(rewards) - 1) / len(rewards)  # reward minus the others' mean is so much more than that
    return [(reward - mean) / divisor for reward in rewards]


def rows_of(groups: list[Group], config: Config) -> list[Row]:
    """The rows of a batch, with advantages; rows without a sampled token are left out.

    What an environment says itself comes first: its `advantages`, token by token, and Atropos's override
    `set_advantage_to_zero`. Shuffled rewards are a control that must know nothing of the answers, so they replace both.
    """
    algorithm = config.algorithm
    rewards = [_shuffled(group, algorithm.seed) if algorithm.shuffle_rewards else rewards_of(group) for group in groups]
    flat = [reward for own in rewards for reward in own]
    batch_std = statistics.stdev(flat) if len(flat) > 1 else 0.0
    rows: list[Row] = []
    before = 0
    for group, own in zip(groups, rewards, strict=True):
        scaled = advantages(own, algorithm.scale_rewards, batch_std, algorithm.baseline)
        for index, (tokens, masks) in enumerate(zip(group.tokens, group.masks, strict=True)):
            start = next((place for place, mask in enumerate(masks) if mask != MASKED), None)
            if start is None:
                continue
            rollout = group.outcome_of(index)
            logprobs = (group.inference_logprobs or [])[index] if group.inference_logprobs else [0.0] * len(tokens)
            trained = [mask != MASKED for mask in masks[start:]]
            own_advantages = None if algorithm.shuffle_rewards else _own_advantages(group, index)
            rows.append(
                Row(
                    prompt=tokens[:start],
                    completion=tokens[start:],
                    trained=trained,
                    logprobs=[value if kept else 0.0 for value, kept in zip(logprobs[start:], trained, strict=True)],
                    advantage=scaled[rollout],
                    token_advantages=None if own_advantages is None else own_advantages[start:],
                    truncated=group.outcomes[rollout].truncated if group.outcomes else False,
                    version=min((version for version, _ in group.versions[index]), default=None)
                    if group.versions
                    else None,
                    rollout=before + rollout,
                    reward=own[rollout],
                )
            )
        before += len(own)
    return rows


class BatchSource:
    """Reads groups until a step's worth of them is worth training on.

    Args:
        reader: The API.
        config: The run's configuration.
        ending: Says whether the run is to end; asked between waits.
        cursor: Where to begin: 0, or a checkpoint's.
        rollouts: What a checkpoint had counted.
        dropped: What a checkpoint had counted, by reason.
    """

    def __init__(
        self,
        reader: GroupReader,
        config: Config,
        ending: Callable[[], bool],
        cursor: int = 0,
        rollouts: int = 0,
        dropped: Mapping[str, int] | None = None,
    ) -> None:
        self._reader, self._config, self._ending = reader, config, ending
        self.cursor = cursor
        """Position after the last batch that was given out: groups read towards one that never was lie behind it."""
        self._position = cursor
        self.rollouts = rollouts
        """Rollouts delivered so far, trained on or not."""
        self.dropped: Counter[str] = Counter(dropped or {})
        # A value function learns from groups without spread as well.
        self._passes_over = config.algorithm.drop_zero_signal and ALGORITHMS[config.algorithm.name].spread
        self._pace: deque[tuple[float, int]] = deque(maxlen=_RATE_WINDOW)
        self._several = Several([member.label for member in members_of(config.environment)])
        self._waiting = 0

    def next(self, version: int) -> GroupBatch:
        """The next step's groups.

        Args:
            version: The policy version that will be trained, against which groups are old.

        Raises:
            Ending: The run is to end.
            ComponentFailed: The API does not answer.
        """
        rollout = self._config.rollout
        kept: list[Group] = []
        seen: list[Group] = []
        stale: list[int] = []
        began = time.monotonic()
        self._position = self.cursor
        while len(kept) < rollout.groups_per_step:
            # Never wait for more groups at once than may queue, or nobody would move.
            wanted = min(rollout.groups_per_step - len(kept), max(1, rollout.queue_groups // 2))
            for number, group in self._read(wanted * rollout.group_size):
                seen.append(group)
                oldest = group.oldest_version()
                # After a resume there are groups of versions that came after the checkpoint and are no more.
                age = 0 if oldest is None else abs(version - oldest)
                stale.append(age)
                if (reason := self._reason_to_drop(group, age)) is None:
                    kept.append(group)
                else:
                    self.dropped[reason] += 1
                    self._reader.dropped([(number, reason)])
        waited = time.monotonic() - began
        self.rollouts += sum(len(rewards_of(group)) for group in seen)
        self._pace.append((time.monotonic(), self.rollouts))
        self.cursor = self._position
        return GroupBatch(
            kept,
            self.cursor,
            _numbers(seen, kept, stale, waited) | self._several.numbers(seen, kept) | self._totals(),
            version,
        )

    def _read(self, sequences: int) -> Iterator[tuple[int, Group]]:
        while True:
            if self._ending():
                raise Ending
            answer = self._reader.next_batch(self._position, sequences, _POLL_S)
            if answer.batch:
                self._position, self._waiting = answer.cursor, answer.waiting
                if answer.stale:  # the API held the limit before they came here
                    self.dropped["stale"] += answer.stale
                yield from zip(answer.sequence_numbers, answer.batch, strict=True)
                return

    def _reason_to_drop(self, group: Group, age: int) -> str | None:
        if age > self._config.rollout.max_staleness:
            return "stale"
        if not any(mask != MASKED for masks in group.masks for mask in masks):
            return "empty"
        if self._passes_over and self._is_silent(group):
            return "zero_signal"
        return None

    def _is_silent(self, group: Group) -> bool:
        if group.advantages is not None and not self._config.algorithm.shuffle_rewards:
            return not any(any(row) for row in group.advantages)
        return is_flat(group)

    def _totals(self) -> dict[str, float]:
        first, last = self._pace[0], self._pace[-1]
        rate = (last[1] - first[1]) / (last[0] - first[0]) if last[0] > first[0] else 0.0
        totals = {"rollouts": float(self.rollouts), "rollouts_per_second": round(rate, 1)}
        totals["groups/waiting"] = float(self._waiting)
        return totals | {f"dropped/{reason}": float(count) for reason, count in sorted(self.dropped.items())}


def _numbers(seen: list[Group], kept: list[Group], stale: list[int], waited: float) -> dict[str, float]:
    """A step's numbers over everything that was delivered for it, under TRL's names where it has one."""
    rewards = [reward for group in seen for reward in rewards_of(group)]
    flat = [is_flat(group) for group in seen]
    outcomes = [outcome for group in seen for outcome in group.outcomes or []]
    lengths = [sum(mask != MASKED for mask in masks) for group in seen for masks in group.masks]
    numbers = {
        "reward": statistics.fmean(rewards),
        "reward_std": statistics.stdev(rewards) if len(rewards) > 1 else 0.0,
        "frac_reward_zero_std": sum(flat) / len(flat),
        **_flat_shares([group for group, is_flat in zip(seen, flat, strict=True) if is_flat], len(seen)),
        "groups/delivered": float(len(seen)),
        "groups/trained": float(len(kept)),
        "completions/mean_length": statistics.fmean(lengths),
        "completions/max_length": float(max(lengths)),
        "staleness/mean": statistics.fmean(stale),
        "staleness/min": float(min(stale)),
        "staleness/max": float(max(stale)),
        "wait_seconds": round(waited, 4),
    }
    if outcomes:
        numbers["success"] = sum(outcome.success for outcome in outcomes) / len(outcomes)
        numbers["completions/clipped_ratio"] = sum(outcome.truncated for outcome in outcomes) / len(outcomes)
        numbers["errors"] = float(sum(outcome.error is not None for outcome in outcomes))
        numbers["errors/share"] = numbers["errors"] / len(outcomes)
        if any(PARSED in outcome.parts for outcome in outcomes):
            unread = sum(outcome.parts.get(PARSED, 1.0) <= 0 for outcome in outcomes)
            numbers["parse_failures"] = unread / len(outcomes)
        numbers["turns/mean"] = statistics.fmean(outcome.turns for outcome in outcomes)
        for name in sorted({name for outcome in outcomes for name in outcome.parts}):
            values = [outcome.parts[name] for outcome in outcomes if name in outcome.parts]
            numbers[f"rewards/{name}/mean"] = statistics.fmean(values)
    return numbers


def _own_advantages(group: Group, row: int) -> list[float] | None:
    """An advantage for each token of a row, where the environment gave them; None where rewards decide."""
    if group.overrides is not None and group.overrides[row].get("set_advantage_to_zero"):
        return [0.0] * len(group.tokens[row])
    return None if group.advantages is None else group.advantages[row]


def _flat_shares(flat: list[Group], of: int) -> dict[str, float]:
    """Why groups carry no signal, as shares of all: all answers wrong, all right, or neither (a scorer that gives
    everything the same)."""
    right = wrong = 0
    for group in flat:
        if group.outcomes:
            won = [outcome.success for outcome in group.outcomes]
            right, wrong = right + all(won), wrong + (not any(won) and group.outcomes[0].reward <= 0)
        else:
            right, wrong = right + (group.scores[0] >= 1), wrong + (group.scores[0] <= 0)
    shares = {"all_right": right, "all_wrong": wrong, "other": len(flat) - right - wrong}
    return {f"frac_reward_zero_std/{why}": count / of for why, count in shares.items()}


def _shuffled(group: Group, seed: int) -> list[float]:
    rewards = rewards_of(group)
    random.Random(f"{seed}:{group.group_id}").shuffle(rewards)
    return rewards
