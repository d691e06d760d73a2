"""The dialects of Atropos's server types sglang and vllm, and what outside environments sampled, found again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from toprope.training.inference.dialect import BadRequest
from toprope.training.inference.generate import parse_generate

SECRET = "s3cret"


@pytest.fixture(scope="module")
def http(tiny_policy: Path) -> Iterator[Any]:
    import torch
    from starlette.testclient import TestClient
    from transformers import AutoModelForCausalLM

    from toprope.training.inference.app import InferenceServer
    from toprope.training.inference.engine import Engine
    from toprope.training.policy.loading import load_tokenizer

    model = AutoModelForCausalLM.from_pretrained(tiny_policy, dtype=torch.float32).eval()
    tokenizer = load_tokenizer(tiny_policy)
    engine = Engine(model, tokenizer, max_context=64)
    engine.start()
    with TestClient(InferenceServer(engine, tokenizer, model_name="tiny", secret=SECRET).app) as client:
        client.headers["authorization"] = f"Bearer {SECRET}.outside"
        yield client
    engine.stop()


def test_sglang_gets_one_answer_or_a_list(http: Any) -> None:
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


def test_vllm_gets_parallel_lists(http: Any) -> None:
    body = {"prompt": {"prompt_token_ids": [5, 6, 7]}, "logprobs": 0, "n": 2, "max_tokens": 4, "temperature": 0.7}
    answer = http.post("/generate", json=body).json()
    assert len(answer["logprobs"]) == len(answer["finish_reasons"]) == len(answer["text"]) == 2
    for row, ids in zip(answer["logprobs"], answer["token_ids"], strict=True):
        assert [int(next(iter(item[0]))) for item in row] == ids


def test_what_was_sampled_under_an_outside_key_is_found_again_and_makes_no_session(http: Any) -> None:
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


def test_a_key_without_a_session_leaves_nothing_to_find(http: Any) -> None:
    own = {"authorization": f"Bearer {SECRET}"}
    body = {"prompt": {"prompt_token_ids": [20, 21]}, "max_tokens": 12}
    ids = http.post("/generate", json=body, headers=own).json()["token_ids"][0]
    row = {"tokens": [20, 21, *ids], "spans": [[2, 2 + len(ids)]]}
    assert http.post("/v1/samples/match", json={"rows": [row]}).json()["rows"] == [None]


def test_health_is_open_and_the_rest_is_not(http: Any) -> None:
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
def test_what_cannot_be_done_is_refused_with_the_reason(http: Any, path: str, body: dict[str, Any]) -> None:
    answer = http.post(path, json=body)
    assert answer.status_code == 400 and answer.json()["error"]["message"]


def test_both_dialects_are_told_apart() -> None:
    assert parse_generate(b'{"text":"a"}').sglang
    assert not parse_generate(b'{"prompt":"a"}').sglang
    with pytest.raises(BadRequest):
        parse_generate(b'{"prompt":{"prompt_token_ids":[true]}}')
