"""Slurm, by its commands: sbatch, squeue, scancel and scontrol, which every version and site has.

slurmrestd needs a version of its interface that differs by site, and sacct a database that many sites lack.
"""

from __future__ import annotations

import getpass
import os
import re
import shlex
import subprocess
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from toprope.errors import visible
from toprope.settings.clusters import Cluster
from toprope.supervisor.launchers.engine import Job, JobRequest, NotReached, Phase, QueueFull, Refused, Unreachable

_ANSWER_S = 20.0
_LEAVE_S = 60
"""Seconds before its time limit at which Slurm warns a job by SIGUSR1."""
_FIELDS = "%i|%T|%S|%N|%B|%r|%j"
"""The name comes last, because names of other jobs of the user may contain the mark."""
_WAITING = frozenset({"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT"})
_RUNNING = frozenset({"RUNNING", "SUSPENDED", "STOPPED", "SIGNALING", "RESIZING", "STAGE_OUT"})
_PASSED = ("PATH", "HOME", "USER", "LOGNAME", "LANG", "KRB5CCNAME", "LD_LIBRARY_PATH")
_UNREACHABLE = (
    "unable to contact slurm", "connection refused", "timed out", "connection failure", "send failure",
    "receive failure", "zero bytes were",
)  # fmt: skip
"""In a command's last line. Those before it may be a site's own words about a quota."""
_NEVER_STARTS = {
    "PartitionTimeLimit": "lower launcher.time_limit_minutes",
    "PartitionNodeLimit": "lower launcher.nodes, unless nodes of the partition are down",
    "PartitionConfig": "lower launcher.resources, or change launcher.partition",
    "BadConstraints": "change launcher.features or launcher.resources",
}
"""Slurm's reasons for a wait that ends only if its partition changes, with the remedies."""

Run = Callable[[Sequence[str], str, Mapping[str, str]], subprocess.CompletedProcess[str]]
"""Runs a command with a text as its input and a whole environment. Raises OSError, or TimeoutExpired in the end."""


