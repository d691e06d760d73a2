"""A real, unmodified atroposlib environment in its own virtual environment, with our API and inference.

`make tools-atropos` creates that environment (3 GB); without it these tests are skipped.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.training_api_server import REGISTRATION, SECRET, Served, served, until
from toprope.records.journal.file_journal import FileJournal
from toprope.records.journal.groups import MASKED
from toprope.records.messages import ENV_COMPONENT, ENV_FOLDER, ENV_LISTENER_FD, ENV_REPORT_FD, ENV_SECRET
from toprope.records.run.folder import RunFolder
from toprope.records.run.specification import EnvironmentSource, Specification
from toprope.settings.schema import Config
from toprope.training.api.clients.sync_client import SyncApiClient
from toprope.training.api.intake.version_matching import InferenceMatcher

VENV = Path(os.environ.get("TOPROPE_BENCH_VENV") or Path.home() / ".cache" / "toprope" / "bench-atropos")

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(
        not (VENV / "bin" / "run-api").exists(),
        reason=f"atroposlib is not installed in {VENV}: `make tools-atropos` installs it; TOPROPE_BENCH_VENV names "
        "another folder",
    ),
]

ENVIRONMENT = """
import random
from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup


class Letters(BaseEnv):
    name = "letters"

    @classmethod
    def config_init(cls):
        env = BaseEnvConfig(
            tokenizer_name="POLICY", group_size=2, use_wandb=False, wandb_name="letters", batch_size=4,
            max_token_length=64, total_steps=1000,
            rollout_server_url="http://nowhere.invalid", steps_per_eval=100000, max_num_workers=2,
        )
        server = APIServerConfig(
            model_name="POLICY", base_url="http://127.0.0.1:1/v1", api_key="none", num_requests_for_eval=2,
            server_type="sglang",
        )
        return env, [server]

    async def setup(self):
        self.number = 0

    async def get_next_item(self):
        self.number += 1
        return self.number

    async def collect_trajectories(self, item):
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            await managed.completion(
                prompt=f"item {item} " + chr(97 + item % 26), n=2, max_tokens=12, temperature=1.0
            )
            nodes = managed.get_state()["nodes"]
        group = ScoredDataGroup(tokens=[], masks=[], scores=[], inference_logprobs=[])
        for index, node in enumerate(nodes):
            group["tokens"].append(node.tokens)
            group["masks"].append(node.masked_tokens)
            group["inference_logprobs"].append(node.logprobs)
            group["scores"].append(float(index))
        return group, []

    async def evaluate(self, *args, **kwargs):
        return None


if __name__ == "__main__":
    Letters.cli()
"""


@pytest.fixture(scope="module")
def inference(tiny_policy: Path) -> Iterator[str]:
    """Our inference server on the tiny policy; its address."""
    from transformers import AutoModelForCausalLM

    from toprope.training.component.http_server import serve
    from toprope.training.inference.app import InferenceServer
    from toprope.training.inference.embedded_engine import EmbeddedEngine
    from toprope.training.policy.loading import load_tokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny_policy).eval(), load_tokenizer(tiny_policy)
    engine = EmbeddedEngine(model, tokenizer, max_context=128)
    engine.start()
    server = InferenceServer(engine, tokenizer, model_name=str(tiny_policy), secret=SECRET)
    loop, ending = asyncio.new_event_loop(), asyncio.Event()
    urls: list[str] = []
    thread = threading.Thread(target=lambda: loop.run_until_complete(serve(server.app, urls.append, ending)))
    thread.start()
    until(lambda: urls)
    yield urls[0]
    loop.call_soon_threadsafe(ending.set)
    thread.join(20)
    loop.close()
    engine.stop()


@contextmanager
def environment(
    folder: Path, policy: Path, inference: str, kind: str, command: str, *flags: str
) -> Iterator[subprocess.Popen[bytes]]:
    program = folder / "letters.py"
    program.write_text(ENVIRONMENT.replace("POLICY", str(policy)))
    arguments = [
        f"--openai.base_url={inference}/v1", f"--openai.api_key={SECRET}.outside", f"--openai.server_type={kind}",
        f"--openai.model_name={policy}", f"--env.tokenizer_name={policy}", "--env.use_wandb=False", *flags,
    ]  # fmt: skip
    hidden = ("PYTHON", "TOPROPE", "WANDB")
    variables = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    variables |= {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", "OMP_NUM_THREADS": "1"}
    with (folder / "environment.log").open("wb") as log:
        process = subprocess.Popen(
            [str(VENV / "bin" / "python"), str(program), command, *arguments],
            cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=variables,
        )  # fmt: skip
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def log_of(folder: Path) -> str:
    return (folder / "environment.log").read_text(errors="replace")[-3000:]


def batch(api: Served, cursor: int, running: subprocess.Popen[bytes], folder: Path) -> dict[str, Any]:
    def attempt() -> dict[str, Any] | None:
        assert running.poll() is None, log_of(folder)
        answer = api.get(f"/batch?cursor={cursor}&wait_s=0.5")
        return answer if answer["batch"] else None

    return until(attempt, 90)


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_atropos_environment_serves_and_survives_restart(
    tmp_path: Path, tiny_policy: Path, inference: str, kind: str
) -> None:
    matcher = InferenceMatcher(SECRET)
    matcher.connect(inference)
    with served(tmp_path / "journal", matcher=matcher, max_staleness=2) as api:
        api.post("/register", REGISTRATION | {"batch_size": 4})
        url = f"--env.rollout_server_url={api.url}/{SECRET}"
        with environment(tmp_path, tiny_policy, inference, kind, "serve", url) as running:
            first = batch(api, 0, running, tmp_path)
            second = batch(api, first["cursor"], running, tmp_path)
            assert first["sequence_numbers"] == [1, 2] and second["cursor"] == 4
        counts = api.get("/counts")
        assert counts["unmatched"] == 0 and not counts["dropped"] and not counts["refused"]
        for group in first["batch"] + second["batch"]:
            assert group["env_id"] == 0 and len(group["tokens"]) == 2
            for masks, versions, logprobs in zip(
                group["masks"], group["versions"], group["inference_logprobs"], strict=True
            ):
                sampled = sum(mask != MASKED for mask in masks)
                assert versions == [[0, sampled]]
                assert [value <= 0 for value in logprobs] == [mask != MASKED for mask in masks]
    with served(tmp_path / "journal") as api:
        assert api.get("/counts")["accepted"] == counts["accepted"]
        assert api.call("GET", "/status-env", {"env_id": 0})[0] == 200, "the environment keeps its id"


@contextmanager
def crew_api(folder: RunFolder, listener: socket.socket) -> Iterator[tuple[subprocess.Popen[bytes], SyncApiClient]]:
    """The API as a process, on a socket that stays open when it is killed, and a trainer's client."""
    variables = {
        ENV_FOLDER: str(folder.path), ENV_COMPONENT: "api", ENV_SECRET: SECRET, ENV_REPORT_FD: "2",
        ENV_LISTENER_FD: str(listener.fileno()),
    }  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "toprope.training.api"],
        stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, pass_fds=[listener.fileno()], env=os.environ | variables,
    )  # fmt: skip
    client = SyncApiClient(f"http://127.0.0.1:{listener.getsockname()[1]}", SECRET)
    try:
        yield process, client
    finally:
        client.close()
        process.kill()
        process.communicate()


