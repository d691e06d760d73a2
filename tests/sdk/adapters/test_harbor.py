"""The adapter of Harbor: task folders in a process sandbox behind the worker's wall, scored by their own tests."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from toprope.sdk.adapters import harbor
from toprope.sdk.adapters._harbor.folders import task_folders
from toprope.sdk.adapters._harbor.sandbox import Sandbox
from toprope.sdk.errors import LoadError, WorkerError
from toprope.sdk.wall import Wall
from toprope.training.rollouts.workers.environment_worker import EnvironmentWorker

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the sandbox needs the wall of Linux")

DOCKERFILE = """\
FROM ubuntu:24.04
ENV GREETING=hello TEST_DIR=/tests
RUN apt-get update && \\
    apt-get install -y python3 curl{packages} && \\
    mkdir -p /etc/shop && rm -rf /var/lib/apt/lists/*
RUN pip3 install --break-system-packages pytest==8.4.1
COPY stock.txt /etc/shop/stock.txt
WORKDIR /workspace
"""
TEST_SH = """\
#!/bin/bash
apt-get install -y curl
pytest /tests/test_outputs.py -rA -p no:cacheprovider
if [ $? -eq 0 ]; then echo 1 > /logs/verifier/reward.txt; else echo 0 > /logs/verifier/reward.txt; fi
"""
TEST_PY = """\
from pathlib import Path

def test_total():
    assert Path("/workspace/total.txt").read_text().split() == ["{total}"]
    assert not Path("/tests/left").exists()
"""
SUM = "awk '{s+=$2} END {print s}' /etc/shop/stock.txt > /workspace/total.txt"


def written(folder: Path, name: str, packages: str = "", total: int = 5, test: str = TEST_SH) -> Path:
    files = {
        "task.toml": 'version = "1.0"\n[metadata]\ndifficulty = "easy"\n[verifier]\ntimeout_sec = 60\n',
        "instruction.md": f"Write the total of `/etc/shop/stock.txt` to `/workspace/total.txt`. ({name})\n",
        "environment/Dockerfile": DOCKERFILE.format(packages=packages),
        "environment/stock.txt": f"pears 2\nplums {total - 2}\n",
        "tests/test.sh": test,
        "tests/test_outputs.py": TEST_PY.format(total=total),
        "solution/solve.sh": f"#!/bin/bash\n{SUM}\n",
    }
    for path, text in files.items():
        place = folder / name / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    return folder / name


def with_worker(folder: Path, body: Callable[[EnvironmentWorker], Awaitable[Any]], **knobs: Any) -> Any:
    async def main() -> Any:
        async with await EnvironmentWorker.behind(Wall(reads=(str(folder),)), timeout=60) as link:
            await link.open({"adapter": "harbor", "target": str(folder)}, timeout=60, knobs=knobs)
            return await body(link)

    return asyncio.run(main())


def bash(command: str) -> str:
    return f"<tool_call>{json.dumps({'name': 'bash', 'arguments': {'command': command}})}</tool_call>"


async def worked(link: EnvironmentWorker, *commands: str) -> tuple[list[str], Any]:
    """The output of commands in the first task, and the outcome."""
    begun = await link.begin("train", 0, 1, timeout=60)
    [handle] = begun.rollouts
    printed = []
    for command in commands:
        [turn] = await link.advance([[handle, bash(command), False]], timeout=60)
        printed.append(str(turn.messages[0]["content"]))
    [turn] = await link.advance([[handle, "Done.", False]], timeout=120)
    return printed, turn.outcome


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    for number in range(12):
        written(tmp_path, f"shop-{number}")
    return tmp_path


def test_tests_of_the_task_give_the_reward(tasks: Path) -> None:
    async def body(link: EnvironmentWorker) -> Any:
        right = await worked(link, "pwd; cat /etc/shop/stock.txt; echo $GREETING", SUM)
        wrong = await worked(link, "echo 6 > total.txt", "mkdir -p /tests && touch /tests/left", "exit 3")
        return right, wrong

    (printed, right), (said, wrong) = with_worker(tasks, body)
    assert printed == ["/workspace\npears 2\nplums 3\nhello", "(no output)"]
    assert right.error is None and right.reward == 1.0 and right.success
    assert wrong.error is None and wrong.reward == 0.0 and said[2] == "(exit code 3)"


def test_solution_of_the_task_demonstrates_it(tasks: Path) -> None:
    async def body(link: EnvironmentWorker) -> Any:
        begun = await link.begin("train", 0, 1, timeout=60)
        [handle] = begun.rollouts
        assert "Use the tool `bash`" in begun.messages[-1]["content"]
        while True:
            answer = await link.solve(handle, timeout=60)
            [turn] = await link.advance([[handle, answer, False]], timeout=120)
            if turn.done:
                return turn.outcome

    assert with_worker(tasks, body).reward == 1.0


LEFT_S = f"300.{os.getpid()}"
"""Seconds by which the process of this test is known, in whatever namespace it runs."""


def test_slow_commands_and_what_they_leave_behind_are_ended(tasks: Path) -> None:
    async def body(link: EnvironmentWorker) -> Any:
        return await worked(link, "sleep 60", f"nohup sleep {LEFT_S} >/dev/null 2>&1 &\necho started", SUM)

    printed, outcome = with_worker(tasks, body, command_s=1.0)
    assert "took longer than 1 s" in printed[0] and "started" in printed[1] and outcome.reward == 1.0
    limit = time.monotonic() + 5
    while any(one.info["cmdline"] == ["sleep", LEFT_S] for one in psutil.process_iter(["cmdline"])):
        assert time.monotonic() < limit, "what the command left behind still runs"
        time.sleep(0.05)


def test_rollouts_of_one_worker_do_not_reach_each_other(tasks: Path) -> None:
    async def body(link: EnvironmentWorker) -> list[str]:
        assert link.enclosure is not None
        begun = await link.begin("train", 0, 2, timeout=60)
        for handle in begun.rollouts:
            await link.advance([[handle, bash("echo mine > /workspace/answer.txt"), False]], timeout=60)
        found = []
        for folder in sorted(Path(link.enclosure.scratch).glob("task-*")):
            place = f"/''{str(folder)[1:]}/workspace"  # not a path of the task's own /tmp
            does = f"cat {place}/answer.txt; echo x >> {place}/answer.txt; ls {place}/.. >/dev/null && echo listed"
            [turn] = await link.advance([[begun.rollouts[0], bash(does), False]], timeout=60)
            found.append(str(turn.messages[0]["content"]))
        return found

    own, other = sorted(with_worker(tasks, body), key=lambda said: "Permission denied" in said)
    assert own == "mine\nlisted" and other.count("Permission denied") == 3 and "mine" not in other


WON = "echo 1 > /logs/verifier/reward.txt"
FORGERIES = {
    "program": f"cd ${{PATH%%:*}}; printf '#!/bin/sh\\n{WON}' > x && chmod +x x && mv x python3 && ln -sf python3 bash",
    "process": f"env -i setsid bash -c 'while :; do {WON}; sleep 0.01; done' >/dev/null 2>&1 &",
    "module": "printf 'import sys; sys.exit(0)' > /workspace/pytest.py",
    "link": "rm -rf /tests && ln -s workspace /tests && printf 'import os; os._exit(0)' > /tests/conftest.py",
}


def test_verdict_is_not_the_policy_s(tmp_path: Path) -> None:
    for number in range(12):
        written(tmp_path, f"shop-{number}", test=f"{TEST_SH}\nsleep 0.1\n")

    async def body(link: EnvironmentWorker) -> Any:
        return {name: (await worked(link, command))[1] for name, command in FORGERIES.items()}

    found = with_worker(tmp_path, body)
    assert {name: (one.error, one.reward) for name, one in found.items()} == dict.fromkeys(FORGERIES, (None, 0.0))


def test_tasks_that_need_a_container_are_left_out_and_refused(tasks: Path) -> None:
    written(tasks, "exotic", packages=" no-such-package-xyz")
    (tasks / "several").mkdir()
    for name in ("task.toml", "instruction.md"):
        (tasks / "several" / name).write_text((tasks / "shop-0" / name).read_text())
    (tasks / "several" / "environment").mkdir()
    (tasks / "several" / "environment" / "docker-compose.yaml").write_text("services: {}\n")
    why = {one.name: one.missing(one.image()) for one in task_folders(tasks)}
    assert "no-such-package-xyz" in why["exotic"] and "several services" in why["several"] and not why["shop-0"]

    async def names(link: EnvironmentWorker) -> set[str]:
        pages = [await link.tasks(split, 0, 20, timeout=60) for split in ("train", "validation", "heldout")]
        return {task.messages[0]["content"].rpartition("(")[2] for page in pages for task in page.tasks}

    assert with_worker(tasks, names) == {f"shop-{number})" for number in range(12)}
    with pytest.raises(WorkerError, match=r"None of 1 tasks.*no-such-package-xyz"):
        with_worker(tasks / "exotic", names)


def test_reward_files_are_read_strictly(tmp_path: Path) -> None:
    rewards = {
        "half": ('echo \'{"a": 1, "b": 0}\' > /logs/verifier/reward.json', 0.5),
        "named": ('echo \'{"reward": 0.25, "b": 0}\' > /logs/verifier/reward.json', 0.25),
        "none": ("true", "wrote no reward"),
        "words": ("echo good > /logs/verifier/reward.txt", "not a number"),
    }
    for name, (script, expected) in rewards.items():
        folder = written(tmp_path / name, "task", test=script)
        for number in range(9):
            written(tmp_path / name, f"task-{number}", test=script)
        _, outcome = with_worker(folder.parent, lambda link: worked(link, "true"))
        if isinstance(expected, float):
            assert outcome.reward == expected
        else:
            assert expected in (outcome.error or "")


def test_first_format_of_terminal_bench_is_decided_by_the_exit_code(tmp_path: Path) -> None:
    folder = tmp_path / "hello"
    (folder / "tests").mkdir(parents=True)
    (folder / "task.yaml").write_text("instruction: |-\n  Create /app/hello.txt.\n\n  Be brief.\ndifficulty: easy\n")
    (folder / "Dockerfile").write_text("FROM ubuntu\nWORKDIR /app\n")
    (folder / "run-tests.sh").write_text("test -f /app/hello.txt\n")
    [task] = task_folders(folder)
    assert (task.instruction, task.difficulty, task.rewards) == (
        "Create /app/hello.txt.\n\nBe brief.", "easy", False
    )  # fmt: skip
    machine = Sandbox(task, task.image())
    assert machine.verify()[0] == 1
    machine.run("touch hello.txt", 10.0)
    assert machine.verify()[0] == 0
    machine.close()


def test_nothing_runs_without_a_wall(tasks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = harbor.make(str(tasks))
    environment.knobs = harbor.Harbor.Knobs()
    real = Path.read_text

    def without(self: Path, *given: Any) -> str:
        return "Seccomp:\t0\n" if self == Path("/proc/self/status") else real(self, *given)

    monkeypatch.setattr(Path, "read_text", without)
    with pytest.raises(LoadError, match="no wall around the worker"):
        environment.setup()
    with pytest.raises(LoadError, match="is not a folder"):
        harbor.make("/no/such/folder")


DOCKER = """#!/bin/sh
# Containers are folders. What is read most is read here, the rest in docker.py; `base` is empty for system programs.
if [ "$1 $3" = "cp -" ]; then
    place=${{2#*:}} base=$(dirname "$0")/state/${{2%%:*}}
    case $place in /workspace*|/logs*) ;; *) [ -e "$base$place" ] || base= ;; esac
    exec tar -cf - -C "$base$(dirname "$place")" "$(basename "$place")"
fi
exec {python} -IS "$0.py" "$@"
"""
DOCKER_PY = r"""
# The task's paths in commands are moved into the container's folder, and back in what they print.
import os, re, shutil, signal, subprocess, sys
from pathlib import Path

state = Path(__file__).parent / "state"
state.mkdir(exist_ok=True)
word, *rest = sys.argv[1:]
with (state / "calls").open("a") as calls:
    print(word, *rest, file=calls)


def moved(text, name):
    root = f"{state}/{name}/"
    return re.sub(r"(?<![\w/])/(tests|logs|etc/shop|workspace|usr/local)", lambda found: root + found[1], text)


def files(name):
    return {str(place.relative_to(state / name)) for place in (state / name).rglob("*") if not place.is_dir()}


def end_processes(name):
    for place in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"CONTAINER={name}".encode() in place.read_bytes().split(b"\0"):
                os.kill(int(place.parent.name), signal.SIGKILL)
        except OSError:
            pass


if word == "info" and (state / "refuses").exists():
    sys.exit("permission denied while trying to connect to the docker API")
elif word == "build":
    shutil.copytree(rest[-1], state / rest[2], dirs_exist_ok=True)
elif word == "run":
    image, name = rest[-3], rest[rest.index("--name") + 1]
    for folder in ("tests", "logs", "workspace", "etc/shop", "usr/local/bin"):
        (state / name / folder).mkdir(parents=True)
    for file in (state / image).iterdir():
        target = {".txt": "etc/shop", ".sh": "tests"}.get(file.suffix, "usr/local/bin")
        if file.name != "Dockerfile":
            (state / name / target / file.name).write_text(moved(file.read_text(), name))
            (state / name / target / file.name).chmod(0o700)
    (state / f"{name}.files").write_text("\n".join(files(name)))
elif word == "cp" and rest[0] == "-":
    name, _, place = rest[1].partition(":")
    os.execvp("tar", ["tar", "-xf", "-", "-C", state / name / place.lstrip("/")])
elif word == "cp":
    name, _, place = rest[1].partition(":")
    target = Path(moved(place, name))
    if target.is_dir():
        for file in Path(rest[0]).iterdir():
            (target / file.name).write_text(moved(file.read_text(), name))
    else:
        target.write_text(moved(Path(rest[0]).read_text(), name))
elif word == "stop" and (state / "stuck").exists():
    sys.exit("cannot stop container")
elif word == "stop":
    end_processes(rest[-1])
elif word == "diff":
    old = (state / f"{rest[0]}.files").read_text().split("\n")
    print("\n".join(f"A /{one}" for one in files(rest[0]) - {*old}))
elif word == "exec":
    root = state / rest[0]
    inside = dict(os.environ, CONTAINER=rest[0], PATH=f"{root}/usr/local/bin:{os.environ['PATH']}")
    words = [moved(one, rest[0]) for one in rest[1:]]
    done = subprocess.run(words, cwd=root / "workspace", env=inside, stdout=-1, stderr=-2)
    sys.stdout.buffer.write(done.stdout.replace(str(root).encode(), b""))
    sys.exit(done.returncode if done.returncode >= 0 else 128 - done.returncode)
elif word == "rm":
    shutil.rmtree(state / rest[-1])
"""
COUNTED = """\
#!/bin/bash
grep -qx 5 /workspace/total.txt && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt
"""


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a stand-in for docker, which PATH finds."""
    program = tmp_path / "bin" / "docker"
    program.parent.mkdir()
    program.write_text(DOCKER.format(python=sys.executable))
    program.with_name("docker.py").write_text(DOCKER_PY)
    program.chmod(0o700)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return program.parent


def test_tasks_that_no_process_can_run_get_a_container(tmp_path: Path, docker: Path) -> None:
    folder = tmp_path / "tasks"
    for number in range(12):
        written(folder, f"shop-{number}", packages=" no-such-package-xyz", test=COUNTED)
    for one in list(folder.glob("*/task.toml")):
        one.write_text(one.read_text() + "[environment]\nmemory_mb = 512\nallow_internet = false\n")

    async def work() -> Any:
        async with await EnvironmentWorker.behind(Wall(trusted=True), timeout=60) as link:
            await link.open({"adapter": "harbor", "target": str(folder)}, timeout=60, knobs={"command_s": 0.5})
            right = await worked(link, "cat /etc/shop/stock.txt", SUM, "sleep 9")
            return right, await worked(link, "exit 3")

    (printed, right), (said, wrong) = asyncio.run(work())
    assert printed[:2] == ["pears 2\nplums 3", "(no output)"] and "it took longer than 0.5 s" in printed[2]
    assert (right.error, right.reward, wrong.reward, said) == (None, 1.0, 0.0, ["(exit code 3)"])
    calls = (docker / "state" / "calls").read_text()
    assert "--memory=512m --network=none" in calls and calls.count("rm --force") == calls.count("run --detach") == 2
    assert not list((docker / "state").glob("*/workspace"))


