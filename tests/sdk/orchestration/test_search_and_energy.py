"""Web search against a local HTTP server, and energy counters against a stand-in for the zeus library."""

from __future__ import annotations

import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from toprope.sdk.adapters.orchestrator import make
from toprope.sdk.errors import InvalidRequest
from toprope.sdk.orchestration import energy
from toprope.sdk.orchestration.energy import Meter
from toprope.sdk.orchestration.search import Corpus, provider
from toprope.sdk.orchestration.tools import Tool, Toolbox, calculator, web_search
from toprope.sdk.rollouts import Rollout, configure

KEY = "key-very-secret-012345"


@pytest.fixture
def engine():
    """A server that speaks both dialects; `/moved` redirects, `/broken` fails, `/nonsense` is no JSON."""
    seen: list[tuple[str, dict[str, str], dict[str, Any]]] = []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            return

        def answer(self, asked: dict[str, Any]) -> None:
            address = urlsplit(self.path)
            seen.append((address.path, dict(self.headers), asked))
            rows = [{"title": f"T{n}", "description": f"about {n}", "content": f"about {n}"} for n in range(5)]
            data = json.dumps({"web": {"results": rows}, "results": rows}).encode()
            status = {"/moved": 302, "/broken": 503}.get(address.path, 200)
            self.send_response(status)
            if status == 302:
                self.send_header("Location", "/elsewhere")
            self.end_headers()
            self.wfile.write(b"<html>" if address.path == "/nonsense" else data)

        def do_GET(self) -> None:
            self.answer({name: values[0] for name, values in parse_qs(urlsplit(self.path).query).items()})

        def do_POST(self) -> None:
            self.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    yield SimpleNamespace(url=f"http://127.0.0.1:{server.server_port}", seen=seen)
    server.shutdown()
    server.server_close()
    thread.join(10)


def test_line_of_a_corpus_ends_at_its_newline_alone(tmp_path: Path):
    (tmp_path / "a.jsonl").write_bytes('{"text": "one\u2028two\x85 three"}\r\n\n{"text": "four"}\n'.encode())
    assert {title for title, _ in Corpus.of(tmp_path).search("three four")} == {"a 1", "a 3"}


def test_found_passage_shows_the_words_that_were_looked_for(tmp_path: Path):
    words = [f"word{number}" for number in range(2000)]
    (tmp_path / "a.txt").write_text(
        f"Begin.\n\n{' '.join(words[:1000])}\n\n{'y' * 2000}\n\n" + "\n\n".join(words[1000:])
    )
    corpus = Corpus.of(tmp_path)
    tool = web_search(corpus.search, most=1)
    for word in words[::37]:
        assert word in tool.call(word).split(), word
    assert "Begin." in tool.call("begin") and [len(text) for _, text in corpus.search("y" * 800)] == [800, 800]


@pytest.mark.parametrize(
    ("name", "variable", "header", "value", "asked"),
    [
        ("brave", "BRAVE_API_KEY", "X-subscription-token", KEY, {"q": "ropes & knots", "count": "2"}),
        ("tavily", "TAVILY_API_KEY", "Authorization", f"Bearer {KEY}", {"query": "ropes & knots", "max_results": 2}),
    ],
)
def test_provider_request_follows_its_api(engine, monkeypatch, name, variable, header, value, asked):
    monkeypatch.setenv(variable, KEY)
    box = Toolbox([web_search(provider(name, f"{engine.url}/search"), most=2)])
    observation = box.call("web_search", "ropes & knots")
    assert observation.content == "[T0] about 0\n\n[T1] about 1" and not observation.failed
    [(path, headers, given)] = engine.seen
    assert (path, given) == ("/search", asked)
    assert {key.capitalize(): one for key, one in headers.items()}[header] == value


def test_provider_failure_hides_the_key(engine, monkeypatch):
    monkeypatch.setenv("BRAVE_API_KEY", KEY)
    for path, said in (("moved", "answered 302"), ("broken", "answered 503"), ("nonsense", "could not be asked")):
        observation = Toolbox([web_search(provider("brave", f"{engine.url}/{path}"))]).call("web_search", "x")
        assert observation.failed and said in observation.content and KEY not in observation.content
    assert [path for path, _, _ in engine.seen] == ["/moved", "/broken", "/nonsense"], "the key goes nowhere else"


