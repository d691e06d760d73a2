"""A vLLM server of our own: its command line and variables, its start and end.

It listens on a Unix socket in a private folder, with a key of its own that only its environment holds. Its development
endpoints (pause, weights, sleep) are reachable there only.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from toprope.errors import ComponentFailed
from toprope.sdk.worker.client import worker_environment
from toprope.settings.schema import Config
from toprope.text_format import clip, hide, hide_keys, printed_line

MOST_ROWS = 256
"""Answers that a server samples at once."""
MODEL = "policy"
"""Name of the served model."""
_END_S, _TRACKER_S = 10.0, 5.0
_PREFIX, _LONGEST_PLACE = "toprope-vllm-", 40
_CHUNK, _SAID = 64_000, 1200
_LOGGED = re.compile(r"(\([\w.-]+ pid=\d+\) *)?([A-Z]+ [\d-]+ [\d:]+ \[[\w.]+:\d+\] ?)?(\[rank\d+\]: ?)?")
_RAISED = re.compile(
    r"([A-Za-z_]\w*\.)*[A-Z]\w*(Error|Exception|Exit)(: |$)|([A-Za-z_]\w*\.)+[A-Z]\w*: |Fatal Python error: "
)
_DETAIL = re.compile(r"\s+(?!File )\S")
"""Further lines of an error's message; the frames of a traceback come before it."""
_WORKER = Path(__file__).parent / "worker"


@dataclass(frozen=True)
class VllmSettings:
    """Options of a server."""

    python: str
    """Interpreter that has vLLM."""
    policy: Path
    """Folder of the starting policy, with its tokenizer."""
    dtype: str
    device: str
    """`cpu` or `cuda`"""
    max_context: int
    memory_share: float = 0.4
    lora_rank: int = 0
    """Rank of adapters; 0 without."""
    sleeps: bool = False
    gpus: int = 1
    """GPUs between which the weights are split."""
    waits: bool = False
    """True if an update waits until all answers have ended."""
    in_memory: bool = False
    """True if weights arrive within the GPU's memory."""
    exact: bool = False
    """True if a request waits until the newest published weights are adopted."""
    seed: int = 0
    threads: int = 1
    silence_s: float = 120.0
    """Seconds without an answer after which it counts as hung."""

    @classmethod
    def of(cls, config: Config, python: str, policy: Path, device: str) -> VllmSettings:
        """The settings for a configuration on a device."""
        auto = "float32" if device == "cpu" else "bfloat16"
        return cls(
            python=python,
            policy=policy,
            dtype=auto if config.policy.dtype == "auto" else config.policy.dtype,
            device=device,
            max_context=config.policy.max_context,
            memory_share=config.inference.memory_share,
            lora_rank=config.policy.lora_rank if config.policy.lora else 0,
            sleeps=config.inference.sleep,
            gpus=max(1, config.launcher.inference_gpus),
            waits=config.rollout.in_flight == "keep",
            in_memory=config.inference.transfer == "gpu" and not config.policy.lora,
            exact=config.samples_in_step,
            seed=config.algorithm.seed,
            threads=config.launcher.threads,
            silence_s=config.launcher.hang_timeout_s,
        )

    def command(self, model: Path, socket: Path) -> list[str]:
        """The command line of a server of the model in a folder."""
        line = [self.python, "-P", "-m", "vllm.entrypoints.cli.main", "serve", str(model)]
        line += ["--tokenizer", str(self.policy), "--served-model-name", MODEL, "--uds", str(socket)]
        line += ["--dtype", self.dtype, "--max-model-len", str(self.max_context), "--seed", str(self.seed)]
        line += ["--max-num-seqs", str(MOST_ROWS), "--generation-config", "vllm", "--enable-scale-out"]
        line += ["--logprobs-mode", "processed_logprobs", "--worker-extension-cls", "toprope_worker.Extension"]
        line += ["--disable-uvicorn-access-log"]
        if self.device == "cpu":
            line += ["--enforce-eager"]
            if "kv_lora_rank" in _configuration(self.policy):
                # vLLM's kernel for CPUs turns the wrong rows of the three-dimensional queries of latent attention.
                line += ["--compilation-config", json.dumps({"custom_ops": ["-rotary_embedding"]})]
        else:
            line += ["--gpu-memory-utilization", str(self.memory_share), "--tensor-parallel-size", str(self.gpus)]
        if self.lora_rank:
            rank = next((size for size in (8, 16, 32, 64, 128, 256, 320, 512) if size >= self.lora_rank), 512)
            line += ["--enable-lora", "--max-lora-rank", str(rank), "--max-loras", "2", "--max-cpu-loras", "4"]
        if self.in_memory:
            line += ["--weight-transfer-config", json.dumps({"backend": "ipc"})]
        return [*line, "--enable-sleep-mode"] if self.sleeps else line

    def variables(self, key: str, folder: Path) -> dict[str, str]:
        """The environment of a server: ours without secrets, its key, and what its start depends on."""
        return worker_environment(
            {
                "VLLM_API_KEY": key,
                "VLLM_SERVER_DEV_MODE": "1",
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
                "VLLM_NO_USAGE_STATS": "1",
                "VLLM_LOGGING_LEVEL": "WARNING",
                "VLLM_HOST_IP": "127.0.0.1",
                "VLLM_RPC_BASE_PATH": str(folder),
                "TMPDIR": str(folder),
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "OMP_NUM_THREADS": str(self.threads),
                "HF_HUB_OFFLINE": "1",
                "TOKENIZERS_PARALLELISM": "false",
                # A C++ compiler would take a minute at the first request, for a sampler that gains nothing from it.
                **({"TORCHDYNAMO_DISABLE": "1"} if self.device == "cpu" else {}),
                # Handles of GPU memory are pickled; only the trainer's folder and the owner of the key can send any.
                **({"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"} if self.in_memory else {}),
                "PYTHONPATH": str(_WORKER),
            }
        )


