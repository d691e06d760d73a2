"""The tracker of a run: a program that follows the run's folder and logs it elsewhere, for every kind of run.

It alone gets the keys of trackers, and no failure of it ends the run.
"""

from __future__ import annotations

import sys

from toprope.errors import TopropeError
from toprope.records.messages import Failed, Ready, Warned
from toprope.records.run.specification import Specification
from toprope.trackers.follower import RunFollower
from toprope.trackers.tracker import TrackedRun, Tracker
from toprope.training.component.member import CrewMember

_LOOK_EVERY_S = 0.5


def tracked_run(member: CrewMember) -> TrackedRun:
    """The run of a member, as trackers know it."""
    spec = member.spec
    return TrackedRun(
        run_id=spec.run_id,
        project=spec.config.logging.wandb_project,
        kind=spec.kind,
        folder=member.folder.path,
        group=_group(spec),
        config={
            **spec.config.model_dump(mode="json", exclude={"launcher"}),
            "environment_name": spec.environment.name,
            "toprope_version": spec.toprope_version,
            **({} if spec.sweep is None else {"sweep": spec.sweep.model_dump(mode="json", exclude={"knobs"})}),
            **({} if spec.member is None else {"candidate": spec.member.candidate, "epoch": spec.member.epoch}),
        },
        attempt=member.attempt,
    )


def _group(spec: Specification) -> str | None:
    if spec.member is not None:
        return spec.member.sweep
    if spec.kind == "sweep":
        return spec.run_id
    return spec.seed_group.id if spec.seed_group else None


def open_trackers(member: CrewMember) -> list[Tracker]:
    """The trackers that the run's configuration names.

    Raises:
        ComponentFailed: One of them does not start.
    """
    run, logging = tracked_run(member), member.spec.config.logging
    trackers: list[Tracker] = []
    if logging.wandb != "disabled":
        from toprope.trackers.weights_and_biases import WandbTracker  # takes half a second

        wandb = WandbTracker(run, logging.wandb)
        if wandb.warning:
            member.report(Warned(wandb.warning))
        trackers.append(wandb)
    return trackers


def main() -> int:
    """Run the component; returns its exit status."""
    member = CrewMember.join()
    try:
        follower = RunFollower(member.folder, member.spec, open_trackers(member))
        follower.write_record()
        member.report(Ready())
        while not member.ending.is_set():
            member.beat()
            if not follower.pass_on():
                member.ending.wait(_LOOK_EVERY_S)
        follower.finish()
    except TopropeError as error:
        print(error, file=sys.stderr, flush=True)
        member.report(Failed(error.message, error.hint))
        return 1
    return 0
