"""The section `launcher` of the configuration, and the restarts that it allows."""

from __future__ import annotations

from collections import deque
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field, ValidationError

from toprope.settings.sections.environment import Section

_LONGEST_WAIT_S = 60.0


class Resources(BaseModel, extra="forbid", frozen=True):
    """The room that one component needs on its node of a cluster."""

    cpus: int = Field(1, ge=1, le=1024)
    gpus: int = Field(0, ge=0, le=64)
    memory_mb: int = Field(0, ge=0, le=16_777_216)
    """0: as much as the cluster gives by default."""


_WITH_RESOURCES = ("api", "inference", "trainer", "environment")


def _checked_resources(value: dict[str, Any]) -> dict[str, Any]:
    """Check the resources of components by the model above."""
    for component, wanted in value.items():
        if component not in _WITH_RESOURCES:
            raise ValueError(f"there is no component {component!r}; there are: {', '.join(_WITH_RESOURCES)}")
        try:
            Resources.model_validate(wanted)
        except ValidationError as error:
            problem = error.errors(include_url=False, include_input=False)[0]
            raise ValueError(f"{'.'.join(map(str, (component, *problem['loc'])))}: {problem['msg']}") from None
    return value


class LauncherSection(Section):
    """Where and how the crew runs."""

    kind: Literal["local", "slurm", "ray"] = Field(
        "local", description="local: on this machine; slurm, ray: as a job on one of the owner's clusters."
    )
    cluster: str = Field(
        "", max_length=64, description="The owner's cluster, by name; empty: the only one of the kind."
    )
    nodes: int = Field(
        1,
        ge=1,
        le=1024,
        description="Nodes of a cluster. With more than one, environment workers and drivers spread over the others.",
    )
    resources: Annotated[dict[str, Any], AfterValidator(_checked_resources)] = Field(
        default_factory=dict,
        description="On a cluster, the room of each component on its node: {trainer: {cpus, gpus, memory_mb}}; also "
        "api, inference and environment. Without: one CPU each, launcher.threads for trainer and inference, and, with "
        "launcher.inference_gpus, the GPUs of both.",
    )
    features: list[str] = Field(
        default_factory=list, description="Features that the nodes must have (Slurm's --constraint, Ray's resources)."
    )
    partition: str = Field("", max_length=64, description="Slurm's partition; empty: the owner's, or Slurm's default.")
    account: str = Field("", max_length=64, description="Slurm's account; empty: the owner's, or Slurm's default.")
    time_limit_minutes: int = Field(
        0,
        ge=0,
        le=525_600,
        description="Time asked from Slurm; 0: the partition's. A run at its limit writes a checkpoint, ends as "
        "lost, and resumes as launcher.resume_lost says.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto",
        description="auto: GPUs if the machine has any. A run has its GPUs to itself and waits until they are free.",
    )
    threads: int = Field(
        1,
        ge=1,
        le=256,
        description="CPU threads of each torch process. Training on the CPU reserves those of trainer and inference, "
        "and is queued until they are free; tests run beside training and wait for other tests only.",
    )
    num_processes: int = Field(
        1,
        ge=1,
        le=64,
        description="Processes that train the policy together, each on a GPU of its own or on `threads` CPU threads; "
        "weights, gradients and moments are split between them (FSDP2). For the algorithms of GRPO's family and ppo.",
    )
    inference_gpus: int = Field(
        0, ge=0, le=64, description="GPUs of inference; 0: it shares the trainer's first. No effect on a CPU."
    )
    drivers: int = Field(
        1,
        ge=1,
        le=1024,
        description="Environment drivers, each with workers of its own; those after the first only sample for "
        "training. At least one for each node after the first.",
    )
    start_timeout_s: float = Field(600.0, gt=0, le=86_400, description="Seconds until every component must be ready.")
    stop_grace_s: float = Field(
        4.0,
        ge=0,
        le=600,
        description="Seconds the trainer gets for a last checkpoint at a stop; other members get at most 2 to end.",
    )
    stall_after_s: float = Field(
        300.0,
        ge=0,
        le=604_800,
        description="Seconds without a step (without progress, in runs that have no steps) after which a live run "
        "counts as stalled; 0: never.",
    )
    stall_after_steps: float = Field(
        10.0,
        ge=1,
        le=10_000,
        description="A stall also needs the time of so many usual steps (the median of the last 100).",
    )
    resume_lost: Literal["auto", "never"] = Field(
        "auto",
        description="auto: a training run whose keeper is gone (killed, machine restarted) resumes from its newest "
        "checkpoint at the next look of a server or command; never: it stays lost until resume_training.",
    )
    resume_lost_limit: int = Field(
        3, ge=0, le=1000, description="Automatic resumptions in a row without a new checkpoint in between."
    )
    resume_lost_backoff_s: float = Field(
        10.0, ge=0, le=3600, description="Seconds before the second resumption in a row; doubled for each further one."
    )
    restarts: int = Field(
        3,
        ge=0,
        le=100,
        description="Restarts in place of each component, and of the environment's worker, within restart_window_s "
        "after it dies or hangs; the next failure ends the run. 0: the first failure ends it.",
    )
    restart_window_s: float = Field(3600.0, gt=0, le=604_800, description="Seconds over which restarts are counted.")
    restart_backoff_s: float = Field(
        0.5, ge=0, le=600, description="Seconds before the first restart in the window; doubled for each further one."
    )
    hang_timeout_s: float = Field(
        120.0,
        ge=1,
        le=86_400,
        description="Seconds without a sign of life after which api, inference or environment counts as hung.",
    )
    trainer_hang_timeout_s: float = Field(
        1800.0,
        ge=1,
        le=86_400,
        description="The same for the trainer, which is silent during forward and backward.",
    )

    def resources_of(self, component: str) -> Resources:
        """The room of a component on a cluster."""
        usual = {"cpus": self.threads} if component in ("trainer", "inference") else {}
        if usual and (self.device == "cuda" or (self.inference_gpus and self.device != "cpu")):
            # Without GPUs of its own, inference shares the trainer's.
            usual["gpus"] = self.inference_gpus if component == "inference" else self.num_processes
        return Resources.model_validate({**usual, **self.resources.get(component, {})})

    @property
    def driver_count(self) -> int:
        """Environment drivers of a run that samples."""
        return self.drivers if self.kind == "local" else max(self.drivers, self.nodes - 1)

    def room(self) -> Resources:
        """Return the room to ask for on each node: that of all members, or, on several nodes, the larger of the
        environment's and of the others', because the environment moves to the other nodes."""
        shares = {name: self.resources_of(name) for name in ("api", "inference", "trainer", "environment")}
        apart = [[shares.pop("environment")]] if self.nodes > 1 else []
        sums = [
            (
                sum(resources.cpus for resources in part),
                sum(resources.gpus for resources in part),
                sum(resources.memory_mb for resources in part),
            )
            for part in ([*shares.values()], *apart)
        ]
        cpus, gpus, memory_mb = (max(column) for column in zip(*sums, strict=True))
        return Resources.model_construct(cpus=cpus, gpus=gpus, memory_mb=memory_mb)


class RestartAllowance:
    """Restarts of one process: so many within a window, each after a longer wait.

    Times are in seconds, of any clock that never goes back.
    """

    def __init__(self, section: LauncherSection) -> None:
        self.limit, self.window_s = section.restarts, section.restart_window_s
        self._backoff_s = section.restart_backoff_s
        self._restart_times: deque[float] = deque()
        self.total = 0
        """Restarts so far, within the window or before."""

    def used(self, now: float) -> int:
        """Restarts within the window that ends now."""
        while self._restart_times and now - self._restart_times[0] > self.window_s:
            self._restart_times.popleft()
        return len(self._restart_times)

    def take(self, now: float) -> float | None:
        """Take one: the seconds to wait before it, or None if none is left."""
        used = self.used(now)
        if used >= self.limit:
            return None
        self._restart_times.append(now)
        self.total += 1
        return min(self._backoff_s * 2.0**used, _LONGEST_WAIT_S)
