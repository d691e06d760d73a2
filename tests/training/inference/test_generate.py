"""POST /generate in the dialects of sglang and vLLM, and matching of samples for outside environments."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.training.inference.conftest import SECRET
from toprope.training.inference.app import InferenceServer
from toprope.training.inference.dialect import BadRequest
from toprope.training.inference.embedded_engine import EmbeddedEngine
from toprope.training.inference.generate import parse_generate


@pytest.fixture
def http(engine: EmbeddedEngine, tokenizer: Any) -> Iterator[TestClient]:
    with TestClient(InferenceServer(engine, tokenizer, model_name="tiny", secret=SECRET).app) as client:
        client.headers["authorization"] = f"Bearer {SECRET}.outside"
        yield client


def test_sglang_gets_one_answer_or_a_list(http: TestClient) -> None:
    params = {"max_new_tokens": 5, "temperature": 1.0, "n": 3}
    body = {"input_ids": [5, 6, 7], "sampling_params": params, "return_logprob": True}
    answers = http.post("/generate", json=body).json()
    assert len(answers) == 3
    for answer in answers:
        meta = answer["meta_info"]
        assert [item[1] for item in meta["output_token_logprobs"]] == answer["output_ids"]
        assert all(item[0] <= 0 for item in meta["output_token_logprobs"])
        assert meta["finish_reason"]["type"] in ("stop", "length") and meta["prompt_tokens"] == 3
    single = http.post("/generate", json={"text": "abc", "sampling_params": {"max_new_tokens": 2}}).json()
    assert 1 <= len(single["output_ids"]) <= 2


def test_vllm_gets_parallel_lists(http: TestClient) -> None:
    body = {"prompt": {"prompt_token_ids": [5, 6, 7]}, "logprobs": 0, "n": 2, "max_tokens": 4, "temperature": 0.7}
    answer = http.post("/generate", json=body).json()
    assert len(answer["logprobs"]) == len(answer["finish_reasons"]) == len(answer["text"]) == 2
    for row, ids in zip(answer["logprobs"], answer["token_ids"], strict=True):
        assert [int(next(iter(item[0]))) for item in row] == ids


def test_samples_of_outside_key_are_matched_without_session(http: TestClient) -> None:
    body = {"prompt": {"prompt_token_ids": [9, 10]}, "logprobs": 0, "n": 2, "max_tokens": 6}
    answer = http.post("/generate", json=body).json()
    completion = http.post("/v1/completions", json={
        "prompt": [[9, 11], [9, 12]], "max_tokens": 6, "return_token_ids": True
    }).json()  # fmt: skip
    chat = http.post("/v1/chat/completions", json={
        "messages": [{"role": "user", "content": "hi"}], "max_tokens": 6, "return_token_ids": True
    }).json()  # fmt: skip
    sampled = [([9, 10], ids) for ids in answer["token_ids"]]
    sampled += [([9, 11 + n], choice["token_ids"]) for n, choice in enumerate(completion["choices"])]
    sampled += [(chat["prompt_token_ids"], chat["choices"][0]["token_ids"])]
    rows = [{"tokens": [*before, *ids], "spans": [[len(before), len(before) + len(ids)]]} for before, ids in sampled]
    rows.append({"tokens": [9, 10, 250, 250], "spans": [[2, 4]]})
    found = http.post("/v1/samples/match", json={"rows": rows}).json()["rows"]
    assert found[-1] is None and None not in found[:-1]
    for row, (_, ids) in zip(found, sampled, strict=False):
        assert row["versions"] == [[0, len(ids)]] and len(row["logprobs"]) == len(ids)
    assert http.get("/v1/policy").json()["sessions"] == 0
    assert http.get("/v1/sessions/outside").status_code == 404


def test_samples_of_bare_secret_are_not_kept(http: TestClient) -> None:
    own = {"authorization": f"Bearer {SECRET}"}
    body = {"prompt": {"prompt_token_ids": [20, 21]}, "max_tokens": 12}
    ids = http.post("/generate", json=body, headers=own).json()["token_ids"][0]
    row = {"tokens": [20, 21, *ids], "spans": [[2, 2 + len(ids)]]}
    assert http.post("/v1/samples/match", json={"rows": [row]}).json()["rows"] == [None]


def test_only_health_needs_no_key(http: TestClient) -> None:
    nobody = {"authorization": ""}
    for path in ("/health", "/health_generate"):
        assert http.get(path, headers=nobody).status_code == 200
    for path in ("/generate", "/v1/samples/match"):
        assert http.post(path, json={}, headers=nobody).status_code == 401


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {}),
        ("/generate", {"prompt": {"other": 1}}),
        ("/generate", {"prompt": [1.5]}),
        ("/generate", {"prompt": {"prompt_token_ids": [10_000]}}),
        ("/generate", {"prompt": "a", "prompt_logprobs": 1}),
        ("/generate", {"input_ids": []}),
        ("/generate", {"input_ids": [5], "sampling_params": {"n": 0}}),
        ("/generate", {"input_ids": [5], "stream": True}),
        ("/generate", {"input_ids": "abc"}),
        ("/v1/samples/match", {"rows": [{"tokens": [1], "spans": [[0, 2]]}]}),
        ("/v1/samples/match", {"rows": [{"tokens": [1], "spans": [[1, 1]]}]}),
    ],
)
def test_invalid_requests_are_refused_with_reason(http: TestClient, path: str, body: dict[str, Any]) -> None:
    answer = http.post(path, json=body)
    assert answer.status_code == 400 and answer.json()["error"]["message"]


def test_settings_of_other_servers_are_left_out_and_told_once(
    http: TestClient, capfd: pytest.CaptureFixture[str]
) -> None:
    neutral = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "min_new_tokens": 0, "frequency_penalty": 0.0}
    named = {"top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1}
    for _ in range(2):
        for params in (neutral, named):
            body = {"input_ids": [5], "sampling_params": {"max_new_tokens": 2, **params}}
            assert http.post("/generate", json=body).status_code == 200
    body = {"prompt": "a", "max_tokens": 2, "top_k": 0, "min_tokens": 2}
    assert http.post("/generate", json=body).status_code == 200
    told = [line.partition(":")[0] for line in capfd.readouterr().err.splitlines() if "left out" in line]
    assert told == ["top_k", "min_p", "repetition_penalty", "min_tokens"]


def test_dialects_are_distinguished_by_fields() -> None:
    assert parse_generate(b'{"text":"a"}').sglang
    assert not parse_generate(b'{"prompt":"a"}').sglang
    with pytest.raises(BadRequest):
        parse_generate(b'{"prompt":{"prompt_token_ids":[true]}}')
