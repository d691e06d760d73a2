"""The wall around a worker: attacks on it, its exceptions, its fallbacks, and what must still work behind it.

`benchmarks/hostile/environments.py` has all attacks, each with a control.
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.hostile.environments import compare
from tests.sdk.wall.conftest import READS, asked, has_groups, landlock
from toprope.records.run.specification import EnvironmentSource, RewardSource
from toprope.records.walls import ENV_WALLS, Walls
from toprope.sdk.errors import WorkerDied
from toprope.sdk.wall import Wall, enclosure, kernel, level_here, namespaces_refusal, network_refusal, plan
from toprope.sdk.wall.enclosure import most_tasks
from toprope.sdk.wall.groups import ProcessGroup
from toprope.sdk.worker.client import WorkerClient, worker_environment
from toprope.settings.owner import Home
from toprope.training.rollouts.workers.walls import environment_wall

ATTACKS = """
read_settings read_another_runs_secret read_at_the_interpreters_start read_variables_of_a_keeper
read_through_a_foreign_root forge_results change_its_own_source copy_memory_of_a_keeper steal_a_descriptor
trace_a_keeper ask_a_local_daemon open_an_io_ring limit_a_keeper stop_a_keeper make_namespaces_by_clone
tell_a_local_daemon idle_all_of_its_user move_a_keeper
call_out call_out_of_its_own_network leave_a_daemon open_thousands_of_files
""".split()
NEEDS_GROUPS = {"leave_a_daemon"}
NEEDS_NAMESPACES = {"call_out_of_its_own_network"}


FILES = "import resource\ndef work():\n    return list(resource.getrlimit(resource.RLIMIT_NOFILE))\n"


def test_a_worker_opens_as_many_files_as_packages_ask_for(tmp_path: Path) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    (tmp_path / "files.py").write_text(FILES)
    allowed = 65_536 if hard == resource.RLIM_INFINITY else min(hard, 65_536)
    assert asked(Wall(reads=(str(tmp_path),)), tmp_path / "files.py")[0] == [allowed, allowed]


@landlock
def test_attacks_succeed_only_without_the_wall(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(enclosure, "DESCRIPTORS", 4096)  # fewer than machines themselves allow
    names = [name for name in ATTACKS if name not in NEEDS_GROUPS or has_groups()]
    names = [name for name in names if name not in NEEDS_NAMESPACES or not network_refusal("own")]
    walled, control, canary = asyncio.run(compare(tmp_path / "places", names))
    assert {name: walled[name].said for name in names if walled[name].succeeded} == {}
    assert [name for name in names if not control[name].succeeded] == []
    assert not [name for name in names if canary in walled[name].said]


USES = """
import multiprocessing, os, subprocess, sys, tempfile, concurrent.futures
def work():
    found = {"home": os.path.expanduser("~"), "tmp": tempfile.gettempdir(), "cwd": os.getcwd()}
    with open(os.path.join(found["home"], "kept"), "a") as file: file.write("x")
    found["kept"] = os.path.getsize(os.path.join(found["home"], "kept"))
    fork = multiprocessing.get_context("fork")
    with fork.Pool(2) as pool: found["pool"] = pool.map(abs, [-1, -2])
    with fork.Manager() as manager: found["manager"] = list(manager.list([1, 2]))
    with concurrent.futures.ThreadPoolExecutor(4) as threads: found["threads"] = list(threads.map(abs, [-3]))
    found["tool"] = subprocess.run(["sh", "-c", "echo $HOME | cat"], capture_output=True, text=True).stdout.strip()
    import ssl, zoneinfo, socket
    found["authorities"] = ssl.create_default_context().cert_store_stats()["x509_ca"] > 0
    found["zone"] = str(zoneinfo.ZoneInfo("Europe/Berlin"))
    found["name"] = bool(socket.getaddrinfo("localhost", 80))
    import asyncio
    async def said():
        child = await asyncio.create_subprocess_exec("cat", stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        return (await child.communicate(b"hi"))[0].decode()
    found["asyncio"] = asyncio.run(said())
    from toprope.sdk.sandbox import passes_tests, run_python
    found["tests"] = passes_tests("f = abs", "assert f(-1) == 1", seconds=20, memory_mb=512)
    found["sandbox"] = run_python("6 * 7", seconds=20).output
    found["data"] = open(DATA).read()
    return found
"""


@landlock
def test_ordinary_code_works_behind_the_wall(tmp_path: Path) -> None:
    (tmp_path / "data.txt").write_text("declared")
    (tmp_path / "code").mkdir()
    file = tmp_path / "code" / "uses.py"
    file.write_text(USES.replace("DATA", repr(str(tmp_path / "data.txt"))))
    home = tmp_path / "homes" / "uses"
    wall = Wall(reads=(str(file.parent), str(tmp_path / "data.txt")), home=str(home))
    for times in (1, 2):  # its HOME is kept
        found, built = asked(wall, file)
        assert found.pop("kept") == times
        assert found.pop("home") == found.pop("tool") == str(home)
        assert found.pop("tmp") == found.pop("cwd") == built.scratch and not os.path.exists(built.scratch)
        assert found == {
            **{"pool": [1, 2], "manager": [1, 2], "threads": [3], "authorities": True, "zone": "Europe/Berlin"},
            **{"name": True, "sandbox": "42\n", "data": "declared", "asyncio": "hi", "tests": True},
        }


@landlock
@pytest.mark.skipif(bool(namespaces_refusal()), reason="no mount namespaces here")
def test_temporary_files_of_a_worker_are_its_own(tmp_path: Path) -> None:
    if any(place.startswith(("/tmp/", "/var/tmp/")) for place in (__file__, sys.prefix, sys.base_prefix)):
        pytest.skip("code among temporary files leaves them as they are")
    outside = [tempfile.mkdtemp(dir=place) for place in ("/tmp", "/var/tmp")]
    mark = f"own-{os.path.basename(outside[0])}"
    command = "ls -A /tmp /var/tmp | tr '\\n' ' '; echo; echo 1 > $HOME/kept; for place in /tmp /var/tmp; do "
    command += f"mkdir -m 700 $place/{mark} && stat -c %a $place/{mark}; done; touch {outside[0]}/x {outside[1]}/x"

    async def printed() -> list[str]:
        async with await WorkerClient.start(wall=Wall(home=str(tmp_path / "home")), timeout=60) as worker:
            code: dict[str, Any] = {"file": subprocess.__file__, "attribute": "getoutput", "arguments": {}}
            made = await worker.call("make", **code, wanted=["call"])
            [found] = await worker.call("invoke", handle=made["handle"], method="call", calls=[[command]])
            return str(found).splitlines()

    try:
        for _ in range(2):  # the second worker finds nothing of the first
            listed, *modes, first, second = asyncio.run(printed())
            assert not {mark, *map(os.path.basename, outside)} & set(listed.split())
            assert modes == ["700", "700"]
            assert first.endswith("No such file or directory") and second.endswith("No such file or directory")
            assert (tmp_path / "home" / "kept").read_text() == "1\n"
        assert not os.path.exists(f"/tmp/{mark}") and not os.path.exists(f"/var/tmp/{mark}")
    finally:
        for one in outside:
            os.rmdir(one)


def test_missing_wall_is_marked_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from toprope.training.rollouts.workers.environment_worker import EnvironmentWorker
    from toprope.training.rollouts.workers.walls import missing_wall

    for module in ("plan", "enclosure"):
        monkeypatch.setattr(f"toprope.sdk.wall.{module}.level_here", lambda: ("none", "this kernel has no Landlock"))

    async def started(wall: Wall) -> str:
        async with await EnvironmentWorker.behind(wall, timeout=60) as worker:
            return missing_wall(worker.enclosure)

    assert "can read and change what you can" in asyncio.run(started(Wall()))
    assert asyncio.run(started(Wall(trusted=True))) == ""
    with pytest.raises(WorkerDied, match=r"wall.missing: refuse\. Nothing of its code was run"):
        asyncio.run(started(Wall(required=True)))


@pytest.mark.engines
def test_bubblewrap_stands_in_for_landlock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "landlock_abi", lambda: 0)
    level_here.cache_clear()
    try:
        if level_here()[0] != "bubblewrap":
            pytest.skip("bubblewrap does not work here")
        secret = tmp_path / "secret"
        secret.write_text("secret")
        (tmp_path / "code").mkdir()
        file = tmp_path / "code" / "reads.py"
        file.write_text(READS.format(path=str(secret)))
        found, built = asked(Wall(reads=(str(file.parent),), required=True), file)
        assert found == "FileNotFoundError" and built.level == "bubblewrap"
        assert asked(Wall(reads=(str(file.parent), str(secret))), file)[0] == "secret"
        secret.rename(file.parent / ".env")
        file.write_text(READS.format(path=str(file.parent / ".env")))
        assert asked(Wall(sources=(str(file.parent),)), file)[0] == "FileNotFoundError"
        assert asked(Wall(reads=(str(file.parent),)), file)[0] == "secret"
    finally:
        level_here.cache_clear()


@landlock
def test_attributes_stay_where_mounts_cannot_be_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toprope.sdk.wall.enclosure.plan_for", without_mounts)
    (tmp_path / "code").mkdir()
    outside, file = tmp_path / "outside", tmp_path / "code" / "changes.py"
    outside.write_text("")
    outside.chmod(0o600)
    file.write_text(
        "import fcntl, os\ndef work(): return list(tried())\ndef tried():\n"
        f"    for place in ({str(outside)!r}, os.open(__file__, os.O_RDONLY)):\n"
        "        os.chmod(place, 0o666); os.utime(place, (1, 1)); os.chown(place, -1, 1)\n"
        "        for call in (lambda: os.setxattr(place, 'user.x', b'1'), lambda: os.removexattr(place, 'user.x')):\n"
        "            try: call()\n            except OSError as error: yield error.errno\n"
        "    try: fcntl.ioctl(place, 0x40086602, bytes(8))\n    except OSError as error: yield error.errno\n"
    )
    file.chmod(0o600)
    before = file.stat()
    answers = asked(Wall(reads=(str(file.parent),)), file)[0]
    assert answers == [*[errno.EOPNOTSUPP] * 4, errno.EPERM]
    assert (file.stat().st_mode, file.stat().st_mtime, file.stat().st_gid) == (
        before.st_mode,
        before.st_mtime,
        before.st_gid,
    )
    assert outside.stat().st_mode & 0o777 == 0o600 and outside.stat().st_mtime > 1


def without_mounts(*arguments: Any, **named: Any) -> plan.Plan:
    return replace(plan.plan_for(*arguments, **named), mounts=False)


@landlock
def test_signals_to_the_caller_are_refused_on_older_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Landlock before version 6 lets signals out; the filter then spares the processes above."""
    monkeypatch.setattr(kernel, "landlock_abi", lambda: 3)
    file = tmp_path / "signals.py"
    file.write_text(
        "import os, subprocess\ndef work():\n"
        "    child = subprocess.Popen(['sleep', '60']); child.kill(); child.wait()\n"
        "    try: os.kill(os.getppid(), 0)\n    except PermissionError: return 'refused'\n"
    )
    assert asked(Wall(reads=(str(tmp_path),)), file)[0] == "refused"


@pytest.mark.skipif(bool(network_refusal("own")), reason="no network namespaces here")
def test_own_network_reaches_what_its_caller_relays(tmp_path: Path) -> None:
    file = tmp_path / "dials.py"
    file.write_text(
        "import socket\nclass Dials:\n    def dial(self, port):\n"
        "        try:\n            with socket.create_connection(('127.0.0.1', port), 5) as line:\n"
        "                line.sendall(b'ping'); line.shutdown(1); return line.recv(9).decode()\n"
        "        except OSError as error: return type(error).__name__\n"
    )

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.read() + b"!")
        writer.close()

    async def run() -> None:
        async with await asyncio.start_server(echo, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            wall = Wall(reads=(str(tmp_path),), network="own")
            async with await WorkerClient.start(wall=wall, timeout=60) as worker:
                made = await worker.call("make", file=str(file), attribute="Dials", arguments={}, wanted=["dial"])

                async def dial() -> Any:
                    return await worker.call("invoke", handle=made["handle"], method="dial", calls=[[port]])

                assert await dial() == ["ConnectionRefusedError"]
                await worker.reach(f"http://127.0.0.1:{port}/v1")
                assert await dial() == ["ping!"] and await dial() == ["ping!"]

    asyncio.run(run())


@pytest.mark.skipif(not has_groups(), reason="no control groups can be made here")
def test_group_limits_processes_and_ends_daemons(tmp_path: Path) -> None:
    group = ProcessGroup.make(5)
    assert group is not None
    program = (
        "import os, sys, time\nopen(sys.argv[1] + '/cgroup.procs', 'w').write('0')\nmade = 0\n"
        "try:\n    for made in range(50):\n        if os.fork() == 0: os.setsid(); time.sleep(60)\n"
        "except OSError: pass\nprint(made, flush=True)\n"
    )
    with subprocess.Popen([sys.executable, "-I", "-c", program, group.path], stdout=subprocess.PIPE, text=True) as done:
        assert done.stdout is not None and done.stdout.readline() == "4\n"
        group.remove()
    assert done.wait(10) is not None and not os.path.exists(group.path) and most_tasks() >= 1024


def test_owners_exceptions_reach_the_wall_by_name(tmp_path: Path) -> None:
    home = Home(tmp_path / "home", tmp_path / "config")
    (tmp_path / "config").mkdir()
    home.settings_file.write_text(
        "wall: {missing: refuse}\nenvironment:\n  old: {trust: yes}\n  corpus: {reads: [data], writes: [/srv/cache]}\n"
        "variables: {environment: {A_KEY: secret, CUDA_VISIBLE_DEVICES: '', HF_HUB_OFFLINE: 1, OMP_NUM_THREADS: 1}}\n"
    )
    walls = Walls.from_variables({ENV_WALLS: Walls.of_home(home).encode()})
    assert walls.variables == ("A_KEY",), "those that only limit reach code of agents, too"
    old, corpus, other = (environment_wall(walls, EnvironmentSource(name=name)) for name in ("old", "corpus", "a/b"))
    assert old.trusted and not corpus.trusted and not other.trusted and other.required
    assert corpus.reads == (str(tmp_path / "config" / "data"),) and corpus.writes == ("/srv/cache",)
    assert old.home == str(tmp_path / "home" / "homes" / "old") and str(tmp_path / "home") in other.closed
    assert environment_wall(Walls(), EnvironmentSource(name="old")).home is None


def test_environments_of_different_names_share_no_home() -> None:
    walls, names = Walls(homes="/homes"), ("a/b", "a-b", "a:b", "..", ".", "-", "a-b.", "standard-tasks")
    homes = [walls.home_of(name, of_agent=agent) for name in names for agent in (False, True)]
    assert len(set(homes)) == len(homes) and "/homes/a-b" in homes
    assert all(home is not None and os.path.dirname(os.path.normpath(home)) == "/homes" for home in homes)


def test_code_of_an_agent_takes_over_no_rights_and_no_home(tmp_path: Path) -> None:
    written, own = tmp_path / "environments", tmp_path / "own"
    (tmp_path / "link").symlink_to(written)
    rights = {"old": {"trust": True, "reads": ["/corpus"]}}
    walls = Walls(homes="/homes", rights=rights, agents=(str(written),), variables=("A_KEY",))
    walls = Walls.from_variables({ENV_WALLS: walls.encode()})
    reward = RewardSource(name="r", file=str(written / "x.py"), attribute="r")
    for source in (
        EnvironmentSource(name="old", file=str(written / "x.py")),
        EnvironmentSource(name="old", file=str(tmp_path / "link" / "x.py")),
        EnvironmentSource(name="old", file=str(own / "x.py"), rewards=[reward]),
    ):
        wall = environment_wall(walls, source)
        assert not wall.trusted and not wall.reads and wall.home == "/homes/old@agent" and wall.withheld == ("A_KEY",)
    wall = environment_wall(walls, EnvironmentSource(name="old", file=str(own / "x.py")))
    assert wall.trusted and wall.reads == ("/corpus",) and wall.home == "/homes/old" and not wall.withheld


def test_product_starts_no_worker_without_a_wall() -> None:
    root = Path(__file__).parents[3]
    found = [
        f"{file.relative_to(root)}: {line.strip()}"
        for folder in ("toprope", "tools", "server")
        for file in (root / folder).rglob("*.py")
        for line in file.read_text().splitlines()
        if re.search(r"\b(WorkerClient|EnvironmentWorker|cls)\.start\(", line)
        if "RestartingWorker" not in line
    ]
    assert found == [
        "toprope/training/rollouts/workers/environment_worker.py: "
        "return await cls.start(interpreter, wall=wall, **options)"
    ]


@pytest.mark.skipif(not has_groups(), reason="no control groups can be made here")
def test_groups_of_killed_makers_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makers in different pid namespaces have the same pid, so neither names nor checks rest on it."""
    monkeypatch.setattr(os, "getpid", lambda: 2)
    first, second = ProcessGroup.make(8), ProcessGroup.make(8)
    assert first is not None and second is not None and first.path != second.path
    os.utime(first.path, (1, 1))
    third = ProcessGroup.make(8)
    assert third is not None and not os.path.exists(first.path) and os.path.exists(second.path)
    for group in (second, third):
        group.remove()


def test_variables_that_name_folders_to_write_to_pass_only_if_they_are_writable(tmp_path: Path) -> None:
    open_plan = plan.Plan(writes=[str(tmp_path / "cache")])
    given = {"HF_HOME": str(tmp_path / "cache" / "hf"), "XDG_CACHE_HOME": "/elsewhere", "HOME": "/root", "LANG": "C"}
    found = plan.variables_behind(given, open_plan, "/scratch", "/home/x")
    assert found.get("HF_HOME") == given["HF_HOME"] and "XDG_CACHE_HOME" not in found
    assert (found["HOME"], found["TMPDIR"], found["LANG"]) == ("/home/x", "/scratch", "C")
    assert plan.variables_behind(given, plan.Plan(trusted=True), "/scratch", "/home/x") == given
    alone = plan.Plan(trusted=True, network="own")
    assert plan.variables_behind(given, alone, "/scratch", "/home/x") == {**given, "HF_HUB_OFFLINE": "1"}
    online = {**given, "HF_HUB_OFFLINE": "0"}
    assert plan.variables_behind(online, alone, "/scratch", "/home/x") == online


@landlock
def test_git_works_behind_the_wall_beside_a_closed_configuration(tmp_path: Path) -> None:
    file = tmp_path / "clones.py"
    file.write_text(
        "import os, subprocess\ndef work():\n    return os.environ.get('GIT_CONFIG_NOSYSTEM'), "
        "subprocess.run(['git', 'config', '--list'], capture_output=True, text=True).stderr\n"
    )
    assert asked(Wall(reads=(str(tmp_path),)), file)[0] == ["1", ""]


@landlock
def test_commands_of_a_policy_do_not_read_the_variables_of_their_worker(tmp_path: Path) -> None:
    file = tmp_path / "runs.py"
    file.write_text(
        "import subprocess\nfrom toprope.sdk.adapters._harbor.sandbox import require_wall\n"
        "def look():\n"
        "    return subprocess.run(['sh', '-c', 'cat /proc/$PPID/environ'], capture_output=True).returncode\n"
        "def work():\n    before = look()\n    require_wall()\n    return before, look()\n"
    )
    assert asked(Wall(reads=(str(tmp_path),)), file)[0] == [0, 1]


SHARES = """
import os, subprocess, tempfile
from toprope.sdk.wall.within import RolloutWall
TRIES = '''
import multiprocessing, os, sys
for what in (lambda place: open(place + "/text").read(), lambda place: open(place + "/text", "a").close(),
             lambda place: os.listdir(place), lambda place: os.mkdir(place + "/made")):
    for place in sys.argv[1:]:
        try: what(place); print("y", end="")
        except PermissionError: print("n", end="")
multiprocessing.Lock()
os.kill(os.getppid(), 0)
'''
def work():
    own, other, folder = tempfile.mkdtemp(), tempfile.mkdtemp(), os.path.dirname(__file__)
    for place in (own, other, tempfile.gettempdir(), os.environ["HOME"]):
        open(place + "/text", "w").close()
    os.symlink(other + "/text", own + "/link")
    wall = RolloutWall([own])
    places = [own, other, tempfile.gettempdir(), os.environ["HOME"], folder]
    ran = subprocess.run(wall.command(["python3", "-c", TRIES, *places]), capture_output=True, text=True)
    def touched(path):
        try: return wall.touch(lambda: open(path).read())
        except PermissionError: return "closed"
    return [ran.stdout, ran.stderr, touched(own + "/text"), touched(own + "/link"), open(own + "/link").read()]
"""


@landlock
def test_rollouts_of_a_worker_are_hidden_from_each_other(tmp_path: Path) -> None:
    (tmp_path / "text").touch()
    file = tmp_path / "shares.py"
    file.write_text(SHARES)
    found, _ = asked(Wall(reads=(str(tmp_path),), writes=(str(tmp_path),)), file)
    assert found == ["ynnnn" * 4, "", "", "closed", ""]


def test_programs_that_the_wall_does_not_start_are_not_found(tmp_path: Path) -> None:
    for folder in ("own", "tools"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "program").write_text("#!/bin/sh\n")
        (tmp_path / folder / "program").chmod(0o700)
    given = {"PATH": f"{tmp_path}/tools:{tmp_path}/own"}
    walled = plan.Plan(reads=[str(tmp_path / "own")], landlock=6)
    found = plan.variables_behind(given, walled, "/scratch", "/home/x")
    assert shutil.which("program", path=given["PATH"]) == f"{tmp_path}/tools/program"
    assert shutil.which("program", path=found["PATH"]) == f"{tmp_path}/own/program"
    assert plan.variables_behind(given, plan.Plan(), "/scratch", "/home/x")["PATH"] == given["PATH"]
    opened = plan.Plan(reads=[str(tmp_path / "tools/program")], landlock=6)
    assert plan.variables_behind(given, opened, "/scratch", "/home/x")["PATH"] == f"{tmp_path}/tools"


def test_endless_answer_ends_the_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toprope.sdk.worker.client._LONGEST_LINE", 1 << 16)
    file = tmp_path / "floods.py"
    file.write_text("def work(): return 'x' * (1 << 20)\n")
    with pytest.raises(WorkerDied, match="more than"):
        asked(Wall(reads=(str(tmp_path),)), file, env=worker_environment())
