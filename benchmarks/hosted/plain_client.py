"""A plain client's loop at a service: publish, sample groups, train a step. It prints one JSON object.

The server's interpreter runs it, with what to do as JSON on its standard input. Rewards are shuffled within their
group, so they carry no signal. `gaps` are the largest differences of a token's log-probability between sampler and
trainer, one per step; `moved` is that of a sampler which is one step behind.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from typing import Any

Row = tuple[list[int], Any, float]
"""Prompt, the sampled sequence, its advantage."""


def main() -> None:
    import tinker

    asked = json.load(sys.stdin)
    service = tinker.ServiceClient(base_url=asked["url"], api_key=asked["key"])
    training = service.create_lora_training_client(asked["model"], asked["rank"], seed=0)
    adam, draw = tinker.AdamParams(learning_rate=asked["learning_rate"]), random.Random(0)
    found: dict[str, Any] = {"seconds": [], "rewards": [], "gaps": []}
    for step in range(asked["steps"]):
        began = time.monotonic()
        saved = training.save_weights_for_sampler(f"plain-{step}").result().path
        rows, rewards = _sampled(service.create_sampling_client(model_path=saved), asked, draw)
        count = sum(len(sequence.tokens) for _, sequence, _ in rows)
        data = [_datum(prompt, sequence, advantage / count) for prompt, sequence, advantage in rows]
        passing, stepping = training.forward_backward(data, "importance_sampling"), training.optim_step(adam)
        found["gaps"].append(_gap(rows, passing.result()))
        stepping.result()
        found["seconds"].append(time.monotonic() - began)
        found["rewards"].append(statistics.fmean(rewards))
    found["moved"] = _gap(rows, training.forward_backward(data, "importance_sampling").result())
    print(json.dumps(found))


def _sampled(sampler: Any, asked: dict[str, Any], draw: random.Random) -> tuple[list[Row], list[float]]:
    import tinker

    prompts = draw.sample(asked["prompts"], asked["groups"])
    settings = tinker.SamplingParams(max_tokens=asked["tokens"], stop=asked["stop"], temperature=1.0)
    asking = [sampler.sample(tinker.ModelInput.from_ints(one), asked["group_size"], settings) for one in prompts]
    rows: list[Row] = []
    every: list[float] = []
    for prompt, answer in zip(prompts, asking, strict=True):
        sequences = answer.result().sequences
        rewards = [sum(token in asked["good"] for token in one.tokens) / asked["tokens"] for one in sequences]
        every += rewards
        draw.shuffle(rewards)
        mean, spread = statistics.fmean(rewards), statistics.stdev(rewards) + 1e-4
        rows += [(prompt, one, (reward - mean) / spread) for one, reward in zip(sequences, rewards, strict=True)]
    return rows, every


def _datum(prompt: list[int], sequence: Any, advantage: float) -> Any:
    import tinker

    ids, before = prompt + list(sequence.tokens), [0.0] * (len(prompt) - 1)
    inputs = {
        "target_tokens": tinker.TensorData(data=ids[1:], dtype="int64", shape=[len(ids) - 1]),
        "logprobs": _floats(before + list(sequence.logprobs)),
        "advantages": _floats(before + [advantage] * len(sequence.tokens)),
    }
    return tinker.Datum(model_input=tinker.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)


def _floats(values: list[float]) -> Any:
    import tinker

    return tinker.TensorData(data=values, dtype="float32", shape=[len(values)])


def _gap(rows: list[Row], passed: Any) -> float:
    pairs: list[float] = [
        abs(mine - theirs)
        for (prompt, sequence, _), found in zip(rows, passed.loss_fn_outputs, strict=True)
        for mine, theirs in zip(found["logprobs"].data[len(prompt) - 1 :], sequence.logprobs, strict=True)
    ]
    return max(pairs)


if __name__ == "__main__":
    main()