def test_atropos_environment_survives_kill_of_api(tmp_path: Path, tiny_policy: Path, inference: str) -> None:
    folder = RunFolder.create(tmp_path / "runs", "run-1")
    config = Config()
    config.rollout.group_size, config.rollout.groups_per_step, config.policy.max_context = 2, 2, 64
    Specification(
        run_id="run-1", kind="train", created_at=0.0, toprope_version="0", policy_cache=str(tmp_path),
        environment=EnvironmentSource(name="letters"), config=config,
    ).write(folder)  # fmt: skip
    prompts: list[list[int]] = []

    def read(client: SyncApiClient, batches: int, running: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + 120
        while batches:
            assert running.poll() is None, log_of(tmp_path)
            assert time.monotonic() < deadline, log_of(tmp_path)
            answer = client.next_batch(len(prompts), 4, 1.0)
            for group in answer.batch or ():
                pair = group.tokens[0], group.masks[0]
                prompts.append([token for token, mask in zip(*pair, strict=True) if mask == MASKED])
            batches -= bool(answer.batch)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"--env.rollout_server_url=http://127.0.0.1:{listener.getsockname()[1]}/{SECRET}"
        with environment(tmp_path, tiny_policy, inference, "vllm", "serve", url) as running:
            for _ in range(2):
                with crew_api(folder, listener) as (process, client):
                    read(client, 2, running)
                    accepted = client.counts().accepted
                    process.kill()
                    process.wait()
            with crew_api(folder, listener) as (_, client):
                read(client, 2, running)
                counts = client.counts()
    assert len(prompts) == 12 and counts.accepted >= max(12, accepted) and counts.balanced()
    assert counts.waiting + counts.delivered == counts.accepted and not counts.dropped
    assert len({tuple(prompt) for prompt in prompts}) == 12, "each item was sampled and delivered once"


def test_atropos_process_mode_works_with_our_inference(tmp_path: Path, tiny_policy: Path, inference: str) -> None:
    out = tmp_path / "groups.jsonl"
    flags = (f"--env.data_path_to_save_groups={out}", "--env.total_steps=2", "--env.group_size=2")
    with environment(tmp_path, tiny_policy, inference, "sglang", "process", *flags) as running:
        assert running.wait(120) == 0, log_of(tmp_path)
    groups = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(groups) == 2 and all(len(group["tokens"]) == 2 for group in groups), log_of(tmp_path)


def test_journal_of_atropos_run_is_readable(tmp_path: Path, tiny_policy: Path, inference: str) -> None:
    with served(tmp_path / "journal") as api:
        api.post("/register", REGISTRATION | {"batch_size": 4})
        url = f"--env.rollout_server_url={api.url}/{SECRET}"
        with environment(tmp_path, tiny_policy, inference, "vllm", "serve", url) as running:
            batch(api, 0, running, tmp_path)
    journal = FileJournal(tmp_path / "journal")
    assert {record.note.lane for record in journal.iterate() if record.size} == {"#0"}
    journal.close()
