"""The server's side of a mirrored run: a detached process that holds the run's lock and writes its copy.

    python -P -m toprope.supervisor.mirror.receiver RUN_FOLDER --lock-fd FD --ready-fd FD --keys-fd FD

It starts when the run is submitted, again whenever a front end finds that it is gone, and ends with the run. It takes
the lock's file for the far keeper's signs of life, so front ends see those and no others.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from aiohttp import web

from toprope import shipped
from toprope.atomic import replacing, write_json
from toprope.errors import TopropeError, shown
from toprope.records.run.checkpoints import problem_of
from toprope.records.run.folder import RunFolder, checkpoints_in, folder_bytes, read_json
from toprope.records.run.full_disk import NO_ROOM
from toprope.records.run.launch import Launch, kept_there, note_kept, want_no_more, wanted
from toprope.records.run.specification import Specification
from toprope.records.run.status import Status
from toprope.sdk.wall.kernel import hide_memory
from toprope.settings.clusters import Mirror
from toprope.settings.owner import Home
from toprope.supervisor.keeper import program
from toprope.supervisor.launchers.claims import claim, claimed_by_front_end, holder
from toprope.supervisor.launchers.cluster import FULL, can_listen, free_port, variables_name
from toprope.supervisor.lock import RunLock
from toprope.supervisor.mirror.wire import CHUNK, WHOLE, Prefix, bearer, is_mirrored, is_step, run_key, tls
from toprope.supervisor.notices import home_of_keeper, tell_end

_LOOK_EVERY_S = 0.2
_LEAVE_S = 30.0
"""A run that has ended and is silent for so long has nothing more to send."""
_BODY_S = 60.0
_MOST_FILES = 10_000
_MOST_BODIES = 4
_STEP = "step-"
_FINISHED = (f"checkpoints/{_STEP}", f"checkpoints/.{_STEP}")
"""Beginnings of the path of a finished checkpoint, and of one that arrives."""
_KEPT_FREE = 0.05
"""The part of the room of a run that only the next files get, which are small and tell how it went."""
_TELLING = ("events.jsonl", "metrics.jsonl", "results.json", "evaluations/")


class Receiver:
    """Answers the far side of one run. See `wire` for the protocol.

    Args:
        folder: The copy of the run folder.
        lock: Its lock.
        key: The run's key.
        mirror: The owner's limits.
    """

    def __init__(self, folder: RunFolder, lock: RunLock, key: bytes, mirror: Mirror) -> None:
        self._folder, self._lock, self._bearer, self._mirror = folder, lock, bearer(key), mirror
        self._prefixes: dict[str, Prefix] = {}
        self._bytes = folder_bytes(folder.path)
        self._files = set(self._list_offered())
        self._beat, self._damaged, self._heard = 0, set[str](), time.monotonic()
        self._turn, self._bodies = asyncio.Lock(), asyncio.Semaphore(_MOST_BODIES)
        (folder.crew / FULL).unlink(missing_ok=True)  # the owner may have raised the limit
        if self._holder():
            self._hold(self._launch().attempt, beats=True)  # its keeper goes on and begins no second time
        self.over = asyncio.Event()
        """Everything has arrived."""

    def app(self) -> web.Application:
        """Return the application. Only who has the run's key gets further than its first line."""
        app = web.Application(middlewares=[self._admit], client_max_size=WHOLE + 1)
        app.router.add_post("/begin", self._begin)
        app.router.add_get("/file", self._give)
        app.router.add_put("/file", self._take)
        app.router.add_post("/pass", self._pass)
        return app

    @web.middleware
    async def _admit(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if not hmac.compare_digest(request.headers.get("Authorization", "").encode(), self._bearer.encode()):
            return web.Response(status=401)
        async with self._bodies:
            try:
                await asyncio.wait_for(request.read(), _BODY_S)  # a connection that broke unseen keeps nobody waiting
            except TimeoutError:
                return web.Response(status=408)
            return await self._answer(request, handler)

    async def _answer(self, request: web.Request, handler: Any) -> web.StreamResponse:
        async with self._turn:  # one after the other: a job has one sender
            if request.path != "/begin" and self._holder() != request.headers.get("X-Keeper"):
                return web.Response(status=409, text="another job has the run, or none has begun")
            try:
                answer: web.StreamResponse = await handler(request)
            except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
                return web.Response(status=400, text=f"{type(error).__name__}: {error}"[:300])
            except TopropeError as error:
                return web.Response(status=400, text=str(error)[:300])
            except FileNotFoundError:
                return web.Response(status=400, text="there is no such file")
            except OSError as error:
                later = {"Retry-After": "60"} if error.errno in NO_ROOM else {}
                return web.Response(status=507, headers=later, text=os.strerror(error.errno or 0))
            finally:
                self._heard = time.monotonic()
            return answer

    # The beginning of a job

    def _launch(self) -> Launch:
        launch = Launch.read(self._folder)
        assert launch is not None
        return launch

    def _holder(self) -> str:
        """Return the job's own word for itself that holds the run; empty before it began or with a damaged launch."""
        try:
            return holder(self._folder, self._launch().place)
        except TopropeError:
            return ""

    async def _begin(self, request: web.Request) -> web.Response:
        body, launch, status = await request.json(), self._launch(), Status.read(self._folder)
        keeper, job = str(request.headers["X-Keeper"]), str(body["job"])
        if not keeper.startswith("keeper "):
            raise ValueError("X-Keeper")
        if job != launch.name or (status.ended_at is not None and not launch.delivery):
            return web.Response(status=409, text=f"{job[:80]} is over")
        if self._holder() != keeper and not claim(self._folder, launch.place, by=keeper):
            return web.Response(status=409, text=f"{job[:80]} was claimed before")
        self._hold(launch.attempt, beats=True)
        answer: dict[str, Any] = {
            "delivery": launch.delivery,
            "attempt": launch.attempt,
            "files": await asyncio.to_thread(lambda: list(self._list_offered())),
            "environments": str(shipped.ENVIRONMENTS),
            "home": str(self._folder.path.parent.parent),
            "inputs": [str(path) for path in self._inputs()],
            "variables": {},
        }
        with suppress(TopropeError):
            answer["variables"] = read_json(self._folder.path / variables_name(launch.attempt))
        return web.json_response(answer)

    def _hold(self, attempt: int, *, beats: bool = False) -> None:
        self._lock.write_holder(pid=os.getpid(), since=time.time(), attempt=attempt, beats=beats)

    def _list_offered(self) -> Iterator[str]:
        """Yield the files that the far side may lack."""
        for path in sorted(self._folder.path.rglob("*")):
            name = path.relative_to(self._folder.path).as_posix()
            hidden = any(part.startswith(".") for part in path.relative_to(self._folder.path).parts)
            if path.is_file() and not hidden and (is_mirrored(name) or name.startswith(f"checkpoints/{_STEP}")):
                yield name

    def _inputs(self) -> list[Path]:
        """Return the files of the owner that the run names and that do not come with Toprope."""
        spec = Specification.read(self._folder)
        names = [source.file for source in (spec.environment, *spec.mixture) if source.file]
        names += [reward.file for source in (spec.environment, *spec.mixture) for reward in source.rewards]
        names += [source.file for source in (spec.trainer, spec.dataset) if source is not None]
        paths = [Path(name) for name in dict.fromkeys(names)]
        return [path for path in paths if path.is_file() and not path.is_relative_to(shipped.ENVIRONMENTS)]

    # Files

    async def _give(self, request: web.Request) -> web.Response:
        name, at = request.query["path"], int(request.query["at"])
        if name.startswith("input/"):
            path = self._inputs()[int(name.removeprefix("input/"))]
        elif name in ("spec.json", "launch.json") or is_mirrored(name.replace(*_FINISHED)):
            path = self._folder.path / name
        else:
            raise ValueError(f"{name[:80]} is not offered")
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(at)
            return web.Response(body=file.read(CHUNK), headers={"X-Size": str(size)})

    async def _take(self, request: web.Request) -> web.Response:
        name, data = request.query["path"], await request.read()
        if not is_mirrored(name):
            raise ValueError(f"{name[:80]} is not a file of the cluster's side")
        if name.startswith("checkpoints/") and name.split("/")[1].removeprefix(".") not in self._pick_wanted(last=True):
            raise ValueError(f"nobody wants {name[:80]}")
        if name == "status.json":
            if not request.query.get("whole"):
                raise ValueError("the status is replaced at once")
            self._check_status(data)
        elif self._bytes + len(data) > self._most_bytes(name):
            (self._folder.crew / FULL).touch(mode=0o600)
            return web.Response(status=507, text=f"mirror.most_mb allows {self._mirror.most_mb} MB")
        if len(self._files) >= _MOST_FILES and name not in self._files:
            return web.Response(status=507, text=f"a run has at most {_MOST_FILES} files")
        self._files.add(name)
        path = self._folder.path / name
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if request.query.get("whole"):
            self._bytes += len(data) - (path.stat().st_size if path.exists() else 0)
            with replacing(path) as temporary:
                temporary.write_bytes(data)
            self._prefixes.pop(name, None)
            return web.Response()
        return await self._extend(name, path, request.query, data)

    def _most_bytes(self, name: str) -> float:
        return self._mirror.most_mb * 1_000_000 * (1 if name.startswith(_TELLING) else 1 - _KEPT_FREE)

    async def _extend(self, name: str, path: Path, query: Mapping[str, str], data: bytes) -> web.Response:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with open(descriptor, "ab") as file:
            size = os.fstat(descriptor).st_size
            if query.get("anew") == "1":
                file.truncate(0)
                self._bytes, self._prefixes[name] = self._bytes - size, Prefix()
            elif name not in self._prefixes or self._prefixes[name].size != size:
                self._prefixes[name] = await asyncio.to_thread(Prefix.of, path)
            prefix = self._prefixes[name]
            if (str(prefix.size), prefix.head) != (query["at"], query["head"]):
                return web.json_response({"size": prefix.size, "head": prefix.head}, status=412)
            file.write(data)
            file.flush()
            prefix.feed(data)
            self._bytes += len(data)
        return web.Response()

    def _check_status(self, data: bytes) -> None:
        """Refuse a status that is not this attempt's, or names a checkpoint elsewhere."""
        status, launch = Status.model_validate_json(data), self._launch()
        place = str((status.checkpoint or {}).get("path", f"checkpoints/{_STEP}000000"))
        former = Status.read(self._folder)
        if (status.run_id, status.kind, status.attempt) != (former.run_id, former.kind, launch.attempt):
            raise ValueError("the status is another run's or attempt's")
        if not place.startswith("checkpoints/") or not is_step(place.removeprefix("checkpoints/")):
            raise ValueError("the status names no checkpoint of the run")

    # The end of a look

    async def _pass(self, request: web.Request) -> web.Response:
        body = await request.json()
        folder, names = self._folder, set(map(str, body["names"]))
        (folder.path / variables_name(self._launch().attempt)).unlink(missing_ok=True)  # they have arrived
        for name in self._files - names - {"status.json"}:
            if not name.startswith(("checkpoints/", "standard/")):  # scores come from runs on both sides
                with suppress(FileNotFoundError):
                    self._bytes -= (folder.path / name).stat().st_size
                    (folder.path / name).unlink()
                self._prefixes.pop(name, None)
                self._files.discard(name)
        for step in map(str, body["complete"]):
            await self._complete(step)
        for name in map(str, body["taken"]):
            if "/" not in name and name.endswith(".json"):
                (folder.orders / name).unlink(missing_ok=True)
        sizes = {str(step): int(size) for step, size in body["kept"].items() if is_step(str(step))}
        note_kept(folder, sizes)
        if (beat := int(body["beat"])) != self._beat:
            self._beat = beat
            os.utime(folder.lock)
        wishes = self._pick_wanted(last=bool(body["last"]))
        over = bool(body["last"]) and not wishes and Status.read(folder).ended_at is not None
        orders = {path.name: path.read_text() for path in sorted(folder.orders.glob("[!.]*.json"))}
        if over:
            for step in wanted(folder):  # the cluster keeps it no more
                want_no_more(folder, step)
            self.over.set()
        return web.json_response({"orders": orders, "wanted": sorted(wishes), "over": over})

    def _pick_wanted(self, *, last: bool) -> set[str]:
        """Return the checkpoints that the cluster is asked for; at the end of a run the newest, if it is no larger than
        the owner allows."""
        sizes = kept_there(self._folder)
        steps = {step for step in wanted(self._folder) if step in sizes}
        newest = max(sizes, key=lambda step: int(step.removeprefix(_STEP)), default="")
        if last and newest and sizes[newest] <= self._mirror.checkpoint_mb * 1_000_000:
            steps.add(newest)
        present = {path.name for path in checkpoints_in(self._folder.checkpoints)}
        return steps - self._damaged - present

    async def _complete(self, step: str) -> None:
        """Put a checkpoint that has arrived into its place, if it is sound."""
        hidden, place = self._folder.checkpoints / f".{step}", self._folder.checkpoints / step
        if not is_step(step) or not hidden.is_dir() or place.exists():
            return
        try:
            problem = await asyncio.to_thread(problem_of, hidden)
        except TopropeError as error:  # a newer version wrote it
            problem = error.message
        if problem is None:
            hidden.rename(place)
        else:
            self._damaged.add(step)
            print(f"The checkpoint {step} did not arrive whole: {shown(problem)}", file=sys.stderr, flush=True)
        want_no_more(self._folder, step)

    async def wait(self) -> None:
        """Wait until the run is over here, or a front end took it back, or somebody deleted its folder."""
        launch = self._launch()
        was_over = Status.read(self._folder).ended_at is not None
        while not self.over.is_set() and self._folder.launch.exists():
            silent = time.monotonic() - self._heard > _LEAVE_S and not self._turn.locked()
            if claimed_by_front_end(self._folder, launch.attempt) or (silent and self._is_done()):
                return
            with suppress(TimeoutError):
                await asyncio.wait_for(self.over.wait(), _LOOK_EVERY_S)
        if self.over.is_set():
            await asyncio.sleep(_LOOK_EVERY_S)  # the last answer is on its way
            self._folder.tidy()
            self._hold(launch.attempt)
            if not was_over and (home := home_of_keeper(os.environ)) is not None:
                tell_end(self._folder, home)

    def _is_done(self) -> bool:
        return Status.read(self._folder).ended_at is not None and not wanted(self._folder)


async def listen(app: web.Application, mirror: Mirror, port: int, key: bytes, *, trusted: bool) -> web.AppRunner:
    """Serve an app on the owner's address, or on all addresses if this machine does not have it."""
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    context = None if trusted else tls(key)[0]
    host = mirror.host if can_listen(mirror.host, port) else "0.0.0.0"
    await web.TCPSite(runner, host, port, ssl_context=context, reuse_address=True).start()
    return runner


@contextmanager
def taking_facts(mirror: Mirror, key: bytes, target: Path, *, trusted: bool) -> Iterator[str]:
    """Yield the HOST:PORT at which a node's facts are taken, by the way of mirrored runs, and written to a file.

    Raises:
        OSError: No port is free.
    """

    async def take(request: web.Request) -> web.Response:
        if not hmac.compare_digest(request.headers.get("Authorization", "").encode(), bearer(key).encode()):
            return web.Response(status=401)
        write_json(target, await request.json())
        return web.Response()

    app, loop = web.Application(), asyncio.new_event_loop()
    app.router.add_post("/facts", take)
    thread = threading.Thread(target=loop.run_forever, name="facts", daemon=True)
    thread.start()
    try:
        serving = listen(app, mirror, free_port(mirror), key, trusted=trusted)
        runner = asyncio.run_coroutine_threadsafe(serving, loop).result()
        yield f"{mirror.host}:{runner.addresses[0][1]}"
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def _keep(path: Path, lock: RunLock, *_: object) -> int:
    folder, home = RunFolder(path), home_of_keeper(os.environ) or Home.locate()
    launch = Launch.read(folder)
    assert launch is not None
    mirror = home.clusters().named[launch.cluster].mirror
    if mirror is None:
        raise ValueError(f"{launch.cluster} has no mirror any more")
    key = run_key(mirror.key(), folder.run_id, launch.attempt)
    port = int(launch.mirror.rpartition(":")[2])

    async def run() -> None:
        receiver = Receiver(folder, lock, key, mirror)
        await listen(receiver.app(), mirror, port, key, trusted=launch.network == "trusted")
        hide_memory()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM, signal.SIGINT))  # nothing is lost by its end
        await receiver.wait()

    try:
        asyncio.run(run())
    finally:
        lock.release()
    return 0


if __name__ == "__main__":
    sys.exit(program.main(keep=_keep, log="mirror"))
