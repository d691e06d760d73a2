"""The keeper of a run on a cluster that shares no folder with the server.

    python -P -m toprope.supervisor.mirror.far HOME JOB HOST:PORT KEY_FILE [trusted]

HOME is the owner's folder on the cluster, JOB the name of the job: run, attempt and, if it only brings what an earlier
job left, the number of the delivery. It asks the server for the run, keeps it as on any cluster, and meanwhile sends
what is new. After the end it goes on until everything has arrived, or for two minutes; a later job delivers the rest.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2 as httpx

from toprope import shipped
from toprope.atomic import write_json
from toprope.errors import TopropeError
from toprope.records.run.checkpoints import newest_sound
from toprope.records.run.folder import RUN_ID, RunFolder, translate_paths
from toprope.records.run.status import Status
from toprope.records.walls import ENV_WALLS, Walls
from toprope.sdk.wall.kernel import hide_memory
from toprope.settings.clusters import cluster_key
from toprope.supervisor.heartbeat import is_beating
from toprope.supervisor.keeper import program
from toprope.supervisor.lock import ALREADY_KEPT, RunLock, is_held
from toprope.supervisor.mirror.sender import Sender
from toprope.supervisor.mirror.wire import Refused, Wire, run_key
from toprope.supervisor.runs.cleanup import settle_run
from toprope.supervisor.runs.orders import write_end_order

_BEGIN_S, _BEGIN_EVERY_S = 600.0, 1.0
_REST_S = 120.0
_OUTLIVED_S = 60.0
"""The longest wait for a keeper whose engine gave it up."""
_HASH_BYTES = 2 << 30


def main(arguments: Sequence[str] | None = None, *, programs: Mapping[str, Sequence[str]] | None = None) -> int:
    """Run the program and return its exit code. See `program.main`."""
    home, job, server, key_file, *network = sys.argv[1:] if arguments is None else arguments
    run_id, attempt, *_ = job.split(".")
    if not RUN_ID.fullmatch(run_id):
        raise ValueError(f"{run_id!r} is not a run id")
    os.umask(0o077)
    key = run_key(cluster_key(Path(key_file)), run_id, int(attempt))
    wire = Wire(server, key, trusted=network == ["trusted"], keeper=f"keeper {uuid.uuid4().hex}")
    hide_memory()
    folder = RunFolder(Path(home) / "runs" / run_id)
    try:
        assignment = _begin(wire, folder, job)
    except (Refused, httpx.HTTPError) as error:
        print(f"{server} did not give the run {run_id}: {error!r}", file=sys.stderr)
        return ALREADY_KEPT
    program.redirect(folder.log("keeper"))
    walls = _walls(assignment["variables"], Path(home), Path(key_file), _input_places(folder, assignment["inputs"]))
    os.environ.update(assignment["variables"] | os.environ | walls)
    # As in a keeper: signals wait for its event loop, and none reaches the thread.
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1))
    sender = Sender(folder, wire, assignment["attempt"])
    code = 0
    if assignment["delivery"]:
        if not _settle(folder, assignment["attempt"]):
            return ALREADY_KEPT
        sender.start()
    else:
        sender.start()
        code = program.main([str(folder.path), "--foreground"], programs=programs)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM, signal.SIGINT))
    if not sender.finish(_REST_S):
        print("The server has not taken everything; another job will bring the rest.", file=sys.stderr, flush=True)
    return code


def _walls(variables: Mapping[str, str], home: Path, key_file: Path, inputs: Mapping[str, str]) -> dict[str, str]:
    """Return the owner's decisions about walls with the folders of this cluster in place of the server's.

    Args:
        inputs: Places here of the owner's files, by their places at the server.
    """
    walls = Walls.from_variables(variables)
    homes = None if walls.homes is None else str(home / "homes")
    agents = tuple(local_path for file, local_path in inputs.items() if walls.wrote_agent(file))
    closed = (str(home), str(key_file.expanduser()))
    local_walls = replace(walls, closed=closed, homes=homes, agents=agents, added=())  # those are of the server
    return {ENV_WALLS: local_walls.encode()}


def _begin(wire: Wire, folder: RunFolder, job: str) -> dict[str, Any]:
    """Ask the server for the run until it is here.

    Raises:
        Refused: The run has another job, or another keeper here.
        httpx.HTTPError: The server was not there for ten minutes.
    """
    limit = time.monotonic() + _BEGIN_S
    while True:
        try:
            assignment: dict[str, Any] = wire.ask("POST", "/begin", json={"job": job}).json()
            if not assignment["delivery"] and not _is_free(folder):
                raise Refused(f"{folder.path} has another keeper")
            _fetch(wire, folder, assignment)
            return assignment
        except httpx.HTTPError as error:
            if time.monotonic() >= limit:
                raise
            print(f"The server cannot be reached; trying on: {error!r}", file=sys.stderr, flush=True)
            time.sleep(_BEGIN_EVERY_S)


def _is_free(folder: RunFolder) -> bool:
    """True if the run has no keeper on this cluster."""
    return not (is_held(folder.lock) or is_beating(folder))


def _fetch(wire: Wire, folder: RunFolder, assignment: dict[str, Any]) -> None:
    """Fetch from the server what this folder lacks. What the server says of a new attempt holds; if the folder has the
    attempt already, the folder is right, and the server has a part of it."""
    if not folder.path.is_dir():
        RunFolder.create(folder.path.parent, folder.run_id)
    moves = _input_places(folder, assignment["inputs"])
    for number, place in enumerate(moves.values()):
        wire.fetch(f"input/{number}", Path(place))
    moves |= {assignment["environments"]: str(shipped.ENVIRONMENTS), assignment["home"]: str(folder.path.parent.parent)}
    try:
        keeps = assignment["delivery"] and Status.read(folder).attempt >= assignment["attempt"]
    except TopropeError:
        keeps = False
    for name in ("spec.json", "launch.json"):
        _replace(wire, folder, name, moves if name == "spec.json" else {})
    if keeps:
        return
    checkpoint, _ = newest_sound(folder, hash_bytes=_HASH_BYTES)
    for name in assignment["files"]:
        if name == "status.json" or (name.startswith("checkpoints/") and checkpoint is not None):
            continue
        if name == "events.jsonl" or not (folder.path / name).exists():
            _replace(wire, folder, name, {})
    # Last: it says that the folder has the attempt. After a job that was killed here, the next one fetches the rest.
    _replace(wire, folder, "status.json", {})
    if not assignment["delivery"]:
        _prepare(folder, assignment["files"])


def _input_places(folder: RunFolder, inputs: Sequence[str]) -> dict[str, str]:
    """Return the places here of the owner's files that a run names."""
    place = folder.path.parent.parent / "inputs" / folder.run_id
    return {path: str(place / str(number) / Path(path).name) for number, path in enumerate(inputs)}


