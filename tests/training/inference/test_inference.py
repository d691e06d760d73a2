"""The inference component: what it samples is what it says it sampled, under every session and setting."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from toprope.records.journal.groups import MASKED, PROMPT_LOGPROB
from toprope.training.component.http_server import serve
from toprope.training.inference.app import InferenceServer
from toprope.training.inference.client import PolicyClient, Sampling, SessionLost
from toprope.training.inference.engine import Engine, Request, Sample
from toprope.training.inference.sessions import SessionStore, Turn, join_turns
from toprope.training.policy.loading import load_tokenizer
from toprope.training.policy.weight_sync import WeightFile, WeightReader

SECRET = "s3cret"


@pytest.fixture(scope="module")
def model(tiny_policy: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_policy, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer(tiny_policy: Path) -> Any:
    return load_tokenizer(tiny_policy)


@pytest.fixture
def engine(model: Any, tokenizer: Any):
    engine = Engine(model, tokenizer, max_context=64)
    engine.start()
    yield engine
    engine.stop()


def ask(engine: Engine, *requests: Request) -> list[list[Sample]]:
    answers: queue.Queue[tuple[int, Any]] = queue.Queue()
    for index, request in enumerate(requests):
        engine.submit(request, lambda result, index=index: answers.put((index, result)))
    got = dict(answers.get(timeout=30) for _ in requests)
    for result in got.values():
        if isinstance(result, Exception):
            raise result
    return [got[index] for index in range(len(requests))]


def reference_logprobs(model: Any, prompt: list[int], answer: list[int], temperature: float = 1.0) -> torch.Tensor:
    with torch.no_grad():
        logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1] / temperature
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(answer).unsqueeze(1)).squeeze(1)


def test_logprobs_are_those_of_the_model_in_a_mixed_batch(engine: Engine, model: Any) -> None:
    requests = [
        Request([5, 6, 7], n=5, max_new_tokens=9),
        Request([9] * 17, n=3, max_new_tokens=20, temperature=0.7),
        Request([30, 31], n=1, max_new_tokens=4, temperature=0.0),
    ]
    answers = ask(engine, *requests)
    assert [len(answer) for answer in answers] == [5, 3, 1]
    for request, samples in zip(requests, answers, strict=True):
        for sample in samples:
            expected = reference_logprobs(model, request.prompt_ids, sample.token_ids, request.temperature or 1.0)
            assert torch.allclose(torch.tensor(sample.logprobs), expected, atol=2e-4)
            assert sample.finish_reason == ("stop" if sample.token_ids[-1] == 1 else "length")
            assert len(sample.token_ids) <= request.max_new_tokens


def test_greedy_takes_the_most_likely_token(engine: Engine, model: Any) -> None:
    [[sample]] = ask(engine, Request([5, 6, 7, 8], max_new_tokens=6, temperature=0.0))
    ids = [5, 6, 7, 8]
    for token in sample.token_ids:
        with torch.no_grad():
            assert int(model(torch.tensor([ids])).logits[0, -1].argmax()) == token
        ids.append(token)


def test_nucleus_keeps_to_the_likely_tokens(engine: Engine, model: Any) -> None:
    [samples] = ask(engine, Request([5, 6], n=64, max_new_tokens=1, top_p=0.05))
    with torch.no_grad():
        weights = torch.softmax(model(torch.tensor([[5, 6]])).logits[0, -1], -1)
    ordered, order = weights.sort(descending=True)
    allowed = set(order[(ordered.cumsum(0) - ordered) < 0.05].tolist())
    drawn = {sample.token_ids[0] for sample in samples}
    assert drawn <= allowed
    assert len(drawn) > 1


def test_a_seed_fixes_the_answer_whatever_else_is_asked(engine: Engine) -> None:
    seeded = Request([5, 6, 7], n=2, max_new_tokens=8, seed=7)
    [alone] = ask(engine, seeded)
    with_others = ask(engine, Request([8, 9], n=4, max_new_tokens=3), seeded, Request([4] * 9, n=2, max_new_tokens=12))
    assert [sample.token_ids for sample in alone] == [sample.token_ids for sample in with_others[1]]


def test_stop_text_ends_the_answer_and_is_not_part_of_it(engine: Engine, tokenizer: Any) -> None:
    [[free]] = ask(engine, Request([5, 6, 7], max_new_tokens=12, seed=3))
    word = next(letter for letter in free.text if letter.isascii())
    [[stopped]] = ask(engine, Request([5, 6, 7], max_new_tokens=12, seed=3, stop=[word]))
    assert stopped.finish_reason == "stop"
    assert stopped.text == free.text[: free.text.index(word)]
    assert word in tokenizer.decode(stopped.token_ids)


def test_an_error_in_a_batch_is_an_answer_and_the_next_batch_is_fine(engine: Engine) -> None:
    with pytest.raises(IndexError):
        ask(engine, Request([10_000], max_new_tokens=2))
    [[sample]] = ask(engine, Request([5], max_new_tokens=2))
    assert sample.token_ids


def test_new_weights_are_taken_between_batches_and_named(tiny_policy: Path, tokenizer: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    trained = AutoModelForCausalLM.from_pretrained(tiny_policy, dtype=torch.float32)
    served = AutoModelForCausalLM.from_pretrained(tiny_policy, dtype=torch.float32).eval()
    served.requires_grad_(False)
    engine = Engine(served, tokenizer, weights=WeightReader(tmp_path, dict(served.named_parameters())))
    engine.start()
    try:
        [[before]] = ask(engine, Request([5, 6], max_new_tokens=5, temperature=0.0))
        publisher = WeightFile(tmp_path, dict(trained.named_parameters()))
        with torch.no_grad():
            for parameter in trained.parameters():
                parameter.mul_(-1.5)
        assert publisher.publish() == 1
        [[after]] = ask(engine, Request([5, 6], max_new_tokens=5, temperature=0.0))
    finally:
        engine.stop()
    assert (before.version, after.version) == (0, 1)
    expected = reference_logprobs(trained, [5, 6], after.token_ids)
    assert torch.allclose(torch.tensor(after.logprobs), expected, atol=2e-4)


def test_a_reader_that_lags_many_versions_gets_the_newest(tmp_path: Path) -> None:
    live, copy = {"w": torch.zeros(3)}, {"w": torch.zeros(3)}
    publisher, reader = WeightFile(tmp_path, live), WeightReader(tmp_path, copy)
    for number in range(1, 8):
        live["w"].fill_(number)
        publisher.publish()
    assert reader.refresh() == 7
    assert copy["w"].tolist() == [7.0, 7.0, 7.0]
    assert reader.refresh() == 7


def test_a_later_trainer_takes_over_from_whatever_version_it_has(tmp_path: Path) -> None:
    """The first one's file is not touched, since it may be read; an earlier number does not hide newer weights."""
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


