"""The adapter of inspect-ai, with a stand-in for the package."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from types import SimpleNamespace as Thing
from typing import Any

import pytest

from tests.sdk.adapters.inspect.conftest import (
    PrerequisiteError,
    Sample,
    given_limits,
    places,
    results,
    sample,
    session,
)
from toprope.sdk.adapters import inspect_ai
from toprope.sdk.adapters._inspect_ai import commands
from toprope.sdk.adapters._inspect_ai.commands import confine_commands
from toprope.sdk.adapters._inspect_ai.named_models import NO_KEY, play_named_models
from toprope.sdk.adapters._inspect_ai.provider import Rollout
from toprope.sdk.authoring.env_managed import OwnLoop, Played, Session
from toprope.sdk.authoring.environment import Task
from toprope.sdk.errors import EnvironmentMistake, InvalidRequest, LoadError
from toprope.sdk.rollouts import configure
from toprope.sdk.wall import kernel


def test_inspect_batches_alike_rollouts_into_one_evaluation(inspect: Callable[..., OwnLoop]) -> None:
    async def work() -> None:
        calls: list[int] = []
        started, release, running = asyncio.Event(), asyncio.Event(), asyncio.Lock()

        async def evaluate(asked: list[Sample], rollouts: dict[tuple[str, int], Rollout]) -> None:
            assert not running.locked(), "inspect allows one evaluation at a time"
            async with running:
                calls.append(len(asked))
                started.set()
                await release.wait()
                if any(one.input == "bad" for one in asked):
                    raise ValueError("no such tool")
                for one in asked:
                    by = rollouts[str(one.id), one.epoch].session.api_key
                    one.messages = [Thing(role="assistant", text=f"{one.input} by {by}")]

        environment = inspect([sample("a"), sample("b"), sample("c"), sample("bad"), sample("d")], evaluate)
        a, b, c, bad, d = environment.tasks()

        async def ask(task: Task, *sessions: Session) -> list[str]:
            found = await environment.group(task, sessions)
            return [one.messages[0]["content"] if isinstance(one, Played) else str(one) for one in found]

        first = asyncio.ensure_future(ask(a, *(session(api_key=str(number)) for number in range(3))))
        await asyncio.wait_for(started.wait(), 30)
        second = asyncio.ensure_future(ask(b, *(session(api_key=str(number)) for number in range(2))))
        warm = asyncio.ensure_future(ask(c, session(temperature=0.0)))
        for _ in range(100):  # both reach the queue
            await asyncio.sleep(0)
        release.set()
        assert await asyncio.gather(first, second, warm) == [
            ["a by 0", "a by 1", "a by 2"], ["b by 0", "b by 1"], ["c by k"],
        ]  # fmt: skip
        assert calls == [3, 2, 1], "rollouts with other sampling settings run separately"
        assert "no such tool" in (await ask(bad, session()))[0]
        assert await ask(d, session()) == ["d by k"]

    asyncio.run(work())


@pytest.mark.parametrize(("limits", "expected"), [((None, None), (32, 600)), ((2, 5), (2, 5)), ((50, None), (32, 600))])
def test_lower_limit_of_the_author_counts(
    inspect: Callable[..., OwnLoop], limits: tuple[int | None, int | None], expected: tuple[int, int]
) -> None:
    environment = inspect([sample("a")], limits=limits)
    [played] = results(environment)
    assert isinstance(played, Played) and given_limits[-1] == expected


def test_wait_for_an_evaluation_is_not_the_rollout_s_time(inspect: Callable[..., OwnLoop]) -> None:
    async def evaluate(asked: list[Sample], rollouts: dict[tuple[str, int], Rollout]) -> None:
        await asyncio.sleep(9 if asked[0].input == "slow" else 0.4)

    environment = inspect([sample("a"), sample("b"), sample("c"), sample("slow")], evaluate)

    async def work() -> list[Any]:
        groups = []
        for number, task in enumerate(environment.tasks()):  # each other settings, and so an evaluation of its own
            one = session(timeout_s=1.0, max_tokens=number + 1)
            groups.append(asyncio.ensure_future(environment.group(task, [one])))
        return [(await group)[0] for group in groups]

    *played, slow = asyncio.run(work())
    assert all(isinstance(one, Played) for one in played) and environment.takes_turns
    assert "took longer than 1 s" in str(slow)


def test_inspect_converts_scores_to_parts(inspect: Callable[..., OwnLoop]) -> None:
    call = Thing(id="c1", function="add", arguments={"a": 1})
    messages = [Thing(role="user", text="x"), Thing(role="assistant", text="", tool_calls=[call])]
    both = {"exact": Thing(value="C"), "several": Thing(value=["I", 1.0])}
    trace = "Traceback (most recent call last):\n  File x\nKeyError: 1\n\nDuring ...\nValueError: it\n  broke\n"
    broken = Thing(message="ValueError('it')", traceback=trace)
    environment = inspect(
        [
            sample("good", messages=messages, scores=both),
            sample("long", limit=Thing(type="token"), error=broken),
            sample("beyond", scores={"exact": Thing(value=3.0)}),
            sample("unread", scores={"exact": Thing(value=float("nan"), explanation="Grade not found in: hm")}),
            sample("asked", error=Thing(message="", traceback="EOFError: EOF when reading a line")),
            sample("cut", error=Thing(message="", traceback="EOFError: Compressed file ended")),
            sample("rounded", scores={"exact": Thing(value=1.0000002), "several": Thing(value=-1e-7)}),
        ],
        scorers=("exact", "several"),
    )
    good, failed, beyond, unread, asked, cut, rounded = results(environment)
    assert cut.error == "EOFError: Compressed file ended"
    assert asked.error == "It asks a person, and nobody is there: EOFError: EOF when reading a line"
    assert good.parts == {"exact": 1.0, "several": 0.5} and good.turns == 1 and not good.truncated
    assert good.messages[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}
    assert failed.error == "ValueError: it broke" and failed.truncated
    assert isinstance(beyond, EnvironmentMistake) and "reward_low and reward_high" in str(beyond)
    assert rounded.parts == {"exact": 1.0, "several": 0.0}
    assert unread.error.startswith("the scorer exact gave no score: Grade not found in: hm (environment.model_roles")


def test_task_without_scorer_plays_and_scores_the_lowest(
    inspect: Callable[..., OwnLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = sample("b", error=Thing(message="ValueError: no", traceback=""), output=Thing(choices=[]))
    refused = "x.SandboxInjectionError: Failed to inject: Cannot create sandbox framework directory /var/tmp/.x: denied"
    unserved = sample("c", error=Thing(message="", traceback=refused))
    refused_file = "OSError: [Errno 30] Read-only file system: '/opt/state'"
    assert commands.with_refusal(refused_file).startswith("Rollouts have no folders of the task's image, ")
    refused_folder = "Failed to execute setup script for sample: mkdir: cannot create '/w': Permission denied\nsh: 2"
    unmade = sample("d", error=Thing(message=f"RuntimeError('{refused_folder}')", traceback=""))
    environment = inspect([sample("a", scores=None), failed, unserved, unmade], scorers=())
    assert "environment.rewards adds judges" in environment.parts["unscored"].description
    played, error, unwalled, without_image = results(environment)

    def forbidden(family: int) -> None:
        raise PermissionError

    monkeypatch.setattr(commands, "socket", Thing(socket=forbidden, AF_UNIX=1))
    walled = results(environment)[2]
    assert played.parts == {"unscored": 0.0} and played.turns == 1
    assert error.error == "ValueError: no", "a sample that ended before any answer"
    assert "refuses local sockets. Tasks without text_editor" in walled.error
    assert "no folders of the task's image" in without_image.error
    assert unwalled.error == refused and walled.error.endswith(f": {refused}")


def test_bridged_agents_need_no_key(
    inspect: Callable[..., OwnLoop], stand_in: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    class OpenAIAPI:
        def __init__(self, model: str) -> None:
            if "OPENAI_API_KEY" not in os.environ:
                raise PrerequisiteError("Set a key first")

    stand_in("inspect_ai.model._providers.openai", OpenAIAPI=OpenAIAPI)
    monkeypatch.delenv("OPENAI_API_KEY")
    inspect([])
    for _ in range(2):
        assert os.environ["OPENAI_API_KEY"] == "none"
        with pytest.raises(PrerequisiteError, match="Set a key"):
            OpenAIAPI("a grader of OpenAI")
    monkeypatch.setenv("OPENAI_API_KEY", "of the owner")
    OpenAIAPI("a grader of OpenAI")


def test_inspect_names_what_a_task_needs(
    inspect: Callable[..., OwnLoop], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "package-1.0.dist-info"
    info.mkdir()
    lines = ["Name: package", "Version: 1.0", 'Requires-Dist: rouge_score>=0.1; extra == "b3"', "Requires-Dist: numpy"]
    (info / "METADATA").write_text("\n".join(lines) + "\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(LoadError, match=r"imports rouge_score\. .*toprope env add 'package\[b3\]' -r inspect_ai"):
        inspect([], failure=ModuleNotFoundError("no", name="rouge_score"))
    with pytest.raises(LoadError, match="toprope env add package -r gensim"):
        inspect([], failure=ModuleNotFoundError("no", name="gensim.models"))
    with pytest.raises(LoadError, match="env add /a/task.py -r inspect_ai -r PACKAGE, with .* that has agents"):
        inspect([], failure=ModuleNotFoundError("no", name="agents"), target="/a/task.py@sums")
    with pytest.raises(LoadError, match=r"`uv sync --extra golf`. The owner .*env add 'package\[golf\]' -r inspect_ai"):
        inspect([], failure=ImportError("golf is not installed. Install it via `uv sync --extra golf`."))
    with pytest.raises(LoadError, match=r"toprope env add 'package\[swim\]' -r inspect_ai"):
        inspect([], failure=AssertionError("please install it by running `uv sync --extra swim`"))
    with pytest.raises(LoadError, match=r"^Could not import what .* Install with: pip install rl-golf"):
        inspect([], failure=PrerequisiteError("[bold]ERROR[/bold]: Install with:\n\npip install rl-golf"))
    with pytest.raises(ImportError, match="^cannot import name"):
        inspect([], failure=ImportError("cannot import name 'golf' from 'games'"))
    with pytest.raises(InvalidRequest, match="does not load package/sums: Set a KEY first"):
        inspect([], failure=PrerequisiteError("Set a [bold blue]KEY[/bold blue] first"))


def test_roles_are_the_policy_or_models_of_the_owner(inspect: Callable[..., OwnLoop]) -> None:
    [task] = (environment := inspect([sample("a")])).tasks()
    places.clear()
    named = {"grader": {"base_url": "http://judge/v1", "api_key": "j", "model": "grader"}}
    asyncio.run(environment.group(task, [session(), session(roles=named)]))
    policy = {"grader": "http://x/v1", "critic": "http://x/v1"}
    assert places == [policy, policy | {"grader": "http://judge/v1"}]


def test_models_that_a_task_names_are_played_by_roles(
    stand_in: Callable[..., None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Most are made while the task is loaded, before there are roles."""
    makers: dict[str, Any] = {}
    roles: dict[str, Any] = {}
    policy: list[Any] = [None]

    class ModelAPI:
        def __init__(self, model_name: str, config: Any = None) -> None:
            self.model_name, self.config = model_name, config

    class Player:
        def __init__(self, name: str) -> None:
            self.api, self.name = self, name

        def __str__(self) -> str:
            return f"toprope/{self.name}"

        async def generate(self, text: str, tools: Any, tool_choice: Any, config: str) -> str:
            return f"{self.name}: {text}{config}"

        def should_retry(self, ex: Exception) -> bool:
            return True

    def get_model(model: Any = None, *, role: str | None = None, default: Any = None, **settings: Any) -> Any:
        if role in roles:
            return roles[role]
        model = model or default or policy[0]
        if isinstance(model, Player):
            return model
        if model is None:
            raise ValueError("No model specified (and no model environment variable defined)")
        provider, _, name = model.partition("/")
        if provider == "known":
            return f"the real {name}"
        if provider not in makers:
            raise PrerequisiteError("No authentication: set the GOOGLE_API_KEY")
        settings.pop("memoize")
        return makers[provider](name, **settings)

    def modelapi(name: str) -> Callable[[Any], None]:
        return lambda made: makers.update({name: made()})

    stand_in("inspect_ai._util.error", PrerequisiteError=PrerequisiteError)
    members = {"get_model": get_model, "ModelAPI": ModelAPI, "modelapi": modelapi, "model_roles": lambda: roles}
    stand_in("inspect_ai.model", **members)
    stand_in("inspect_ai.model._model", active_model=lambda: policy[0], get_model=get_model)
    merged = Thing(merge=lambda config: f" as evaluated{config}")
    stand_in("inspect_ai.model._generate_config", active_generate_config=lambda: merged)
    stand_in("solver_of_a_package", get_model=get_model)
    play_named_models()
    play_named_models()
    monkeypatch.setenv("OPENAI_API_KEY", NO_KEY)  # that agents' clients have
    import solver_of_a_package  # type: ignore[import-not-found]
    from inspect_ai.model import get_model as patched  # type: ignore[import-not-found]

    assert solver_of_a_package.get_model is patched is sys.modules["inspect_ai.model._model"].get_model
    named, critic = patched("google/gemini", config="warm"), patched(role="critic", default="openai/gpt")
    monitor, own, nameless = patched("openai/monitor"), patched("known/model"), patched()
    assert own == "the real model" and named.model_name == "google/gemini" and named.config == "warm"
    with pytest.raises(RuntimeError, match="outside any sample"):
        asyncio.run(named.generate("a", [], None, ""))
    policy[0] = Player("policy")
    assert patched("toprope/policy") is policy[0], "as tasks name it that grade with the evaluated model"
    roles |= {"grader": [Player("grader"), Player("another")], "critic": Player("critic")}
    roles["openai/monitor"] = Player("monitor")
    assert patched(roles["critic"]) is patched("toprope/critic") is roles["critic"], (
        "models of our provider, not the policy"
    )
    assert patched("toprope/another") is roles["grader"][1] and patched("toprope/policy") is policy[0]
    said = [asyncio.run(one.generate("a", [], None, "!")) for one in (named, critic, monitor, nameless)]
    assert said == ["grader: a!", "critic: a!", "monitor: a!", "policy: a as evaluated!"]
    assert named.should_retry(OSError())
    assert patched("google/gemini", config="warm") is named and capsys.readouterr().err.count("google/gemini") == 1
    monkeypatch.setenv("GOOGLE_API_KEY", "the owner's")
    with pytest.raises(PrerequisiteError):
        patched("google/gemini")
    assert asyncio.run(named.count_text_tokens("four")) == 2
    with pytest.raises(ValueError, match="not enough"):
        makers["broken"] = lambda name, **settings: (_ for _ in ()).throw(ValueError("not enough"))
        patched("broken/model", memoize=False)


