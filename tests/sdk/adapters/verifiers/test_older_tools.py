"""Tools that tasks and tasksets name as before verifiers 0.3."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pydantic import BaseModel, create_model

from tests.sdk.adapters.verifiers.conftest import Task, Taskset
from toprope.sdk.adapters import verifiers
from toprope.sdk.adapters._verifiers.older_tools import adopt_tools
from toprope.sdk.authoring.env_managed import OwnLoop
from toprope.sdk.errors import EnvironmentMistake


class Setting(BaseModel):
    """Configuration of a tool server."""

    url: str = "http://default/mcp"


class Narrow(Setting):
    """A more special one."""


class Lookup:
    """A tool server."""

    def __init__(self, config: Any) -> None:
        self.config = config

    @classmethod
    def _config_cls(cls) -> type[Setting]:
        return Setting


class Other(Lookup):
    """Another tool server."""


def of_task(settings: type[BaseModel], name: str = "Author", base: type = Task, **members: Any) -> list[Any]:
    """Return the tool servers of a task that has these members."""
    kind: Any = type(name, (base,), members)
    adopt_tools(kind, "Task")
    task = kind(config=settings())
    servers: list[Any] = task.toolsets(task.config)
    return servers


def test_tasks_and_tasksets_are_played_with_tools_named_as_before(
    open_taskset: Callable[..., OwnLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[Any] = []
    monkeypatch.setattr(verifiers, "_check_server", served.append)
    named = {"tool_servers": lambda self: [Lookup(Setting())]}
    task: Any = type("Author", (Task,), named)
    open_taskset()
    assert not served
    open_taskset(task=task)
    open_taskset(taskset=type("Authors", (Taskset,), named))
    assert [type(server) for server in served] == [Lookup, Lookup]
    assert task.toolsets(None) == [], "verifiers asks the class, too"


def test_each_tool_server_gets_the_setting_of_its_type() -> None:
    def settings(**fields: Setting) -> type[BaseModel]:
        names: dict[str, Any] = {name: (type(value), value) for name, value in fields.items()}
        return create_model("Settings", **names)

    one = Setting(url="http://one/mcp")
    [server] = of_task(settings(tools=one), tools=(Lookup,))
    assert type(server) is Lookup and server.config == one
    [server] = of_task(settings(tools=Narrow(url="http://n/mcp")), tools=(Lookup,))
    assert server.config.url == "http://n/mcp", "the only server takes a setting of a more special type"
    servers = of_task(settings(tools=Narrow(url="http://n/mcp")), tools=[Lookup, Other])
    assert [server.config.url for server in servers] == ["http://default/mcp"] * 2
    with pytest.raises(EnvironmentMistake, match="The settings tools, more of Author are all Setting"):
        of_task(settings(tools=one, more=one), tools=(Lookup,))
    [server] = of_task(
        settings(tools=one, more=one), tools=(Lookup,), server_config=lambda self, server: self.config.more
    )
    assert server.config == one


def test_what_names_its_tools_as_today_or_has_none_is_left_alone() -> None:
    for tools in ((), ({"name": "x"},), (dict, Setting)):
        assert of_task(Setting, served=["today's"], tools=tools) == ["today's"]
    own = of_task(Setting, tools=(Lookup,), toolsets=classmethod(lambda cls, config: ["own"]))
    assert own == ["own"]


def test_authors_may_call_their_class_as_verifiers_does() -> None:
    [server] = of_task(Setting, "Task", tool_servers=lambda self: [Lookup(Setting())])
    assert type(server) is Lookup
    one = Setting(url="http://one/mcp")
    [server] = of_task(Setting, "Task", tools=(Lookup,), server_config=lambda self, server: one)
    assert server.config is one
    assert of_task(Setting, "Task", tools=(Lookup,), toolsets=classmethod(lambda cls, config: ["own"])) == ["own"]


def test_tools_of_a_task_of_verifiers_are_served_beside_the_authors() -> None:
    harbor = type("HarborTask", (Task,), {"toolsets": classmethod(lambda cls, config: ["harbor's"])})
    harbor.__module__ = "verifiers.v1.tasksets.harbor.taskset"
    first, server = of_task(Setting, base=harbor, tools=(Lookup,))
    assert first == "harbor's" and type(server) is Lookup