def test_a_model_of_another_number_format_takes_the_weights(tmp_path: Path) -> None:
    copy = {"w": torch.zeros(3, dtype=torch.bfloat16)}
    WeightFile(tmp_path, {"w": torch.tensor([1.0, 2.5, -3.0])}).publish()
    assert WeightReader(tmp_path, copy).refresh() == 1
    assert copy["w"].tolist() == [1.0, 2.5, -3.0]


def turn(prompt: list[int], completion: list[int], version: int = 0) -> Turn:
    return Turn(prompt, completion, [-0.5] * len(completion), [(version, len(completion))], "stop")


def test_turns_that_extend_each_other_join_and_others_become_segments() -> None:
    first, second = turn([1, 2], [3, 4], 1), turn([1, 2, 3, 4, 9], [5], 2)
    other = turn([1, 2, 8], [6], 3)
    joined, alone = join_turns([first, second, other])
    assert joined.tokens == [1, 2, 3, 4, 9, 5]
    assert joined.masks == [MASKED, MASKED, 3, 4, MASKED, 5]
    assert joined.logprobs == [PROMPT_LOGPROB, PROMPT_LOGPROB, -0.5, -0.5, PROMPT_LOGPROB, -0.5]
    assert joined.versions == [(1, 2), (2, 1)]
    assert alone.tokens == [1, 2, 8, 6]


def test_sessions_are_bounded_and_closed_with_their_sub_sessions() -> None:
    store = SessionStore(limit=3)
    for index in range(3):
        store.record(f"g/{index}", turn([1], [2]))
    assert sorted(store.matching("g")) == ["g/0", "g/1", "g/2"]
    store.record("h", turn([1], [2]))
    assert sorted(store.matching("g")) == ["g/1", "g/2"]
    assert store.close("h") == 1
    assert store.get("h") is None
    assert store.close("g") == 2  # g/0 is missing, the others go all the same
    assert len(store) == 0


@pytest.fixture
def http(engine: Engine, tokenizer: Any):
    from starlette.testclient import TestClient

    server = InferenceServer(engine, tokenizer, model_name="tiny", secret=SECRET)
    with TestClient(server.app) as client:
        client.headers["authorization"] = f"Bearer {SECRET}"
        yield client