def _replace(wire: Wire, folder: RunFolder, name: str, moves: Mapping[str, str]) -> None:
    target = folder.path / name
    partial = target.with_name(f".{target.name}.partial")
    wire.fetch(name, partial)
    if moves:
        write_json(partial, translate_paths(json.loads(partial.read_bytes()), moves))
    os.replace(partial, target)


def _prepare(folder: RunFolder, files: Sequence[str]) -> None:
    """Remove what belongs to the former attempt, and begin from the newest sound checkpoint that is here."""
    folder.tidy()
    for path in (*folder.orders.glob("*"), *folder.evaluations.glob("*"), folder.results):
        if path.relative_to(folder.path).as_posix() not in files:
            path.unlink(missing_ok=True)
    folder.crew.mkdir(mode=0o700, exist_ok=True)
    checkpoint, _ = newest_sound(folder, hash_bytes=_HASH_BYTES)
    status = Status.read(folder)
    status.model_copy(update={"checkpoint": None if checkpoint is None else checkpoint.told(folder)}).write(folder)


def _settle(folder: RunFolder, attempt: int) -> bool:
    """Write the end of an attempt whose job has ended; False if its keeper lives on."""
    limit = time.monotonic() + _OUTLIVED_S
    while not _is_free(folder):
        write_end_order(folder, attempt, "Its engine gave its job up.")
        if time.monotonic() >= limit:
            print(f"{folder.path} has another keeper, which does not end.", file=sys.stderr, flush=True)
            return False
        time.sleep(1.0)
    lock = RunLock.acquire(folder.lock)
    if lock is None:
        return False
    try:
        settle_run(folder, told="Its job ended before its keeper had written the end.")
    finally:
        lock.release()
    return True


if __name__ == "__main__":
    sys.exit(main())
