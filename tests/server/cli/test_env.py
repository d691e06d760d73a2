"""`toprope env`: a template that works, playing in the terminal, adding and removing; and the tool that installs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest
import yaml
from mcp.client import Client
from toprope_server.cli.app import build
from toprope_server.cli.env.trial import _show
from toprope_server.mcp.app import TopropeServer
from toprope_server.mcp.roles import Role, owners_role
from toprope_tools.answers.answer import TOKEN_BUDGET, tokens
from toprope_tools.planning.environment_check import check_environment
from toprope_tools.planning.environments import describe_environment
from toprope_tools.planning.installation import describe_outcome
from typer.testing import CliRunner

from tests.support.services.openai_stand_in import OpenAiStandIn
from tests.support.tiny_policy import make_tiny_policy
from tests.support.tools_house import make_workshop
from toprope.errors import EnvironmentFailed
from toprope.records.journal import groups
from toprope.sdk.wall import network_refusal
from toprope.training.rollouts.sampled_group import SampledGroup
from toprope.workbench.interpreters.adding import Interpreters, Order, Outcome
from toprope.workbench.interpreters.registry import Added

TALK = """
from toprope.sdk import Environment, OwnLoop, Part, Played, Task
class Talk(Environment):
    '''Say what was said.'''
    max_turns = 2
    def tasks(self):
        for n in range(3): yield Task(f"Say {n}")
    def step(self, text):
        print("50%\\rheard", text)
        return "again \\x1b[31m", False
    def score(self):
        if self.answer == "raise": raise ValueError("odd answer\\x1b[2J")
        return 0.25
"""


class Shell:
    """Commands in a home of their own."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.home, self.config = path / "home", path / "config"
        monkeypatch.setenv("TOPROPE_HOME", str(self.home))
        monkeypatch.setenv("TOPROPE_CONFIG", str(self.config))

    def __call__(self, *words: str, code: int = 0) -> str:
        done = CliRunner().invoke(build(), ["env", *words])
        assert done.exit_code == code, f"{done.output}\n{done.exception!r}"
        return done.output


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    return Shell(tmp_path, monkeypatch)