@dataclass
class VllmProcess:
    """One running server. Create it with `VllmProcess.start`."""

    process: subprocess.Popen[bytes]
    folder: Path
    lock: int
    key: str = field(repr=False)
    _output_end: bytes = b""
    """The end of its output."""

    def __post_init__(self) -> None:
        self._relay = threading.Thread(target=self._relay_output, name="vLLM's output", daemon=True)
        self._relay.start()

    @classmethod
    def start(cls, settings: VllmSettings, model: Path) -> VllmProcess:
        """Start a server of the model in a folder; it answers after some time.

        Raises:
            ComponentFailed: The interpreter cannot be started.
        """
        folder, lock = _short_folder()
        key = secrets.token_hex(24)
        try:
            process = subprocess.Popen(
                settings.command(model, folder / "socket"),
                cwd=folder,
                env=settings.variables(key, folder),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                process_group=0,
            )
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)
            raise ComponentFailed(
                f"vLLM's interpreter {settings.python} cannot be started: {error.strerror or error}.",
                hint="The owner installs it again: toprope engine add vllm.",
            ) from None
        return cls(process, folder, lock, key)

    def _relay_output(self) -> None:
        """Print its output as this process's own, whose log has limits, and keep the end."""
        output: Any = self.process.stdout
        while part := output.read1(_CHUNK):
            self._output_end = (self._output_end + part)[-_CHUNK:]
            with suppress(OSError, ValueError):  # nobody reads on; an unread pipe would stop vLLM
                print(part.decode(errors="replace"), end="", file=sys.stderr, flush=True)
        output.close()

    def connect(self) -> aiohttp.ClientSession:
        """A session of HTTP with the server; create and close it within one event loop."""
        return aiohttp.ClientSession(
            "http://vllm",
            # A POST on a kept connection that the server closes just then would wait for ever.
            connector=aiohttp.UnixConnector(str(self.folder / "socket"), limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=30),
            headers={"Authorization": f"Bearer {self.key}"},
        )

    @property
    def ended(self) -> bool:
        """True if the process has ended."""
        return self.process.poll() is not None

    def last_words(self) -> str:
        """The last errors that its processes raised, without those that only name another; or its last lines.

        Its libraries and the model's files choose the text: it has no control characters and no keys.
        """
        self._relay.join(1.0 if self.ended else 0.0)
        printed = map(printed_line, self._output_end.decode(errors="replace").splitlines())
        lines = [hide_keys(hide(_LOGGED.sub("", line, count=1), [self.key])) for line in printed]
        raised = dict.fromkeys(
            " ".join([line, *(more.strip() for more in takewhile(_DETAIL.match, lines[place + 1 : place + 4]))])
            for place, line in enumerate(lines)
            if _RAISED.match(line)
        )
        causes = [error for error in raised if "root cause" not in error]
        shown = causes[-2:] or [line for line in lines if line[:1].strip()][-6:]
        return "\n".join(clip(line, _SAID // len(shown)) for line in shown)

    def end(self) -> None:
        """End the server with all its processes, also those of one that was killed, and delete its folder."""
        if not self.ended:
            self.process.terminate()
            try:
                self.process.wait(_END_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        # Its trackers ignore SIGTERM, and delete shared memory once the processes that used it have ended.
        for trackers in (False, True):
            for process in (killed := self._remaining(trackers)):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs([*killed, *self._remaining(trackers=True)], timeout=_TRACKER_S)
        self._relay.join(_END_S)
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self.lock)

    def _remaining(self, trackers: bool) -> list[psutil.Process]:
        """Return the rest of the server's process group: its trackers of shared memory, or all others."""
        found = []
        for pid in psutil.pids():
            with suppress(psutil.Error, OSError):
                # The session tells it from a later group of an equal number.
                if os.getpgid(pid) == self.process.pid and os.getsid(pid) == os.getsid(0):
                    process = psutil.Process(pid)
                    if any("resource_tracker" in word for word in process.cmdline()) == trackers:
                        found.append(process)
        return found


def _short_folder() -> tuple[Path, int]:
    """A private folder for sockets, whose addresses have at most 107 characters, and the descriptor of its lock.

    A run's own temporary folder is too deep. Folders whose processes were killed are deleted here.
    """
    base = Path(tempfile.gettempdir() if len(tempfile.gettempdir()) <= _LONGEST_PLACE else "/tmp")
    for former in base.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            descriptor = os.open(former / "lock", os.O_RDWR)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(former, ignore_errors=True)
            finally:
                os.close(descriptor)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
    lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.rename(folder / ".lock", folder / "lock")  # visible only once it is held
    return folder, lock


def _configuration(policy: Path) -> dict[str, Any]:
    """Return the model's configuration; empty if it is not there."""
    file = policy / "config.json"
    configuration: dict[str, Any] = json.loads(file.read_bytes()) if file.is_file() else {}
    return configuration


def keeps_old_head(policy: Path, device: str) -> bool:
    """True if vLLM would keep the output head of the first weights: on a CPU it does so where embeddings are tied."""
    if device != "cpu" or not (configuration := _configuration(policy)):
        return False
    return bool(
        configuration.get("tie_word_embeddings", configuration.get("text_config", {}).get("tie_word_embeddings", True))
    )
