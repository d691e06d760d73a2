"""A run's frozen specification: everything its crew needs to know, and nothing that changes.

It is written before the keeper starts and never again. Secrets are not in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from toprope.atomic import write_json
from toprope.errors import Corrupt
from toprope.records.run.folder import REPAIR_HINT, RunFolder, describe_misfits, read_json
from toprope.records.run.kinds import KINDS, KindName, RunKind
from toprope.settings.endpoints import Endpoint
from toprope.settings.limits import FrozenLimits
from toprope.settings.schema import Config

__all__ = [
    "AskPlan",
    "Dimension",
    "DatasetSource",
    "EnvironmentSource",
    "FineTunePlan",
    "ModelUnderTest",
    "RewardSource",
    "RunPlan",
    "SeedGroup",
    "Specification",
    "SweepMember",
    "SweepPlan",
    "TestPlan",
    "TrainPlan",
    "TrainerSource",
    "training_plan",
]

SPECIFICATION_VERSION = 1
"""Of spec.json: the newest that is known here."""


class RewardSource(BaseModel):
    """A reward function of the owner's that a worker adds to an environment: `attribute` of the file `file`."""

    model_config = ConfigDict(extra="forbid")

    name: str
    weight: float = 1.0
    low: float = 0.0
    high: float = 1.0
    file: str
    attribute: str


class EnvironmentSource(BaseModel):
    """Where a worker finds an environment.

    Either `file` and `attribute` (a class or factory in a user's file), or `adapter` (a module of
    toprope/sdk/adapters) and `target` (what the adapter calls it).
    """

    model_config = ConfigDict(extra="forbid")

    name: str
    file: str | None = None
    attribute: str | None = None
    adapter: str | None = None
    target: str | None = None
    interpreter: str | None = None
    """Path of the Python that runs the worker; ours when None."""
    rewards: list[RewardSource] = []
    """More parts of its reward, by configuration."""


class ModelUnderTest(BaseModel):
    """A model that a test measures: at an endpoint, or the run's own policy where `endpoint` is None."""

    model_config = ConfigDict(extra="forbid")

    name: str
    endpoint: Endpoint | None = None


class TrainerSource(BaseModel):
    """A class of the owner's own that trains, as it was when the run was frozen."""

    model_config = ConfigDict(extra="forbid")

    file: str
    attribute: str
    sha256: str
    """Of the file."""


class DatasetSource(BaseModel):
    """A version of a data set that a run learns from."""

    model_config = ConfigDict(extra="forbid")

    name: str
    """`best@v2`"""
    file: str
    sha256: str
    """Of the file."""
    items: int


@dataclass(frozen=True)
class TrainPlan:
    """Plan of a run of kind `train`: its configuration says everything."""

    kind: ClassVar[KindName] = "train"


@dataclass(frozen=True)
class FineTunePlan:
    """Plan of a run of kind `sft`: its configuration says everything."""

    kind: ClassVar[KindName] = "sft"


class TestPlan(BaseModel):
    """Plan of a run of kind `test`: `tasks` tasks of the validation split, `group_size` rollouts each."""

    __test__ = False
    kind: ClassVar[KindName] = "test"
    model_config = ConfigDict(extra="forbid")

    tasks: int
    group_size: int
    models: list[ModelUnderTest] = []
    """Which models, each by itself; empty: the run's own policy alone."""
    seconds_per_model: float = 600.0
    max_new_tokens: int | None = None
    """Longest answer of models that are tested by name; rollout.max_new_tokens where None."""
    heldout: bool = False
    """Held-out tasks instead, one answer to each: the final measurement of a sweep's winner, once."""


class AskPlan(BaseModel):
    """Plan of a run of kind `ask`: put conversations to the policy and keep the answers."""

    kind: ClassVar[KindName] = "ask"
    model_config = ConfigDict(extra="forbid")

    conversations: list[list[dict[str, str]]]
    """Chat messages, role and content."""
    temperature: float = 0.0
    """0: the most likely token at each position."""
    max_new_tokens: int
    answers: int = Field(1, ge=1)
    """To each conversation."""
    asked: str
    """Whose answers these are, in words: "step 120 of run x", "the base policy embedded"."""


class SeedGroup(BaseModel):
    """Which of several runs this is that differ in their seed alone: number `index`, from 0, of `size`."""

    model_config = ConfigDict(extra="forbid")

    id: str
    index: int = Field(ge=0)
    size: int = Field(ge=1)


class Dimension(BaseModel):
    """One field that a sweep varies: between `low` and `high`, or one of `choices`."""

    model_config = ConfigDict(extra="forbid")

    low: float | None = None
    high: float | None = None
    log: bool = False
    """Steps are factors rather than differences."""
    integer: bool = False
    choices: list[Any] | None = None