def test_docker_of_a_task_becomes_processes_behind_the_wall_on_request(
    inspect: Callable[..., OwnLoop], stand_in: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[list[str], dict[str, Any]]] = []

    async def open_process(command: list[str], **given: Any) -> None:
        started.append((command, given))

    stand_in("inspect_ai.util._sandbox", local=Thing(LocalSandboxEnvironment=type("Local", (Local,), {})))
    stand_in("inspect_ai.util._subprocess", open_process=open_process)
    _subprocess = sys.modules["inspect_ai.util._subprocess"]
    stand_in("inspect_ai.util", SandboxEnvironmentSpec=lambda kind: Thing(type=kind), _subprocess=_subprocess)
    stand_in("inspect_ai._eval.task.util", task_run_dir=lambda task: "/absent")
    walls: list[bool] = []
    monkeypatch.setattr(inspect_ai, "require_wall", lambda: walls.append(True))
    environment = inspect([sample("plain"), sample("local", sandbox=Thing(type="local"))])
    assert walls == [True], "a task's own local sandbox runs the policy's commands too"
    assert environment._task.sandbox is None  # type: ignore[attr-defined]
    with pytest.raises(InvalidRequest, match="sandbox of type docker.*Set the knob sandbox to local"):
        inspect([sample("boxed", sandbox=Thing(type="docker", config=None))])
    environment._task.dataset.append(sample("boxed", sandbox=Thing(type="docker")))  # type: ignore[attr-defined]
    configure(environment, knobs={"sandbox": "local"})
    assert len(walls) == 3 and environment._task.sandbox.type == "local"  # type: ignore[attr-defined]
    monkeypatch.setenv("OWNERS_KEY", "secret")
    monkeypatch.setenv("TZ", "UTC")
    asyncio.run(_subprocess.open_process(["tool"], env={**os.environ, "OF_THE_TOOL": "1"}, cwd="/"))
    [(command, given)] = started
    own = {"PATH": os.environ["PATH"], "HOME": os.environ["HOME"], "TZ": "UTC", "OF_THE_TOOL": "1"}
    assert command == ["tool"] and given["cwd"] == "/" and own.items() <= given["env"].items()
    assert given["env"].keys() <= {*own, "LANG", "LC_ALL", "LD_LIBRARY_PATH", "TMPDIR"}, "stripped once, and of keys"


