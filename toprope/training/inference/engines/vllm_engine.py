"""The engine `vllm`: requests go on to a vLLM server of our own, and published weights into it.

A thread with an event loop starts the server, relays requests to its tokens-in-tokens-out endpoint, watches for
published weights and adopts them: all weights in a pause that keeps what is being sampled, adapters under a name of
their own for each version. vLLM stamps the version of every token itself.

After every update the server's log-probabilities of a few tokens must be the trainer's. Answers wait for that
comparison. If it fails, or the update or the server does, the server is started again from the newest weights and all
unanswered requests are repeated; if that fails too, the engine gives up.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from toprope.errors import ComponentFailed, TopropeError
from toprope.training.inference.decode_batch import cut_text
from toprope.training.inference.engine import Cancelled, Done, Sample, SamplingRequest
from toprope.training.inference.engines.vllm_messages import Checked, generate
from toprope.training.inference.engines.vllm_process import MODEL, MOST_ROWS, VllmProcess, VllmSettings
from toprope.training.policy.publishing import Published, newest_published, published_stamp

_LOOK_S = 0.02
_START_S = 1800.0
_RESTARTS = 3
"""Restarts in a row, without an update or a quiet time between them, after which the engine gives up."""
_QUIET_S = 600.0
_ATTEMPTS = 3
"""Servers that one request may outlive."""
_TOLERANCE = {"float32": 2e-3, "bfloat16": 0.5, "float16": 0.1}
"""Largest difference from the trainer's log-probabilities that number formats explain. Random tokens have values around
-12, of which bfloat16 keeps two or three digits."""


class _UpdateFailed(Exception):
    """The server did not take weights; it must not sample any more."""


class VllmEngine:
    """See `toprope.training.inference.engine.Engine` for the contract.

    Args:
        settings: Options of the server.
        tokenizer: Decodes answers.
        end_ids: Token ids that end an answer.
        crew: Folder in which the trainer publishes weights; None for a policy that is not trained.
        gave_up: Called with the reason when no server can be kept alive.
        start_process: Starts a server of the model in a folder.
    """

    def __init__(
        self,
        settings: VllmSettings,
        tokenizer: Any,
        end_ids: frozenset[int],
        *,
        crew: Path | None = None,
        gave_up: Callable[[TopropeError], object] = lambda error: None,
        start_process: Callable[[VllmSettings, Path], VllmProcess] = VllmProcess.start,
    ) -> None:
        self._options, self._tokenizer, self._crew = settings, tokenizer, crew
        self._gave_up, self._start_process = gave_up, start_process
        self.max_context, self.end_ids = settings.max_context, end_ids
        self.version = self.batches = self.rows = self.tokens = self.restarts = 0
        self.busy_s = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._inbox: queue.SimpleQueue[tuple[SamplingRequest, Done]] = queue.SimpleQueue()
        self._ready = threading.Event()
        self._stopping = asyncio.Event()
        self._open = asyncio.Event()
        """Set while the server may be asked."""
        self._sound = asyncio.Event()
        """Set while the weights of the server are known to be the trainer's."""
        self._life = 0
        self._sleeping = False
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._http: aiohttp.ClientSession | None = None
        self._process: VllmProcess | None = None
        self._adapter = ""
        self._adapters: dict[str, int] = {}
        """Loaded adapters, and how many requests use each."""
        self._stamp = 0
        """Of the published weights that the server has."""
        self._problem: TopropeError | None = None
        self._beat_at, self._last_beat = 0, -1
        self._asking, self._since = 0, 0.0
        """Requests that the server is answering."""
        self._updated = False
        """True if this server has taken an update."""

    def start(self) -> None:
        """Start the server, which takes seconds to minutes; requests wait for it."""
        self._loop = asyncio.new_event_loop()
        self._thread.start()

    def wait_ready(self, timeout_s: float) -> bool:
        """Wait at most so long for the server.

        Raises:
            TopropeError: It cannot be started.
        """
        ready = self._ready.wait(timeout_s)
        if self._problem is not None:
            raise self._problem
        return ready

    def stop(self, timeout_s: float = 60.0) -> None:
        """End the server; waiting requests are answered with an error."""
        if self._loop is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join(max(timeout_s, 15.0))

    def is_progressing(self) -> bool:
        """True if the loop turns, which an update without an answer stops. Silence after a request is not noticed."""
        advanced, self._last_beat = self._beat_at != self._last_beat, self._beat_at
        return self._thread.is_alive() and advanced

    def submit(self, request: SamplingRequest, done: Done) -> None:
        """Queue a request; `done` is called in the engine's thread."""
        assert self._loop is not None, "the engine was started"
        self._inbox.put((request, done))
        try:
            self._loop.call_soon_threadsafe(self._take)
        except RuntimeError:  # the loop is closed
            self._refuse()

    def cancel(self, request: SamplingRequest) -> None:
        """Have the server drop the request."""
        request.given_up = True
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._drop, request)

    def sleep(self) -> None:
        """Free the server's memory once running requests are answered; later ones wait for `wake`."""
        self._call(self._sleep())

    def wake(self) -> None:
        """Take the memory again, and go on."""
        self._call(self._wake())

    def _call(self, work: Any) -> None:
        assert self._loop is not None, "the engine was started"
        asyncio.run_coroutine_threadsafe(work, self._loop).result(_START_S)

    # All below runs in the engine's thread.

    def _run(self) -> None:
        assert self._loop is not None, "the engine was started"
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._live())
        finally:
            self._loop.close()
            self._refuse()

    async def _live(self) -> None:
        keeping = asyncio.create_task(self._keep())
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait({keeping, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if keeping.done():
                error = keeping.exception()
                self._problem = error if isinstance(error, TopropeError) else ComponentFailed(f"vLLM failed: {error}")
                self._ready.set()
                self._gave_up(self._problem)
        finally:
            for task in (keeping, stopping, *self._tasks.values()):
                task.cancel()
            await asyncio.gather(keeping, stopping, *self._tasks.values(), return_exceptions=True)
            await self._end_server()

    async def _keep(self) -> None:
        """Keep a server with the newest weights alive.

        Raises:
            TopropeError: That is not possible.
        """
        failures = 0
        while True:
            began = time.monotonic()
            try:
                await self._start_server()
                self._sleeping = False
                self._ready.set()
                self._open.set()
                await self._follow()
            except (_UpdateFailed, aiohttp.ClientError, OSError, ComponentFailed) as error:
                words = str(error) or type(error).__name__
                failures = 1 if self._updated or time.monotonic() - began > _QUIET_S else failures + 1
                self._updated = False
                if self._process is not None and self._process.ended:
                    words = f"{words} It printed: {self._process.last_words()}"
                print(f"vLLM is started again: {words}", flush=True)
                if failures > _RESTARTS or not self._ready.is_set():
                    raise ComponentFailed(
                        f"vLLM could not be kept running. {words}",
                        hint="Its output is in logs/inference-vllm.log in the run's folder. inference.engine embedded "
                        "and transformers do without it.",
                    ) from None
            self._open.clear()
            self._sound.clear()
            self._life += 1
            self.restarts += 1
            await self._end_server()

    async def _start_server(self) -> None:
        found = None if self._crew is None else newest_published(self._crew)
        self._stamp = 0 if self._crew is None else published_stamp(self._crew)
        whole = found is not None and not found.adapters and found.handles is None
        model = found.folder if found is not None and whole else self._options.policy
        self._process = await asyncio.to_thread(self._start_process, self._options, model)
        self._http = self._process.connect()
        self._adapter, self._adapters = "", {}
        deadline = time.monotonic() + _START_S
        while not await self._is_up():
            self._beat_at += 1
            if self._process.ended:
                raise ComponentFailed("vLLM ended while it started.")
            if time.monotonic() > deadline:
                raise ComponentFailed(f"vLLM was not ready within {_START_S:.0f} s.")
            await asyncio.sleep(0.2)
        await self._post("/collective_rpc", {"method": "toprope_loaded"})
        if self._options.in_memory:
            await self._post("/init_weight_transfer_engine", {"init_info": {"packed": False}})
        if found is None:
            await self._post("/update_weight_version", {"new_version": "0"})
            self.version = 0
            self._sound.set()
        elif not whole:
            await self._adopt(found)
        else:
            await self._post("/update_weight_version", {"new_version": str(found.policy)})
            await self._compare(found)

    async def _is_up(self) -> bool:
        assert self._http is not None
        try:
            async with self._http.get("/health") as response:
                return response.status == 200
        except (aiohttp.ClientError, OSError):
            return False

    async def _follow(self) -> None:
        """Adopt weights as they are published, until the server is gone."""
        assert self._process is not None
        while not self._process.ended:
            self._beat_at += 1
            if self._crew is not None and not self._sleeping and (stamp := published_stamp(self._crew)) != self._stamp:
                if (found := newest_published(self._crew)) is not None:
                    await self._adopt(found)
                    self._updated = True
                self._stamp = stamp
            await asyncio.sleep(_LOOK_S)
        raise ComponentFailed(f"vLLM ended with status {self._process.process.returncode}.")

    async def _adopt(self, found: Published) -> None:
        """Bring published weights into the server.

        Raises:
            _UpdateFailed: It refused them, or they are not what the trainer has.
        """
        if found.adapters:
            name = f"{MODEL}-{found.folder.name}"
            await self._post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(found.folder)})
            self._adapters[name] = 0
            await self._compare(found, name)
            self._adapter = name
            for old in [known for known, users in self._adapters.items() if not users and known != name]:
                await self._unload(old)
            return
        self._sound.clear()
        await self._post(f"/pause?mode={'wait' if self._options.waits else 'keep'}")
        if (handles := found.handles) is not None:
            await self._post("/start_weight_update")
            await self._post("/update_weights", {"update_info": handles})
            await self._post("/finish_weight_update")
        else:
            path = {"weights_path": str(found.folder)}
            await self._post("/collective_rpc", {"method": "reload_weights", "kwargs": path})
        await self._post("/reset_prefix_cache")
        await self._post("/update_weight_version", {"new_version": str(found.policy)})
        await self._post("/resume")
        await self._compare(found)

    async def _compare(self, found: Published, model: str = MODEL) -> None:
        check = found.check
        sampling = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
        body = await self._post(
            "/inference/v1/generate", {"model": model, "token_ids": check.tokens, "sampling_params": sampling}
        )
        given = msgspec.json.decode(body, type=Checked).prompt_logprobs[1:]
        theirs = [
            entry[str(token)].logprob if entry and str(token) in entry else float("nan")
            for token, entry in zip(check.tokens[1:], given, strict=True)
        ]
        error, allowed = check.largest_error(theirs), _TOLERANCE[self._options.dtype]
        if not error <= allowed:
            raise _UpdateFailed(
                f"After the update to version {found.policy} vLLM's log-probabilities differ from the trainer's by "
                f"{error:.3g}, more than {allowed}."
            )
        self.version = found.policy
        self._sound.set()

    async def _unload(self, name: str) -> None:
        if self._adapters.pop(name, None) is not None:
            await self._post("/v1/unload_lora_adapter", {"lora_name": name})

    async def _post(self, path: str, body: Any = None) -> bytes:
        assert self._http is not None
        async with self._http.post(path, json={} if body is None else body) as response:
            data = await response.read()
            if response.status != 200:
                said = data.decode(errors="replace")[:300]
                raise _UpdateFailed(f"vLLM refused {path} with {response.status}: {said}")
        return data

    async def _end_server(self) -> None:
        if self._http is not None:
            await self._http.close()
        if self._process is not None:
            await asyncio.to_thread(self._process.end)
        self._http = self._process = None

    async def _sleep(self) -> None:
        self._sleeping = True
        self._open.clear()
        while self._asking and self._sleeping:
            await asyncio.sleep(_LOOK_S)
        if self._sleeping:  # a caller that no longer waits may have woken the engine
            await self._post("/sleep?level=1&mode=wait")

    async def _wake(self) -> None:
        if not self._sleeping:
            return
        await self._post("/wake_up")
        self._sleeping = False
        self._open.set()

    def _take(self) -> None:
        if self._problem is not None or self._stopping.is_set():
            return  # what remains is refused at the end
        while not self._inbox.empty():
            request, done = self._inbox.get()
            self._tasks[id(request)] = asyncio.ensure_future(self._answer(request, done))

    def _refuse(self) -> None:
        while True:
            try:
                _, done = self._inbox.get_nowait()
            except queue.Empty:
                return
            done(RuntimeError("the engine has stopped"))

    def _drop(self, request: SamplingRequest) -> None:
        if (task := self._tasks.get(id(request))) is not None:
            task.cancel()

    async def _answer(self, request: SamplingRequest, done: Done) -> None:
        try:
            answer: list[Sample] | Exception = await self._samples(request)
        except asyncio.CancelledError:
            answer = Cancelled() if request.given_up else RuntimeError("the engine has stopped")
        except Exception as error:  # the error is the answer
            answer = error
        self._tasks.pop(id(request), None)
        done(answer)

    async def _samples(self, request: SamplingRequest) -> list[Sample]:
        for _ in range(_ATTEMPTS):
            await self._open.wait()
            while self._options.exact and self._crew is not None and published_stamp(self._crew) != self._stamp:
                await asyncio.sleep(_LOOK_S)
                await self._open.wait()
            life, adapter = self._life, self._adapter
            self._count(1)
            if adapter:
                self._adapters[adapter] += 1
            try:
                # The most likely answer is the same every time, and vLLM refuses to give it more than once.
                parts = range(0, request.n if request.temperature else 1, MOST_ROWS)
                assert self._http is not None
                found = await asyncio.gather(
                    *(
                        generate(
                            self._http, request, first=first, model=adapter or MODEL,
                            end_ids=self.end_ids, context=self.max_context,
                        )
                        for first in parts
                    )
                )  # fmt: skip
            except (aiohttp.ClientError, OSError):
                await self._closed(life)
                continue
            finally:
                self._count(-1)
                if adapter in self._adapters:
                    self._adapters[adapter] -= 1
            if not await self._is_sound(life):
                continue
            choices = [choice for part in found for choice in part] * (1 if request.temperature else request.n)
            self.batches, self.rows = self.batches + 1, self.rows + request.n
            self.tokens += sum(len(choice.token_ids) for choice in choices)
            texts = self._tokenizer.batch_decode([choice.token_ids for choice in choices], skip_special_tokens=True)
            adapted = int(adapter.removeprefix(f"{MODEL}-v").partition("-")[0]) if adapter else None
            return [
                Sample(
                    token_ids=choice.token_ids,
                    logprobs=[entry.logprob for entry in choice.logprobs.content],
                    versions=choice.versions(adapted),
                    text=cut_text(text, request.stop),
                    finish_reason="length" if choice.finish_reason == "length" else "stop",
                )
                for choice, text in zip(choices, texts, strict=True)
            ]
        raise RuntimeError(f"vLLM ended {_ATTEMPTS} times while it answered this request")

    def _count(self, change: int) -> None:
        """Count requests in progress, and the time in which there are any."""
        now = time.monotonic()
        if self._asking:
            self.busy_s += now - self._since
        self._asking, self._since = self._asking + change, now

    async def _closed(self, life: int) -> None:
        """Wait until the server of that life has been given up."""
        while self._life == life:
            await asyncio.sleep(_LOOK_S)

    async def _is_sound(self, life: int) -> bool:
        """True once the weights behind an answer are known to be the trainer's; False if the server was given up."""
        while self._life == life:
            if self._sound.is_set():
                return True
            await asyncio.sleep(_LOOK_S)
        return False
