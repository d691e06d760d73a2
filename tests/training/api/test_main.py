"""The API as a process: address, account, orders, restarts after SIGKILL."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

import pytest

from tests.support.training_api_server import SECRET, until
from toprope.records.journal.groups import Group
from toprope.records.messages import (
    ENV_COMPONENT,
    ENV_FOLDER,
    ENV_REPORT_FD,
    ENV_SECRET,
    CountsReport,
    Peers,
    Ready,
    Report,
    Stop,
    decode_report,
    encode_line,
)
from toprope.records.run.folder import RunFolder
from toprope.records.run.specification import EnvironmentSource, Specification
from toprope.settings.schema import Config
from toprope.training.api.__main__ import vocabulary_size
from toprope.training.api.clients.sync_client import SyncApiClient
from toprope.training.api.http.errors import Refused


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder.create(tmp_path / "runs", "run-1")
    config = Config()
    config.rollout.group_size, config.rollout.groups_per_step, config.policy.max_context = 2, 2, 64
    Specification(
        run_id="run-1", kind="train", created_at=0.0, toprope_version="0", policy_cache=str(tmp_path),
        environment=EnvironmentSource(name="words"), config=config,
    ).write(folder)  # fmt: skip
    return folder


class Program:
    """The API's process, its reports and its standard input."""

    def __init__(self, process: subprocess.Popen[bytes], reports: int) -> None:
        self.process, self._reports, self._pending = process, reports, b""
        self.reports: list[Report] = []

    def read(self) -> list[Report]:
        try:
            while chunk := os.read(self._reports, 65_536):
                *lines, self._pending = (self._pending + chunk).split(b"\n")
                self.reports += [report for line in lines if (report := decode_report(line)) is not None]
        except BlockingIOError:
            pass
        return self.reports

    def address(self) -> str:
        return until(lambda: next((r.address for r in self.read() if isinstance(r, Ready)), None))

    def accepted(self) -> list[int]:
        return [report.counts["accepted"] for report in self.read() if isinstance(report, CountsReport)]

    def order(self, order: Stop | Peers) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(encode_line(order))
        self.process.stdin.flush()


@contextmanager
def program(folder: RunFolder) -> Iterator[Program]:
    readable, writable = os.pipe()
    os.set_blocking(readable, False)
    variables = {
        ENV_FOLDER: str(folder.path), ENV_COMPONENT: "api", ENV_SECRET: SECRET, ENV_REPORT_FD: str(writable),
    }  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "toprope.training.api"],
        stdin=subprocess.PIPE, stderr=subprocess.PIPE, pass_fds=[writable], env=os.environ | variables,
    )  # fmt: skip
    os.close(writable)
    running = Program(process, readable)
    try:
        yield running
    finally:
        process.kill()
        process.communicate()
        os.close(readable)


def test_api_reports_address_and_account_and_obeys_stop(folder: RunFolder) -> None:
    with program(folder) as api:
        client = SyncApiClient(api.address(), SECRET)
        for mark in range(3):
            client.post_group(Group([[mark, 2]] * 2, [[-100, 2]] * 2, [0.0, 1.0]))
        until(lambda: 3 in api.accepted())
        client.post_group(Group([[9, 2]] * 2, [[-100, 2]] * 2, [0.0, 1.0]))
        client.close()
        api.order(Stop())
        assert api.process.wait(10) == 0
        assert api.accepted()[-1] == 4, "the last report is complete"
        assert len(api.accepted()) <= 5, "at most one a second and one at the end"
        assert api.process.stderr is not None and api.process.stderr.read() == b""


def test_api_ends_with_its_keeper(folder: RunFolder) -> None:
    with program(folder) as api:
        address = api.address()
        client = SyncApiClient(address, SECRET)
        assert api.process.stdin is not None
        api.process.stdin.close()
        assert api.process.wait(10) == 0
        client.close()
        api.process.stdin = None


def test_run_is_the_first_registered_trainer(folder: RunFolder) -> None:
    with program(folder) as api:
        url = f"{api.address()}/{SECRET}"
        with urlopen(f"{url}/info") as answer:
            assert json.load(answer) == {"batch_size": 4, "max_token_len": 64}
        with urlopen(f"{url}/wandb_info") as answer:
            assert json.load(answer)["group"] == "run-1"


def test_token_ids_are_bounded_by_policy_vocabulary(folder: RunFolder, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"text_config": {"vocab_size": 10}}')
    with program(folder) as api:
        client = SyncApiClient(api.address(), SECRET)
        client.post_group(Group([[50, 2]], [[-100, 2]], [0.0]))
        api.order(Peers({"policy": str(tmp_path)}))

        def refused() -> bool:
            try:
                client.post_group(Group([[50, 2]], [[-100, 2]], [0.0]))
            except Refused as refusal:
                return refusal.field == "tokens[0][0]"
            return False

        until(refused)
        client.close()