longest: ContextVar[int] = ContextVar("longest", default=1)
"""inspect's limit of a file that is read."""
turned = threading.Event()


class Local:
    """inspect's local sandbox; `exec` returns the command and its own variables."""

    _SANDBOX_TOOLS_DIR_ENV = "TOOLS_DIR"

    def __init__(self, place: Path) -> None:
        place.mkdir()
        self.directory = Thing(name=str(place))
        self._sandbox_tools_dir, self._sandbox_tools_used = place / "tools", False

    async def exec(self, cmd: list[str], input: Any, cwd: Any, env: dict[str, str]) -> Any:
        if cmd[0] == "/its/tools":
            self._sandbox_tools_used = True
            env = {**env, self._SANDBOX_TOOLS_DIR_ENV: str(self._sandbox_tools_dir)}
        return cmd, {**env, "INPUT": input} if input else env

    async def read_file(self, file: str, text: bool = True) -> str:
        if file == "slow":
            return str(turned.wait(10))
        return Path(file).read_text()[: longest.get()]

    async def write_file(self, file: str, contents: str) -> None:
        Path(file).write_text(contents)


@pytest.mark.skipif(not kernel.landlock_abi(), reason="this machine has no Landlock")
def test_samples_do_not_reach_each_other_s_files(stand_in: Callable[..., None], tmp_path: Path) -> None:
    kind: Any = type("Local", (Local,), {})
    stand_in("inspect_ai.util._sandbox.local", LocalSandboxEnvironment=kind, SANDBOX_CLI="/its/tools")
    local = sys.modules["inspect_ai.util._sandbox.local"]
    stand_in("inspect_ai.util._sandbox", local=local)
    stand_in("inspect_ai.util._subprocess", open_process=None)
    stand_in("inspect_ai.util", _subprocess=sys.modules["inspect_ai.util._subprocess"])
    confine_commands()
    one, other, mine = kind(tmp_path / "one"), kind(tmp_path / "other"), f"{tmp_path}/one/mine"

    async def use() -> None:
        await one.write_file(mine, "12")
        assert await one.read_file(mine, text=True) == "1"
        longest.set(2)
        assert await one.read_file(mine) == "12", "its limits count there"
        asyncio.get_running_loop().call_soon(turned.set)
        assert await one.read_file("slow") == "True", "others go on meanwhile"
        with pytest.raises(PermissionError):
            await other.read_file(mine)
        with pytest.raises(PermissionError):
            await other.write_file(mine, "2")

    asyncio.run(use())
    for box, expected in ((one, "12"), (other, "")):
        command, env = asyncio.run(box.exec(["cat", mine]))
        assert subprocess.run(command, env=os.environ | env, capture_output=True, text=True).stdout == expected
        assert env["HOME"] == env["TMPDIR"] != os.environ["HOME"]
    asyncio.run(one.write_file("/tmp/of a setup", "echo ready"))
    for box, expected in ((one, "ready\n"), (other, "")):
        command, env = asyncio.run(box.exec(["sh", "/tmp/of a setup"]))
        assert subprocess.run(command, env=os.environ | env, capture_output=True, text=True).stdout == expected
    assert asyncio.run(one.read_file("/tmp/of a setup")) and not os.path.exists("/tmp/of a setup")
    asyncio.run(one.write_file("/tmp/staged", "echo $1"))
    with tempfile.TemporaryDirectory(dir="/tmp") as taken:  # somebody else's
        script = f"cd /tmp && sh '/tmp/staged' {taken}/a; echo data/tmp/staged >/tmp/out; cat < /tmp/out"
        command, env = asyncio.run(one.exec(["sh", "-c", script], env={"OUT": "/tmp/out", "N": "7"}))
        printed = subprocess.run(command, env=os.environ | env, capture_output=True, text=True)
    assert printed.stdout.split("\n") == [f"{taken}/a", "data/tmp/staged", ""], printed.stderr
    assert env["OUT"] == f"{env['HOME']}/out" and env["N"] == "7"
    code, home = "open('/tmp/a')", env["HOME"]
    for words, moved in (
        (["python", "-c", code, "/tmp/a"], ["python", "-c", code, f"{home}/a"]),
        (["bash", "--login", "-eo", "pipefail", "-lc", code], ["-lc", f"open('{home}/a')"]),
        (["sh", "-c", "$0", "python", "-c", code], ["python", "-c", code]),
        (["sh", "run", "-c", code], ["run", "-c", code]),
    ):
        command, env = asyncio.run(one.exec(words, input=code))
        assert command[-len(moved) :] == moved and env["INPUT"] == code, "text that the task hands on is its own"
    assert not one._sandbox_tools_used
    command, env = asyncio.run(one.exec(["/its/tools", "start-server"]))
    assert one._sandbox_tools_used and env["TOOLS_DIR"] == f"{tmp_path}/one/tools" and command[0] != "/its/tools"


def test_sample_that_is_left_out_fails_alone(inspect: Callable[..., OwnLoop]) -> None:
    environment = inspect([sample("a"), sample("left out")])
    first, second = environment.tasks()

    async def both() -> list[Any]:
        return await asyncio.gather(environment.group(first, [session()]), environment.group(second, [session()]))

    [played], [missing] = asyncio.run(both())
    assert isinstance(played, Played) and "was not played" in str(missing)