def test_only_the_key_opens_the_door(http: Any) -> None:
    assert http.get("/health", headers={"authorization": ""}).status_code == 200
    for key in ("", "Bearer wrong", "Bearer", f"Basic {SECRET}", f"Bearer {SECRET}x"):
        answer = http.get("/v1/models", headers={"authorization": key})
        assert answer.status_code == 401
        assert "key" in answer.json()["error"]["message"]
    assert http.get("/v1/models").json()["data"][0]["id"] == "tiny"


def test_chat_answers_in_openais_dialect_with_what_training_needs(http: Any, tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "hello"}]
    body = {"messages": messages, "n": 3, "max_tokens": 5, "logprobs": True, "return_token_ids": True}
    answer = http.post("/v1/chat/completions", json=body).json()
    assert answer["object"] == "chat.completion"
    assert answer["system_fingerprint"] == "policy-v0"
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert tokenizer.decode(answer["prompt_token_ids"]) == text
    assert [entry["index"] for entry in answer["choices"]] == [0, 1, 2]
    for entry in answer["choices"]:
        assert tokenizer.decode(entry["token_ids"], skip_special_tokens=True) == entry["message"]["content"]
        assert [token["logprob"] for token in entry["logprobs"]["content"]] == entry["token_logprobs"]
        assert entry["versions"] == [[0, len(entry["token_ids"])]]
    assert answer["usage"]["completion_tokens"] == sum(len(entry["token_ids"]) for entry in answer["choices"])


def test_completions_take_texts_and_ids(http: Any, tokenizer: Any) -> None:
    ids = tokenizer("abc", add_special_tokens=False)["input_ids"]
    body = {"max_tokens": 4, "temperature": 0, "return_token_ids": True}
    by_text = http.post("/v1/completions", json=body | {"prompt": "abc"}).json()
    by_ids = http.post("/v1/completions", json=body | {"prompt": ids}).json()
    several = http.post("/v1/completions", json=body | {"prompt": [ids, ids]}).json()
    assert by_text["choices"][0]["token_ids"] == by_ids["choices"][0]["token_ids"]
    assert [entry["token_ids"] for entry in several["choices"]] == [by_ids["choices"][0]["token_ids"]] * 2


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({"messages": [{"role": "user", "content": "x" * 80}]}, "no room for an answer"),
        ({"messages": [{"role": "user", "content": "x"}], "n": 0}, "n must be"),
        ({"messages": [{"role": "user", "content": "x"}], "temperature": 9}, "temperature must be"),
        ({"messages": [{"role": "user", "content": "x"}], "tool_choice": "required"}, "tool_choice"),
        ({"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "json_object"}}, "in words"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "text alone"),
        ({"messages": [{"role": "assistant", "content": None, "tool_calls": [{"id": "x"}]}]}, "tool_calls are a list"),
        ({"messages": "x"}, "not what this endpoint takes"),
        ({}, "not what this endpoint takes"),
    ],
)
def test_refusals_say_why(http: Any, body: dict[str, Any], why: str) -> None:
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert why in answer.json()["error"]["message"]


def test_ids_outside_the_vocabulary_are_refused(http: Any) -> None:
    answer = http.post("/v1/completions", json={"prompt": [99_999]})
    assert answer.status_code == 400
    assert "token ids must be between" in answer.json()["error"]["message"]


def test_a_sessions_later_turn_keeps_the_sampled_ids(http: Any) -> None:
    """Over two turns, for a group of three: each answer's second prompt begins with what was sampled for it."""
    messages = [{"role": "user", "content": "hi"}]
    group = {"authorization": f"Bearer {SECRET}.g1"}
    first = http.post(
        "/v1/chat/completions",
        json={"messages": messages, "n": 3, "max_tokens": 4, "return_token_ids": True},
        headers=group,
    ).json()
    for index, entry in enumerate(first["choices"]):
        longer = [*messages, entry["message"], {"role": "user", "content": "more"}]
        second = http.post(
            "/v1/chat/completions",
            json={"messages": longer, "max_tokens": 3, "return_token_ids": True},
            headers={"authorization": f"Bearer {SECRET}.g1/{index}"},
        ).json()
        before = first["prompt_token_ids"] + entry["token_ids"]
        assert second["prompt_token_ids"][: len(before)] == before
        kept = http.get(f"/v1/sessions/g1/{index}").json()["sessions"][f"g1/{index}"]
        assert len(kept["turns"]) == 2
        [segment] = kept["segments"]
        assert segment["tokens"] == second["prompt_token_ids"] + second["choices"][0]["token_ids"]
        assert sum(mask != MASKED for mask in segment["masks"]) == len(entry["token_ids"]) + len(
            second["choices"][0]["token_ids"]
        )
    assert http.delete("/v1/sessions/g1").json() == {"closed": 3}
    assert http.get("/v1/sessions/g1").status_code == 404


