"""Compare the engine's decoding with plain torch and with transformers' continuous batching: `make bench-decode`.

    python -P -m benchmarks decode [--rounds N] [--small]

Both sides run the same model of random weights on one thread, with the same prompts and answers of a fixed length (no
token ends them). The plain loop uses transformers' own cache, the dynamic or the static one, whichever a trial finds
faster; with the dynamic one it reads each prompt once. It samples with `torch.multinomial` and keeps log-probabilities.
The engine takes requests as the server hands them over and delivers texts, tokens and log-probabilities.

The sides alternate within a round, and medians of the rounds' ratios count, so the ratios hold on a loaded machine too;
they are ratios of processor time, which one thread spends on both sides. Beforehand the engine's log-probabilities have
to equal a plain forward pass within 1e-4. Control: an engine that concatenates its cache has to grow more than the
engine with the same model, and than the goal for `growth_1024_over_256`; otherwise the benchmark exits with 2.
`floor_growth_1024_over_256` is that growth for torch alone, `growth_over_floor` the engine's over it, and
`read_growth_1024_over_256` that of torch that only sums the keys and values in place of attention: no attention that
reads them in float32 is likely to grow less.

`conversation_ratio` is the time of 24 conversations of ten turns, from 400 tokens on, with the prompts that the engine
keeps over that without; control: two engines that keep none have to miss its goal.

Estimated time: 20 minutes on a quiet machine; needs nothing else.
"""

from __future__ import annotations

import argparse
import queue
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch.nn.functional import linear, silu
from torch.nn.functional import scaled_dot_product_attention as attend

from benchmarks.report import is_met, report
from benchmarks.scratch import scratch
from toprope.training.inference import decode_steps
from toprope.training.inference.embedded_engine import EmbeddedEngine
from toprope.training.inference.engine import SamplingRequest
from toprope.training.policy.loading import load_pretrained, load_tokenizer
from toprope.training.policy.tiny_model import RECIPES, build

GROUP = 8
GROWTH_GOAL = 4.8
CONVERSATION_GOAL = "<= 0.65"
SIZES = {
    "embedded": {},
    "40m": {"hidden_size": 640, "intermediate_size": 1728, "layers": 8, "heads": 10},
}
"""Models by name: fields of the embedded policy's recipe that differ."""


def make_model(folder: Path, size: str) -> tuple[Any, Any]:
    """Build a model of random weights and its tokenizer; returns both, ready for inference."""
    if not folder.exists():
        build(folder, replace(RECIPES["embedded"], steps=0, **SIZES[size]))
    model = load_pretrained(folder, "cpu", dtype=torch.float32).eval()
    model.requires_grad_(False)
    return model, load_tokenizer(folder)


def make_prompts(groups: int) -> list[list[int]]:
    """Prompts as long as the demo's, 7 to 9 tokens."""
    chooser = random.Random(groups)
    return [[chooser.randrange(5, 200) for _ in range(chooser.randrange(7, 10))] for _ in range(groups)]


def start_engine(model: Any, tokenizer: Any, rows: int, **more: Any) -> EmbeddedEngine:
    """Start an engine whose answers end by their length alone."""
    engine = EmbeddedEngine(model, tokenizer, max_rows=rows, **more)
    engine.end_ids = frozenset()
    engine.start()
    return engine


def decode(engine: EmbeddedEngine, prompts: Sequence[list[int]], length: int, group: int = GROUP) -> list[Any]:
    """Have the engine answer every prompt with a group of answers; returns the samples of each prompt."""
    answers: queue.Queue[tuple[int, Any]] = queue.Queue()
    for place, prompt in enumerate(prompts):
        request = SamplingRequest(prompt, n=group, max_new_tokens=length)
        engine.submit(request, lambda result, place=place: answers.put((place, result)))
    found = dict(answers.get() for _ in prompts)
    for result in found.values():
        if isinstance(result, Exception):
            raise result
    return [found[place] for place in range(len(prompts))]