FORGED = """\
setsid nohup bash -c 'while true; do cp won.txt /logs/verifier/reward.txt; sleep 0.01; done' >/dev/null 2>&1 &
echo 1 > won.txt
"""


def test_no_process_of_the_policy_writes_a_container_s_reward(tmp_path: Path, docker: Path) -> None:
    folder = tmp_path / "tasks"
    slow = "#!/bin/bash\necho 0 > /logs/verifier/reward.txt\nsleep 0.5\n"
    for number in range(12):
        written(folder, f"shop-{number}", test=slow)

    async def work(*commands: str) -> Any:
        async with await EnvironmentWorker.behind(Wall(trusted=True), timeout=60) as link:
            await link.open({"adapter": "harbor", "target": str(folder)}, timeout=60, knobs={"container": "always"})
            return (await worked(link, *commands))[1]

    forged = asyncio.run(work("mkdir -p /logs/verifier", FORGED, "sleep 0.2; cat /logs/verifier/reward.txt"))
    assert (forged.error, forged.reward) == (None, 0.0)
    (docker / "state" / "stuck").touch()
    left = asyncio.run(work("true"))
    assert "its processes were not ended before its tests: cannot stop container" in (left.error or "")


REPLACED = {
    "program": "printf '#!/bin/sh\\necho 5' > /usr/local/bin/counted",
    "program found first": "printf '#!/bin/sh\\nexit 0' > /usr/local/bin/grep; chmod +x /usr/local/bin/grep",
    "start of Python": "mkdir -p /usr/local/lib && touch /usr/local/lib/sitecustomize.py",
    "": "mkdir -p /usr/local/bin; cp /usr/local/bin/counted /usr/local/bin/added; touch /usr/local/bin/counted; "
    "echo '# mended' >> /usr/local/bin/total",
}