def test_the_bare_secret_records_nothing(http: Any) -> None:
    http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2})
    assert http.get("/v1/policy").json()["sessions"] == 0


def test_adapters_travel_from_trainer_to_inference(tiny_policy: Path, tokenizer: Any, tmp_path: Path) -> None:
    """With LoRA only adapters are published, and the served policy is the trained one."""
    from toprope.settings.schema import Config
    from toprope.training.policy.loading import load_model

    config = Config()
    config.launcher.device, config.policy.lora, config.policy.lora_rank = "cpu", True, 4
    trained, served = load_model(tiny_policy, config, trained=True), load_model(tiny_policy, config).eval()
    served.requires_grad_(False)
    parameters = {name: value for name, value in trained.named_parameters() if value.requires_grad}
    assert all("lora_" in name for name in parameters)
    publisher = WeightFile(tmp_path, parameters)
    with torch.no_grad():
        for value in parameters.values():
            value.add_(0.3 * torch.randn_like(value))
    publisher.publish()
    engine = Engine(served, tokenizer, weights=WeightReader(tmp_path, dict(served.named_parameters())))
    engine.start()
    try:
        [[sample]] = ask(engine, Request([5, 6, 7], max_new_tokens=8))
    finally:
        engine.stop()
    expected = reference_logprobs(trained.eval(), [5, 6, 7], sample.token_ids)
    assert sample.version == 1
    assert torch.allclose(torch.tensor(sample.logprobs), expected, atol=2e-4)
    base = reference_logprobs(load_model(tiny_policy, Config()).eval(), [5, 6, 7], sample.token_ids)
    assert not torch.allclose(expected, base, atol=1e-2)


def test_a_server_that_takes_the_place_of_another_refuses_its_sessions_and_answers_all_else(
    engine: Engine, tokenizer: Any
) -> None:
    """The client is told the new address while it waits; what had been sampled under the session is gone."""
    first, second = (InferenceServer(engine, tokenizer, model_name="policy", secret=SECRET) for _ in range(2))
    where: list[str | None] = [None]
    messages = [{"role": "user", "content": "hi"}]
    sampling = Sampling(1.0, 1.0, 4)

    async def serving(server: InferenceServer, ending: asyncio.Event) -> str:
        address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        tasks.append(asyncio.create_task(serve(server.app, address.set_result, ending)))
        return await address

    async def work() -> None:
        client = PolicyClient(lambda: where[0], SECRET)
        endings = [asyncio.Event(), asyncio.Event()]
        try:
            asked = asyncio.create_task(client.chat(messages, sampling, n=2, session="g"))
            await asyncio.sleep(0.05)
            assert not asked.done()
            where[0] = await serving(first, endings[0])
            assert len(await asked) == 2
            assert await client.chat(messages, sampling, session="g/1")
            where[0] = None
            endings[0].set()
            await tasks[0]
            asked = asyncio.create_task(client.chat(messages, sampling, n=2))
            where[0] = await serving(second, endings[1])
            assert len(await asked) == 2
            with pytest.raises(SessionLost):
                await client.chat(messages, sampling, session="g/1")
            await client.close_session("g")
            assert await client.chat(messages, sampling, session="g/1"), "a name that was closed is free again"
        finally:
            await client.close()
            for ending in endings:
                ending.set()
            await asyncio.gather(*tasks)

    tasks: list[asyncio.Task[None]] = []
    asyncio.run(asyncio.wait_for(work(), 60))


def test_an_engine_that_is_stuck_does_not_move_and_an_idle_one_does(model: Any, tokenizer: Any) -> None:
    entered, go_on = threading.Event(), threading.Event()

    class Stuck:
        """The model, whose first pass lasts until it is let."""

        device, generation_config = model.device, model.generation_config

        def __call__(self, **arguments: Any) -> Any:
            if not entered.is_set():
                entered.set()
                go_on.wait(60)
            return model(**arguments)

    engine = Engine(Stuck(), tokenizer, max_context=64)
    assert not engine.moves(), "it was not started"
    engine.start()
    try:
        assert engine.moves() and engine.moves()
        answered: queue.Queue[Any] = queue.Queue()
        engine.submit(Request([5, 6], max_new_tokens=3), answered.put)
        assert entered.wait(60)
        assert engine.moves(), "it has come further since"
        assert not engine.moves()
        go_on.set()
        assert answered.get(timeout=60)
        limit = time.monotonic() + 30
        while not (engine.moves() and engine.moves()):
            assert time.monotonic() < limit
    finally:
        go_on.set()
        engine.stop()
