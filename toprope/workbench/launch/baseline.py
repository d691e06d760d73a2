"""The newest test of an environment: the accuracy of an untrained policy, and the share of groups that teach."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from toprope.errors import Corrupt, NotFound
from toprope.records.run.folder import RUN_ID, RunFolder, read_json

_MOST_READ = 300


@dataclass(frozen=True)
class Baseline:
    """A test of a policy on validation tasks."""

    run_id: str
    policy: str
    tasks: int
    group_size: int
    pass_rate: float
    all_wrong_share: float
    """Share of groups without a right answer; they teach nothing."""
    all_right_share: float
    """Share of groups with right answers only; they teach nothing either."""
    truncated: float | None = None
    """Share of answers that were cut off."""
    signal: float | None = None
    """Share of groups whose rewards differ; None in tests of earlier versions."""
    max_new_tokens: int = 0
    """Longest answer of the test, in tokens."""


def newest_runs(runs: Path) -> list[RunFolder]:
    """Return the newest runs, at most 300, by the last change of their folders.

    Args:
        runs: The folder of runs; may not exist yet.
    """
    try:
        entries = [entry for entry in os.scandir(runs) if RUN_ID.fullmatch(entry.name) and entry.is_dir()]
        entries.sort(key=lambda entry: entry.stat().st_mtime, reverse=True)
    except OSError:
        return []
    return [RunFolder(Path(entry.path)) for entry in entries[:_MOST_READ]]


def baseline_of(environment: str, runs: Path) -> Baseline | None:
    """Return the newest ended test of a draft's own policy in an environment; None without one.

    Args:
        environment: Name of the environment.
        runs: The folder of runs.
    """
    for folder in newest_runs(runs):
        try:
            if not folder.evaluation("test").is_file():
                continue
            spec = read_json(folder.spec)
            if spec["kind"] != "test" or spec["environment"]["name"] != environment:
                continue
            sampled = read_json(folder.evaluation("test"))["sampled"]
            return Baseline(
                folder.run_id,
                str(spec["config"]["policy"]["model"]),
                int(sampled["tasks"]),
                int(sampled["group_size"]),
                float(sampled["accuracy"]),
                float(sampled["all_wrong_share"]),
                float(sampled["all_right_share"]),
                sampled.get("truncated"),
                sampled.get("signal_share"),
                int(spec["config"]["rollout"]["max_new_tokens"]),
            )
        except (NotFound, Corrupt, KeyError, TypeError, ValueError, AttributeError):
            continue
    return None