@torch.inference_mode()
def decode_plainly(model: Any, prompts: Sequence[list[int]], length: int, *, static: bool) -> tuple[Any, Any]:
    """Decode with transformers' own cache; returns tokens and log-probabilities, (rows, length) as lists."""
    from transformers import StaticCache

    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    cache: Any = None
    if static:
        cache = StaticCache(config=model.config, max_cache_len=longest + length)
        ids, mask = ids.repeat_interleave(GROUP, 0), mask.repeat_interleave(GROUP, 0)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    output = model(
        input_ids=ids,
        attention_mask=mask,
        position_ids=positions,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    cache, logits, positions = output.past_key_values, output.logits[:, -1], positions[:, -1:] + 1
    if not static:
        cache.batch_repeat_interleave(GROUP)
        logits, mask, positions = (one.repeat_interleave(GROUP, 0) for one in (logits, mask, positions))
    tokens, logprobs = [], []
    while True:
        scores = torch.log_softmax(logits, -1)
        token = torch.multinomial(scores.exp(), 1)
        tokens.append(token)
        logprobs.append(scores.gather(1, token))
        if len(tokens) == length:
            return torch.cat(tokens, 1).tolist(), torch.cat(logprobs, 1).tolist()
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
        output = model(
            input_ids=token, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
        )
        logits, positions = output.logits[:, -1], positions + 1


def decode_continuously(model: Any, prompts: Sequence[list[int]], length: int) -> None:
    """Decode with transformers' continuous batching, which takes one prompt for each answer."""
    from transformers import GenerationConfig

    settings = GenerationConfig(max_new_tokens=length, do_sample=True, eos_token_id=-1, pad_token_id=0)
    repeated = [prompt for prompt in prompts for _ in range(GROUP)]
    results = model.generate_batch(
        inputs=repeated, generation_config=settings, progress_bar=False, persistent_manager=True
    )
    lengths = {len(result.generated_tokens) for result in results.values()}
    if len(results) != len(repeated) or lengths != {length}:
        raise RuntimeError(f"continuous batching gave {len(results)} answers of {sorted(lengths)} tokens")


def processor_seconds(work: Callable[[], object]) -> float:
    """Processor seconds of this process during `work`."""
    began = time.process_time()
    work()
    return time.process_time() - began


def check_logprobs(model: Any, engine: EmbeddedEngine) -> float:
    """Largest difference of the engine's log-probabilities from a plain forward pass."""
    worst = 0.0
    prompts = make_prompts(3)
    for prompt, samples in zip(prompts, decode(engine, prompts, 40), strict=True):
        for sample in samples:
            with torch.no_grad():
                logits = model(torch.tensor([prompt + sample.token_ids])).logits[0, len(prompt) - 1 : -1]
            expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(sample.token_ids).unsqueeze(1)).squeeze(1)
            worst = max(worst, float((torch.tensor(sample.logprobs) - expected).abs().max()))
    return worst


def compare(
    model: Any, tokenizer: Any, groups: int, length: int, rounds: int, times: int
) -> tuple[float, float, float]:
    """Tokens a second of the engine over those of the plain loop, and the processor seconds of both for one batch."""
    prompts = make_prompts(groups)
    engine = start_engine(model, tokenizer, groups * GROUP)
    try:
        decode(engine, prompts, length)
        trial = {
            static: processor_seconds(lambda static=static: decode_plainly(model, prompts, length, static=static))
            for static in (False, True, False, True)
        }
        static = trial[True] < trial[False]
        ours, theirs = [], []
        for number in range(rounds):
            sides = [
                (ours, lambda: decode(engine, prompts, length)),
                (theirs, lambda: decode_plainly(model, prompts, length, static=static)),
            ]
            for kept, work in sides if number % 2 == 0 else reversed(sides):
                kept.append(processor_seconds(lambda work=work: [work() for _ in range(times)]) / times)
    finally:
        engine.stop()
    ratio = statistics.median(plain / own for own, plain in zip(ours, theirs, strict=True))
    return ratio, statistics.median(ours), statistics.median(theirs)


def compare_with_continuous(model: Any, tokenizer: Any, groups: int, length: int, rounds: int) -> float:
    """Tokens a second of the engine over those of transformers' continuous batching, by wall time: it has threads."""
    prompts = make_prompts(groups)
    engine = start_engine(model, tokenizer, groups * GROUP)
    ratios = []
    try:
        for number in range(rounds + 1):
            began = time.perf_counter()
            decode(engine, prompts, length)
            ours = time.perf_counter() - began
            began = time.perf_counter()
            decode_continuously(model, prompts, length)
            if number:  # the first round warms both sides up
                ratios.append((time.perf_counter() - began) / ours)
    finally:
        engine.stop()
    return statistics.median(ratios)


