"""The trajectory API as a component of a run: `python -P -m toprope.training.api`, started by the keeper.

It recovers the run's journal and serves on loopback: on a socket that the keeper passes, else on its former port if
that is free, else on a port that the system chooses. It reports its address and, at most once a second, the account of
groups. It ends on a Stop order or when the keeper is gone.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import socket
import sys
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from toprope.errors import NotPossibleNow, TopropeError
from toprope.records.journal.file_journal import FileJournal
from toprope.records.messages import ENV_LISTENER_FD, CountsReport, Failed, Peers, Ready, Stop
from toprope.records.run.folder import RunFolder
from toprope.records.run.specification import Specification
from toprope.training.api.http.app import create_app
from toprope.training.api.http.auth import track_delivery
from toprope.training.api.intake.version_matching import InferenceMatcher
from toprope.training.api.queue.registry import TrainerRegistration
from toprope.training.api.storage.group_commit import GroupCommit
from toprope.training.api.storage.store import TrajectoryStore
from toprope.training.component.http_server import serve
from toprope.training.component.member import CrewMember, send_heartbeats

_COUNTS_EVERY_S = 1.0
_COMPRESS_EVERY_S, _COMPRESS_AGAIN_S = 2.0, 60.0
"""Seconds between looks for closed segments, and after a failure."""


def vocabulary_size(policy: Path) -> int | None:
    """Number of token ids of the policy in this folder; None if its config.json does not give it."""
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


def default_registration(spec: Specification, folder: RunFolder) -> TrainerRegistration:
    """The registration of the run's own trainer, as it would be posted to /register."""
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


async def run(member: CrewMember) -> None:
    """Serve until a Stop order comes or the orders end."""
    config = member.spec.config
    journal = FileJournal(member.folder.journal, sync=config.logging.journal_sync, recent=True)
    try:
        store = TrajectoryStore(
            journal,
            trainer=default_registration(member.spec, member.folder),
            max_staleness=config.rollout.max_staleness,
            train_unmatched=config.rollout.unmatched == "train",
            keep=config.logging.keep_rollouts,
        )
        for damage in journal.damage:
            print(f"journal: skipped {damage}", file=sys.stderr)
        ending = asyncio.Event()
        broken: list[NotPossibleNow] = []

        def disk_failed(error: NotPossibleNow) -> None:
            broken.append(error)
            ending.set()

        port_file = member.folder.journal / "api.port"

        def ready(address: str) -> None:
            try:
                port_file.parent.mkdir(parents=True, exist_ok=True)
                port_file.write_text(str(urlsplit(address).port))
            except OSError as error:  # harms only programs that know the former address
                print(f"{port_file} could not be written: {error}", file=sys.stderr, flush=True)
            member.report(Ready(address))

        commit, matcher = GroupCommit(journal, disk_failed), InferenceMatcher(member.secret)
        gc.collect()
        gc.freeze()  # loaded modules stay: the collector need not visit them again
        tasks = [
            asyncio.create_task(_follow_orders(member, store, matcher, ending)),
            asyncio.create_task(_report_counts(member, store)),
            asyncio.create_task(send_heartbeats(member.report)),
            asyncio.create_task(_release_waiters(ending, store)),
        ]
        compressing = asyncio.create_task(_compress_segments(journal, ending))
        try:
            await serve(
                create_app(store, member.secret, commit=commit, matcher=matcher),
                ready,
                ending,
                port=_former_port(port_file),
                listener=_inherited_socket(),
                http=protocol(),
                timeout_keep_alive=75,
            )
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            ending.set()
            await compressing
            await matcher.close()
            commit.close()
            if not broken:
                with suppress(NotPossibleNow):
                    store.save_counts()
            member.report(_counts_report(store))
        if broken:
            raise broken[0]
        journal.close()
        for ordinal in _compressible(journal):
            _compress(journal, ordinal)
    finally:
        journal.close()


async def _compress_segments(journal: FileJournal, ending: asyncio.Event) -> None:
    """Compress closed segments of the journal in a thread, one after another."""
    while not ending.is_set():
        wait_s = _COMPRESS_EVERY_S
        for ordinal in _compressible(journal):
            if ending.is_set():
                return
            if not await asyncio.to_thread(_compress, journal, ordinal):
                wait_s = _COMPRESS_AGAIN_S
                break
        with suppress(TimeoutError):
            await asyncio.wait_for(ending.wait(), wait_s)


def _compressible(journal: FileJournal) -> list[int]:
    try:
        return journal.compressible()
    except OSError as error:
        print(f"the journal's segments stay uncompressed: {error}", file=sys.stderr, flush=True)
        return []


def _compress(journal: FileJournal, ordinal: int) -> bool:
    """Compress a segment; False if the disk has no room for it, for example. Then it stays as it is."""
    try:
        journal.compress(ordinal)
        return True
    except OSError as error:
        print(f"segment {ordinal} of the journal stays uncompressed: {error}", file=sys.stderr, flush=True)
        return False


def _inherited_socket() -> socket.socket | None:
    """The listening socket that the keeper holds open for this program, if any."""
    descriptor = os.environ.pop(ENV_LISTENER_FD, "")
    return socket.socket(fileno=int(descriptor)) if descriptor.isdecimal() else None


def _former_port(port_file: Path) -> int:
    """The port on which this run's API listened before, which outside environments know; 0 if unknown."""
    try:
        port = int(port_file.read_text())
    except (OSError, ValueError):
        return 0
    return port if 1024 <= port < 65_536 else 0


async def _follow_orders(
    member: CrewMember, store: TrajectoryStore, matcher: InferenceMatcher, ending: asyncio.Event
) -> None:
    try:
        async for order in member.orders():
            if isinstance(order, Stop):
                return
            if not isinstance(order, Peers):
                continue
            if "policy" in order.addresses:
                size = vocabulary_size(Path(order.addresses["policy"]))
                if size is not None:
                    store.set_vocabulary(size)
            if "inference" in order.addresses:
                matcher.connect(order.addresses["inference"])
    finally:
        ending.set()


async def _release_waiters(ending: asyncio.Event, store: TrajectoryStore) -> None:
    """Answer waiting requests at the end, which an order or a signal may bring."""
    await ending.wait()
    store.changed.close()


async def _report_counts(member: CrewMember, store: TrajectoryStore) -> None:
    reported_changes = -1
    while True:
        if store.changes != reported_changes:
            reported_changes = store.changes
            member.report(_counts_report(store))
            try:
                store.save_counts()
            except NotPossibleNow:
                pass  # posts are told that the disk is full
        await asyncio.sleep(_COUNTS_EVERY_S)


def _counts_report(store: TrajectoryStore) -> CountsReport:
    return CountsReport(msgspec.to_builtins(store.queue.counts()))


def protocol() -> type:
    """The HTTP protocol with which the API is served."""
    return track_delivery(AutoHTTPProtocol)


def main() -> int:
    """Run the program; returns its exit status."""
    member = CrewMember.join()
    try:
        asyncio.run(run(member))
    except (TopropeError, OSError) as error:
        member.report(Failed(str(error), getattr(error, "hint", "")))
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