def test_no_verdict_counts_if_the_policy_replaced_a_program(tmp_path: Path, docker: Path) -> None:
    folder = tmp_path / "tasks"
    for number in range(12):
        task = written(
            folder, f"shop-{number}", test="total; counted | grep -qx 5; echo $((1 - $?)) > /logs/verifier/reward.txt"
        )
        (task / "environment" / "counted").write_text("#!/bin/sh\ncat /workspace/total.txt\n")
        (task / "environment" / "total").write_text("#!/bin/sh\n")

    async def work() -> Any:
        async with await EnvironmentWorker.behind(Wall(trusted=True), timeout=60) as link:
            await link.open({"adapter": "harbor", "target": str(folder)}, timeout=60, knobs={"container": "always"})
            return {name: (await worked(link, command, SUM))[1] for name, command in REPLACED.items()}

    found = asyncio.run(work())
    fine = found.pop("")
    assert (fine.error, fine.reward) == (None, 1.0), (
        "what is added, touched, or named by the instruction is not replaced"
    )
    for name, one in found.items():
        assert "no verdict counts, because the policy replaced" in (one.error or ""), name


SEPARATE = """\
artifacts = [{ source = "/workspace/made", exclude = ["*.log"] }, "/workspace/absent"]
[verifier]
environment_mode = "separate"
[[verifier.collect]]
command = "cp total.txt made/"
[verifier.environment]
memory_mb = 256
"""