def run_command(command: Sequence[str], text: str, variables: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a command within bounded time. See `Run`."""
    return subprocess.run(
        command, input=text, capture_output=True, text=True, timeout=_ANSWER_S, check=False, env=variables
    )


class SlurmEngine:
    """The Slurm of one cluster. See `Engine`."""

    title = "Slurm"

    def __init__(self, cluster: Cluster, run: Run = run_command) -> None:
        self._cluster, self._run = cluster, run
        self._expanded: dict[str, list[str]] = {}

    def submit(self, request: JobRequest) -> None:
        """See `Engine.submit`. The script comes by standard input; Slurm keeps a copy, so it holds no secret."""
        try:
            is_known = request.name in self.jobs()
        except Unreachable as error:
            raise NotReached(str(error), hint="Nothing was started. Start it again once Slurm answers.") from None
        if is_known:
            return
        lines = ["#!/bin/sh", *self._cluster.setup, f"exec {shlex.join(request.command)}", ""]
        done = self._ask("sbatch", ["--parsable", *self._options(request)], "\n".join(lines))
        if done.returncode and "MaxSubmit" in done.stderr:
            raise QueueFull(
                f"Slurm takes no more jobs of this user: {_summarize_output(done)}.",
                hint="Nothing was started. Start it again once another job has ended.",
            )
        if done.returncode:
            raise Refused(
                f"Slurm refused the job: {_summarize_output(done)}.",
                hint="Nothing was started. Change launcher.partition, account, features, resources or "
                "time_limit_minutes. The owner's clusters.yaml gives an empty partition or account.",
            )

    def _options(self, request: JobRequest) -> list[str]:
        launcher, room = request.launcher, request.launcher.room()
        options = {
            "--job-name": request.name,
            "--chdir": str(request.folder),
            "--output": str(request.log),
            "--open-mode": "append",
            "--export": "NIL",
            "--signal": f"B:USR1@{_leave_s(launcher.time_limit_minutes)}",
            "--nodes": str(launcher.nodes),
            "--ntasks-per-node": "1",
            "--cpus-per-task": str(room.cpus),
            "--mem": f"{room.memory_mb}M" if room.memory_mb else "",
            "--gpus-per-node": str(room.gpus) if room.gpus else "",
            "--partition": launcher.partition or self._cluster.partition,
            "--account": launcher.account or self._cluster.account,
            "--constraint": "&".join(launcher.features),
            "--time": str(launcher.time_limit_minutes) if launcher.time_limit_minutes else "",
        }
        # The crew goes on if a node fails that is not the keeper's.
        return ["--no-requeue", "--no-kill", *(f"{name}={value}" for name, value in options.items() if value)]

    def jobs(self) -> Mapping[str, Job]:
        """See `Engine.jobs`. Slurm forgets ended jobs after MinJobAge, 300 s by default."""
        done = self._ask("squeue", ["--noheader", "--states=all", f"--user={getpass.getuser()}", f"--format={_FIELDS}"])
        if done.returncode:
            raise Unreachable(f"squeue answered: {_summarize_output(done)}.")
        jobs: dict[str, Job] = {}
        for line in done.stdout.splitlines():
            handle, word, start, nodes, host, reason, name = (line.split("|", 6) + [""] * 6)[:7]
            # Of two jobs with one name the later one is listed under a greater number.
            if name not in jobs or _number(handle) > _number(jobs[name].handle):
                if _phase(word) == "running" and host not in self._hosts(nodes, host):
                    # --no-kill leaves the job its other nodes for ever, but its keeper is not on them.
                    jobs[name] = Job(handle, "ended", word, f"its first node {host} failed", holds_nodes=True)
                else:
                    jobs[name] = Job(handle, _phase(word), word, _explain_job(word, reason, start, nodes))
        return jobs

    def _hosts(self, nodes: str, host: str) -> Collection[str]:
        """Return the names of a list of nodes as Slurm abbreviates it; `host` if it cannot be told."""
        if nodes == host or not nodes or not host:
            return (host,)
        if nodes not in self._expanded:
            done = self._ask("scontrol", ["show", "hostnames", nodes])
            if done.returncode:
                return (host,)
            self._expanded[nodes] = done.stdout.split()
        return self._expanded[nodes]

    def cancel(self, name: str, *, running: bool = False) -> None:
        """See `Engine.cancel`."""
        state = "RUNNING" if running else "PENDING"
        self._ask("scancel", [f"--state={state}", f"--user={getpass.getuser()}", f"--name={name}"])

    def describe(self, request: JobRequest) -> str:
        """See `Engine.describe`."""
        prefixes = ("--nodes", "--cpus", "--mem", "--gpus", "--partition", "--account", "--constraint", "--time")
        return "Slurm: " + " ".join(option for option in self._options(request) if option.startswith(prefixes))

    def _ask(self, program: str, options: Sequence[str], text: str = "") -> subprocess.CompletedProcess[str]:
        configuration = {"SLURM_CONF": str(Path(self._cluster.config).expanduser())} if self._cluster.config else {}
        # No key of the server reaches the job, whatever the site makes of --export.
        variables = {name: value for name, value in os.environ.items() if name in _PASSED or name.startswith("SLURM_")}
        variables |= configuration
        path = str(Path(self._cluster.commands).expanduser() / program) if self._cluster.commands else program
        try:
            done = self._run([path, *options], text, variables)
        except subprocess.TimeoutExpired:
            config = configuration.get("SLURM_CONF")
            absent = f" There is no file {config}, its `config`." if config and not Path(config).is_file() else ""
            raise Unreachable(f"{program} gave no answer within {_ANSWER_S:g} s.{absent}") from None
        except FileNotFoundError:
            where = f"in {self._cluster.commands}" if self._cluster.commands else "on the server's PATH"
            raise Unreachable(f"There is no {program} {where}; `commands` in clusters.yaml names its folder.") from None
        except (OSError, ValueError) as error:  # ValueError: a NUL in an option
            raise Unreachable(f"{program} cannot be run: {getattr(error, 'strerror', None) or error}.") from None
        last_line = done.stderr.strip().casefold().rpartition("\n")[2]
        if done.returncode and any(part in last_line for part in _UNREACHABLE):
            raise Unreachable(f"{program} answered: {_summarize_output(done)}.")
        return done


def _number(handle: str) -> int:
    """The number in 17, 17_3 (of an array) or 17+0 (a part of a job)."""
    found = re.match(r"\d+", handle)
    return int(found[0]) if found else 0


def _leave_s(limit_minutes: int) -> int:
    """The seconds that a job gets to leave: at most half of its time, or a short one would be told as it begins."""
    return min(_LEAVE_S, 30 * limit_minutes) if limit_minutes else _LEAVE_S


def _phase(word: str) -> Phase:
    if word in _WAITING:
        return "waiting"
    if word in _RUNNING:
        return "running"
    return "ending" if word == "COMPLETING" else "ended"


def _explain_job(word: str, reason: str, start: str, nodes: str) -> str:
    """Say why a job waits, or how it ended; nothing about a job that runs."""
    if word == "PENDING":
        if reason in _NEVER_STARTS:
            return f"{reason}; it will not start so: stop it, and {_NEVER_STARTS[reason]}"
        day, _, clock = start.partition("T")
        return f"{reason}, estimated start {day} {clock[:5]}" if clock else reason
    if word in _RUNNING:
        return ""
    return word + (f" ({reason})" if reason not in ("None", "") else "") + (f" on {nodes}" if nodes else "")


def _summarize_output(done: subprocess.CompletedProcess[str]) -> str:
    """Return the last words of a command, from outside and therefore shortened."""
    lines = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
    text = "; ".join(line.removeprefix("sbatch: ").removeprefix("error: ").rstrip(".") for line in lines[-2:])
    return visible(text, 300).rstrip(".") or f"exit status {done.returncode}"
