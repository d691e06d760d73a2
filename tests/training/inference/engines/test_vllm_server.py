"""A real vLLM server: its adapters, and that it cannot sleep on a CPU."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.training_api_server import until
from tests.training.inference.conftest import sample
from tests.training.inference.test_conformance import LARGEST_ERROR, Rig, _interpreter, start_rig
from toprope.training.inference.engine import SamplingRequest
from toprope.training.inference.engines.vllm_process import VllmProcess, VllmSettings

pytestmark = pytest.mark.engines


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    made = start_rig("vllm", tmp_path_factory.mktemp("adapters") / "vllm", {"policy.lora": True, "policy.lora_rank": 4})
    yield made
    made.engine.stop()


def test_vllm_answers_with_the_trainers_adapters(adapted: Rig) -> None:
    prompt = [5, 6, 7]
    request = SamplingRequest(prompt, n=4, max_new_tokens=30)
    for version in (1, 2, 3):
        assert adapted.publish() == version
        adapted.adopted(version)
        [answers] = sample(adapted.engine, request)
        with adapted.trained.disable_adapter():
            assert min(adapted.error_of(prompt, answer) for answer in answers) > 10 * LARGEST_ERROR
        assert max(adapted.error_of(prompt, answer) for answer in answers) <= LARGEST_ERROR
        assert all(answer.versions == [(version, len(answer.token_ids))] for answer in answers)


def test_vllm_ends_an_answer_with_the_adapters_that_began_it(adapted: Rig) -> None:
    old = adapted.engine.version
    answered: queue.Queue[Any] = queue.Queue()
    adapted.engine.submit(SamplingRequest([5, 6, 7], n=16, max_new_tokens=110), answered.put)
    until(lambda: adapted.engine._asking)  # type: ignore[attr-defined]
    new = adapted.publish()
    adapted.adopted(new)
    assert {version for answer in answered.get(timeout=300) for version, _ in answer.versions} == {old}


def test_vllm_on_a_cpu_does_not_sleep(tmp_path: Path) -> None:
    python = _interpreter("vllm")
    assert python is not None
    server = VllmProcess.start(VllmSettings(python, tmp_path, "float32", "cpu", 64, sleeps=True), tmp_path)
    try:
        until(lambda: server.ended, 300)
        print(server.last_words())
        assert "Sleep mode is not supported" in server.last_words()
    finally:
        server.end()
