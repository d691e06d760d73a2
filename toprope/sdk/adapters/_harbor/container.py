"""A task's machine as a container of docker or podman: its image is built as its author wrote it.

The worker must be let out of its wall for that: a process that starts containers can do all that the owner can.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import uuid
import weakref

from toprope.sdk.adapters._harbor.folders import TaskFolder, told
from toprope.sdk.errors import EnvironmentMistake, LoadError

__all__ = ["Container", "engine"]

_PROGRAMS = ("docker", "podman")
_LOOK_S, _BUILD_S, _STEP_S = 20.0, 1800.0, 120.0
_LONGEST_S = "21600"
"""The container ends after so many seconds even if the worker was killed; `engine` removes what is left of it."""
_LABEL = "toprope-task"
_KILLED = 137
"""Exit code of `timeout -s KILL` for a command that took too long."""


def engine() -> str:
    """Return the program that runs containers here.

    Raises:
        LoadError: There is none, or it refuses this worker; the text says what to do.
    """
    why = []
    for name in _PROGRAMS:
        if (program := shutil.which(name)) is None:
            continue
        done = _done([program, "info"], _LOOK_S)
        if done.returncode == 0:
            old = ["--filter", f"label={_LABEL}", "--filter", "until=7h"]
            _done([program, "container", "prune", "--force", *old], _STEP_S)
            return program
        why.append(f"{name} refuses: {' '.join(done.stdout.split())[-200:]}")
    if why:
        raise LoadError(
            f"{'; '.join(why)}. Start its service, and let this environment out of its wall, which closes the "
            "service's socket: the owner sets `trust: yes` for it in settings.yaml."
        )
    raise LoadError("This machine has neither docker nor podman. Install one.")


class Container:
    """The machine of one rollout.

    Args:
        task: The task.
        program: See `engine`.

    Raises:
        EnvironmentMistake: Its image is not built, or does not start.
    """

    def __init__(self, task: TaskFolder, program: str) -> None:
        self._task, self._program = task, program
        path = str(task.context.resolve())
        image = f"toprope-{hashlib.sha256(path.encode()).hexdigest()[:16]}"  # its layers are cached
        self._engine(["build", "--quiet", "--tag", image, path], _BUILD_S, "its image was not built")
        self._name = f"toprope-{uuid.uuid4().hex}"
        limits = [f"--cpus={task.cpus:g}"] if task.cpus else []
        limits += [f"--memory={task.memory_mb:g}m"] if task.memory_mb else []
        limits += [] if task.internet else ["--network=none"]
        names = ["--name", self._name, "--label", _LABEL]
        words = ["run", "--detach", "--init", *names, *limits, image, "sleep", _LONGEST_S]
        self._delete = weakref.finalize(self, _done, [program, "rm", "--force", "--volumes", self._name], _STEP_S)
        self._engine(words, _STEP_S, "its container does not start")

    def run(self, command: str, seconds: float) -> str:
        """Run a command of the policy in the working folder; what it printed, and its exit code if that is not 0."""
        return told(*self._run(command, seconds), seconds)

    def verify(self) -> tuple[int | None, str]:
        """Run the task's tests on the files that the policy left, after the end of all its processes.

        The restart ends them from outside: a process in the background could write a reward after the tests did.

        Returns:
            The exit code, None if it took too long; and what was printed.

        Raises:
            EnvironmentMistake: The container does not restart, so no reward of it counts.
        """
        self._engine(["restart", "-t", "0", self._name], _STEP_S, "its processes were not ended before its tests")
        self._run("rm -rf /tests /logs/verifier; mkdir -p /tests /logs/verifier", _STEP_S)
        tests = self._task.path / "tests"
        if tests.is_dir():
            self._engine(["cp", f"{tests}/.", f"{self._name}:/tests"], _STEP_S, "its tests were not copied")
        script = "/tests/test.sh"
        if not (tests / "test.sh").is_file():
            script = "/tests/run-tests.sh"
            place = str(self._task.path / self._task.tests)
            self._engine(["cp", place, f"{self._name}:{script}"], _STEP_S, "its tests were not copied")
        return self._run(f"TEST_DIR=/tests bash {script}", self._task.seconds)

    def read(self, path: str) -> str | None:
        """A file of the task's machine; None if it is not there."""
        done = _done([self._program, "exec", self._name, "cat", path], _STEP_S, errors=False)
        return done.stdout if done.returncode == 0 else None

    def close(self) -> None:
        """End and remove the container."""
        self._delete()

    def _run(self, command: str, seconds: float) -> tuple[int | None, str]:
        words = ["exec", self._name, "timeout", "-s", "KILL", f"{seconds:g}", "bash", "-c", command]
        done = _done([self._program, *words], seconds + _STEP_S)
        return None if done.returncode == _KILLED else done.returncode, done.stdout

    def _engine(self, words: list[str], seconds: float, what: str) -> None:
        done = _done([self._program, *words], seconds)
        if done.returncode:
            raise EnvironmentMistake(f"{self._task.name}: {what}: {' '.join(done.stdout.split())[-300:]}")


def _done(command: list[str], seconds: float, *, errors: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a command; one that takes too long counts as failed.

    Args:
        errors: Whether what it prints on standard error counts as its output.
    """
    told = subprocess.STDOUT if errors else subprocess.DEVNULL
    try:
        return subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=told, timeout=seconds, check=False,
            text=True, errors="replace",
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, _KILLED, f"no answer within {seconds:g} s")