def growth(model: Any, tokenizer: Any, groups: int, rounds: int) -> float:
    """Processor time of answers of 1,024 tokens over that of answers of 256."""
    prompts = make_prompts(groups)
    engine = start_engine(model, tokenizer, groups * GROUP)
    try:
        decode(engine, prompts, 16)
        return statistics.median(
            processor_seconds(lambda: decode(engine, prompts, 1024))
            / processor_seconds(lambda: decode(engine, prompts, 256))
            for _ in range(rounds)
        )
    finally:
        engine.stop()


def converse(engine: EmbeddedEngine, talks: int = 24, turns: int = 10, first: int = 400, seed: int = 0) -> None:
    """Have the engine answer each turn of conversations, which go on with its answer and 60 more tokens."""
    dice = random.Random(seed)
    prompts = [[dice.randrange(5, 200) for _ in range(first)] for _ in range(talks)]
    for _ in range(turns):
        for prompt, [sample] in zip(prompts, decode(engine, prompts, 24, 1), strict=True):
            prompt += [*sample.token_ids, *(dice.randrange(5, 200) for _ in range(60))]


def conversation_ratio(model: Any, tokenizer: Any, rounds: int, **more: Any) -> float:
    """Processor time of conversations with an engine over that with one that keeps no prompts."""
    engines = [start_engine(model, tokenizer, 24, **settings) for settings in (more, {"kept_bytes": 0})]
    ratios = []
    try:
        for seed in range(rounds + 1):
            ours, theirs = (processor_seconds(partial(converse, one, seed=seed)) for one in engines)
            ratios.append(ours / theirs)
    finally:
        for engine in engines:
            engine.stop()
    return statistics.median(ratios[1:])  # the first round warms both sides up