def test_provider_needs_known_name_and_key(monkeypatch):
    monkeypatch.delenv("TAVILY_API_KEY", raising=False)
    with pytest.raises(InvalidRequest, match="TAVILY_API_KEY"):
        provider("tavily")
    with pytest.raises(InvalidRequest, match="brave, tavily"):
        provider("altavista")


def test_orchestrator_uses_search_provider(engine, monkeypatch):
    monkeypatch.setenv("BRAVE_API_KEY", KEY)
    told = {"tools": {"web_search": {"provider": "brave", "url": f"{engine.url}/search", "usd": 0.005}}}
    environment = configure(make(json.dumps(told)), knobs={"tools": ["web_search"]})
    rollout = Rollout(environment, next(iter(environment.tasks())))
    rollout.begin()
    turn = rollout.advance("THOUGHT: who knows\nTOOL: web_search\nINPUT: sums")
    assert turn.messages[0]["content"].startswith("OBSERVATION: [T0] about 0")
    parts = rollout.advance("FINAL_ANSWER: none").outcome.parts
    assert parts["usd"] == 0.005 and parts["cost"] == pytest.approx(0.05) and parts["turns"] == 2


class _Counters:
    """zeus.monitor.ZeusMonitor as far as it is used (zeus 0.11 and later): windows, and joules of each device."""

    def __init__(self, approx_instant_energy: bool = False) -> None:
        self.gpu_indices, self.cpu_indices, self._open = [0], [0], set()

    def begin_window(self, name: str) -> None:
        assert name not in self._open
        self._open.add(name)

    def end_window(self, name: str) -> Any:
        self._open.remove(name)
        return SimpleNamespace(time=0.1, gpu_energy={0: 3.0}, cpu_energy={0: 1.5}, dram_energy=None)


def test_energy_is_measured_by_counter(monkeypatch):
    monkeypatch.setitem(sys.modules, "zeus", ModuleType("zeus"))
    monkeypatch.setitem(sys.modules, "zeus.monitor", SimpleNamespace(ZeusMonitor=_Counters))
    meter = Meter()
    observation = Toolbox([calculator()], meter).call("calculator", "1 + 1")
    assert (observation.energy_joules, observation.energy_source) == (4.5, "measured")
    assert observation.power_watts == pytest.approx(4.5 / observation.latency_seconds)


def test_energy_is_estimated_without_counter(monkeypatch):
    def refuses(**_: Any) -> None:
        raise PermissionError("/sys/class/powercap")

    monkeypatch.setitem(sys.modules, "zeus", ModuleType("zeus"))
    monkeypatch.setitem(sys.modules, "zeus.monitor", SimpleNamespace(ZeusMonitor=refuses))
    monkeypatch.setattr(energy, "_POWERCAP", Path("/nowhere"))
    meter = Meter()
    meter._rapl = energy.Rapl(Path("/nowhere"))

    def busy(text: str) -> str:
        until = time.process_time() + 0.5
        while time.process_time() < until:
            pass
        return "done"

    def waits(text: str) -> str:
        time.sleep(0.5)
        return "done"

    toolbox = Toolbox([Tool("busy", "Computes.", busy), Tool("waits", "Waits.", waits)], meter)
    worked, waited = toolbox.call("busy", ""), toolbox.call("waits", "")
    assert worked.energy_source == waited.energy_source == "estimate"
    # Power follows utilisation: 3 W for a core that waits, 15 W for one that computes.
    assert waited.power_watts == pytest.approx(3.0, abs=1.0)
    assert worked.energy_joules == pytest.approx(3 * worked.latency_seconds + 12 * 0.5, rel=0.15)


def test_energy_is_read_from_rapl_where_it_is_readable(tmp_path):
    for name, before in (("intel-rapl:0", 1_000_000), ("intel-rapl:1", 9_000_000), ("intel-rapl:0:0", 5)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "energy_uj").write_text(f"{before}\n")
        (tmp_path / name / "max_energy_range_uj").write_text("10000000\n")
    (tmp_path / "intel-rapl:2").mkdir()  # not readable
    meter = Meter()
    meter._monitor, meter._rapl = None, energy.Rapl(tmp_path)

    def work(text: str) -> str:
        (tmp_path / "intel-rapl:0" / "energy_uj").write_text("3500000")
        (tmp_path / "intel-rapl:1" / "energy_uj").write_text("500000")  # it began again at zero
        return "done"

    observation = Toolbox([Tool("work", "Computes.", work)], meter).call("work", "")
    assert observation.energy_source == "measured"
    assert observation.energy_joules == pytest.approx(2.5 + 1.5)