def test_tests_with_a_container_of_their_own_get_declared_files_alone(tmp_path: Path, docker: Path) -> None:
    folder = tmp_path / "tasks"
    test = "cd /workspace && test \"$(echo * made/*)\" = 'made made/total.txt' && grep -qx 5 made/total.txt\n"
    for number in range(12):
        task = written(folder, f"shop-{number}", test=f"{test}echo $((1 - $?)) > /logs/verifier/reward.txt\n")
        (task / "task.toml").write_text(SEPARATE)

    async def work() -> Any:
        async with await EnvironmentWorker.behind(Wall(trusted=True), timeout=60) as link:
            await link.open({"adapter": "harbor", "target": str(folder)}, timeout=60)
            forged = "printf '#!/bin/sh\\nexit 0' > /usr/local/bin/grep; chmod +x /usr/local/bin/grep"
            right = await worked(link, "mkdir made; touch made/a.log other", SUM)
            return right[1], (await worked(link, "mkdir made; echo 6 > total.txt", forged))[1]

    right, wrong = asyncio.run(work())
    assert [(one.error, one.reward) for one in (right, wrong)] == [(None, 1.0), (None, 0.0)]
    calls = (docker / "state" / "calls").read_text()
    assert calls.count("rm --force") == calls.count("run --detach") == 4 and calls.count("--memory=256m") == 2


