"""The trajectory API over HTTP: Atropos's endpoints, and ours.

Environments and trainers written for Atropos's `run-api` work with it unchanged. Our own endpoints add a cursor, with
which a trainer can ask again for a batch whose answer was lost, as well as commits, drop reports, and waiting instead
of polling. A batch repeats the posted bodies byte for byte. Answers are not compressed: on one machine compression
costs more than it saves. A request that changes the account of groups is answered once the change is on disk.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from toprope.errors import InvalidValue, NotPossibleNow
from toprope.training.api.http.auth import AuthMiddleware
from toprope.training.api.http.errors import Refused, to_refusal
from toprope.training.api.http.group_endpoints import (
    GroupEndpoints,
    integer_parameter,
    query_parameters,
    wait_for,
    wait_parameter,
)
from toprope.training.api.http.metrics import render_metrics
from toprope.training.api.intake.validation import Limits, read_body
from toprope.training.api.intake.version_matching import InferenceMatcher
from toprope.training.api.queue.registry import EnvironmentRegistration, TrainerRegistration, decode
from toprope.training.api.storage.group_commit import GroupCommit
from toprope.training.api.storage.store import TrajectoryStore

_DEBUG_FIELDS = (
    "tokens", "masks", "scores", "advantages", "ref_logprobs", "generation_params", "inference_logprobs", "messages",
    "images",
)  # fmt: skip


class _EnvironmentId(msgspec.Struct):
    env_id: int


class _Cursor(msgspec.Struct):
    cursor: int


class _Drop(msgspec.Struct):
    sequence_number: int
    reason: str


class _Drops(msgspec.Struct):
    items: list[_Drop]


def create_app(
    store: TrajectoryStore,
    secret: str,
    *,
    commit: GroupCommit | None = None,
    matcher: InferenceMatcher | None = None,
) -> AuthMiddleware:
    """The ASGI application over a store.

    Args:
        store: The store it serves.
        secret: Needed for everything but GET /, as a bearer token or as the first part of the path.
        commit: Makes answers wait for the disk; None if the journal needs no such wait.
        matcher: Finds the policy versions of groups that outside environments post.
    """
    groups = GroupEndpoints(store, commit, matcher)
    endpoints = _Endpoints(store, groups)
    routes = [
        Route("/", endpoints.root, methods=["GET"]),
        Route("/register", endpoints.register, methods=["POST"]),
        Route("/register-env", endpoints.register_env, methods=["POST"]),
        Route("/disconnect-env", endpoints.disconnect_env, methods=["POST"]),
        Route("/wandb_info", endpoints.wandb_info, methods=["GET"]),
        Route("/info", endpoints.info, methods=["GET"]),
        Route("/scored_data", endpoints.refuse_method, methods=["POST"]),
        Route("/scored_data_list", endpoints.refuse_method, methods=["POST"]),
        Route("/batch", endpoints.refuse_method, methods=["GET"]),
        Route("/status", endpoints.status, methods=["GET"]),
        Route("/status-env", endpoints.status_env, methods=["GET"]),
        Route("/latest_example", endpoints.latest_example, methods=["GET"]),
        Route("/reset_data", endpoints.reset_data, methods=["POST"]),
        Route("/commit", endpoints.commit, methods=["POST"]),
        Route("/take_up", endpoints.take_up, methods=["POST"]),
        Route("/dropped", endpoints.dropped, methods=["POST"]),
        Route("/counts", endpoints.counts, methods=["GET"]),
        Route("/metrics", endpoints.metrics, methods=["GET"]),
        Route("/room", endpoints.room, methods=["GET"]),
        Route("/wanted", endpoints.wanted, methods=["GET"]),
    ]
    handlers: dict[Any, Callable[[Request, Any], Awaitable[Response]]] = {
        InvalidValue: _on_error,
        NotPossibleNow: _on_error,
        HTTPException: _on_http,
        ClientDisconnect: _on_disconnect,
    }
    others = Starlette(routes=routes, exception_handlers=handlers)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = groups.routes.get((scope["method"], scope["path"]))
        if endpoint is None:
            await others(scope, receive, send)
        else:
            await groups.handle(endpoint, scope, receive, send)

    return AuthMiddleware(app, secret)


class _Endpoints:
    def __init__(self, store: TrajectoryStore, groups: GroupEndpoints) -> None:
        self._store = store
        self._limits = store.limits
        self._groups = groups

    async def refuse_method(self, request: Request) -> Response:
        """Placeholder for the routes of `GroupEndpoints`: other methods on their paths get a 405."""
        raise HTTPException(405)

    async def root(self, request: Request) -> Response:
        return _json({"message": "AtroposLib API"})

    async def register(self, request: Request) -> Response:
        self._store.register(decode(await self._read_small(request), TrainerRegistration))
        await self._groups.wait_until_durable()
        return _json({"uuid": uuid.uuid4().int})

    async def register_env(self, request: Request) -> Response:
        environment = decode(await self._read_small(request), EnvironmentRegistration)
        env_id = self._store.register_environment(environment)
        if env_id is None:
            return _json({"status": "wait for trainer to start"})
        await self._groups.wait_until_durable()
        registry = self._store.registry
        trainer = registry.trainer
        return _json(
            {
                "status": "success",
                "env_id": env_id,
                "wandb_name": registry.unique_name(env_id),
                "checkpoint_dir": trainer.checkpoint_dir if trainer else "",
                "starting_step": registry.current_step,
                "checkpoint_interval": trainer.save_checkpoint_interval if trainer else -1,
                "num_steps": trainer.num_steps if trainer else -1,
            }
        )

    async def disconnect_env(self, request: Request) -> Response:
        self._store.disconnect_environment(decode(await self._read_small(request), _EnvironmentId).env_id)
        await self._groups.wait_until_durable()
        return _json({"status": "success"})

    async def wandb_info(self, request: Request) -> Response:
        trainer = self._store.registry.trainer
        return _json(
            {"group": trainer.wandb_group if trainer else None, "project": trainer.wandb_project if trainer else None}
        )

    async def info(self, request: Request) -> Response:
        trainer = self._store.registry.trainer
        return _json(
            {
                "batch_size": trainer.batch_size if trainer else -1,
                "max_token_len": trainer.max_token_len if trainer else -1,
            }
        )

    async def status(self, request: Request) -> Response:
        store = self._store
        return _json({"current_step": store.registry.current_step, "queue_size": store.queue.waiting})

    async def status_env(self, request: Request) -> Response:
        env_id = integer_parameter(query_parameters(request.scope), "env_id", None, 0, 2**31)
        if env_id is None:
            env_id = decode(await self._read_small(request), _EnvironmentId).env_id
        return _json(self._store.environment_status(env_id))

    async def latest_example(self, request: Request) -> Response:
        body = self._store.latest_body()
        if body is None:
            return _json({name: [] for name in _DEBUG_FIELDS})
        return _json({name: None for name in _DEBUG_FIELDS} | msgspec.json.decode(body))

    async def reset_data(self, request: Request) -> Response:
        if self._store.by_cursor:
            raise Refused(
                "trainer_reads",
                "This run's trainer reads with a cursor, which would be ahead of an empty queue. Nothing was dropped.",
                status=409,
            )
        self._store.reset()
        await self._groups.wait_until_durable()
        return PlainTextResponse("Reset successful")

    async def commit(self, request: Request) -> Response:
        newly = self._store.commit(decode(await self._read_small(request), _Cursor).cursor)
        await self._groups.wait_until_durable()
        return _json({"status": "success", "committed": newly, "cursor": self._store.queue.committed})

    async def take_up(self, request: Request) -> Response:
        """The cursor from which a trainer continues whose checkpoint was made at the given one.

        That is the given cursor, moved into the range the journal allows: a journal that was lost ends before it, and
        one whose newest checkpoint was lost has committed past it.
        """
        queue = self._store.queue
        cursor = decode(await self._read_small(request), _Cursor).cursor
        cursor = min(max(cursor, queue.committed), queue.delivered)
        self._store.commit(cursor)
        await self._groups.wait_until_durable()
        return _json({"cursor": cursor})

    async def dropped(self, request: Request) -> Response:
        items = decode(await read_body(request.scope, request.receive, self._limits), _Drops).items
        newly = self._store.drop([(item.sequence_number, item.reason) for item in items])
        await self._groups.wait_until_durable()
        return _json({"status": "success", "dropped": newly})

    async def counts(self, request: Request) -> Response:
        return _json(self._store.queue.counts())

    async def metrics(self, request: Request) -> Response:
        text = render_metrics(self._store, time.time())
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def room(self, request: Request) -> Response:
        queue = self._store.queue
        query = query_parameters(request.scope)
        below = integer_parameter(query, "below", None, 1, 2**31)
        if below is None:
            raise Refused(
                "bad_parameter",
                "below is missing: the number of waiting groups to get under.",
                status=400,
                field="below",
            )

        def has_room() -> bool:
            # Groups may have few rows: a trainer that waits for more of them must not meet a driver that waits for it.
            return queue.waiting < below or self._groups.missing_rows() is not None

        await wait_for(self._store, request.receive, wait_parameter(query), lambda: has_room() or None, has_room)
        return _json({"room": has_room(), "waiting": queue.waiting})

    async def wanted(self, request: Request) -> Response:
        """The rows that the waiting trainer still needs, so that the driver can wait for the trainer."""
        missing_rows, wait_s = self._groups.missing_rows, wait_parameter(query_parameters(request.scope))
        demand = await wait_for(self._store, request.receive, wait_s, missing_rows, lambda: missing_rows() is not None)
        version, rows = demand or (self._store.version, 0)
        return _json({"version": version, "rows": rows})

    async def _read_small(self, request: Request) -> bytes:
        return await read_body(request.scope, request.receive, Limits(body_bytes=65_536, decoded_bytes=65_536))


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


async def _on_error(request: Request, error: InvalidValue | NotPossibleNow) -> Response:
    refusal = to_refusal(error)
    headers = {} if refusal.retry_after is None else {"Retry-After": str(refusal.retry_after)}
    return Response(refusal.body(), refusal.status, headers, media_type="application/json")


async def _on_http(request: Request, error: HTTPException) -> Response:
    message = error.detail
    if error.status_code == 405 and request.url.path.endswith("/reset_data"):
        message = "GET /reset_data changes nothing. POST /reset_data drops every group that is not committed."
    elif error.status_code == 404:
        message = "There is no such endpoint."
    kind = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http")
    answer = await _on_error(request, Refused(kind, message, status=error.status_code))
    answer.headers.update(error.headers or {})
    return answer


async def _on_disconnect(request: Request, error: ClientDisconnect) -> Response:
    return Response(status_code=499)