@torch.inference_mode()
def floor_growth(model: Any, rows: int, rounds: int, *, reads_only: bool = False) -> float:
    """The same growth of torch alone: the model's products, and attention over keys and values that lie in place.

    `reads_only`: their sums in place of attention.
    """
    config, length = model.config, 1024
    hidden, heads, inner = config.hidden_size, config.num_attention_heads, config.intermediate_size
    shapes = [(3 * hidden, hidden), (hidden, hidden), (2 * inner, hidden), (hidden, inner)]
    layers = [[torch.randn(shape) * 0.02 for shape in shapes] for _ in range(config.num_hidden_layers)]
    caches = [torch.randn(2, rows, heads, length, hidden // heads) for _ in layers]

    def token(place: int) -> None:
        x = torch.randn(rows, 1, hidden)
        for (inward, outward, up, down), cache in zip(layers, caches, strict=True):
            query, key, value = linear(x, inward).view(rows, 1, 3, heads, -1).permute(2, 0, 3, 1, 4)
            cache[0, :, :, place : place + 1], cache[1, :, :, place : place + 1] = key, value
            keys, values = cache[:, :, :, : place + 1]
            if reads_only:
                seen = query.add(keys.sum() + values.sum(), alpha=1e-6)
            else:
                seen = attend(query, keys, values)
            x = x + linear(seen.transpose(1, 2).reshape(rows, 1, hidden), outward)
            gate, free = linear(x, up).chunk(2, -1)
            x = x + linear(silu(gate) * free, down)

    def seconds(places: range) -> float:
        return processor_seconds(lambda: [token(place) for place in places])

    seconds(range(0, length, 64))
    return statistics.median(seconds(range(0, length, 4)) / seconds(range(0, length // 4, 4)) for _ in range(rounds))


@contextmanager
def concatenated_cache() -> Iterator[None]:
    """The control: the engine's cache is transformers' own."""
    kept = decode_steps.grow_by_blocks

    def reorder(cache: Any, source: torch.Tensor | None = None, _longest: int = 0) -> None:
        if source is not None:
            cache.reorder_cache(source)

    decode_steps.grow_by_blocks = reorder
    try:
        yield
    finally:
        decode_steps.grow_by_blocks = kept


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--small", action="store_true", help="leave out the model of 40 million parameters")
    options = parser.parse_args()
    torch.set_num_threads(1)
    console = Console(stderr=True)
    figures: dict[str, Any] = {"threads": torch.get_num_threads(), "rounds": options.rounds}
    with scratch("decode") as root:
        model, tokenizer = make_model(root / "embedded", "embedded")
        engine = start_engine(model, tokenizer, 24)
        try:
            figures["logprob_difference"] = check_logprobs(model, engine)
        finally:
            engine.stop()
        if figures["logprob_difference"] > 1e-4:
            print("The engine's log-probabilities are not those of the model.", file=sys.stderr)
            return 2
        for rows in (48, 128):
            for length, times in ((8, 12), (64, 2)):
                console.print(f"embedded policy, {rows} rows of {length} tokens")
                ratio, ours, _ = compare(model, tokenizer, rows // GROUP, length, options.rounds, times)
                figures[f"embedded_{rows}x{length}_ratio"] = ratio
                figures[f"embedded_{rows}x{length}_tokens_per_cpu_second"] = rows * length / ours
        console.print("continuous batching")
        figures["continuous_ratio"] = compare_with_continuous(model, tokenizer, 6, 64, options.rounds)
        console.print("conversations")
        figures["conversation_ratio"] = conversation_ratio(model, tokenizer, options.rounds)
        figures["control_conversation_ratio"] = conversation_ratio(model, tokenizer, 1, kept_bytes=0)
        console.print("growth of the embedded policy")
        figures["embedded_growth_1024_over_256"] = growth(model, tokenizer, 2, options.rounds)
        if options.small:
            with concatenated_cache():
                figures["control_growth_1024_over_256"] = growth(model, tokenizer, 2, 1)
        else:
            model, tokenizer = make_model(root / "40m", "40m")
            figures["40m_parameters"] = sum(parameter.numel() for parameter in model.parameters())
            console.print("40 million parameters, 16 rows of 256 tokens")
            ratio, ours, _ = compare(model, tokenizer, 2, 256, options.rounds, 1)
            figures["40m_16x256_ratio"], figures["40m_16x256_tokens_per_cpu_second"] = ratio, 16 * 256 / ours
            console.print("growth of 40 million parameters")
            figures["growth_1024_over_256"] = growth(model, tokenizer, 1, options.rounds)
            with concatenated_cache():
                figures["control_growth_1024_over_256"] = growth(model, tokenizer, 1, 1)
            for name, reads_only in {"floor": False, "read": True}.items():
                growing = floor_growth(model, GROUP, options.rounds, reads_only=reads_only)
                figures[f"{name}_growth_1024_over_256"] = growing
            figures["growth_over_floor"] = figures["growth_1024_over_256"] / figures["floor_growth_1024_over_256"]
    goals = {f"embedded_{rows}x{length}_ratio": ">= 0.85" for rows in (48, 128) for length in (8, 64)}
    goals |= {"continuous_ratio": ">= 1.0", "conversation_ratio": CONVERSATION_GOAL}
    if not options.small:
        goals |= {"40m_16x256_ratio": ">= 0.8", "growth_1024_over_256": f"<= {GROWTH_GOAL}"}
    return report(
        "Decoding",
        figures,
        goals=goals,
        control="an engine that concatenates its cache must miss the goal for growth, and grow more than the engine; "
        "one that keeps no prompts must miss that for conversations.",
        control_failed=control_failed(figures),
    )


def control_failed(figures: dict[str, float]) -> str:
    """Return why a control failed: that of growth ran on the model whose growth has the goal, or else on the embedded
    policy."""
    if is_met(figures["control_conversation_ratio"], CONVERSATION_GOAL):
        return "conversations were as fast without kept prompts"
    ours = figures.get("growth_1024_over_256", figures["embedded_growth_1024_over_256"])
    won = figures["control_growth_1024_over_256"] <= max(GROWTH_GOAL, ours)
    return "a cache that is concatenated grew no more than the engine or the goal" if won else ""


if __name__ == "__main__":
    sys.exit(main())