def test_machines_of_tests_are_read_as_harbor_does(tmp_path: Path) -> None:
    path = written(tmp_path, "shop")
    shared = (path / "task.toml").read_text()
    tests = path / "tests"

    def read(text: str) -> Any:
        (path / "task.toml").write_text(text)
        [task] = task_folders(path)
        return task

    assert read(shared).verifier is None
    machine = read(SEPARATE).verifier.machine
    assert (machine.context, machine.memory_mb, read(SEPARATE).verifier.brings_tests) == (
        path / "environment",
        256,
        False,
    )
    assert "container of their own" in read(SEPARATE).missing(read(SEPARATE).image())
    (tests / "Dockerfile").touch()
    assert read(SEPARATE).verifier.machine.context == tests and read(SEPARATE).verifier.brings_tests
    prebuilt = read('[verifier.environment]\ndocker_image = "judge:1"\n').verifier
    assert prebuilt.machine.prebuilt == "judge:1" and prebuilt.brings_tests
    assert read('[environment]\ndocker_image = "shop:1"\n').prebuilt == "", "its Dockerfile is there"
    (path / "environment" / "Dockerfile").unlink()
    assert read('[environment]\ndocker_image = "shop:1"\n').prebuilt == "shop:1"
    with pytest.raises(LoadError, match="not a readable task"):
        read("artifacts = [{}]\n[verifier]\nenvironment_mode = 'separate'\n")


def test_tasks_without_a_container_are_refused_with_what_to_do(
    tmp_path: Path, docker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path / "tasks", "shop", packages=" no-such-package-xyz")
    environment = harbor.make(str(tmp_path / "tasks"))
    environment.knobs = harbor.Harbor.Knobs()
    (docker / "state").mkdir()
    (docker / "state" / "refuses").touch()
    with pytest.raises(LoadError, match=r"docker refuses: permission denied .*`trust: yes`"):
        environment.setup()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LoadError, match=r"no-such-package-xyz.*neither docker nor podman\. Install one\."):
        environment.setup()
    environment.knobs = harbor.Harbor.Knobs(container="never")
    with pytest.raises(LoadError, match=r"or choose others\."):
        environment.setup()
