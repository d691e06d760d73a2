"""The conductor's program: the one member of a sweep's crew, which has runs measure candidates, epoch after epoch.

    init -> evaluating -> selecting -> mutating -> evaluating -> ... -> complete

Every decision is in the journal (`toprope.records.sweep_journal`) before anything is done about it, so a conductor
that was
killed, however often, goes on where it was and finds the members that it had started: they have keepers of their own.
At an order to stop it ends at once; the sweep's keeper stops the members. When the keeper is gone it ends, too, and the
members go on for whoever brings the sweep back.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable
from typing import Any, TypeVar

from toprope.errors import ComponentFailed, TopropeError
from toprope.records.messages import Evaluated, Failed, Finished, Progress, Ready, Warned
from toprope.records.run.status import Status
from toprope.records.sweep_journal import (
    Candidate,
    Finalist,
    Generation,
    Measured,
    Scored,
    Started,
    Survivors,
    SweepLog,
    final_id,
)
from toprope.settings.owner import Home
from toprope.sweeps.members import SweepMembers, hopeless_reason
from toprope.sweeps.strategy_runner import StrategyRunner
from toprope.training.component.member import CrewMember, send_heartbeats
from toprope.workbench.launch.reserve_budget import NoRoomWithin

__all__ = ["Conductor", "main"]

_LOOK_EVERY_S = 0.25
_TELL_EVERY_S = 1.0
_ROOM_EVERY_S = 2.0
_WAITED_FOR = frozenset({"concurrent_runs"})
"""Limits that are no longer reached once some other run has ended."""

T = TypeVar("T")


class _Ending(Exception):
    """The sweep is to end."""


class Conductor:
    """One life of a sweep's conductor.

    Args:
        member: Its membership of the sweep's crew.
        home: The owner's.
    """

    def __init__(self, member: CrewMember, home: Home) -> None:
        assert member.spec.sweep is not None
        self._member, self._plan = member, member.spec.sweep
        self._members = SweepMembers(home, member.spec)
        self._log = SweepLog(member.folder)
        self._phase, self._epoch = "init", 1
        self._doing: dict[str, int] = {}
        """Steps of candidates that are being measured."""
        self._told: tuple[Any, ...] = ()

    async def run(self) -> None:
        """Goes on with the sweep to its end.

        Raises:
            TopropeError: It cannot go on; what was measured so far stands.
            _Ending: It was told to end.
        """
        self._member.report(Ready())
        teller = asyncio.create_task(self._tell())
        strategist = await self._unless_ending(StrategyRunner.open(self._plan))
        try:
            for epoch in range(1, self._plan.epochs + 1):
                self._epoch = epoch
                await self._one_epoch(strategist)
            await self._measure_winner()
            self._enter("complete")
            best = self._log.standing.best
            self._member.report(Finished({"best": best.score if best else None}))
        finally:
            teller.cancel()
            await strategist.close()

    async def _one_epoch(self, strategist: StrategyRunner) -> None:
        standing, epoch = self._log.standing, self._epoch
        if len(standing.generations) < epoch:
            await self._new_generation(strategist)
        generation = standing.generations[epoch - 1]
        if epoch not in standing.survivors:
            self._enter("evaluating")
            await self._measure(generation, strategist)
            self._enter("selecting")
            scores = [standing.scores[one.id].score for one in generation.candidates]
            ids = await self._unless_ending(strategist.select(generation.candidates, scores))
            self._log.append(Survivors(epoch=epoch, ids=ids))
        # As it was then: a conductor that goes on says the same of epochs that were before it.
        best = standing.best_until(epoch)
        if best is not None:
            self._member.report(Evaluated(f"epoch-{epoch}", self._summary(best, epoch)))

    def _summary(self, best: Scored, epoch: int) -> dict[str, Any]:
        return {
            "accuracy": best.measured.accuracy,
            "score": best.score,
            "split": "validation",
            "tasks": best.measured.tasks,
            "best": self._log.standing.runs[best.candidate],
            "steps": self._log.standing.steps_until(epoch),
        }

    async def _new_generation(self, strategist: StrategyRunner) -> None:
        standing, epoch = self._log.standing, self._epoch
        if epoch == 1:
            answer = await self._unless_ending(strategist.start())
        else:
            self._enter("mutating")
            survivors = [standing.candidates[one] for one in standing.survivors[epoch - 1]]
            history = [
                {
                    **standing.candidates[one].model_dump(),
                    "score": scored.score,
                    "epoch": standing.born[one],
                    "measured": scored.measured.model_dump(),
                }
                for one, scored in standing.scores.items()
            ]
            answer = await self._unless_ending(strategist.advance(epoch, survivors, history))
        room = self._plan.runs - 1 - len(standing.candidates)
        found = strategist.candidates(answer, standing.candidates, room)
        kept = self._within_steps(found)
        if len(kept) < len(answer):
            self._warn(
                f"{len(answer) - len(kept)} candidates of epoch {epoch} are beyond what was planned and left out"
            )
        if not kept:
            raise ComponentFailed(f"The strategy has no candidates for epoch {epoch} that the plan has room for.")
        self._log.append(Generation(epoch=epoch, candidates=kept))

    def _within_steps(self, found: list[Candidate]) -> list[Candidate]:
        """Those whose steps the plan has room for: the total was told to whoever agreed to the sweep."""
        if self._plan.evaluate != "train":
            return found
        standing = self._log.standing
        left = self._plan.total_steps - sum(one.steps for one in standing.candidates.values())
        kept = []
        for one in found:
            if one.id not in standing.candidates:
                if one.steps > left:
                    continue
                left -= one.steps
            kept.append(one)
        return kept

    # Measuring

    async def _measure(self, generation: Generation, strategist: StrategyRunner) -> None:
        """Has every candidate without a score measured, as many at a time as the machine has room for."""
        standing = self._log.standing
        waiting = [one for one in generation.candidates if one.id not in standing.scores]
        # Those whose run was there before this conductor come first: they hold what the others wait for.
        waiting.sort(key=lambda one: not (one.id in standing.runs and self._members.is_there(standing.runs[one.id])))
        width = asyncio.Semaphore(self._members.width())

        async def one(candidate: Candidate) -> None:
            async with width:
                await self._measure_one(candidate, generation.epoch, strategist)

        tasks = [asyncio.ensure_future(one(candidate)) for candidate in waiting]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _measure_one(self, candidate: Candidate, epoch: int, strategist: StrategyRunner) -> None:
        self._check_ending()
        members, standing = self._members, self._log.standing
        run_id = members.run_id(candidate)
        if candidate.continues and candidate.continues not in standing.runs:
            self._log.append(Scored(candidate=candidate.id, score=None, why="what it goes on from was never measured"))
            return
        if candidate.id not in standing.runs:
            self._log.append(Started(candidate=candidate.id, epoch=epoch, run_id=run_id))
        try:
            if not await self._taken_up(run_id):
                await self._start(run_id, lambda: members.start(candidate, epoch, standing))
        except NoRoomWithin:
            raise
        except TopropeError as error:
            if not members.is_there(run_id) or members.was_stopped(run_id):
                self._score(Scored(candidate=candidate.id, score=None, why=f"it did not start: {error.message}"))
                return
        status, why = await self._follow(candidate.id, run_id)
        measured = await asyncio.to_thread(members.measured, status)
        if not why and status.state != "completed":
            said = status.failure.reason if status.failure else status.reason
            why = f"its run {status.state}: {said}".strip().rstrip(":")
        score = None
        if not why:
            score = await self._unless_ending(strategist.evaluate(candidate, measured))
        self._doing.pop(candidate.id, None)
        self._score(Scored(candidate=candidate.id, score=score, measured=measured, why=why))

    def _score(self, scored: Scored) -> None:
        self._log.append(scored)
        if scored.why:
            self._warn(f"{self._log.standing.runs[scored.candidate]} has no score: {scored.why}")

    async def _start(self, run_id: str, start: Any) -> None:
        """Starts a run once the owner's limits have room for it beside those that live.

        Raises:
            NoRoomWithin: They will not have any.
            TopropeError: It cannot start.
        """
        said = False
        while True:
            self._check_ending()
            await self._member.hold_async()
            try:
                await asyncio.to_thread(start)
                return
            except NoRoomWithin as error:
                # What members that live reserved and do not use is free when they end.
                if not set(error.limits) <= _WAITED_FOR and not self._doing:
                    raise
                if not said:
                    said = True
                    self._warn(f"{run_id} waits: {error.message}")
                await asyncio.sleep(_ROOM_EVERY_S)

    async def _taken_up(self, run_id: str) -> bool:
        """Has a run go on that was stopped with the sweep before this conductor began; whether it was.

        Raises: see `_start`.
        """
        members = self._members
        if not await asyncio.to_thread(members.was_stopped, run_id):
            return False
        while not members.over(await asyncio.to_thread(members.status, run_id)):
            self._check_ending()
            await asyncio.sleep(_LOOK_EVERY_S)
        await self._start(run_id, lambda: members.go_on(run_id))
        return True

    async def _follow(self, candidate: str, run_id: str) -> tuple[Status, str]:
        """Waits for the end of a run; its status, and why it was stopped early, if it was."""
        members, why = self._members, ""
        while True:
            self._check_ending()
            status = await asyncio.to_thread(members.status, run_id)
            if members.over(status):
                return status, why
            if self._plan.evaluate == "train":
                self._doing[candidate] = int(status.progress.get("step") or 0)
            else:
                self._doing.setdefault(candidate, 0)
            if not why and (found := hopeless_reason(status)):
                why = f"stopped early, {found}"
                await asyncio.to_thread(members.runs.stop, run_id)
            await asyncio.sleep(_LOOK_EVERY_S)

    async def _measure_winner(self) -> None:
        """Measures the best candidate on held-out tasks, the only time that the sweep looks at them."""
        standing = self._log.standing
        best = standing.best
        if best is None:
            why = next((one.why for one in standing.scores.values() if one.why), "none was measured")
            raise ComponentFailed(
                f"No candidate has a score; the first: {why}",
                hint="list_runs names the members; read_logs says more of each.",
            )
        if standing.final is not None and (standing.final.measured is not None or standing.final.why):
            if standing.final.measured is not None and self._members.is_there(final_id(self._member.spec.run_id)):
                self._tell_heldout(self._members.status(final_id(self._member.spec.run_id)), standing.final.candidate)
            return
        if not self._member.spec.config.evaluation.heldout_tasks:
            self._log.append(Finalist(candidate=best.candidate, why="evaluation.heldout_tasks is 0"))
            return
        if standing.final is None:
            self._log.append(Finalist(candidate=best.candidate))
        assert standing.final is not None
        winner = standing.candidates[standing.final.candidate]
        self._enter("evaluating")
        run_id = final_id(self._member.spec.run_id)
        try:
            if not await self._taken_up(run_id):
                await self._start("the winner's run", lambda: self._members.start_final(winner, standing))
        except NoRoomWithin:
            raise
        except TopropeError as error:
            if not self._members.is_there(run_id) or self._members.was_stopped(run_id):
                self._log.append(Finalist(candidate=winner.id, why=f"it could not be measured: {error.message}"))
                self._warn(f"the winner was not measured on held-out tasks: {error.message}")
                return
        status, _ = await self._follow(winner.id, run_id)
        if status.state != "completed":
            said = status.failure.reason if status.failure else status.reason
            self._log.append(Finalist(candidate=winner.id, run_id=run_id, why=f"its run {status.state}: {said}"))
            self._warn(f"the winner was not measured on held-out tasks: its run {status.state}: {said}")
            return
        measured: Measured = await asyncio.to_thread(self._members.measured, status)
        self._log.append(Finalist(candidate=winner.id, run_id=run_id, measured=measured))
        self._tell_heldout(status, winner.id)

    # Telling and ending

    def _tell_heldout(self, status: Status, winner: str) -> None:
        best = self._log.standing.runs[winner]
        self._member.report(Evaluated("heldout", {**status.evaluations.get("test", {}), "best": best}))

    def _enter(self, phase: str) -> None:
        self._phase = phase
        self._report_progress()

    async def _tell(self) -> None:
        while True:
            self._report_progress()
            await asyncio.sleep(_TELL_EVERY_S)

    def _report_progress(self) -> None:
        standing, plan = self._log.standing, self._plan
        if plan.evaluate == "train":
            done, total = standing.steps + sum(self._doing.values()), plan.total_steps
        else:
            done, total = len(standing.scores), plan.runs - 1
        values = {"epoch": float(self._epoch), "measured": float(len(standing.scores))}
        if standing.best is not None and standing.best.score is not None:
            values["best"] = round(standing.best.score, 6)
        what = self._phase if self._phase == "complete" else f"{self._phase} (epoch {self._epoch} of {plan.epochs})"
        told = (what, done, tuple(values.items()))
        if told != self._told:
            self._told = told
            self._member.report(Progress(what, done, total, values))

    def _warn(self, what: str) -> None:
        self._member.report(Warned(what))

    def _check_ending(self) -> None:
        if self._member.ending.is_set():
            raise _Ending

    async def _unless_ending(self, work: Awaitable[T]) -> T:
        """What `work` comes to; left when the sweep is to end, however long a strategy takes."""
        task = asyncio.ensure_future(work)
        while not (await asyncio.wait({task}, timeout=_LOOK_EVERY_S))[0]:
            if self._member.ending.is_set():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                raise _Ending
        return task.result()


def main() -> int:
    """The component program."""
    member = CrewMember.join()
    signal.signal(signal.SIGTERM, lambda *_: member.ending.set())
    # The members' keepers take their surroundings from here, and outlive the temporary folder of this run.
    os.environ.pop("TMPDIR", None)

    async def run() -> None:
        pulse = asyncio.create_task(send_heartbeats(member.report))
        try:
            await Conductor(member, Home.locate()).run()
        finally:
            pulse.cancel()

    try:
        asyncio.run(run())
    except _Ending:
        return 0
    except TopropeError as error:
        member.report(Failed(error.message, error.hint))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
