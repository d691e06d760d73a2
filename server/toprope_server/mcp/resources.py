"""MCP resources: the list, the contents, and notifications of changes, in both eras of the protocol.

Clients up to 2025-11-25 subscribe and unsubscribe, and get notifications on their connection; from 2026-07-28 on a
client opens a stream that names resources, and closing it ends the subscription. Runs are checked once a second while
there is a subscriber, and never otherwise.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import anyio
from anyio import to_thread
from mcp.server.lowlevel.helper_types import ReadResourceContents
from mcp.server.mcpserver.exceptions import ResourceError, ResourceNotFoundError
from mcp.server.subscriptions import InMemorySubscriptionBus, ListenHandler, ResourceUpdated
from mcp.shared.exceptions import MCPError
from mcp.types import (
    INVALID_PARAMS,
    EmptyResult,
    Resource,
    ResourceTemplate,
    SubscribeRequestParams,
    SubscriptionsListenRequestParams,
    SubscriptionsListenResult,
    UnsubscribeRequestParams,
)

from toprope.errors import NotFound, TopropeError

if TYPE_CHECKING:
    from mcp.server.context import ServerRequestContext
    from mcp.server.lowlevel import Server
    from toprope_tools.resources.resource_changes import Changes
    from toprope_tools.workshop import Workshop

logger = logging.getLogger("toprope.server")

_CHECK_EVERY_S = 1.0
_MOST_URIS = 64
"""Per subscriber."""
_MOST_STREAMS = 32

_RUNS = Resource(
    uri="toprope://runs",
    name="runs",
    title="Runs",
    description="The newest runs on this machine: id, kind, environment, state.",
    mime_type="application/json",
)


_PAGES = Resource(
    uri="toprope://docs",
    name="docs",
    title="Documentation",
    description="Every page with its title: environments, settings, algorithms, sweeps, findings, and a template.",
    mime_type="application/json",
)


def _template(path: str, name: str, title: str, description: str, mime_type: str) -> ResourceTemplate:
    return ResourceTemplate(
        uri_template=f"toprope://runs/{{run_id}}{path}",
        name=name,
        title=title,
        description=description,
        mime_type=mime_type,
    )


TEMPLATES = [
    _template("", "run", "A run", "How a run stands, with its newest events.", "application/json"),
    _template("/config", "config", "A run's configuration", "The frozen configuration of a run.", "application/yaml"),
    _template("/metrics", "metrics", "A run's metrics", "Up to 100 rows over the steps of a run.", "text/csv"),
    _template("/logs/{component}", "log", "A component's log", "Its last lines; untrusted text.", "text/plain"),
    _template("/plot.png", "plot", "A run's picture", "Reward and accuracy of a completed run.", "image/png"),
    ResourceTemplate(
        uri_template="toprope://datasets/{name}",
        name="dataset",
        title="A data set's card",
        description="What a data set (best, best@v2) holds and is made of; toprope://datasets lists them.",
        mime_type="text/markdown",
    ),
    ResourceTemplate(
        uri_template="toprope://docs/{page}",
        name="page",
        title="A page of the documentation",
        description="A page that toprope://docs lists, such as environments, settings or environment-template.",
        mime_type="text/markdown",
    ),
]


class Resources:
    """The resources of the server's workshop."""

    def __init__(self, workshop: Callable[[], Workshop]) -> None:
        self._workshop = workshop
        self._streams = 0

    def serve(self, server: Server[Any]) -> None:
        """Register the handlers of subscriptions in both eras."""
        server.add_request_handler("resources/subscribe", SubscribeRequestParams, self._subscribe)
        server.add_request_handler("resources/unsubscribe", UnsubscribeRequestParams, self._unsubscribe)
        server.add_request_handler("subscriptions/listen", SubscriptionsListenRequestParams, self._listen)

    async def listed(self) -> list[Resource]:
        """The list of runs, the documentation, and the newest runs one by one if the workshop can be opened."""
        from toprope_tools.resources.resources import LISTED

        try:
            runs = await to_thread.run_sync(lambda: self._workshop().statuses()[:LISTED])
        except TopropeError:
            runs = []
        return [
            _RUNS,
            _PAGES,
            *(
                Resource(
                    uri=f"toprope://runs/{run.run_id}",
                    name=run.run_id,
                    description=f"{run.kind} on {run.environment}: {run.state}",
                    mime_type="application/json",
                )
                for run in runs
            ),
        ]

    async def read(self, uri: str) -> list[ReadResourceContents]:
        """The content of a resource.

        Raises:
            ResourceNotFoundError, ResourceError: With the text of our own error.
        """
        from toprope_tools.resources.resources import read, resource_at

        try:
            content, mime_type = await read(self._workshop(), resource_at(uri))
        except NotFound as error:
            raise ResourceNotFoundError(str(error)) from None
        except TopropeError as error:
            raise ResourceError(str(error)) from None
        return [ReadResourceContents(content=content, mime_type=mime_type)]

    # Up to 2025-11-25

    async def _subscribe(self, ctx: ServerRequestContext[Any, Any], params: SubscribeRequestParams) -> EmptyResult:
        # Subscriptions end with their connection; a session lives for one request only.
        connection = ctx.session._connection
        subscriber: _Subscriber | None = connection.state.get(_KEY)
        if subscriber is None:
            subscriber = connection.state[_KEY] = _Subscriber(self._changes(), ctx.session.send_resource_updated)
            connection.exit_stack.callback(subscriber.end)
        await self._add(subscriber.changes, [str(params.uri)])
        subscriber.begin()
        return EmptyResult()

    async def _unsubscribe(self, ctx: ServerRequestContext[Any, Any], params: UnsubscribeRequestParams) -> EmptyResult:
        subscriber: _Subscriber | None = ctx.session._connection.state.get(_KEY)
        if subscriber is not None:
            subscriber.changes.remove(str(params.uri))
        return EmptyResult()

    # From 2026-07-28

    async def _listen(
        self, ctx: ServerRequestContext[Any, Any], params: SubscriptionsListenRequestParams
    ) -> SubscriptionsListenResult:
        if self._streams >= _MOST_STREAMS:
            raise MCPError(INVALID_PARAMS, f"{_MOST_STREAMS} streams are open, which is the limit.")
        changes = self._changes()
        await self._add(changes, list(params.notifications.resource_subscriptions or []))
        # A bus for each stream: each gets what it asked for, independent of the others.
        bus = InMemorySubscriptionBus()
        self._streams += 1
        try:
            async with anyio.create_task_group() as tasks:
                if changes:
                    tasks.start_soon(_notify_changes, changes, lambda uri: bus.publish(ResourceUpdated(uri=uri)))
                result = await ListenHandler(bus)(ctx, params)
                tasks.cancel_scope.cancel()
        finally:
            self._streams -= 1
        return result

    def _changes(self) -> Changes:
        from toprope_tools.resources.resource_changes import Changes

        return Changes(self._workshop())

    async def _add(self, changes: Changes, uris: list[str]) -> None:
        if len(changes) + len(uris) > _MOST_URIS:
            raise MCPError(INVALID_PARAMS, f"At most {_MOST_URIS} resources can be subscribed to at once.")
        for uri in uris:
            try:
                await to_thread.run_sync(changes.add, uri)
            except TopropeError as error:
                raise MCPError(INVALID_PARAMS, str(error), data={"uri": uri}) from None


_KEY = "toprope.subscriber"


class _Subscriber:
    """One connection's subscriptions, and the task that checks them for changes."""

    def __init__(self, changes: Changes, notify: Callable[[str], Awaitable[None]]) -> None:
        self.changes, self._notify = changes, notify
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Start to check. This needs a task of its own: no task group outlives the request."""
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(_notify_changes(self.changes, self._notify))

    def end(self) -> None:
        """Stop checking: the connection is closed."""
        if self._task is not None:
            self._task.cancel()


async def _notify_changes(changes: Changes, notify: Callable[[str], Awaitable[None]]) -> None:
    """Notify of changes until cancelled, or until nothing is watched."""
    while changes:
        await anyio.sleep(_CHECK_EVERY_S)
        try:
            for uri in await to_thread.run_sync(changes.news):
                await notify(uri)
        except (anyio.ClosedResourceError, anyio.BrokenResourceError):
            return
        except Exception:
            logger.exception("a check for changed resources failed; the next one follows")
