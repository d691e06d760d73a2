"""A task's machine as a container of docker or podman: its image is built as its author wrote it.

The policy may change everything in its container, programs as well, and the tests of most tasks run there. So the
programs that a verdict rests on are compared with the image's before the tests; libraries and packages are not, since
installing them is part of many tasks. Tests with a container of their own get the task's declared files alone.

The worker must be let out of its wall for that: a process that starts containers can do all that the owner can.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import posixpath
import re
import shlex
import shutil
import subprocess
import tarfile
import uuid
import weakref
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from pathlib import Path

from toprope.sdk.adapters._harbor.folders import PYTEST_FILES, TaskFolder, command_message
from toprope.sdk.adapters._harbor.task_settings import filled_in
from toprope.sdk.errors import EnvironmentMistake, LoadError

__all__ = ["Container", "engine"]

_PROGRAMS = ("docker", "podman")
_LOOK_S, _BUILD_S, _STEP_S = 20.0, 1800.0, 120.0
_LONGEST_S = "21600"
"""The container ends after so many seconds even if the worker was killed; `engine` removes what is left of it."""
_LABEL = "toprope-task"
_TRUSTED = (
    *("bash", "sh", "env", "cat", "cp", "mkdir", "rm", "sleep", "timeout", "readlink"),
    *("python", "python3", "pytest", "uv", "uvx"),
)
"""Programs under every test, and those by which it is started."""
_WORDS = re.compile(r"(?<![\w./$-])[A-Za-z_][\w.+-]*")
_LOADED = re.compile(
    rf"^[AC] (/etc/ld\.so\.preload|/.*/(?:site|user)customize\.py|/(?:{'|'.join(map(re.escape, PYTEST_FILES))}))$",
    re.MULTILINE,
)
"""Files, among changed ones, by which a policy's code gets into every program, every Python, or pytest in `/tests`."""
_ABSOLUTE = re.compile(r'(?:^|["\s])(/[^\s",]+)')
_KILLED = 137
"""Exit code of `timeout -s KILL` for a command that took too long."""


