"""An environment that is only described leaves nothing behind, and nobody waits for it."""

import asyncio
import os
import subprocess
import sys
import tempfile
import time

import psutil

from tests.support.run_harness import eventually
from toprope.sdk.wall.scratch import sweep_scratch
from toprope.sdk.worker.client import WorkerClient
from toprope.workbench.catalog.catalog import Catalog

ODD = """
import subprocess, sys
from toprope.sdk import Environment, Task

subprocess.Popen([sys.executable, "-I", "-S", "-c", "import time; time.sleep(120)", "{token}"], start_new_session=True)


class Odd(Environment):
    '''Leaves a daemon that holds our pipes.'''

    def tasks(self):
        for i in range(300):
            yield Task(f"Say {{i}}", reference=str(i))

    def score(self):
        return 1.0
"""


def found(token):
    processes = []
    for process in psutil.process_iter():
        try:
            if token in process.cmdline():
                processes.append(process)
        except psutil.Error:
            continue
    return processes


def test_describe_leaves_no_process_and_no_file(tmp_path):
    token = f"odd-{os.getpid()}-{time.monotonic_ns()}"
    (tmp_path / "odd.py").write_text(ODD.format(token=token))
    catalog = Catalog([tmp_path])
    began = time.monotonic()
    try:
        described = asyncio.run(catalog.describe(catalog.find("odd")))
        assert described.card.name == "odd"
        assert time.monotonic() - began < 15
        assert not found(token)
    finally:
        for process in found(token):
            process.kill()
    assert [path.name for path in tmp_path.iterdir()] == ["odd.py"]


DESCRIBES = """
import asyncio, pathlib, sys
from toprope.workbench.catalog.catalog import Catalog
catalog = Catalog([pathlib.Path(sys.argv[1])])
asyncio.run(catalog.describe(catalog.find("slow")))
"""


def test_folder_of_a_description_goes_although_its_process_was_killed(tmp_path, monkeypatch):
    (tmp_path / "envs").mkdir()
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    text = "open('said', 'w').close()  # in its working folder\n__import__('time').sleep(60)\n"
    (tmp_path / "envs" / "slow.py").write_text(text + ODD.format(token="never"))
    command = [sys.executable, "-c", DESCRIBES, str(tmp_path / "envs")]
    with subprocess.Popen(command, env=os.environ | {"TMPDIR": str(tmp_path / "tmp")}) as process:
        eventually(lambda: list((tmp_path / "tmp").glob("*/said")), 60)
        process.kill()

    def swept():
        sweep_scratch()
        return not list((tmp_path / "tmp").iterdir())

    eventually(swept)


def test_worker_end_is_seen_while_daemon_holds_pipes(tmp_path):
    token = f"odd-{os.getpid()}-{time.monotonic_ns()}"
    file = tmp_path / "odd.py"
    file.write_text(ODD.format(token=token) + "\nimport os\nos._exit(3)\n")

    async def work():
        link = await WorkerClient.start()
        began = time.monotonic()
        try:
            await link.call("open", timeout=60, source={"file": str(file), "attribute": "Odd"})
        except Exception as error:
            return str(error), time.monotonic() - began
        finally:
            await link.close()
        raise AssertionError("a worker that ended has answered")

    try:
        said, seconds = asyncio.run(work())
    finally:
        for process in found(token):
            process.kill()
    assert "exit code 3" in said and seconds < 15


def test_lookup_of_huge_name_is_quick(tmp_path):
    catalog = Catalog([tmp_path])
    began = time.monotonic()
    try:
        catalog.find("x" * 1_000_000)
    except Exception as error:
        assert len(str(error)) < 1000
    assert time.monotonic() - began < 5


def test_unstartable_worker_does_not_blame_environment(tmp_path):
    file = tmp_path / "plain.py"
    file.write_text(ODD.format(token="never"))
    catalog = Catalog([tmp_path])
    entry = catalog.find("plain")
    source = entry.environment.model_copy(update={"interpreter": str(tmp_path / "no-python")})
    try:
        asyncio.run(catalog.describe(type(entry)(**{**vars(entry), "environment": source})))
    except Exception as error:
        assert "was not loaded" in str(error) and "ulimit" in str(error)
    else:
        raise AssertionError(f"described by an interpreter that is not there ({sys.executable})")


HANGING = '''
import time
from toprope.sdk import Task
from toprope.sdk.tooled import ToolEnvironment

def waits() -> str:
    """Never answers."""
    while True:
        time.sleep(1000)

class Hanging(ToolEnvironment):
    """Has a tool that hangs."""

    tools = (waits,)
    tool_timeout_s = 0.1

    def tasks(self):
        for i in range(300):
            yield Task(f"Say {i}", reference=str(i))

    def score(self):
        return {"score": 1.0}
'''


def test_thread_of_hung_tool_ends_with_its_process(tmp_path):
    """A call that hangs is abandoned; the worker still exits by itself when it is closed, without being killed."""
    (tmp_path / "hanging.py").write_text(HANGING)

    async def work():
        link = await WorkerClient.start()
        process = psutil.Process(link.pid)
        await link.call("open", timeout=60, source={"file": str(tmp_path / "hanging.py"), "attribute": "Hanging"})
        begun = await link.call("begin", split="train", index=0, count=1)
        call = '<tool_call>{"name": "waits", "arguments": {}}</tool_call>'
        [moved] = await link.call("advance", moves=[[begun["rollouts"][0], call]])
        assert "did not answer within 0.1 s" in moved["messages"][-1]["content"]
        assert process.num_threads() >= 3, "the abandoned call has a thread still"
        await link.close(grace=20)
        return link._process.returncode, process

    code, process = asyncio.run(work())
    assert code == 0 and not process.is_running()
