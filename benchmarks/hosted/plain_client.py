"""A plain client's loop at a service: publish, sample groups, train a step.

The server's interpreter runs it. The first line on its standard input says, as JSON, what to do; each further line is a
number of steps, which it takes, or `controls`, which it measures; it answers with a line of JSON. Shuffled rewards stay
within their group, so they carry no signal. Answers whose advantage is 0 are not sent.

`gap` is the largest difference of a token's log-probability between sampler and trainer, `moved` that of a sampler
which is one step behind. `resumed` and `behind` are the largest errors of the loss, as shares of the largest loss,
over steps that are taken again from a saved state, compared with those steps and with the ones after them.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import sys
import time
from typing import Any

Row = tuple[list[int], Any, float]
"""Prompt, the sampled sequence, its advantage."""
_AGAIN = 4
"""Steps that are taken again from a saved state."""


class _Loop:
    def __init__(self, asked: dict[str, Any]) -> None:
        import tinker

        self._asked, self._draw, self._step = asked, random.Random(0), 0
        self._service = tinker.ServiceClient(base_url=asked["url"], api_key=asked["key"])
        self._training = self._service.create_lora_training_client(asked["model"], asked["rank"], seed=0)
        self._adam = tinker.AdamParams(learning_rate=asked["learning_rate"])
        self._rows: list[Row] = []
        self._data: list[Any] = []

    def step(self) -> dict[str, float]:
        began = time.monotonic()
        self._step += 1
        saved = self._training.save_weights_for_sampler(f"{self._asked['name']}-{self._step}").result().path
        rows, reward = _sampled(self._service.create_sampling_client(model_path=saved), self._asked, self._draw)
        count = sum(len(sequence.tokens) for _, sequence, _ in rows)
        used = [row for row in rows if row[2]] or rows[:1]
        data = [_datum(prompt, sequence, advantage / count) for prompt, sequence, advantage in used]
        if used[0][2] or not self._rows:  # the controls need a batch with a gradient
            self._rows, self._data = used, data
        passing = self._training.forward_backward(data, "importance_sampling")
        stepping = self._training.optim_step(self._adam)
        gap = _gap(used, passing.result())
        stepping.result()
        tokens = sum(len(prompt) + len(sequence.tokens) for prompt, sequence, _ in used)
        return {"seconds": time.monotonic() - began, "reward": reward, "gap": gap, "tokens": tokens}

    def controls(self) -> dict[str, float]:
        passed = self._training.forward_backward(self._data, "importance_sampling").result()
        found = {"moved": _gap(self._rows, passed)}
        self._training.optim_step(self._adam).result()
        saved = self._training.save_state(f"{self._asked['name']}-saved").result().path
        straight = self._losses(self._training)
        again = self._losses(self._service.create_training_client_from_state_with_optimizer(saved))
        most = max(map(abs, straight))
        for name, others in (("resumed", straight), ("behind", straight[1:])):
            found[name] = max(abs(one - two) for one, two in zip(again, others, strict=False)) / most
        return found

    def _losses(self, training: Any) -> list[float]:
        """The loss before each of some steps on the same batch."""
        found = []
        for _ in range(_AGAIN):
            passed = training.forward_backward(self._data, "importance_sampling").result()
            training.optim_step(self._adam).result()
            found.append(
                -sum(
                    math.exp(mine - theirs) * advantage
                    for (prompt, sequence, advantage), one in zip(self._rows, passed.loss_fn_outputs, strict=True)
                    for mine, theirs in zip(one["logprobs"].data[len(prompt) - 1 :], sequence.logprobs, strict=True)
                )
            )
        return found


def main() -> None:
    loop = _Loop(json.loads(sys.stdin.readline()))
    for line in sys.stdin:
        found = loop.controls() if line == "controls\n" else [loop.step() for _ in range(int(line))]
        print(json.dumps(found), flush=True)


def _sampled(sampler: Any, asked: dict[str, Any], draw: random.Random) -> tuple[list[Row], float]:
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
        if asked["shuffled"]:
            draw.shuffle(rewards)
        mean, spread = statistics.fmean(rewards), statistics.stdev(rewards) + 1e-4
        rows += [(prompt, one, (reward - mean) / spread) for one, reward in zip(sequences, rewards, strict=True)]
    return rows, statistics.fmean(every)


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
