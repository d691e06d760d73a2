"""Start tools that authors name as before verifiers 0.3, which now reads `toolsets(config)` and would leave them out.

Until then a task or taskset had its tool servers in the attribute `tools`, each with the setting of its type, or made
them in a method `tool_servers`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from toprope.sdk.errors import EnvironmentMistake

__all__ = ["adopt_tools"]


def adopt_tools(kind: Any, base: str) -> None:
    """Give a task or taskset whose author names tools as before the `toolsets` that verifiers reads.

    Args:
        kind: The author's class.
        base: The class of verifiers from which it derives: `Task` or `Taskset`. Authors call theirs so, too.
    """
    lineage = kind.__mro__
    depth = max(number for number, ancestor in enumerate(lineage) if ancestor.__name__ == base)
    authors = [ancestor for ancestor in lineage[:depth] if not ancestor.__module__.startswith("verifiers.")]
    own = {name for ancestor in authors for name in vars(ancestor)}
    if "toolsets" in own or not ("tool_servers" in own or _declared(kind)):
        return
    lineage[depth].tool_servers, lineage[depth].server_config = _tool_servers, _server_config
    kind.toolsets = _WithOlder(kind.toolsets)


class _WithOlder:
    """`toolsets` with an instance's tool servers. A class lacks them: verifiers asks it about tunnels only."""

    def __init__(self, inherited: Callable[[Any], list[Any]]) -> None:
        self._inherited = inherited

    def __get__(self, thing: Any, owner: type) -> Callable[[Any], list[Any]]:
        return lambda config: [*self._inherited(config), *(() if thing is None else thing.tool_servers())]


def _declared(kind: type) -> tuple[Any, ...]:
    """Return the classes of tool servers in `tools`, which may hold something else today."""
    tools = getattr(kind, "tools", ())
    are_servers = isinstance(tools, tuple | list) and all(
        isinstance(tool, type) and hasattr(tool, "_config_cls") for tool in tools
    )
    return tuple(tools) if are_servers else ()


def _tool_servers(self: Any) -> list[Any]:
    return [server(self.server_config(server)) for server in _declared(type(self))]


def _server_config(self: Any, server: Any) -> Any:
    """Return the setting that has the type of a server's configuration; its defaults without one.

    Raises:
        EnvironmentMistake: Several settings fit.
    """
    wanted = server._config_cls()
    values = {name: getattr(self.config, name) for name in type(self.config).model_fields}
    fitting = [name for name, value in values.items() if type(value) is wanted]
    if not fitting and set(_declared(type(self))) == {server}:
        fitting = [name for name, value in values.items() if isinstance(value, wanted)]
    if len(fitting) > 1:
        raise EnvironmentMistake(
            f"The settings {', '.join(fitting)} of {type(self).__name__} are all {wanted.__name__}: {server.__name__} "
            "may have any of them. Choose in a method `server_config`."
        )
    return values[fitting[0]] if fitting else wanted()
