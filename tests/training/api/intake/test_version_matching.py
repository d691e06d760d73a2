"""Groups of outside environments get the versions and log-probabilities that inference recorded."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.training_api_server import ENVIRONMENT, REGISTRATION, SECRET, Served, group, marks, served
from toprope.records.journal.file_journal import FileJournal
from toprope.training.api.intake.validation import GroupValidator
from toprope.training.api.intake.version_matching import InferenceMatcher, sampled_spans
from toprope.training.inference.engine import Sample
from toprope.training.inference.samples import (
    MATCH_PATH,
    MatchAnswer,
    MatchedRow,
    MatchRequest,
    SampleIndex,
    SoughtRow,
)


@contextmanager
def inference(index: SampleIndex) -> Iterator[str]:
    """An inference server that answers match requests from `index`."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            allowed = self.path == MATCH_PATH and self.headers["Authorization"] == f"Bearer {SECRET}"
            rows = msgspec.json.decode(body, type=MatchRequest).rows
            answer = msgspec.json.encode(MatchAnswer([index.match(row) for row in rows])) if allowed else b"no"
            self.send_response(200 if allowed else 401)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *values: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def registered(api: Served) -> None:
    api.post("/register", REGISTRATION)
    api.get("/batch?cursor=0")
    api.post("/register-env", ENVIRONMENT)


def outside(mark: int, rows: int = 2, **fields: Any) -> dict[str, Any]:
    return group(mark, rows=rows, env_id=0, **fields)


@pytest.mark.parametrize("train", [False, True])
def test_versions_are_added_and_unmatched_setting_is_followed(tmp_path: Path, train: bool) -> None:
    index, matcher = SampleIndex(), InferenceMatcher(SECRET)
    for version in (4, 5):
        index.add([1], Sample([2, 3], [-0.5, -0.25 * version], [(version, 2)], "", "stop"))
    with inference(index) as url, served(tmp_path / "journal", matcher=matcher, train_unmatched=train) as api:
        registered(api)
        matcher.connect(url)
        api.post("/scored_data", outside(1))
        # Leaving out its number does not make a post one of the run's own driver, which sends versions.
        api.post("/scored_data_list", [group(9, rows=2), outside(1, inference_logprobs=[[1.0, -9.0, -9.0]] * 2)])
        api.post("/scored_data", group(8, rows=2, versions=[[(6, 2)]] * 2))  # a post of the run's own driver
        assert api.get("/counts")["unmatched"] == 1
        answer = api.get("/batch?cursor=0&sequences=6" if not train else "/batch?cursor=0&sequences=8")
        assert marks(answer) == ([1, 9, 1, 8] if train else [1, 1, 8])
        first = answer["batch"][0]
        assert first["versions"] == [[[4, 2]], [[5, 2]]]
        assert first["inference_logprobs"] == [[1.0, -0.5, -1.0], [1.0, -0.5, -1.25]]
        assert answer["batch"][-2]["inference_logprobs"] == [[1.0, -9.0, -9.0]] * 2, "posted log-probabilities stay"
        assert api.get("/counts")["dropped"] == ({} if train else {"unmatched": 1})
        assert "toprope_api_unmatched_total 1" in api.raw("GET", "/metrics")[2].decode()
    notes = [record.note for record in FileJournal(tmp_path / "journal").iterate() if record.size]
    assert [(note.oldest_version, note.unmatched) for note in notes] == [
        (4, False), (None, True), (4, False), (6, False),
    ]  # fmt: skip


def test_matched_versions_obey_max_staleness(tmp_path: Path) -> None:
    index, matcher = SampleIndex(), InferenceMatcher(SECRET)
    index.add([1], Sample([2, 3], [-0.5, -0.5], [(1, 2)], "", "stop"))
    index.add([7], Sample([2, 3], [-0.5, -0.5], [(9, 2)], "", "stop"))
    with inference(index) as url, served(tmp_path / "journal", matcher=matcher, max_staleness=3) as api:
        registered(api)
        matcher.connect(url)
        for mark in (1, 7):
            api.post("/scored_data", outside(mark))
        assert marks(api.get("/batch?cursor=0&sequences=2&version=9")) == [7]
        assert api.get("/counts")["dropped"] == {"stale": 1}


def test_missing_inference_server_does_not_block_posts(tmp_path: Path) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        matcher = InferenceMatcher(SECRET)
        with served(tmp_path / "journal", matcher=matcher) as api:
            registered(api)
            api.post("/scored_data", outside(1))
            assert api.get("/counts")["unmatched"] == 0, "no address, so nothing was looked up"
            matcher.connect(f"http://127.0.0.1:{nobody.getsockname()[1]}")
            for mark in (2, 3):
                api.post("/scored_data", outside(mark))
            assert api.get("/counts")["unmatched"] == 2