def engine() -> str:
    """Return the program that runs containers here.

    Raises:
        LoadError: No engine is installed, or it refuses this worker; the text says what to do.
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
        is_checked: Its programs are compared before the tests.

    Raises:
        EnvironmentMistake: Its image is not built, or does not start.
    """

    def __init__(self, task: TaskFolder, program: str, *, is_checked: bool = True) -> None:
        self._task, self._program = task, program
        path = str(task.context.resolve())
        image = task.prebuilt or f"toprope-{hashlib.sha256(path.encode()).hexdigest()[:16]}"  # its layers are cached
        if not task.prebuilt:
            self._engine(["build", "--quiet", "--tag", image, path], _BUILD_S, "its image was not built")
        self._name = f"toprope-{uuid.uuid4().hex}"
        limits = [f"--cpus={task.cpus:g}"] if task.cpus else []
        limits += [f"--memory={int(task.memory_mb)}m"] if task.memory_mb else []
        limits += [] if task.internet else ["--network=none"]
        names = ["--name", self._name, "--label", _LABEL]
        words = ["run", "--detach", "--init", "--no-healthcheck", *names, *limits, image, "sleep", _LONGEST_S]
        self._delete = weakref.finalize(self, _done, [program, "rm", "--force", "--volumes", self._name], _STEP_S)
        self._engine(words, _BUILD_S, "its container does not start")
        self._tests: Container | None = None
        self._started_by = ("timeout", "bash")
        self._entry: list[str] = []
        self._programs: dict[str, str] = {}
        self._digests: dict[str, str] = {}
        if is_checked and task.verifier is None:
            self._remember_programs()

    def run(self, command: str, seconds: float) -> str:
        """Run a command of the policy in the working folder; what it printed, and its exit code if that is not 0."""
        return command_message(*self._run(command, seconds), seconds)

    def verify(self) -> tuple[int | None, str]:
        """Run the task's tests on the files that the policy left, after the end of all its processes.

        The stop ends them from outside: a process in the background could write a reward after the tests did.

        Returns:
            The exit code, None if it took too long; and what was printed.

        Raises:
            EnvironmentMistake: No reward counts, because the container does not stop, or the policy replaced programs.
        """
        verifier = self._task.verifier
        for command in () if verifier is None else verifier.collect:
            self._run(command, _STEP_S)
        self._engine(["stop", "-t", "0", self._name], _STEP_S, "its processes were not ended before its tests")
        if verifier is None:
            self._start_checked()
            return self._test(brings_tests=False)
        self._tests = Container(verifier.machine, self._program, is_checked=False)
        places = [f"{place}/" for place, _ in verifier.artifacts]
        for place, left_out in verifier.artifacts:
            if not any(place.startswith(folder) for folder in places):
                self._carry(place, left_out, self._tests)
        return self._tests._test(verifier.brings_tests)

    def _test(self, brings_tests: bool) -> tuple[int | None, str]:
        tests, script = self._task.path / "tests", "/tests/test.sh"
        self._make_afresh("/logs/verifier", "its tests")
        if not brings_tests:
            self._make_afresh("/tests", "its tests")
            if tests.is_dir():
                self._engine(["cp", f"{tests}/.", f"{self._name}:/tests"], _STEP_S, "its tests were not copied")
            if not (tests / "test.sh").is_file():
                script = "/tests/run-tests.sh"
                place = str(self._task.path / self._task.tests)
                self._engine(["cp", place, f"{self._name}:{script}"], _STEP_S, "its tests were not copied")
        variables = filled_in(self._task.variables)
        return self._run(f"TEST_DIR=/tests bash {script}", self._task.seconds, variables=variables)

    def _make_afresh(self, folder: str, before: str) -> None:
        code, printed = self._run(f"rm -rf {folder} && mkdir -p {posixpath.dirname(folder)} && mkdir {folder}", _STEP_S)
        if code != 0:
            raise EnvironmentMistake(f"{self._task.name}: {folder} was not replaced before {before}: {printed[-200:]}")

    def _remember_programs(self) -> None:
        """Note the image's programs, before the policy's first command."""
        entry = self._engine(
            ["inspect", "--format", "{{json .Config.Entrypoint}}", self._name], _LOOK_S, "its entrypoint is unknown"
        )
        self._entry = [place for place, digest in self._digests_of(_ABSOLUTE.findall(entry)).items() if digest]
        self._programs = self._find_programs()
        by_name = {posixpath.basename(place): place for place in self._programs}
        self._digests = self._digests_of({*self._programs, *self._programs.values()})
        if not {"timeout", "bash", "readlink"} <= by_name.keys() or not all(self._digests.values()):
            raise EnvironmentMistake(f"{self._task.name}: its image's programs (bash, coreutils) cannot be read.")
        self._started_by = (by_name["timeout"], by_name["bash"])

    def _find_programs(self) -> dict[str, str]:
        """The entrypoint, the programs that the tests' script names, and those under it: as the shell finds them, and
        without links.

        Without those that the instruction names too: the task may be to mend them.
        """
        script = (self._task.path / self._task.tests).read_text("utf-8", "replace")
        script_words = {*_WORDS.findall(script)} - {*_WORDS.findall(self._task.instruction)}
        places = self._paths(f"type -P {' '.join(sorted({*_TRUSTED, *script_words}))}")
        reader = next((place for place in places if place.endswith("/readlink")), "readlink")
        places = [*self._entry, *places]
        return dict(zip(places, self._paths(shlex.join([reader, "-f", *places])), strict=False))

    def _paths(self, command: str) -> list[str]:
        """Return the paths that a command prints, without the shell's warnings, as of a locale that it lacks."""
        printed = self._run(command, _STEP_S, errors=False)[1].splitlines()
        return [line for line in printed if line.startswith("/")]

    def _start_checked(self) -> None:
        """Start the stopped container again if its programs are the image's."""
        digests = self._digests_of(self._digests)
        changed = [place for place, digest in self._digests.items() if digests[place] != digest]
        listed = _done([self._program, "diff", self._name], _STEP_S)
        loaded = _LOADED.findall(listed.stdout) if listed.returncode == 0 else ["(its changes cannot be listed)"]
        has_python = any("/python" in place for place in self._programs)  # else one is installed, with such files
        changed += [place for place in loaded if has_python or not place.endswith("customize.py")]
        if not changed:
            self._engine(["start", self._name], _STEP_S, "its container does not start again")
            programs = self._find_programs()
            changed = [place for place, target in self._programs.items() if programs.get(place) != target]
        if changed:
            raise EnvironmentMistake(
                f"{self._task.name}: no verdict counts, because the policy replaced programs that its tests use: "
                f"{', '.join(changed[:5])}. Tests in a container of their own are safe from that (task.toml: "
                '[verifier] environment_mode = "separate").'
            )

    def _digests_of(self, places: Iterable[str]) -> dict[str, str]:
        with ThreadPoolExecutor(8) as pool:
            return dict(zip(places, pool.map(self._digest, places), strict=True))

    def _digest(self, place: str) -> str:
        """The target of a link, the hash of another file's content; empty if it is neither."""
        whole = hashlib.sha256()
        with contextlib.suppress(tarfile.TarError), self._members(place) as members:
            member = members.next()
            content = members.extractfile(member) if member is not None and member.isreg() else None
            while content is not None and (piece := content.read(1 << 20)):
                whole.update(piece)
            return whole.hexdigest() if content is not None else member.linkname if member is not None else ""
        return ""

    def _carry(self, place: str, left_out: tuple[str, ...], tests: Container) -> None:
        """Copy a file or folder to the container of the tests; one that is not there is left out."""
        above = posixpath.dirname(place) or "/"
        tests._run(f"mkdir -p {shlex.quote(above)}", _STEP_S)
        into = [self._program, "cp", "-", f"{tests._name}:{above}"]
        with contextlib.suppress(tarfile.ReadError), self._members(place) as members:
            with subprocess.Popen(into, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as writing:
                with tarfile.open(fileobj=writing.stdin, mode="w|") as carried:
                    for member in members:
                        inside = member.name.split("/")[1:]
                        names = (*inside, "/".join(inside))
                        if not (member.isdev() or any(fnmatch(name, out) for name in names for out in left_out)):
                            carried.addfile(member, members.extractfile(member) if member.isreg() else None)
            if writing.returncode:
                raise EnvironmentMistake(f"{self._task.name}: its files {place} were not copied to its tests.")

    @contextlib.contextmanager
    def _members(self, place: str) -> Iterator[tarfile.TarFile]:
        """A file or folder as the engine reads it from outside, without links being followed.

        Raises:
            tarfile.ReadError: It is not there.
        """
        words = [self._program, "cp", f"{self._name}:{place}", "-"]
        with subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as reading:
            try:
                with tarfile.open(fileobj=reading.stdout, mode="r|") as members:
                    yield members
            finally:
                reading.kill()

    def read(self, path: str) -> str | None:
        """A file of the task's machine; None if it is not there."""
        done = _done([self._program, "exec", (self._tests or self)._name, "cat", path], _STEP_S, errors=False)
        return done.stdout if done.returncode == 0 else None

    def put(self, source: Path, path: str) -> None:
        """Copy the content of a folder of the task to a place of its machine."""
        self._make_afresh(path, "its files were copied")
        self._engine(["cp", f"{source}/.", f"{self._name}:{path}"], _STEP_S, f"{path} was not copied")

    def close(self) -> None:
        """End and remove the container, and that of its tests."""
        if self._tests is not None:
            self._tests.close()
        self._delete()

    def _run(
        self, command: str, seconds: float, *, errors: bool = True, variables: Mapping[str, str] | None = None
    ) -> tuple[int | None, str]:
        timeout, bash = self._started_by
        given = [word for name in variables or () for word in ("--env", name)]  # without values, which may be keys
        words = ["exec", *given, self._name, timeout, "-s", "KILL", f"{seconds:g}", bash, "-c", command]
        done = _done([self._program, *words], seconds + _STEP_S, errors=errors, variables=variables)
        return None if done.returncode == _KILLED else done.returncode, done.stdout

    def _engine(self, words: list[str], seconds: float, problem: str) -> str:
        done = _done([self._program, *words], seconds)
        if done.returncode:
            raise EnvironmentMistake(f"{self._task.name}: {problem}: {' '.join(done.stdout.split())[-300:]}")
        return done.stdout


def _done(
    command: list[str], seconds: float, *, errors: bool = True, variables: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command; one that takes too long counts as failed.

    Args:
        errors: Count what it prints on standard error as its output.
        variables: Environment variables that it has besides this process's.
    """
    errors_to = subprocess.STDOUT if errors else subprocess.DEVNULL
    try:
        return subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors_to, timeout=seconds, check=False,
            text=True, errors="replace", env={**os.environ, **(variables or {})},
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, _KILLED, f"no answer within {seconds:g} s")
