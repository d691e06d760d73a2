"""A run of an earlier version with a keeper of that version, for tests of newer front ends.

`freeze` writes the folder as version 0 of Toprope did, field by field, so that later changes of the models do not
affect it. As a program this file is the keeper: it holds the lock, writes steps, and carries out the order to stop.

    older_keeper.py RUN_FOLDER
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import time
from pathlib import Path

CONFIG = {
    "environment": {"knobs": {}},
    "policy": {"model": "embedded", "max_context": 64},
    "rollout": {"group_size": 8, "groups_per_step": 8, "max_new_tokens": 7},
    "launcher": {"kind": "local", "device": "auto", "threads": 1, "start_timeout_s": 600.0, "stop_grace_s": 4.0},
    "budget": {"steps": 1000, "max_train_seconds": None},
}


def freeze(runs: Path, run_id: str) -> Path:
    """Write the folder of a run that is training, and return its path."""
    folder, now = runs / run_id, time.time()
    for name in ("orders", "evaluations", "journal", "checkpoints", "logs", "crew"):
        (folder / name).mkdir(parents=True, mode=0o700)
    environment = {"name": "dice", "file": "/nowhere.py", "attribute": "Dice", "adapter": None, "target": None}
    spec = {
        "version": 1,
        "run_id": run_id,
        "kind": "train",
        "created_at": now,
        "toprope_version": "0.0.1",
        "draft_id": "draft-2222",
        "draft_revision": 1,
        "preset": "cpu-embedded",
        "environment": environment | {"interpreter": None},
        "config": CONFIG,
        "locks": {},
        "test": None,
        "ask": None,
        "policy_cache": str(runs.parent / "policies"),
    }
    (folder / "spec.json").write_text(json.dumps(spec))
    event(folder, 1, "state", **{"from": "queued", "to": "validating", "reason": ""})
    event(folder, 2, "state", **{"from": "validating", "to": "starting", "reason": ""})
    event(folder, 3, "state", **{"from": "starting", "to": "training", "reason": ""})
    write(folder, status(run_id, "training", now))
    return folder


def status(run_id: str, state: str, now: float, **fields: object) -> dict[str, object]:
    """Return the content of status.json in that version."""
    return {
        "version": 1,
        "run_id": run_id,
        "kind": "train",
        "environment": "dice",
        "state": state,
        "reason": "",
        "attempt": 1,
        "created_at": now,
        "started_at": now,
        "training_at": now,
        "ended_at": None,
        "since": now,
        "updated_at": now,
        "progress": {"step": 1, "total_steps": 1000},
        "crew": {"trainer": {"state": "ready", "pid": 1, "exit_code": None, "since": now}},
        "counts": {"accepted": 3},
        "evaluations": {},
        "checkpoint": None,
        "failure": None,
        **fields,
    }


def write(folder: Path, value: dict[str, object]) -> None:
    aside = folder / ".status.json.old"
    aside.write_text(json.dumps(value))
    aside.replace(folder / "status.json")


def event(folder: Path, seq: int, kind: str, **data: object) -> None:
    with (folder / "events.jsonl").open("a") as file:
        file.write(json.dumps({"seq": seq, "at": time.time(), "kind": kind, "data": data}) + "\n")


def keep(folder: Path) -> None:
    """Run the keeper of that version: write a step now and then until it is told to stop."""
    lock = os.open(folder / "keeper.lock", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.pwrite(lock, json.dumps({"pid": os.getpid(), "since": time.time()}).encode() + b"\n", 0)
    print("locked", flush=True)
    now, step = json.loads((folder / "spec.json").read_text())["created_at"], 1
    while not (orders := list((folder / "orders").glob("*.json"))):
        time.sleep(0.02)
        step += 1
        progress = {"step": step, "total_steps": 1000, "reward": 0.5, "an_old_number": 7}
        write(folder, status(folder.name, "training", now, progress=progress))
    order = json.loads(orders[0].read_text())
    assert order["order"] == "stop" and set(order) >= {"grace_s"}, order
    for path in orders:
        path.unlink()
    event(folder, 4, "state", **{"from": "training", "to": "stopping", "reason": "stopped on request"})
    event(folder, 5, "a_kind_of_its_own", text="forgotten since")
    event(folder, 6, "state", **{"from": "stopping", "to": "stopped", "reason": "stopped on request"})
    event(folder, 7, "end", state="stopped", seconds=1.0)
    write(folder, status(folder.name, "stopped", now, reason="stopped on request", ended_at=time.time(), crew={}))


if __name__ == "__main__":
    keep(Path(sys.argv[1]))