class SweepPlan(BaseModel):
    """Plan of a run of kind `sweep`: a population over `space`, for some epochs."""

    kind: ClassVar[KindName] = "sweep"
    model_config = ConfigDict(extra="forbid")

    space: dict[str, Dimension]
    """By dotted field."""
    strategy: str
    """A name of `toprope.sdk.evolution.STRATEGIES`, or `optuna`; of a user's own the name of its class."""
    file: str | None = None
    """The file with a user's own class."""
    options: dict[str, Any] = {}
    """More arguments of the strategy."""
    evaluate: Literal["train", "test"] = "train"
    """How a candidate is measured, on the validation split: after training, or as it is."""
    population: int = Field(ge=1)
    epochs: int = Field(ge=1)
    selection_ratio: float = Field(gt=0, le=1)
    mutation_rate: float = Field(ge=0, le=1)
    steps: int = Field(ge=1)
    """Optimizer steps of a candidate's run in the first epoch."""
    seed: int = 0
    runs: int = Field(ge=1)
    """The most runs that it may start, the winner's last measurement among them."""
    total_steps: int = Field(ge=0)
    """The most optimizer steps of all of them together."""
    knobs: list[dict[str, Any]] = []
    """The knobs on the environment's card when this was planned."""


RunPlan = TrainPlan | FineTunePlan | TestPlan | AskPlan | SweepPlan
"""What a run is to do, tagged by the kind of the run."""


def training_plan(config: Config) -> TrainPlan | FineTunePlan:
    """Return the plan of a training run: `algorithm.name` decides between rewards and demonstrations."""
    return FineTunePlan() if config.algorithm.name == "sft" else TrainPlan()


class SweepMember(BaseModel):
    """Which candidate of a sweep a run measures."""

    model_config = ConfigDict(extra="forbid")

    sweep: str
    """The sweep's run."""
    candidate: str
    epoch: int
    parent: str | None = None
    """The candidate that it was made from."""
    continues: str | None = None
    """The run whose weights and optimizer it begins with."""
    first_task: int = 0
    """How many training tasks those that it goes on from were given: it begins after them."""
    final: bool = False
    """Whether this is the winner's measurement on held-out tasks."""


class Specification(BaseModel):
    """spec.json of a run."""

    model_config = ConfigDict(extra="forbid")

    version: int = SPECIFICATION_VERSION
    run_id: str
    kind: KindName
    created_at: float
    toprope_version: str
    draft_id: str | None = None
    draft_revision: int | None = None
    preset: str | None = None
    environment: EnvironmentSource
    mixture: list[EnvironmentSource] = []
    """The others beside it, in the order of config.environment.mixture."""
    config: Config
    locks: dict[str, Any] = {}
    """The owner's locks that held when this was frozen, as read."""
    beside_preset: dict[str, list[Any]] = {}
    """Fields whose value is not the preset's, each with the preset's value and this one."""
    teacher: ModelUnderTest | None = None
    """Who demonstrates in a run of kind `sft`, where it is a model at an endpoint."""
    trainer: TrainerSource | None = None
    """Who trains, where it is a class of the owner's own."""
    dataset: DatasetSource | None = None
    """What a run of kind `sft` learns from instead of a teacher's demonstrations."""
    base_run: str | None = None
    """The run whose checkpoint the policy begins as, where the configuration named one."""
    reproduces: str | None = None
    """The run that this one repeats, to see whether it comes out the same."""
    seed_group: SeedGroup | None = None
    limits: FrozenLimits | None = None
    """The owner's limits that held when this was started, to which its keeper holds it."""
    test: TestPlan | None = None
    ask: AskPlan | None = None
    sweep: SweepPlan | None = None
    member: SweepMember | None = None
    policy_cache: str
    """Folder under which embedded policies are made and kept."""

    @property
    def run_kind(self) -> RunKind:
        """The facts about runs of this kind."""
        return KINDS[self.kind]

    @classmethod
    def read(cls, folder: RunFolder) -> Specification:
        """The specification on disk.

        Raises:
            NotFound, Corrupt: See `read_json`.
        """
        try:
            return cls.model_validate(read_json(folder.spec, SPECIFICATION_VERSION))
        except ValidationError as error:
            raise Corrupt(
                f"{folder.spec} is not a specification: {describe_misfits(error)}.", hint=REPAIR_HINT
            ) from None

    def write(self, folder: RunFolder) -> None:
        write_json(folder.spec, self.model_dump(mode="json"))