@pytest.mark.parametrize("content", ["", "[]", '{"vocab_size": "many"}', '{"text_config": 3}'])
def test_vocabulary_size_is_none_without_usable_config(tmp_path: Path, content: str) -> None:
    assert vocabulary_size(tmp_path) is None
    (tmp_path / "config.json").write_text(content)
    assert vocabulary_size(tmp_path) is None


def test_acknowledged_groups_survive_sigkill(folder: RunFolder) -> None:
    with program(folder) as api:
        client = SyncApiClient(api.address(), SECRET)
        for mark in range(5):
            client.post_group(Group([[mark, 2]] * 2, [[-100, 2]] * 2, [0.0, 1.0], group_id=f"k{mark}"))
        first = client.next_batch(0, 4)
        client.dropped([(1, "stale")])
        client.commit(1)
        os.kill(api.process.pid, signal.SIGKILL)
        assert api.process.wait(10) == -signal.SIGKILL
        client.close()
    with program(folder) as api:
        client = SyncApiClient(api.address(), SECRET)
        counts = client.counts()
        assert (counts.accepted, counts.waiting, counts.delivered, counts.dropped) == (5, 3, 1, {"stale": 1})
        again = client.next_batch(1, 4)
        assert first.batch is not None and again.batch is not None
        assert again.batch[0] == first.batch[1]
        client.post_group(Group([[4, 2]] * 2, [[-100, 2]] * 2, [0.0, 1.0], group_id="k4"))
        assert client.counts().accepted == 5
        client.close()


def test_api_returns_at_its_former_port(folder: RunFolder) -> None:
    with program(folder) as api:
        address = api.address()
        client = SyncApiClient(address, SECRET)  # keeps its connection, which then breaks
        client.post_group(Group([[1, 2]] * 2, [[-100, 2]] * 2, [0.0, 1.0]))
        os.kill(api.process.pid, signal.SIGKILL)
        api.process.wait(10)
    with program(folder) as api:
        assert api.address() == address
        client.post_group(Group([[2, 2]] * 2, [[-100, 2]] * 2, [0.0, 1.0]))
        assert client.counts().accepted == 2
        with program(folder) as other:  # its port is taken, so it uses another one
            assert other.address() != address
    (folder.journal / "api.port").write_text("nonsense")
    with program(folder) as api:
        assert api.address() != address
    client.close()


def test_configured_staleness_and_sync_are_used(folder: RunFolder, tmp_path: Path) -> None:
    spec = Specification.read(folder)
    config = spec.config.model_copy(deep=True)
    config.logging.journal_sync, config.logging.keep_rollouts, config.rollout.max_staleness = "always", "none", 1
    other = RunFolder.create(tmp_path / "runs", "run-2")
    spec.model_copy(update={"config": config, "run_id": "run-2"}).write(other)
    with program(other) as api:
        client = SyncApiClient(api.address(), SECRET)
        client.policy_version = 5
        for version in (1, 4):
            versions = [[(version, 1)]] * 4
            client.post_group(Group([[1, 2]] * 4, [[-100, 2]] * 4, [0.0, 1.0] * 2, versions=versions))
        batch = client.next_batch(0, 4)
        assert batch.sequence_numbers == [2] and batch.stale == 1
        assert client.counts().dropped == {"stale": 1}
        client.close()


def test_api_starts_quickly_without_heavy_libraries(folder: RunFolder) -> None:
    with program(folder) as api:
        began = time.monotonic()
        api.address()
        assert time.monotonic() - began < 5
        maps = Path(f"/proc/{api.process.pid}/maps").read_text()
        assert "libtorch" not in maps and "numpy" not in maps
    program_text = "import sys, toprope.training.api.__main__; print(*[m for m in sys.modules if '.' not in m])"
    result = subprocess.run([sys.executable, "-P", "-c", program_text], capture_output=True, text=True, check=True)
    loaded = set(result.stdout.split())
    assert "starlette" in loaded and not loaded & {"torch", "transformers", "numpy", "aiohttp", "trl", "wandb"}


def test_api_reports_why_it_cannot_start(folder: RunFolder) -> None:
    folder.journal.rmdir()
    folder.journal.mkdir()
    (folder.journal / "00000001.journal").mkdir()
    with program(folder) as api:
        assert api.process.wait(10) == 1
        assert any(type(report).__name__ == "Failed" for report in api.read())


def test_api_refuses_to_start_without_a_keeper() -> None:
    result = subprocess.run(
        [sys.executable, "-P", "-m", "toprope.training.api"], capture_output=True, text=True, timeout=30,
        env={name: value for name, value in os.environ.items() if not name.startswith("TOPROPE_")},
    )  # fmt: skip
    assert result.returncode != 0 and "start_training" in result.stderr
