"""Environments that run their rollouts themselves: a real worker against a real inference server."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch

from tests.support.services.openai_stand_in import OpenAiStandIn
from toprope.errors import ComponentFailed
from toprope.sdk.errors import WorkerError
from toprope.sdk.wall import Wall, network_refusal
from toprope.sdk.wall.plan import Network
from toprope.settings.endpoints import Endpoint
from toprope.settings.sections.launcher import LauncherSection
from toprope.training.component.http_server import serve
from toprope.training.inference.app import InferenceServer
from toprope.training.inference.client import PolicyClient, Sampling
from toprope.training.inference.embedded_engine import EmbeddedEngine
from toprope.training.inference.sessions import Turn
from toprope.training.policy.loading import load_tokenizer
from toprope.training.rollouts.endpoint_client import EndpointClient, ModelFailed, Unanswered
from toprope.training.rollouts.endpoint_proxy import EndpointProxy
from toprope.training.rollouts.env_managed_sampler import EnvManagedSampler
from toprope.training.rollouts.group_sampler import TaskRef
from toprope.training.rollouts.workers.environment_worker import EnvironmentWorker
from toprope.training.rollouts.workers.restarting_worker import RestartingWorker

SECRET = "s3cret"
SAMPLING = Sampling(1.0, 1.0, 6)

TALK = '''
"""Two turns, one retry, one judge."""
import asyncio, json, os, urllib.error, urllib.request
from toprope.sdk import OwnLoop, Part, Played, Task

async def ask(session, messages, key=None, path="/chat/completions", n=1):
    body = {"model": session.model, "messages": messages, "max_tokens": session.max_tokens, "n": n}
    head = {"Authorization": f"Bearer {key or session.api_key}", "Content-Type": "application/json"}
    request = urllib.request.Request(session.base_url + path, json.dumps(body).encode(), head)
    def send():
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.loads(answer.read())["choices"][n // 2]["message"]
    return await asyncio.to_thread(send)

class Talk(OwnLoop):
    parts = {"kind": Part(), "length": Part(0.0, high=1000)}
    max_turns = 2

    def tasks(self):
        for number in range(60):
            yield Task(f"task {number}", reference=number)

    async def rollout(self, session):
        said = list(self.task.messages)
        if "task 3" in said[0]["content"]:
            raise ValueError("no task for me")
        if "task 4" in said[0]["content"]:
            await asyncio.sleep(60)
        if "task 5" in said[0]["content"]:
            os._exit(9)
        if "task 7" in said[0]["content"]:
            said.append(await ask(session, said, n=3))    # the second of three
            return Played({"kind": 1, "length": 1}, messages=said)
        await ask(session, said)                      # nobody takes this answer
        said.append(await ask(session, said))
        said.append({"role": "user", "content": "go on"})
        await ask(session, [{"role": "user", "content": "judge"}], session.judge_key)
        said.append(await ask(session, said))
        try:
            await ask(session, said, path="/../v1/sessions/g0")
        except urllib.error.HTTPError as error:
            assert error.code in (401, 404, 405), error.code
        return Played({"kind": 1, "length": len(said)}, messages=said, turns=2)
'''


@pytest.fixture(scope="module")
def engine(tiny_policy: Path):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_policy, dtype=torch.float32).eval()
    engine = EmbeddedEngine(model, load_tokenizer(tiny_policy), max_context=256)
    engine.start()
    yield engine
    engine.stop()


def run_with_worker(
    engine: EmbeddedEngine,
    tiny_policy: Path,
    folder: Path,
    body: Callable[[EnvManagedSampler, list[Any], Any], Awaitable[None]],
) -> None:
    """Runs `body` with a sampler, the reports of its worker, and the server."""
    (folder / "talk.py").write_text(TALK)
    server = InferenceServer(engine, load_tokenizer(tiny_policy), model_name="policy", secret=SECRET)

    async def opened() -> EnvironmentWorker:
        # With a network of its own, the worker reaches the policy and nothing else.
        network: Network = "allow" if network_refusal("own") else "own"
        link = await EnvironmentWorker.behind(Wall(reads=(str(folder),), network=network), timeout=60)
        await link.call("open", timeout=60, source={"file": str(folder / "talk.py"), "attribute": "Talk"})
        return link

    async def work() -> None:
        address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        ending, reports = asyncio.Event(), []
        serving = asyncio.create_task(serve(server.app, address.set_result, ending))
        policy = PolicyClient(await address, SECRET)
        section = LauncherSection(restart_backoff_s=0)
        async with await RestartingWorker.start(opened, section, reports.append) as worker:
            try:
                await body(EnvManagedSampler(worker, policy, multi_turn=True, call_timeout_s=30), reports, server)
            finally:
                await policy.close()
                ending.set()
                await serving

    asyncio.run(work())


async def numbers(sampler: EnvManagedSampler) -> dict[str, int]:
    """Index of each training task by its prompt."""
    link = await sampler.worker.current()
    found = (await link.call("tasks", split="train", start=0, count=100))["tasks"]
    return {task["messages"][0]["content"]: index for index, task in enumerate(found)}


def test_only_turns_of_the_outcome_are_trained(engine: EmbeddedEngine, tiny_policy: Path, tmp_path: Path) -> None:
    async def body(sampler: EnvManagedSampler, reports: list[Any], server: Any) -> None:
        places = await numbers(sampler)
        good = [places[name] for name in places if not name.startswith(("task 3", "task 4", "task 5", "task 7"))][:3]
        groups = await asyncio.gather(*(sampler.sample(TaskRef("train", index), 3, SAMPLING) for index in good))
        for made in groups:
            assert [outcome.error for outcome in made.outcomes] == [None] * 3
            assert [outcome.reward for outcome in made.outcomes] == [1.0] * 3
            assert made.outcomes[0].parts == {"kind": 1.0, "length": 4.0} and made.outcomes[0].turns == 2
            assert made.messages[0]["content"] == f"task {made.reference}", "judges see it"
            group = made.to_record("talk", "g")
            # A random policy samples special tokens, which clients drop, and bytes that are no text: such a
            # conversation is not continued.
            whole = [
                not any(token < 4 for token in turns[0].completion_ids[:-1])
                and "\ufffd" not in turns[0].completion_text
                for turns in made.turns
            ]
            for turns, plain in zip(made.turns, whole, strict=True):
                assert len(turns) == 2, "the retry and the judge are not in it"
                continued = turns[0].prompt_ids + turns[0].completion_ids
                assert not plain or turns[1].prompt_ids[: len(continued)] == continued
            assert len(group.tokens) <= 3 + whole.count(False), "two turns of a rollout are one sequence"
            assert all("assistant" in talk and "go on" in talk for talk in made.transcripts)
        assert len(server.sessions) == 0, "sessions are closed with their group"

    run_with_worker(engine, tiny_policy, tmp_path, body)


def test_chosen_answer_of_several_is_trained(engine: EmbeddedEngine, tiny_policy: Path, tmp_path: Path) -> None:
    async def body(sampler: EnvManagedSampler, reports: list[Any], server: Any) -> None:
        index = next(place for name, place in (await numbers(sampler)).items() if name.startswith("task 7"))
        made = await sampler.sample(TaskRef("train", index), 4, SAMPLING)
        assert [outcome.error for outcome in made.outcomes] == [None] * 4
        for turns, text in zip(made.turns, made.texts, strict=True):
            assert len(turns) == 1 and turns[0].completion_ids
            # A random policy samples special tokens, which clients drop.
            assert any(token < 4 for token in turns[0].completion_ids[:-1]) or text.strip() in turns[0].completion_text
        assert len(server.sessions) == 0

    run_with_worker(engine, tiny_policy, tmp_path, body)


def test_rollout_error_is_data_and_dead_worker_costs_one_group(
    engine: EmbeddedEngine, tiny_policy: Path, tmp_path: Path
) -> None:
    async def body(sampler: EnvManagedSampler, reports: list[Any], server: Any) -> None:
        places = await numbers(sampler)
        raising, sleeping, dying, fine = (
            next(index for name, index in places.items() if name.startswith(start))
            for start in ("task 3", "task 4", "task 5", "task 6")
        )
        made = await sampler.sample(TaskRef("train", raising), 2, SAMPLING)
        assert all("no task for me" in (outcome.error or "") for outcome in made.outcomes)
        assert made.outcomes[0].reward == 0.0
        sampler.rollout_timeout_s = 0.5
        made = await sampler.sample(TaskRef("train", sleeping), 2, SAMPLING)
        assert all("longer than 0.5 s" in (outcome.error or "") for outcome in made.outcomes)
        sampler.rollout_timeout_s = 60.0
        neighbour, dead = await asyncio.gather(
            sampler.sample(TaskRef("train", fine), 2, SAMPLING),
            sampler.sample(TaskRef("train", dying), 2, SAMPLING),
            return_exceptions=True,
        )
        assert isinstance(dead, WorkerError) and dead.kind == "ended"
        assert not isinstance(neighbour, BaseException) or neighbour.kind == "ended"
        assert len(reports) >= 2
        made = await sampler.sample(TaskRef("train", fine), 2, SAMPLING)
        assert [outcome.error for outcome in made.outcomes] == [None, None]

    run_with_worker(engine, tiny_policy, tmp_path, body)


def test_fixed_answer_is_scored_by_a_scripted_policy(tmp_path: Path) -> None:
    (tmp_path / "talk.py").write_text(TALK)

    async def work() -> None:
        async with await EnvironmentWorker.start(timeout=60) as link:
            card = await link.call("open", timeout=60, source={"file": str(tmp_path / "talk.py"), "attribute": "Talk"})
            assert card["own_loop"]
            outcome = await link.call("score", timeout=60, split="heldout", index=0, answer="hello")
            assert outcome["error"] is None, outcome
            assert outcome["parts"] == {"kind": 1.0, "length": 4.0} and outcome["error"] is None
            with pytest.raises(WorkerError, match="`run`"):
                await link.call("begin", split="train", index=0, count=1)

    asyncio.run(work())


def test_endpoint_key_is_hidden_from_worker(tmp_path: Path) -> None:
    (tmp_path / "talk.py").write_text(TALK)
    stand_in = OpenAiStandIn(lambda question: f"heard {question[:6]}")
    key = "sk-very-secret-0123456789"

    async def opened() -> EnvironmentWorker:
        link = await EnvironmentWorker.start(timeout=60)
        await link.call("open", timeout=60, source={"file": str(tmp_path / "talk.py"), "attribute": "Talk"})
        return link

    async def work() -> None:
        async with await RestartingWorker.start(opened, LauncherSection(restart_backoff_s=0)) as worker:

            def sampler(model: str) -> tuple[EnvManagedSampler, EndpointClient]:
                client = EndpointClient(Endpoint(base_url=stand_in.url, model=model), key, None, tries=2)
                return EnvManagedSampler(worker, client, multi_turn=True, call_timeout_s=30), client

            good, client = sampler("priced")
            places = await numbers(good)
            fine = next(index for name, index in places.items() if name.startswith(("task 1", "task 2")))
            made = await good.sample(TaskRef("train", fine), 2, SAMPLING)
            assert [(outcome.error, outcome.reward) for outcome in made.outcomes] == [(None, 1.0)] * 2
            assert made.texts == ["heard go on"] * 2 and all("heard task" in talk for talk in made.transcripts)
            assert [len(turns) for turns in made.turns] == [2, 2], "neither the retry nor the judge"
            assert client.usage.cost_usd == 2.0
            sent = [body for _, told, body in stand_in.seen if told == f"Bearer {key}"]
            assert len(sent) == 8 and {body["max_tokens"] for body in sent} == {6}
            await client.close()
            for model, error in (("forbidden", ModelFailed), ("broken", Unanswered)):
                bad, client = sampler(model)
                with pytest.raises(error) as failure:
                    await bad.sample(TaskRef("train", fine), 2, SAMPLING)
                assert key not in str(failure.value)
                await client.close()

    try:
        asyncio.run(work())
    finally:
        stand_in.close()


PAIR = '''
"""Asks its opponent, and is right if that answers."""
from toprope.sdk import OwnLoop, Played, Task
from toprope.sdk.authoring.policy_client import ask

class Pair(OwnLoop):
    tags = ("self-play",)

    def tasks(self):
        for number in range(60):
            yield Task(f"task {number}")

    async def rollout(self, session):
        theirs = await ask(session.as_opponent(), self.task.messages)
        mine = await ask(session, [{"role": "user", "content": theirs["content"]}])
        return Played({"score": float("fixed" in theirs["content"])}, [{"role": "assistant", **mine}])
'''


def test_opponent_at_an_endpoint_is_asked_unrecorded_with_its_own_key(tmp_path: Path) -> None:
    (tmp_path / "pair.py").write_text(PAIR)
    policy, other = OpenAiStandIn(lambda question: "policy"), OpenAiStandIn(lambda question: "fixed")

    async def opened() -> EnvironmentWorker:
        link = await EnvironmentWorker.start(timeout=60)
        await link.call("open", timeout=60, source={"file": str(tmp_path / "pair.py"), "attribute": "Pair"})
        return link

    async def work() -> None:
        async with await RestartingWorker.start(opened, LauncherSection(restart_backoff_s=0)) as worker:
            own = EndpointClient(Endpoint(base_url=policy.url, model="m"), "sk-own", None)
            fixed = EndpointClient(Endpoint(base_url=other.url, model="n"), "sk-other", None)
            sampler = EnvManagedSampler(worker, own, multi_turn=True, call_timeout_s=30)
            sampler.opponent = fixed
            made = await sampler.sample(TaskRef("train", 0), 2, SAMPLING)
            assert [outcome.reward for outcome in made.outcomes] == [1.0, 1.0]
            assert [len(turns) for turns in made.turns] == [1, 1]
            assert {key for _, key, _ in policy.seen} == {"Bearer sk-own"} and len(policy.seen) == 2
            assert {key for _, key, _ in other.seen} == {"Bearer sk-other"} and len(other.seen) == 2
            sampler.opponent = True
            with pytest.raises(ComponentFailed, match="policy server"):
                await sampler.sample(TaskRef("train", 0), 2, SAMPLING)
            await own.close()
            await fixed.close()

    try:
        asyncio.run(work())
    finally:
        policy.close()
        other.close()


GRADED = '''
"""Asks the model that has a role."""
from dataclasses import replace

from toprope.sdk import OwnLoop, Played, Task
from toprope.sdk.authoring.policy_client import ask

class Graded(OwnLoop):
    tags = ("model-roles",)

    def tasks(self):
        for number in range(60):
            yield Task(f"task {number}")

    async def rollout(self, session):
        mine = await ask(session, self.task.messages)
        grader = session.roles["grader"]
        own = {"base_url": grader["base_url"], "api_key": grader["api_key"], "model": grader["model"]}
        asked = replace(session, stop=(), **own)
        verdict = await ask(asked, [{"role": "user", "content": mine["content"]}], max_tokens=900)
        return Played({"score": float(verdict["content"] == "good")}, [{"role": "assistant", **mine}])
'''


def test_model_with_a_role_is_asked_with_its_own_key_and_room(tmp_path: Path) -> None:
    (tmp_path / "graded.py").write_text(GRADED)
    policy, other = OpenAiStandIn(lambda question: "policy"), OpenAiStandIn(lambda question: "good")

    async def opened() -> EnvironmentWorker:
        link = await EnvironmentWorker.start(timeout=60)
        await link.call("open", timeout=60, source={"file": str(tmp_path / "graded.py"), "attribute": "Graded"})
        return link

    async def work() -> None:
        async with await RestartingWorker.start(opened, LauncherSection(restart_backoff_s=0)) as worker:
            own = EndpointClient(Endpoint(base_url=policy.url, model="m"), "sk-own", None)
            grader = EndpointClient(Endpoint(base_url=other.url, model="n"), "sk-grader", None)
            sampler = EnvManagedSampler(worker, own, multi_turn=True, call_timeout_s=30)
            sampler.roles = {"grader": grader}
            made = await sampler.sample(TaskRef("train", 0), 2, dataclasses.replace(SAMPLING, stop=("\n",)))
            assert [(outcome.error, outcome.reward) for outcome in made.outcomes] == [(None, 1.0)] * 2
            assert [len(turns) for turns in made.turns] == [1, 1], "verdicts are not recorded"
            assert all(body["stop"] == ["\n"] for _, _, body in policy.seen)
            assert not any("stop" in body for _, _, body in other.seen), "the policy's would cut a verdict"
            assert {key for _, key, _ in other.seen} == {"Bearer sk-grader"} and len(other.seen) == 2
            assert {body["max_tokens"] for _, _, body in other.seen} == {900}
            dead = EndpointClient(Endpoint(base_url="http://127.0.0.1:9/v1", model="gone"), None, None, tries=1)
            sampler.roles = {"grader": dead}
            with pytest.raises(Unanswered, match=r"^grader \(gone\): Not answered .* cannot be reached"):
                await sampler.sample(TaskRef("train", 0), 1, SAMPLING)
            for client in (own, grader, dead):
                await client.close()

    try:
        asyncio.run(work())
    finally:
        policy.close()
        other.close()


def test_proxy_accepts_rollout_keys_only_and_streams() -> None:
    stand_in = OpenAiStandIn(lambda question: "hm")

    async def work() -> None:
        client = EndpointClient(Endpoint(base_url=stand_in.url, model="right"), None, None)
        body = {"messages": [{"role": "user", "content": "x"}], "n": 2, "max_tokens": 99, "stream": True}
        async with EndpointProxy(client, 1, SAMPLING) as proxy, aiohttp.ClientSession() as http:
            for bad in ("", "Bearer x", f"Basic {proxy.keys[0]}"):
                headers = {"Authorization": bad}
                async with http.post(f"{proxy.url}/v1/chat/completions", json=body, headers=headers) as answer:
                    assert answer.status == 401
            headers = {"Authorization": f"Bearer {proxy.keys[0]}"}
            for wrong in ({"max_tokens": "many"}, {"temperature": []}, {"top_p": "high"}):
                async with http.post(f"{proxy.url}/v1/chat/completions", json=body | wrong, headers=headers) as answer:
                    assert answer.status == 400 and "must be numbers" in await answer.text()
            async with http.post(f"{proxy.url}/v1/completions", json={"prompt": "x"}, headers=headers) as answer:
                assert answer.status == 404 and "name a model that runs here" in await answer.text()
            async with http.get(f"{proxy.url}/v1/models/org/policy", headers=headers) as answer:
                found = await answer.json()
            async with http.get(f"{proxy.url}/v1/models", headers=headers) as answer:
                assert (await answer.json())["data"] == [found] and found["id"] == "policy"
            own = body | {"temperature": 0.2}
            async with http.post(f"{proxy.url}/v1/chat/completions", json=own, headers=headers) as answer:
                assert (await answer.text()).count('"content":"hm"') == 2 and stand_in.seen[-1][2]["temperature"] == 1.0
            assert [turn.completion_text for turn in proxy.turns[0]] == ["hm", "hm"]
            for wrong in (b"{", b'{"n": "x"}'):
                async with http.post(f"{proxy.url}/v1/chat/completions", data=wrong, headers=headers) as answer:
                    assert answer.status == 400
        await client.close()

    try:
        asyncio.run(work())
    finally:
        stand_in.close()


def test_rollouts_have_the_temperature_of_the_run_and_no_turns_of_a_killed_driver(
    engine: EmbeddedEngine, tiny_policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("toprope.training.rollouts.env_managed_sampler.outcome_turns", lambda turns, talk: turns)
    submit, seen = engine.submit, list[float]()
    monkeypatch.setattr(
        engine, "submit", lambda request, done: (seen.append(request.temperature), submit(request, done))
    )

    async def body(sampler: EnvManagedSampler, reports: list[Any], server: InferenceServer) -> None:
        server.sessions.record("g0/0", Turn([1], [2], [-0.1], [(0, 1)], "stop", "another task", "left open"))
        places = await numbers(sampler)
        fine = next(index for name, index in places.items() if name.startswith(("task 1", "task 2")))
        made = await sampler.sample(TaskRef("train", fine), 2, Sampling(0.7, 1.0, 6))
        assert [len(turns) for turns in made.turns] == [3, 3]
        assert sorted(seen) == [0.7] * 6 + [1.0] * 2, "judges keep their own"

    run_with_worker(engine, tiny_policy, tmp_path, body)


def test_scripted_policy_streams() -> None:
    import urllib.request

    from toprope.sdk.worker.scripted_policy import scripted_session

    with scripted_session("so be it") as session:
        body = b'{"messages": [], "stream": true}'
        with urllib.request.urlopen(f"{session.base_url}/chat/completions", body, timeout=30) as answer:
            assert answer.headers["Content-Type"] == "text/event-stream"
            lines = answer.read().decode().split("\n\n")
    assert '"delta": {"role": "assistant", "content": "so be it"}' in lines[0] and lines[2] == "data: [DONE]"