@pytest.mark.parametrize(("highest", "told"), [(2.0, "reward 0.5 of 2;"), (1e6, "reward 0.5;")])
def test_reward_is_shown_beside_a_bound_that_its_author_names(
    highest: float, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    group = SampledGroup("t", [], ["x"], [groups.Outcome(0.5)], [[]], 0.1)
    assert _show(group, 0, cast(Any, SimpleNamespace(max_reward=highest))) == 0
    assert told in capsys.readouterr().out


def test_env_new_template_is_listed_and_passes_its_test(shell: Shell) -> None:
    said = shell("new", "back-words")
    file, test = shell.config / "environments" / "back_words.py", shell.config / "environments" / "test_back_words.py"
    assert str(file) in said and str(test) in said
    words = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", str(test)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, cwd=file.parent)
    assert done.returncode == 0 and re.search(r"\b9 passed", done.stdout), done.stdout
    played = shell("try", "back-words", "--model", "solver", "--tasks", "2", "--knob", "length=4")
    assert played.count("reward 1 of 1 (letters 1, exact 1); success yes") == 2
    assert re.search(r"user: Write this backwards: [a-j]{4}\n", played)
    for command in ("try", "check"):
        for wrong in ("@x", "[1"):
            said = shell(command, "back-words", "-k", f"length={wrong}", code=2)
            assert "not YAML" in said and f'"{wrong}"' in said
        said = shell(command, "back-words", "-k", "length=2024-01-01", code=1 if command == "try" else 2)
        assert "2024-01-01" in said and "length" in said, said
    assert "as in `toprope env try back-words -k NAME=VALUE`" in shell("try", "back-words", "-k", "nope=1", code=1)
    assert "toprope: 4 ready, 1 not tried" in shell("list")
    text = file.read_text()
    assert "already exists" in shell("new", "back-words", code=1) and file.read_text() == text
    for wrong in ("Upper", "../up", "json", "yaml", "class", "2nd"):
        shell("new", wrong, code=1)
    assert len(list(file.parent.glob("*.py"))) == 2


def test_env_try_shows_turns_errors_and_output_with_endpoint(shell: Shell, tmp_path: Path) -> None:
    file = tmp_path / "talk.py"
    file.write_text(TALK)
    stand_in = OpenAiStandIn(lambda question: "raise" if "again" in question else "fine")
    shell.config.mkdir()
    (shell.config / "settings.yaml").write_text(
        yaml.safe_dump({"models": {"mine": {"base_url": stand_in.url, "model": "right"}}})
    )
    try:
        said = shell("try", str(file), "--model", "mine", "--tasks", "1", code=1)
    finally:
        stand_in.close()
    assert "user: Say " in said and "assistant: fine\nuser: again" in said and "\x1b" not in said
    assert "error: ValueError: odd answer\ufffd[2J" in said and "talk.py:" in said
    assert "\nheard fine" in said, "a progress bar leaves its last state"
    unsolved = shell("try", str(file), "--model", "solver", "--tasks", "9", code=1)
    assert "no reference" in unsolved and re.search(r"This split has only [1-3] task", unsolved)
    assert "There is no file" in shell("try", str(tmp_path / "none.py"), code=1)
    file.write_text("import nothing_of_that_name\n" + TALK)
    assert "nothing_of_that_name" in shell("try", str(file), "--model", "solver", code=1)


def test_env_try_waits_as_long_as_the_owner_lets_environments_load(shell: Shell, tmp_path: Path) -> None:
    file = tmp_path / "slow.py"
    file.write_text(f"import time\ntime.sleep(600)\n{TALK}")
    (shell.config / "presets").mkdir(parents=True)
    (shell.config / "presets" / "brief.yaml").write_text("config: {environment: {load_timeout_s: 2}}\n")
    (shell.config / "settings.yaml").write_text("preset: brief\n")
    assert "did not answer 'open' within 2 s" in shell("try", str(file), "--model", "solver", code=1)


def test_policy_in_folder_answers(shell: Shell, tmp_path: Path) -> None:
    policy = tmp_path / "policy"
    policy.mkdir()
    make_tiny_policy(policy)
    said = shell("try", "number_guess", "--model", str(policy), "--tasks", "1", "--max-tokens", "4")
    assert "user: Guess my number" in said and re.search(r"reward [\d.]+ of 1\.2 \(solved", said)
    assert not list(tmp_path.glob("home/runs/*"))
    file = tmp_path / "talk.py"
    file.write_text(TALK.replace("Say ", f"Say {'on and ' * 300}"))
    said = shell("try", str(file), "--model", str(policy), "--tasks", "1", code=1)
    assert "A prompt is too long: the prompt has" in said and "or solver for the environment's own answers" in said


def test_yaml_files_are_added_alone_and_those_of_a_folder_are_named(shell: Shell, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "_rate.py").write_text("def score(prompt, completion):\n    return float(prompt in completion)\n")
    (folder / "rows.jsonl").write_text("".join(f'{{"prompt": "say {n}", "answer": "{n}"}}\n' for n in range(40)))
    (folder / "rate.yaml").write_text("adapter: score\nfile: _rate.py\nrows: rows.jsonl\n")
    (folder / "sums.yml").write_text("adapter: dataset\npath: rows.jsonl\nprompt: '{prompt}'\nreference: answer\n")
    (folder / "wrong.yaml").write_text("adapter: scor\n")
    (folder / "other.yaml").write_text("steps: [1]\n")
    said = shell("add", str(folder))
    assert "3 YAML files there may open any file" in said and f"toprope env add {folder}/rate.yaml." in said
    assert "mine: folder" in shell("list") and "rate" not in shell("list", "--all").split()
    for file, name in (("rate.yaml", "rated"), ("sums.yml", "sums")):
        said = f"{name}: added. 1 environment to choose from: {name}.\nNext: toprope env try {name}\n"
        assert shell("add", str(folder / file), "--name", name) == said
    assert "user: say 11\n" in shell("try", "rated", "--model", "solver", "--tasks", "1")
    said = shell("add", str(folder / "wrong.yaml"), code=1)
    assert "which is no adapter" in said and "score" in said.partition("no adapter")[2]
    assert "names no adapter" in shell("add", str(folder / "other.yaml"), code=1)
    assert "adapter: dataset, path: FILE" in shell("add", str(folder / "rows.jsonl"), code=1)
    (folder / "rate.yaml").unlink()
    assert re.search(r"rated \[broken: \S+rate.yaml does not exist", shell("list", "--all"))


def test_installation_without_environments_says_where_they_may_be(tmp_path: Path) -> None:
    (project := tmp_path / "many").mkdir()
    added = Added(name="many", kind="packages", given=str(project))
    assert "Neither its installed modules nor the files in its folder" in describe_outcome(Outcome(added), [])
    for name in ("chess", "go"):
        (place := project / "environments" / name).mkdir(parents=True)
        (place / "pyproject.toml").touch()
    told = describe_outcome(Outcome(added), [])
    assert f"It holds 2 projects to add one by one, such as toprope env add {project}/environments/chess." in told
    plain = added.model_copy(update={"given": "many"})
    assert "None of its installed modules provides" in describe_outcome(Outcome(plain), [])


def test_adding_and_removing_on_the_command_line(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "talk.py").write_text(TALK)
    said = "mine: added. 1 environment to choose from: talk.\nNext: toprope env try talk\n"
    assert shell("add", str(tmp_path / "mine")) == said
    assert "mine: folder" in shell("list") and "toprope: 3 ready, 2 not tried" in shell("list")
    assert "talk [not tried]  Say what was said." in shell("list", "--all")
    shell("check", "talk")
    assert "toprope: 4 ready, 1 not tried" in shell("list") and "talk  Say what was said." in shell("list", "--all")
    assert "talk: Say what was said." in shell("try", "talk", "--model", "solver", "--tasks", "1", code=1)
    assert "already has it; nothing was installed" in shell("add", "reasoning_gym")
    assert "Did you mean" in shell("add", "reasoning gim", code=1)
    assert shell("remove", "mine") == "Removed mine.\n" and "mine" not in shell("list").split("Added")[-1]
    assert (tmp_path / "mine" / "talk.py").is_file()
    assert "was added" in shell("remove", "mine", code=1)


LOUD = """
from toprope.sdk import Environment, Part, Task, knob
class Loud(Environment):
    '''Says much.'''
    tags = ("t" * 100_000,)
    parts = {f"part{n}": Part(description="d\\x1b[2J" + "d" * 10_000) for n in range(200)}
    class Knobs:
        size: str = knob("k" * 100_000, choices=["k" * 100_000, "other"], help="h\\x1b[2J")
        raises: bool = knob(False)
    def setup(self):
        if self.knobs.raises: raise ValueError("no\\x1b[2J" + "!" * 100_000)
    def tasks(self):
        for n in range(300): yield Task(f"Say\\x1b[2J {n}")
    def score(self):
        return dict.fromkeys(self.parts, 0.0)
"""


@pytest.fixture
def house(tmp_path: Path) -> Any:
    shop, launcher = make_workshop(tmp_path)
    yield shop
    launcher.close()


def test_describe_shortens_verbose_environment(house: Any) -> None:
    folder = house.home.configuration / "environments"
    folder.mkdir(parents=True)
    (folder / "loud.py").write_text(LOUD)

    async def ask() -> Any:
        with pytest.raises(EnvironmentFailed) as refusal:
            await describe_environment(house, name="loud", knobs={"raises": True})
        return await describe_environment(house, name="loud"), str(refusal.value)

    answer, refused = anyio.run(ask)
    assert tokens(answer) < TOKEN_BUDGET and len(answer.data.reward_parts) == 40
    assert "no[2J!!" in refused and "\x1b" not in refused and len(refused) < 5000
    assert "\x1b" not in answer.text + refused


CALLS_HOME = """
import socket
from toprope.sdk import Environment, Part, Task
class Caller(Environment):
    '''Calls home.'''
    def setup(self):
        try:
            socket.socket(socket.AF_INET, socket.SOCK_STREAM).close()
            self.parts = {"reached": Part()}
        except OSError:
            self.parts = {"alone": Part()}
    def tasks(self):
        for n in range(300): yield Task(f"Say {n}", reference=str(n))
    def score(self):
        return float(self.answer == self.task.reference)
"""


@pytest.mark.skipif(bool(network_refusal("deny")), reason="this machine has no seccomp")
def test_network_lock_holds_before_a_run(house: Any) -> None:
    folder = house.home.configuration / "environments"
    folder.mkdir(parents=True)
    (folder / "caller.py").write_text(CALLS_HOME)

    async def ask() -> list[str]:
        described = await describe_environment(house, name="caller")
        checked = await check_environment(house, name="caller")
        assert checked.data.verdict != "critical"
        return list(described.data.reward_parts)

    assert anyio.run(ask) == ["reached"]
    (house.home.configuration / "locks.yaml").write_text(
        "locks: [{field: environment.network, value: deny, reason: Not from here.}]\n"
    )
    assert anyio.run(ask) == ["alone"]


def test_agents_install_only_if_owner_allows(house: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ordered: list[str] = []

    def add(self: Interpreters, order: Order, progress: Any) -> Outcome:
        assert order.plain_only
        ordered.append(order.given)
        for word in ("resolving", "installing"):
            progress(word)
        return Outcome(Added(name=order.given, kind="packages", given=order.given, adapter="textarena"), own=True)

    monkeypatch.setattr(Interpreters, "add", add)
    monkeypatch.setenv("TOPROPE_CONFIG", str(house.home.configuration))
    news: list[str | None] = []

    async def heard(progress: float, total: float | None, message: str | None) -> None:
        news.append(message)

    async def ask(role: Role, *given: str) -> tuple[list[str], list[Any]]:
        with anyio.fail_after(60):
            async with Client(TopropeServer(lambda: house, role)) as client:
                names = [tool.name for tool in (await client.list_tools()).tools]
                asked = [
                    await client.call_tool("add_environment", {"what": one}, progress_callback=heard) for one in given
                ]
                return names, asked

    assert "installs" not in owners_role().permits
    names, [refused] = anyio.run(ask, Role(), "textarena")
    assert "add_environment" not in names and refused.is_error and "not offered here" in refused.content[0].text
    house.home.configuration.mkdir(parents=True, exist_ok=True)
    house.home.settings_file.write_text("installs: allow\n")
    role = Role().within(owners_role())
    assert "installs" in role.permits
    names, [installed, path, url] = anyio.run(ask, role, "textarena", "./mine", "x @ https://example.org/x.whl")
    assert names.index("add_environment") < names.index("select_environment")
    assert not installed.is_error and "nothing was installed" in installed.content[0].text
    assert installed.structured_content["done"] and ordered == ["textarena"]
    for one in (path, url):
        assert one.is_error and "toprope env add" in one.content[0].text
    house.home.settings_file.write_text("installs: ask\n")  # a server that was started before is held to it as well
    _, [late] = anyio.run(ask, role, "textarena")
    assert late.is_error and "Ask the owner to run: toprope env add textarena" in late.content[0].text


def test_long_installation_continues_when_called_again(house: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    from toprope_tools.planning.installation import add_environment

    go, calls = threading.Event(), []

    def add(self: Interpreters, order: Order, progress: Any) -> Outcome:
        calls.append(order)
        progress("installing 3 packages")
        assert go.wait(60)
        return Outcome(Added(name="tiny", kind="packages", given="tiny"))

    monkeypatch.setattr(Interpreters, "add", add)
    monkeypatch.setattr("toprope_tools.planning.installation._LOOK_S", 0.02)
    house.home.configuration.mkdir(parents=True, exist_ok=True)
    house.home.settings_file.write_text("installs: allow\nstatus: {waits: {'': 0.1}}\n")
    news: list[str | None] = []

    async def heard(progress: float, total: float | None, message: str | None) -> None:
        news.append(message)

    async def twice() -> tuple[Any, Any]:
        first = await add_environment(house, what="tiny", progress=heard)
        go.set()
        return first, await add_environment(house, what="tiny")

    first, second = anyio.run(twice)
    assert not first.data.done and "still being installed («installing 3 packages»)" in first.text
    assert 'add_environment(what="tiny")' in first.text and news == ["installing 3 packages"]
    assert second.data.done and len(calls) == 1
