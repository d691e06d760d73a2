"""Who takes part, as the Atropos protocol has it: a trainer that says what a batch is, environments that register.

Both may come in any order, come again after a crash, and go. A registration that could never lead to a batch is refused
with the reason, since its environment or trainer would wait for ever without a word.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from toprope.records.journal.marks import Snapshot
from toprope.training.api.http.errors import Refused
from toprope.training.api.intake.validation import lane_of
from toprope.training.api.queue.fair_scheduler import Lane
from toprope.training.api.queue.group_queue import GroupQueue

__all__ = ["EnvironmentRegistration", "Registry", "TrainerRegistration", "decode", "formable"]

_MIN_SHARE = 0.01
"""What /status-env reports at least as `env_weight`: Atropos environments divide by it."""

_T = TypeVar("_T")


class TrainerRegistration(msgspec.Struct):
    """The body of POST /register. `batch_size` counts sequences."""

    wandb_group: str
    wandb_project: str
    batch_size: Annotated[int, Meta(ge=1, le=1_048_576)]
    max_token_len: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    checkpoint_dir: str
    save_checkpoint_interval: Annotated[int, Meta(ge=-1, le=2**31 - 1)]
    starting_step: Annotated[int, Meta(ge=0, le=2**31 - 1)]
    num_steps: Annotated[int, Meta(ge=-1, le=2**31 - 1)]


class EnvironmentRegistration(msgspec.Struct):
    """The body of POST /register-env."""

    max_token_length: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    desired_name: Annotated[str, Meta(min_length=1, max_length=512)]
    weight: Annotated[float, Meta(gt=0, le=1e6)]
    group_size: Annotated[int, Meta(ge=1, le=65_536)]
    min_batch_allocation: Annotated[float, Meta(ge=0, le=1)] | None = None


def decode(body: bytes, kind: type[_T]) -> _T:
    """A small request body as `kind`; numbers may come as text, as they may at run-api.

    Raises:
        Refused: It is not one.
    """
    try:
        return msgspec.json.decode(body, type=kind, strict=False)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at `$")
        raise Refused("invalid_value", what + ".", field=where.strip("`.") or None) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Refused("malformed_json", f"The body is not JSON: {error}.", status=400) from None


def formable(sizes: Iterable[int], batch: int) -> bool:
    """Whether groups of these sizes, any number of each, can add up to exactly `batch` sequences."""
    reach, within = 1, (1 << (batch + 1)) - 1
    for size in set(sizes):
        step = size
        while step <= batch:
            reach |= (reach << step) & within
            step *= 2
    return bool(reach >> batch & 1)


class Registry:
    """The trainer and the environments of one API.

    Args:
        queue: Whose lanes carry the environments' claims.
        trainer: What holds until a trainer registers.
    """

    def __init__(self, queue: GroupQueue, trainer: TrainerRegistration | None = None) -> None:
        self._queue = queue
        self.trainer = trainer
        self.environments: list[EnvironmentRegistration] = []
        self.started = False
        """Whether a trainer has asked for a batch: environments are let in from then on."""
        self._step_offset = trainer.starting_step if trainer else 0

    @property
    def current_step(self) -> int:
        """Atropos's step: where the trainer started plus the batches delivered since, in this lineage."""
        return max(0, self._step_offset + self._queue.step)

    def check_trainer(self, trainer: TrainerRegistration, now: float) -> None:
        """
        Raises:
            Refused: The environments that are there can never fill its batches.
        """
        sizes = [self.environments[env_id].group_size for env_id in self._alive(now)]
        if sizes and not formable(sizes, trainer.batch_size):
            raise Refused(
                "impossible_batch",
                f"Batches of {trainer.batch_size} sequences can never be formed from groups of "
                f"{_listed(sizes)}, and a group is never split. Choose a batch_size that sums of these reach.",
                field="batch_size",
            )

    def set_trainer(self, trainer: TrainerRegistration) -> None:
        """Takes a trainer's word; a later one counts."""
        self.trainer = trainer
        self._step_offset = trainer.starting_step - self._queue.step

    def check_environment(self, environment: EnvironmentRegistration, now: float) -> None:
        """
        Raises:
            Refused: Its groups can never be part of a batch, or it claims more than is left.
        """
        alive = self._alive(now)
        if self.trainer is not None:
            sizes = [environment.group_size, *(self.environments[env_id].group_size for env_id in alive)]
            batch = self.trainer.batch_size
            if environment.group_size > batch or not formable(sizes, batch):
                raise Refused(
                    "impossible_batch",
                    f"The trainer's batches have {batch} sequences; groups of {_listed(sizes)} never add up to that, "
                    f"and a group is never split. Choose a group_size that divides {batch}.",
                    field="group_size",
                )
        claimed = sum(self.environments[env_id].min_batch_allocation or 0.0 for env_id in alive)
        if claimed + (environment.min_batch_allocation or 0.0) > 1.0 + 1e-9:
            raise Refused(
                "overallocated",
                f"Other environments claim {claimed:.3g} of every batch; at most {max(0.0, 1 - claimed):.3g} is left.",
                field="min_batch_allocation",
            )

    def add_environment(self, environment: EnvironmentRegistration, now: float) -> int:
        """Gives an environment its id and its lane."""
        env_id = len(self.environments)
        self.environments.append(environment)
        lane = self._lane(env_id)
        lane.weight, lane.minimum = environment.weight, environment.min_batch_allocation or 0.0
        lane.connected, lane.heard_at = True, now
        return env_id

    def real_name(self, env_id: int) -> str:
        """The name that tells environments of one kind apart: `<desired_name>_<n>`."""
        name = self.environments[env_id].desired_name
        return f"{name}_{sum(other.desired_name == name for other in self.environments[:env_id])}"

    def disconnect(self, env_id: int) -> None:
        """Frees an environment's claim; what it posted stays."""
        self._lane(env_id).connected = False

    def heard(self, env_id: int, now: float) -> None:
        """Notes a sign of life.

        Raises:
            Refused: There is no such environment.
        """
        if not 0 <= env_id < len(self.environments):
            raise Refused(
                "unknown_environment",
                f"No environment has the id {env_id}: {len(self.environments)} registered. POST /register-env first.",
                field="env_id",
            )
        self._lane(env_id).heard_at = now

    def status(self, env_id: int) -> dict[str, Any]:
        """The answer of GET /status-env. Queue sizes are in groups of the asking environment: its own, and its own plus
        what others have waiting beyond their minimum allocations."""
        mine, lane = self.environments[env_id], self._lane(env_id)
        connected = {
            other: environment
            for other, environment in enumerate(self.environments)
            if other == env_id or self._lane(other).connected
        }
        total = sum(environment.max_token_length * environment.weight for environment in connected.values())
        batch = self.trainer.batch_size if self.trainer else 0
        others = sum(
            max(0, other.rows - int(other.minimum * batch)) for other in self._queue.lanes if other is not lane
        )
        group_size = max(mine.group_size, lane.largest)
        return {
            "current_step": self.current_step,
            "queue_size": (lane.rows + others) // group_size,
            "unallocated_fraction": 1.0
            - min(1.0, sum(environment.min_batch_allocation or 0.0 for environment in connected.values())),
            "self_queue_size": lane.rows // group_size,
            "max_group_size": max((other.largest for other in self._queue.lanes if other.groups), default=1),
            "env_weight": max(_MIN_SHARE, mine.max_token_length * mine.weight / total),
        }

    def save_to(self, snapshot: Snapshot) -> None:
        """Puts who takes part into a snapshot; their lanes are the queue's."""
        snapshot.trainer = None if self.trainer is None else msgspec.to_builtins(self.trainer)
        snapshot.environments = [msgspec.to_builtins(environment) for environment in self.environments]
        snapshot.started, snapshot.step_offset = self.started, self._step_offset

    def load_from(self, snapshot: Snapshot) -> None:
        """Takes over who took part in a snapshot.

        Raises:
            msgspec.ValidationError: It is not one of ours.
        """
        self.trainer = None if snapshot.trainer is None else msgspec.convert(snapshot.trainer, TrainerRegistration)
        self.environments = msgspec.convert(snapshot.environments, list[EnvironmentRegistration])
        self.started, self._step_offset = snapshot.started, snapshot.step_offset

    def reset(self) -> None:
        """Forgets everybody."""
        self.trainer, self.started, self._step_offset = None, False, -self._queue.step
        self.environments.clear()

    def _lane(self, env_id: int) -> Lane:
        return self._queue.lanes.lane(lane_of(env_id, None))

    def _alive(self, now: float) -> list[int]:
        alive_s = self._queue.lanes.alive_s
        return [env_id for env_id in range(len(self.environments)) if self._lane(env_id).alive(now, alive_s)]


def _listed(sizes: list[int]) -> str:
    return " and ".join(str(size) for size in sorted(set(sizes)))