def test_repeated_post_of_matched_group_is_one_group(tmp_path: Path) -> None:
    index, matcher = SampleIndex(), InferenceMatcher(SECRET)
    index.add([1], Sample([2, 3], [-0.5, -0.5], [(1, 2)], "", "stop"))
    with inference(index) as url, served(tmp_path / "journal", matcher=matcher) as api:
        registered(api)
        matcher.connect(url)
        api.post("/scored_data", outside(1))
    with served(tmp_path / "journal") as api:  # as if the API had been killed before its answer
        assert api.post("/scored_data", outside(1))["sequence_number"] == 1


def test_sampled_spans_are_runs_of_unmasked_tokens() -> None:
    assert sampled_spans([-100, 5, 6, -100, 7]) == [(1, 3), (4, 5)]
    assert sampled_spans([5, -100]) == [(0, 1)]
    assert sampled_spans([-100]) == []


def test_samples_are_found_by_their_ids_and_prompt() -> None:
    index = SampleIndex(end_ids=frozenset({0}))
    index.add([1, 2], Sample([5, 6, 0], [-1.0, -2.0, -3.0], [(3, 3)], "", "stop"))
    index.add([1, 2, 5, 6, 0, 9], Sample([7], [-4.0], [(4, 1)], "", "stop"))
    both = index.match(SoughtRow([1, 2, 5, 6, 0, 9, 7], [(2, 5), (6, 7)]))
    assert both is not None
    assert (both.versions, both.logprobs) == ([(3, 3), (4, 1)], [-1.0, -2.0, -3.0, -4.0])
    cut = index.match(SoughtRow([1, 2, 5, 6], [(2, 4)]))
    assert cut is not None and cut.logprobs == [-1.0, -2.0], "an environment may leave out the end token"
    assert cut.versions == [(3, 2)]
    for tokens, spans in (([1, 2, 5, 6, 0, 9, 8], [(2, 5), (6, 7)]), ([2, 2, 5, 6, 0], [(2, 5)])):
        assert index.match(SoughtRow(tokens, spans)) is None
    assert index.match(SoughtRow([1, 2], [])) == MatchedRow([], []), "nothing was sampled, so nothing is missing"
    long = list(range(10, 40))
    index.add([1], Sample(long, [-1.0] * 30, [(5, 20), (6, 10)], "", "stop"))
    found = index.match(SoughtRow([3, 3, *long], [(2, 32)]))
    assert found is not None and found.versions == [(5, 20), (6, 10)], "a long sample is recognised without its prompt"


def test_oldest_samples_are_forgotten_first() -> None:
    index = SampleIndex(limit=10)
    for token in range(8):
        index.add([1], Sample([token, 50], [-1.0, -1.0], [(token, 2)], "", "stop"))
    assert index.tokens == 10
    known = [index.match(SoughtRow([1, token, 50], [(1, 3)])) is not None for token in range(8)]
    assert known == [False] * 3 + [True] * 5


def test_answers_that_end_with_an_end_token_take_their_own_room_once() -> None:
    index = SampleIndex(limit=10, end_ids=frozenset({0}))
    for token in range(5, 9):
        index.add([1], Sample([token, 50, 51, 52, 0], [-1.0] * 5, [(token, 5)], "", "stop"))
    assert index.tokens == 10
    for end in (5, 6):
        rows = [SoughtRow([1, token, 50, 51, 52, 0], [(1, end)]) for token in range(5, 9)]
        found = [index.match(row) for row in rows]
        assert [one and one.versions for one in found] == [None, None, [(7, end - 1)], [(8, end - 1)]]
        assert [one and len(one.logprobs) for one in found[2:]] == [end - 1] * 2


def test_row_without_sampled_tokens_leaves_its_group_matched(tmp_path: Path) -> None:
    index, matcher = SampleIndex(), InferenceMatcher(SECRET)
    index.add([1], Sample([2, 3], [-0.5, -0.25], [(4, 2)], "", "stop"))
    with inference(index) as url, served(tmp_path / "journal", matcher=matcher) as api:
        registered(api)
        matcher.connect(url)
        api.post("/scored_data", outside(1, masks=[[-100, 2, 3], [-100, -100, -100]]))
        assert api.get("/counts")["unmatched"] == 0
        [posted] = api.get("/batch?cursor=0&sequences=2")["batch"]
    assert posted["versions"] == [[[4, 2]], []]


def test_inconsistent_answer_marks_group_as_unmatched(tmp_path: Path) -> None:
    class InconsistentIndex(SampleIndex):
        def match(self, row: SoughtRow) -> Any:
            return {"versions": [[1, 7]], "logprobs": [0.0]}

    async def main() -> None:
        matcher = InferenceMatcher(SECRET)
        post = GroupValidator().validate(json.dumps(outside(1)).encode())
        with inference(InconsistentIndex()) as url:
            matcher.connect(url)
            await matcher.match([post])
        assert post.note.unmatched and post.body == post.posted
        await matcher.close()

    asyncio.run(main())
