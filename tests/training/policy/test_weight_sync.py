"""Weights travel from the trainer to inference through a mapped file."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import torch

from toprope.training.policy.publishing import tell_sampler
from toprope.training.policy.weight_sync import WeightFile, WeightReader


def test_reader_behind_many_versions_gets_newest(tmp_path: Path) -> None:
    live, copy = {"w": torch.zeros(3)}, {"w": torch.zeros(3)}
    publisher, reader = WeightFile(tmp_path, live), WeightReader(tmp_path, copy)
    for number in range(1, 8):
        live["w"].fill_(number)
        publisher.publish()
    assert reader.refresh() == 7
    assert copy["w"].tolist() == [7.0, 7.0, 7.0]
    assert reader.refresh() == 7


def test_later_trainer_replaces_file_from_its_version(tmp_path: Path) -> None:
    """The first file is not changed, since it may be in use; a lower version number does not hide newer weights."""
    copy = {"w": torch.zeros(3)}
    reader = WeightReader(tmp_path, copy)
    first = WeightFile(tmp_path, {"w": torch.ones(3)})
    for _ in range(5):
        first.publish()
    assert reader.refresh() == 5
    second = WeightFile(tmp_path, {"w": torch.full((3,), 7.0)}, version=2)
    assert reader.refresh() == 5
    assert copy["w"].tolist() == [1.0] * 3
    assert second.publish() == 3
    assert reader.refresh() == 3
    assert copy["w"].tolist() == [7.0] * 3
    first.publish()
    assert reader.refresh() == 3


def test_weights_are_converted_to_dtype_of_reader(tmp_path: Path) -> None:
    copy = {"w": torch.zeros(3, dtype=torch.bfloat16)}
    WeightFile(tmp_path, {"w": torch.tensor([1.0, 2.5, -3.0])}).publish()
    assert WeightReader(tmp_path, copy).refresh() == 1
    assert copy["w"].tolist() == [1.0, 2.5, -3.0]


def test_sampler_is_told_without_the_proxy_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, str | None]] = []

    class Sampler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            told.append((self.path, self.headers["Authorization"]))
            self.send_response(200)
            self.end_headers()

    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with HTTPServer(("127.0.0.1", 0), Sampler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        tell_sampler(f"http://127.0.0.1:{server.server_port}", "secret", "sleep", 10.0)
        server.shutdown()
        thread.join()
    assert told == [("/v1/policy/sleep", "Bearer secret")]
