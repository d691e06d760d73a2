"""The trajectory API as a member of a run's crew: `python -P -m toprope.training.api`, started by the keeper.

It takes the run's journal up where the last attempt left it and serves on loopback: on a socket that it is given, else
on the port that it had before if that is free, else on one of the system's choice. It tells the keeper its address and,
at most once a second, the account of groups. It ends when the keeper says so or is gone.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

import msgspec

from toprope.errors import NotPossibleNow, TopropeError
from toprope.records.journal.journal import FileJournal
from toprope.records.messages import ENV_LISTENER_FD, CountsReport, Failed, Order, Peers, Ready, Report, Stop
from toprope.records.run.folder import RunFolder
from toprope.records.run.specification import Specification
from toprope.training.api.http.app import create_app
from toprope.training.api.http.auth import watched
from toprope.training.api.http.body_protocol import direct
from toprope.training.api.intake.version_matching import InferenceMatcher
from toprope.training.api.queue.registry import TrainerRegistration
from toprope.training.api.storage.group_commit import GroupCommit
from toprope.training.api.storage.store import TrajectoryStore
from toprope.training.component.http_server import serve
from toprope.training.component.member import beating

__all__ = ["MemberLike", "main", "protocol", "run", "vocabulary_of"]

_COUNTS_EVERY_S = 1.0


class MemberLike(Protocol):
    """What this program needs of `toprope.training.component.member.Member`."""

    folder: RunFolder
    spec: Specification
    secret: str

    def report(self, report: Report) -> None: ...

    def orders(self) -> AsyncIterator[Order]: ...


def vocabulary_of(policy: Path) -> int | None:
    """How many token ids the policy in this folder has, None where its config.json does not say."""
    try:
        config = json.loads((policy / "config.json").read_bytes())
    except (OSError, ValueError):
        return None
    if not isinstance(config, dict):
        return None
    for section in (config, config.get("text_config")):
        size = section.get("vocab_size") if isinstance(section, dict) else None
        if isinstance(size, int) and size > 0:
            return size
    return None


def registration_of(spec: Specification, folder: RunFolder) -> TrainerRegistration:
    """What the run's own trainer would say at POST /register."""
    config = spec.config
    return TrainerRegistration(
        wandb_group=spec.run_id,
        wandb_project=config.logging.wandb_project,
        batch_size=config.rollout.group_size * config.rollout.groups_per_step,
        max_token_len=config.policy.max_context,
        checkpoint_dir=str(folder.checkpoints),
        save_checkpoint_interval=config.logging.save_steps,
        starting_step=0,
        num_steps=config.budget.steps,
    )


async def run(member: MemberLike) -> None:
    """Serves until a Stop order comes or the orders end."""
    config = member.spec.config
    journal = FileJournal(member.folder.journal, sync=config.logging.journal_sync, recent=True)
    try:
        store = TrajectoryStore(
            journal,
            trainer=registration_of(member.spec, member.folder),
            max_staleness=config.rollout.max_staleness,
            train_unmatched=config.rollout.unmatched == "train",
            keep=config.logging.keep_rollouts,
        )
        for damage in journal.damage:
            print(f"journal: passed over {damage}", file=sys.stderr)
        ending = asyncio.Event()
        broken: list[NotPossibleNow] = []

        def disk_failed(error: NotPossibleNow) -> None:
            broken.append(error)
            ending.set()

        remembered = member.folder.journal / "api.port"

        def ready(address: str) -> None:
            try:
                remembered.parent.mkdir(parents=True, exist_ok=True)
                remembered.write_text(str(urlsplit(address).port))
            except OSError as error:  # only those who knew the address before are the worse for it
                print(f"{remembered} could not be written: {error}", file=sys.stderr, flush=True)
            member.report(Ready(address))

        commit, matcher = GroupCommit(journal, disk_failed), InferenceMatcher(member.secret)
        gc.collect()
        gc.freeze()  # what was loaded stays: the collector need not walk it again
        orders = asyncio.create_task(_obey(member, store, matcher, ending))
        counts = asyncio.create_task(_report_counts(member, store))
        pulse = asyncio.create_task(beating(member.report))
        answering = asyncio.create_task(_answer_at(ending, store))
        try:
            await serve(
                create_app(store, member.secret, commit=commit, matcher=matcher),
                ready,
                ending,
                port=_last_port(remembered),
                listener=_inherited(),
                http=protocol(),
                proxy_headers=False,
                timeout_keep_alive=75,
            )
        finally:
            orders.cancel()
            counts.cancel()
            pulse.cancel()
            answering.cancel()
            await asyncio.gather(orders, counts, pulse, answering, return_exceptions=True)
            matcher.close()
            commit.close()
            if not broken:
                with suppress(NotPossibleNow):
                    store.tally()
            member.report(_counts(store))
        if broken:
            raise broken[0]
    finally:
        journal.close()


def _inherited() -> socket.socket | None:
    """The socket that whoever started this program keeps open for it."""
    descriptor = os.environ.pop(ENV_LISTENER_FD, "")
    return socket.socket(fileno=int(descriptor)) if descriptor.isdecimal() else None


def _last_port(remembered: Path) -> int:
    """Where this run's API listened before: outside environments know no other address. 0 where that is not known."""
    try:
        port = int(remembered.read_text())
    except (OSError, ValueError):
        return 0
    return port if 1024 <= port < 65_536 else 0


async def _obey(member: MemberLike, store: TrajectoryStore, matcher: InferenceMatcher, ending: asyncio.Event) -> None:
    try:
        async for order in member.orders():
            if isinstance(order, Stop):
                return
            if not isinstance(order, Peers):
                continue
            if "policy" in order.addresses:
                size = vocabulary_of(Path(order.addresses["policy"]))
                if size is not None:
                    store.set_vocabulary(size)
            if "inference" in order.addresses:
                matcher.connect(order.addresses["inference"])
    finally:
        ending.set()


async def _answer_at(ending: asyncio.Event, store: TrajectoryStore) -> None:
    """Answers those who wait when the end comes, by order or by signal."""
    await ending.wait()
    store.changed.close()


async def _report_counts(member: MemberLike, store: TrajectoryStore) -> None:
    reported = -1
    while True:
        if store.changes != reported:
            reported = store.changes
            member.report(_counts(store))
            try:
                store.tally()
            except NotPossibleNow:
                pass  # a full disk is said to those who post
        await asyncio.sleep(_COUNTS_EVERY_S)


def _counts(store: TrajectoryStore) -> CountsReport:
    return CountsReport(msgspec.to_builtins(store.queue.counts()))


def protocol() -> type:
    """The HTTP protocol that the API is served with."""
    try:
        import httptools
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
    except ImportError:
        from uvicorn.protocols.http.h11_impl import H11Protocol

        return watched(H11Protocol)
    return direct(watched(HttpToolsProtocol), httptools.HttpRequestParser)


def main() -> int:
    """The program. Returns its exit status."""
    from toprope.training.component.member import Member

    member = Member.join()
    try:
        asyncio.run(run(member))
    except (TopropeError, OSError) as error:
        member.report(Failed(str(error), getattr(error, "hint", "")))
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
