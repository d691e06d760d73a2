"""Copies published weights from the trainer's node to that of inference, over HTTP between their gates.

    GET /weights?after=V    the newest version that is not V, waiting up to 20 s for one (then 204): its slot,
                            preceded by its layout, whose bytes X-Layout counts; X-Version is its number

Both ends are processes beside the members. So the trainer publishes as on one machine, and inference finds a file in
the same form on its own node.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import aiohttp
from aiohttp import web

from toprope.records.weight_file import newest_version, read_version, write_version

_WAIT_S = 20.0
_LOOK_EVERY_S = 0.01
_AGAIN_S = 0.25
_READ_S = 300.0


class WeightSource:
    """Serves the weight file in a folder on loopback, to requests that carry the run's secret."""

    def __init__(self, folder: Path, secret: str) -> None:
        self._folder, self._bearer = folder, f"Bearer {secret}"
        app = web.Application()
        app.router.add_get("/weights", self._answer)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)

    async def start(self) -> str:
        """Begin to serve; return the URL."""
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def close(self) -> None:
        """Stop serving; requests that wait are broken off."""
        await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != self._bearer:
            return web.Response(status=401)
        after = request.query.get("after", "")
        limit = asyncio.get_running_loop().time() + _WAIT_S
        while (newest := newest_version(self._folder)) is None or str(newest) == after:
            if asyncio.get_running_loop().time() >= limit:
                return web.Response(status=204)
            await asyncio.sleep(_LOOK_EVERY_S)
        version, layout, slot = await asyncio.to_thread(read_version, self._folder)
        headers = {"X-Version": str(version), "X-Layout": str(len(layout))}
        return web.Response(body=layout + slot, headers=headers)


class WeightMirror:
    """Keeps a copy of the trainer's newest weights in a folder of this node."""

    def __init__(self, folder: Path, secret: str) -> None:
        self._folder, self._headers = folder, {"Authorization": f"Bearer {secret}"}
        self._url = ""
        self._task: asyncio.Task[None] | None = None

    def follow(self, url: str) -> None:
        """Copy from this URL from now on. A restarted trainer has another one."""
        if url != self._url:
            self.close()
            self._url = url
            self._task = asyncio.get_running_loop().create_task(self._follow(url))

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _follow(self, url: str) -> None:
        version, complained = "", False
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=5.0, sock_read=_READ_S)
        async with aiohttp.ClientSession(headers=self._headers, timeout=timeout) as session:
            while True:
                try:
                    async with session.get(f"{url}/weights", params={"after": version} if version else {}) as answer:
                        if answer.status == 204:
                            continue
                        answer.raise_for_status()
                        version, layout = answer.headers["X-Version"], int(answer.headers["X-Layout"])
                        body = memoryview(await answer.read())
                    complained = False
                    await asyncio.to_thread(
                        write_version, self._folder, int(version), bytes(body[:layout]), bytes(body[layout:])
                    )
                except (aiohttp.ClientError, TimeoutError, OSError, KeyError, ValueError) as error:
                    version = ""
                    if not complained:
                        print(f"the newest weights could not be copied: {error!r}", file=sys.stderr, flush=True)
                    complained = True
                    await asyncio.sleep(_AGAIN_S)
