"""The client of a hosted service: what a server that falls silent does, and what a long pause."""

from __future__ import annotations

import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

from toprope.records.run.folder import read_json
from toprope.training.component.peer_addresses import PeerAway
from toprope.training.hosted import sampler, service
from toprope.training.hosted.trainer import HostedGroups


def test_download_from_a_silent_server_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "_SILENT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        failed: list[BaseException] = []

        def fetch() -> None:
            try:
                service._download_file(f"http://127.0.0.1:{server.getsockname()[1]}/a", tmp_path, "a")
            except OSError as error:
                failed.append(error)

        fetching = threading.Thread(target=fetch, daemon=True)
        fetching.start()
        fetching.join(20)
        assert [type(error) for error in failed] == [TimeoutError] and not list(tmp_path.iterdir())


def test_download_that_breaks_off_leaves_no_file(tmp_path: Path) -> None:
    class Broken(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "9")
            self.end_headers()
            self.wfile.write(b"half")

    with HTTPServer(("127.0.0.1", 0), Broken) as server:
        serving = threading.Thread(target=server.handle_request)
        serving.start()
        with pytest.raises(ConnectionError, match="5 bytes before its end"):
            service._download_file(f"http://127.0.0.1:{server.server_port}/a", tmp_path, "a")
        serving.join()
    assert not list(tmp_path.iterdir())


def test_published_weights_are_kept_through_a_long_pause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The service drops them after a day; a pause may last longer."""
    saved: list[str] = []
    now, away = [1000.0], [False]

    def save(name: str, seconds: int) -> SimpleNamespace:
        if away[0]:
            raise PeerAway("it does not answer")
        saved.append(name)
        return SimpleNamespace(result=lambda: SimpleNamespace(path=f"tinker://{name}"))

    monkeypatch.setattr("toprope.training.hosted.sampler.time.time", lambda: now[0])
    publisher = sampler.SamplerPublisher(tmp_path, save, "run-1-0", lambda _, call: call())
    publisher.renew()  # nothing was published
    publisher.publish()
    run = HostedGroups.__new__(HostedGroups)
    held = SimpleNamespace(beat=lambda: None, hold=lambda beat: beat() or 0.0)
    run._member, run._publisher = held, publisher  # type: ignore[assignment]

    def pass_time(seconds: float) -> None:
        now[0] += seconds
        run._hold()

    pass_time(service.KEPT_S / 2 - 1)
    assert saved == ["run-1-0-v1"]
    away[0] = True
    pass_time(2)
    away[0] = False
    pass_time(2)
    assert saved == ["run-1-0-v1"]  # not asked again and again
    pass_time(3600)
    pass_time(2)
    assert len(saved) == 2 and read_json(tmp_path / "sampler.json") == {"version": 1, "path": f"tinker://{saved[1]}"}
    assert publisher.publish() == 2
