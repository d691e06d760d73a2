"""Advice on files that a project fetches while its image is built."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from toprope.sdk.adapters._shared import fetched_files

MISSES = "The server ended: FileNotFoundError: Benchmark file not found: /app/env/data/questions/all.csv"


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in fetched_files._PROXIES:
        monkeypatch.delenv(name, raising=False)
    fetched_files._is_reached.cache_clear()


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "server").mkdir()
    (tmp_path / "server/Dockerfile").write_text(
        'FROM python\nRUN curl -LsSf https://astral.sh/install.sh | sh\nENV DATA_PLACE="/app/env/data"\n'
        "RUN python -c \"snapshot_download('someone/questions', \\\n    local_dir='/app/env/data')\"\n"
    )
    return tmp_path


def test_step_of_an_image_that_fetches_a_missing_file_is_named_with_its_host(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def unknown(host: str, port: int) -> None:
        asked.append(host)
        raise socket.gaierror("Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    told = fetched_files.with_source(MISSES, str(project))
    assert told.startswith(f"{MISSES}. Its server/Dockerfile may fetch it (RUN python -c ")
    assert told.endswith("; huggingface.co could not be reached") and asked == ["huggingface.co"]


def test_reachable_data_come_with_the_variable_of_their_place(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *given: [given])
    told = fetched_files.with_source(MISSES, str(project))
    assert "could not be reached" not in told and "do the same on this machine, and DATA_PLACE names the folder" in told


def test_script_that_prepares_data_is_named_without_its_comments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *given: [given])
    (tmp_path / "prepare.py").write_text(
        "# See https://licence.example\nSOURCE = 'https://tasks.example/all.git'\n"
        'run("git", "clone", SOURCE, HERE / "tasks")\n'
    )
    told = fetched_files.with_source("FileNotFoundError: no folder: /srv/data/tasks", str(tmp_path))
    assert fetched_files.with_source("FileNotFoundError: /srv/data/other/x", str(tmp_path)).endswith("other/x")
    assert "Its prepare.py may fetch it (https://tasks.example/all.git)" in told and "licence" not in told


@pytest.mark.parametrize(
    "message",
    [
        "ValueError: /app/env/data is no number",
        "FileNotFoundError: Benchmark file not found: all.csv",
        "FileNotFoundError: /app/other/thing.csv",
        f"{MISSES}; huggingface.co could not be reached",
        "Stockfish not found: /usr/local/bin/stockfish",
        "FileNotFoundError: /home/user/data",
        "FileNotFoundError: not found: https://host.example/app/env/data",
    ],
)
def test_other_messages_stay(message: str, project: Path) -> None:
    assert fetched_files.with_source(message, str(project)) == message
    assert fetched_files.with_source(MISSES, "") == MISSES


def test_a_file_that_may_not_be_read_leaves_the_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "Dockerfile").write_text("RUN wget https://x.example/app/env/data")

    def closed(*given: object) -> str:
        raise PermissionError("closed")

    monkeypatch.setattr(Path, "read_text", closed)
    assert fetched_files.with_source(MISSES, str(tmp_path)) == MISSES
