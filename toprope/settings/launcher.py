"""The section `launcher` of the configuration, and the restarts that it allows."""

from __future__ import annotations

from collections import deque
from typing import Literal

from pydantic import Field

from toprope.settings.environment import Section

_LONGEST_WAIT_S = 60.0


class LauncherSection(Section):
    """Where and how the crew runs."""

    kind: Literal["local"] = Field("local", description="On this machine.")
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto",
        description="auto: a GPU if the machine has one. A run has a GPU to itself and is queued until one is free.",
    )
    threads: int = Field(
        1,
        ge=1,
        le=256,
        description="CPU threads of each torch process. Training on the CPU reserves twice as many, for trainer and "
        "inference, and is queued until they are free; tests run beside training and wait for other tests only.",
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


class RestartAllowance:
    """Restarts of one process: so many within a window, each after a longer wait.

    Times are in seconds, of any clock that never goes back.
    """

    def __init__(self, section: LauncherSection) -> None:
        self.limit, self.window_s = section.restarts, section.restart_window_s
        self._backoff_s = section.restart_backoff_s
        self._taken: deque[float] = deque()
        self.total = 0
        """Restarts so far, within the window or before."""

    def used(self, now: float) -> int:
        """Restarts within the window that ends now."""
        while self._taken and now - self._taken[0] > self.window_s:
            self._taken.popleft()
        return len(self._taken)

    def take(self, now: float) -> float | None:
        """Take one: the seconds to wait before it, or None if none is left."""
        used = self.used(now)
        if used >= self.limit:
            return None
        self._taken.append(now)
        self.total += 1
        return min(self._backoff_s * 2.0**used, _LONGEST_WAIT_S)
