"""The trajectory API over HTTP: Atropos's endpoints with their shapes, and ours beside them.

Environments and trainers written for Atropos's `run-api` talk to it unchanged; ours add a cursor, so that a batch whose
answer was lost can be asked for again, commits, drop reports and waiting instead of polling. Bodies are handed out as
they came in. Answers are not compressed: on one machine that costs more than it saves. What changes the account is
answered when it is on disk; the endpoints that carry groups are in `hot.py`.
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
from toprope.training.api.http.auth import LOOPBACK, Gate
from toprope.training.api.http.errors import Refused
from toprope.training.api.http.group_endpoints import MAX_WAIT_S, Hot, parameters, refusal_of, wait_for, wait_of, whole
from toprope.training.api.http.metrics import exposition
from toprope.training.api.intake.validation import Limits, read_body
from toprope.training.api.intake.version_matching import Matcher
from toprope.training.api.queue.registry import EnvironmentRegistration, TrainerRegistration, decode
from toprope.training.api.storage.group_commit import GroupCommit
from toprope.training.api.storage.store import TrajectoryStore

__all__ = ["MAX_WAIT_S", "create_app"]

_DEBUG_FIELDS = (
    "tokens", "masks", "scores", "advantages", "ref_logprobs", "generation_params", "inference_logprobs", "messages",
    "images",
)  # fmt: skip


class _Identifier(msgspec.Struct):
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
    hosts: tuple[str, ...] = LOOPBACK,
    commit: GroupCommit | None = None,
    matcher: Matcher | None = None,
) -> Gate:
    """The ASGI application over a store.

    Args:
        store: What it serves.
        secret: Without it only GET / answers; as a bearer token or as the first part of the path.
        hosts: Names that the Host header may have.
        commit: Has answers wait for the disk; None: the journal sees to that itself, or nobody does.
        matcher: Finds the policy versions of groups that outside environments post.
    """
    hot = Hot(store, commit, matcher)
    endpoints = _Endpoints(store, hot)
    routes = [
        Route("/", endpoints.root, methods=["GET"]),
        Route("/register", endpoints.register, methods=["POST"]),
        Route("/register-env", endpoints.register_env, methods=["POST"]),
        Route("/disconnect-env", endpoints.disconnect_env, methods=["POST"]),
        Route("/wandb_info", endpoints.wandb_info, methods=["GET"]),
        Route("/info", endpoints.info, methods=["GET"]),
        Route("/scored_data", endpoints.elsewhere, methods=["POST"]),
        Route("/scored_data_list", endpoints.elsewhere, methods=["POST"]),
        Route("/batch", endpoints.elsewhere, methods=["GET"]),
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
        Refused: _on_refused,
        InvalidValue: _on_invalid,
        NotPossibleNow: _on_not_possible,
        HTTPException: _on_http,
        ClientDisconnect: _on_disconnect,
    }
    others = Starlette(routes=routes, exception_handlers=handlers)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = hot.routes.get((scope["method"], scope["path"]))
        if endpoint is None:
            await others(scope, receive, send)
        else:
            await hot.run(endpoint, scope, receive, send)

    return Gate(app, secret, hosts=hosts)


class _Endpoints:
    def __init__(self, store: TrajectoryStore, hot: Hot) -> None:
        self._store = store
        self._limits = store.limits
        self._hot = hot

    async def elsewhere(self, request: Request) -> Response:
        """Stands in the list of routes for what `Hot` answers, so that other methods there are refused by name."""
        raise HTTPException(405)

    async def root(self, request: Request) -> Response:
        return _json({"message": "AtroposLib API"})

    async def register(self, request: Request) -> Response:
        self._store.register(decode(await self._small(request), TrainerRegistration))
        await self._hot.durable()
        return _json({"uuid": uuid.uuid4().int})

    async def register_env(self, request: Request) -> Response:
        environment = decode(await self._small(request), EnvironmentRegistration)
        env_id = self._store.register_environment(environment)
        if env_id is None:
            return _json({"status": "wait for trainer to start"})
        await self._hot.durable()
        registry = self._store.registry
        trainer = registry.trainer
        return _json(
            {
                "status": "success",
                "env_id": env_id,
                "wandb_name": registry.real_name(env_id),
                "checkpoint_dir": trainer.checkpoint_dir if trainer else "",
                "starting_step": registry.current_step,
                "checkpoint_interval": trainer.save_checkpoint_interval if trainer else -1,
                "num_steps": trainer.num_steps if trainer else -1,
            }
        )

    async def disconnect_env(self, request: Request) -> Response:
        self._store.disconnect_environment(decode(await self._small(request), _Identifier).env_id)
        await self._hot.durable()
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
        env_id = whole(parameters(request.scope), "env_id", None, 0, 2**31)
        if env_id is None:
            env_id = decode(await self._small(request), _Identifier).env_id
        return _json(self._store.environment_status(env_id))

    async def latest_example(self, request: Request) -> Response:
        body = self._store.latest_body()
        if body is None:
            return _json({name: [] for name in _DEBUG_FIELDS})
        return _json({name: None for name in _DEBUG_FIELDS} | msgspec.json.decode(body))

    async def reset_data(self, request: Request) -> Response:
        self._store.reset()
        await self._hot.durable()
        return PlainTextResponse("Reset successful")

    async def commit(self, request: Request) -> Response:
        newly = self._store.commit(decode(await self._small(request), _Cursor).cursor)
        await self._hot.durable()
        return _json({"status": "success", "committed": newly, "cursor": self._store.queue.committed})

    async def take_up(self, request: Request) -> Response:
        """Where a trainer goes on whose checkpoint was made at this cursor: there, or as near to it as the journal
        allows. A journal that was lost ends before the cursor; one whose newest checkpoint was lost is past it."""
        queue = self._store.queue
        cursor = decode(await self._small(request), _Cursor).cursor
        cursor = min(max(cursor, queue.committed), queue.delivered)
        self._store.commit(cursor)
        await self._hot.durable()
        return _json({"cursor": cursor})

    async def dropped(self, request: Request) -> Response:
        items = decode(await read_body(request.scope, request.receive, self._limits), _Drops).items
        newly = self._store.drop([(item.sequence_number, item.reason) for item in items])
        await self._hot.durable()
        return _json({"status": "success", "dropped": newly})

    async def counts(self, request: Request) -> Response:
        return _json(self._store.queue.counts())

    async def metrics(self, request: Request) -> Response:
        text = exposition(self._store, time.time())
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def room(self, request: Request) -> Response:
        queue = self._store.queue
        query = parameters(request.scope)
        below = whole(query, "below", None, 1, 2**31)
        if below is None:
            raise Refused("bad_parameter", "below is missing: how many groups may wait.", status=400, field="below")
        await wait_for(
            self._store,
            request.receive,
            wait_of(query),
            lambda: queue.waiting < below or None,
            lambda: queue.waiting < below,
        )
        return _json({"room": queue.waiting < below, "waiting": queue.waiting})

    async def wanted(self, request: Request) -> Response:
        """What the trainer waits for, so that whoever samples can wait for the trainer in turn."""
        hot, wait_s = self._hot, wait_of(parameters(request.scope))
        found = await wait_for(self._store, request.receive, wait_s, hot.wanted, lambda: hot.wanted() is not None)
        version, rows = found or (self._store.version, 0)
        return _json({"version": version, "rows": rows})

    async def _small(self, request: Request) -> bytes:
        return await read_body(request.scope, request.receive, Limits(body_bytes=65_536, decoded_bytes=65_536))


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


async def _on_refused(request: Request, error: Refused) -> Response:
    headers = {} if error.retry_after is None else {"Retry-After": str(error.retry_after)}
    return Response(error.body(), error.status, headers, media_type="application/json")


async def _on_invalid(request: Request, error: InvalidValue) -> Response:
    return await _on_refused(request, refusal_of(error))


async def _on_not_possible(request: Request, error: NotPossibleNow) -> Response:
    return await _on_refused(request, refusal_of(error))


async def _on_http(request: Request, error: HTTPException) -> Response:
    message = error.detail
    if error.status_code == 405 and request.url.path.endswith("/reset_data"):
        message = "GET does not destroy here: POST /reset_data drops every group that is not committed."
    elif error.status_code == 404:
        message = "There is no such endpoint."
    kind = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http")
    answer = await _on_refused(request, Refused(kind, message, status=error.status_code))
    answer.headers.update(error.headers or {})
    return answer


async def _on_disconnect(request: Request, error: ClientDisconnect) -> Response:
    return Response(status_code=499)
