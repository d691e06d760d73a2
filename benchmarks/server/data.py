"""Measure exports and near-duplicate removal: `make bench-data`.

    python -P -m benchmarks.server.data [--items N] [--texts N] [--format F]

A journal is written as the trajectory API writes it: groups of 8 single-turn answers on the tokens of the embedded
policy (its tokenizer, its chat template; words of random letters; right, wrong or cut answers), with log-probabilities.
The items are exported by the program that exports for agents, in a process of its own whose peak resident set is
measured, and the file is compared with the journal: every item's state, action, reward and place. Then texts of 8 to 30
words, a fifth of them with one word changed, go through near-duplicate removal, which is judged by exact Jaccard
indices: of two near duplicates one has to go, and a text that went has to be near to an earlier one that stayed.
Estimated time: ten minutes; `--items` bounds time and disk space.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.report import report
from benchmarks.scratch import scratch
from toprope.records.journal.file_journal import FileJournal
from toprope.records.journal.groups import MASKED, PROMPT_LOGPROB, Group, Outcome
from toprope.records.journal.marks import GroupNote
from toprope.records.run.folder import RunFolder
from toprope.records.run.specification import EnvironmentSource, Specification
from toprope.settings.schema import Config
from toprope.training.policy.loading import embedded_folder
from toprope.training.policy.tiny_model import RECIPES, make_tokenizer
from toprope.trajectories.items import TrajectoryItem
from toprope.trajectories.jobs.orders import Order
from toprope.trajectories.synthesis.near_duplicates import deduplicate, shingles, similarity

SIZE = 8
PROMPT = "Spell this word backward (example: sun -> nus): "
THRESHOLD = 0.7
TOO_LAX_AND_STRICT, CONTROLLED = (0.999, 0.5), 2000
# Linux hands a parent's peak on to its children, so that of a small process stands between.
_WATCHED = """
import os, subprocess, sys
_, status, used = os.wait4(subprocess.Popen(sys.argv[1:], stdout=sys.stderr).pid, 0)
print(used.ru_maxrss)
sys.exit(os.waitstatus_to_exitcode(status))
"""
_encode = msgspec.json.Encoder().encode


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; exit with 1 if an item is missing, wrong or duplicated, or a near duplicate was judged
    wrongly.
    """
    parser = argparse.ArgumentParser(prog="python -P -m benchmarks.server.data", description=__doc__.split("\n")[0])
    parser.add_argument("--items", type=int, default=1_000_000, help="rollouts in the journal (default 1,000,000)")
    parser.add_argument("--texts", type=int, default=100_000, help="texts to deduplicate (default 100,000)")
    parser.add_argument("--format", default="jsonl", choices=("jsonl", "parquet"), help="of the export")
    given = parser.parse_args(arguments)
    figures: dict[str, Any] = {}
    with scratch("data") as path:
        figures |= exported(path, given.items // SIZE, given.format)
    figures |= deduplicated(given.texts)
    figures["count_errors"] = figures.pop("export_errors") + figures["dedupe_wrong"]
    failed = (
        [] if (found := figures["planted_errors_found"]) == 1 else [f"{found} errors were found in a file with one"]
    )
    failed += [f"{name} is 0" for name in ("control_dedupe_missed", "control_dedupe_wrong") if not figures[name]]
    return report(
        "Data",
        figures,
        goals={"count_errors": "== 0", "dedupe_missed_share": "<= 0.01", "export_rss_mb": "<= 200"},
        control="a reward that is changed in the export must be found; removal with too high a threshold must miss "
        "near duplicates, and with a slightly too low one remove texts that are none.",
        control_failed="; ".join(failed),
    )


def exported(place: Path, groups: int, form: str) -> dict[str, Any]:
    """Return the figures of one export of a journal with that number of groups."""
    folder, began = make_run(place), time.monotonic()
    journal = FileJournal(folder.journal)
    for number, group in enumerate(made(groups), 1):
        journal.append(_encode(group), GroupNote(rows=SIZE))
        assert journal.last == number
    journal.close()
    wrote = time.monotonic() - began
    size = sum(segment.stat().st_size for segment in folder.journal.glob("*.journal"))
    target, job = place / f"out.{form}", place / "job"
    job.mkdir()
    order = Order(kind="export", runs=[str(folder.path)], form=form, target=str(target))
    (job / "order.json").write_text(order.model_dump_json())
    began = time.monotonic()
    export = [sys.executable, "-P", "-m", "toprope.trajectories", str(job)]
    done = subprocess.run([sys.executable, "-I", "-S", "-c", _WATCHED, *export], stdout=subprocess.PIPE, text=True)
    seconds = time.monotonic() - began
    if done.returncode:
        raise SystemExit(f"the export ended with {done.returncode}: {(job / 'failure.json').read_text()}")
    outcome = json.loads((job / "outcome.json").read_text())
    return {
        "export_items": outcome["items"],
        "export_rss_mb": peak_mb(int(done.stdout.splitlines()[-1])),
        "export_seconds": round(seconds, 1),
        "export_format": form,
        "export_mb": round(target.stat().st_size / 1e6, 1),
        "export_texts": outcome["texts"],
        "journal_mb": round(size / 1e6, 1),
        "journal_seconds": round(wrote, 1),
        "export_errors": wrong(_rows(target, form), groups),
        "planted_errors_found": wrong(_with_one_error(_rows(target, form)), groups),
    }


def peak_mb(ru_maxrss: int) -> int:
    """Return a peak resident set in MB; macOS tells bytes, Linux KB."""
    return round(ru_maxrss / (1 << 20 if sys.platform == "darwin" else 1 << 10))


def make_run(place: Path) -> RunFolder:
    """Write a run's folder and the tokenizer of its policy, as they lie after training."""
    policies = place / "policies"
    make_tokenizer(RECIPES["embedded"]).save_pretrained(embedded_folder(policies, "embedded"))
    folder = RunFolder.create(place / "runs", "run-a")
    Specification(
        run_id="run-a",
        kind="train",
        created_at=time.time(),
        toprope_version="0",
        environment=EnvironmentSource(name="words", file="/nowhere.py", attribute="Words"),
        config=Config(),
        policy_cache=str(policies),
    ).write(folder)
    return folder


def words(groups: int) -> Iterator[tuple[str, list[tuple[str, float, bool]]]]:
    """Yield each group's word, and its answers with reward and a flag for cut ones: the same at every call."""
    dice = random.Random(7)
    for number in range(groups):
        word = "".join(dice.choices("abcdefghijklmnopqrstuvwxyz", k=dice.randrange(3, 9)))
        answers = []
        for _ in range(SIZE):
            how = dice.random()
            right = how < number / max(1, groups)
            answer = word[::-1] if right else "".join(dice.sample(word, len(word)))
            cut = not right and how > 0.95
            answers.append((answer[:-1] if cut else answer, float(answer == word[::-1] and not cut), cut))
        yield word, answers


def made(groups: int) -> Iterator[Group]:
    """Yield the groups with the embedded policy's tokens."""
    tokenizer = make_tokenizer(RECIPES["embedded"])
    dice = random.Random(8)
    letters = {letter: tokenizer(letter, add_special_tokens=False)["input_ids"] for letter in map(chr, range(97, 123))}
    empty = tokenizer.apply_chat_template(
        [{"role": "user", "content": PROMPT}], tokenize=False, add_generation_prompt=True
    )
    head, tail = (tokenizer(part, add_special_tokens=False)["input_ids"] for part in _around(empty))
    end = [tokenizer.eos_token_id]
    for number, (word, answers) in enumerate(words(groups)):
        asked = [*head, *(token for letter in word for token in letters[letter]), *tail]
        said = [
            [token for letter in one for token in letters[letter]] + ([] if cut else end) for one, _, cut in answers
        ]
        yield Group(
            tokens=[asked + one for one in said],
            masks=[[MASKED] * len(asked) + one for one in said],
            scores=[reward for _, reward, _ in answers],
            inference_logprobs=[[PROMPT_LOGPROB] * len(asked) + [-dice.random() for _ in one] for one in said],
            versions=[[(number // 8, len(one))] for one in said],
            group_id=f"run-a-1-{number}",
            environment="words",
            task_id=f"{number % 30_000:016x}",
            outcomes=[
                Outcome(reward, {"exact": reward}, success=reward >= 1, truncated=cut) for _, reward, cut in answers
            ],
            prompt=f"{PROMPT}{word}",
            answers=[one for one, _, _ in answers],
            seconds=0.05,
        )


def _around(rendered: str) -> tuple[str, str]:
    before, _, after = rendered.partition(PROMPT)
    return before + PROMPT, after


def _with_one_error(rows: Iterator[Any]) -> Iterator[Any]:
    state, action, reward, place = next(rows)
    yield state, action, reward + 1.0, place
    yield from rows


def wrong(rows: Iterator[Any], groups: int) -> int:
    """Return the items that are missing, wrong or out of place in the rows of an export."""
    found = 0
    for seq, (word, answers) in enumerate(words(groups), 1):
        for place, (answer, reward, cut) in enumerate(answers):
            row = next(rows, None)
            expected = (
                [{"role": "user", "content": f"{PROMPT}{word}"}],
                [{"role": "assistant", "content": answer}],
                reward,
                (seq, place, (seq - 1) // 8, reward >= 1, cut, "tokens"),
            )
            found += row != expected
    return found + sum(1 for _ in rows)


def _rows(target: Path, form: str) -> Iterator[tuple[Any, ...]]:
    names = ("group", "rollout", "version", "success", "truncated", "text")
    if form == "jsonl":
        with target.open("rb") as file:
            for line in file:
                item = msgspec.json.decode(line, type=TrajectoryItem)
                yield item.state, item.action, item.reward, tuple(item.metadata[name] for name in names)
        return
    import pyarrow.parquet

    for batch in pyarrow.parquet.ParquetFile(target).iter_batches(4096):
        for row in batch.to_pylist():
            yield row["state"], row["action"], row["reward"], tuple(row[name] for name in names)


def deduplicated(count: int) -> dict[str, Any]:
    """Return the figures of near-duplicate removal."""
    dice, texts, origins = random.Random(9), [], {}
    vocabulary = [f"{dice.choice('bcdfgklmnprst')}{dice.choice('aeiou')}{number:x}" for number in range(5000)]
    for number in range(count):
        if number and dice.random() < 0.2:
            origins[number] = dice.randrange(number)
            said = texts[origins[number]].split()
            said[dice.randrange(len(said))] = dice.choice(vocabulary)
            texts.append(" ".join(said))
        else:
            texts.append(" ".join(dice.choices(vocabulary, k=dice.randrange(8, 31))))
    items = [TrajectoryItem(text, "", 1.0, {"number": number}) for number, text in enumerate(texts)]
    began, worked = time.monotonic(), time.process_time()
    kept, left = deduplicate(items, THRESHOLD)
    seconds, worked = time.monotonic() - began, time.process_time() - worked
    stayed = {item.metadata["number"] for item in kept}
    sets = {number: shingles(f"{texts[number]}\n") for number in {*origins, *origins.values()}}
    near = {one: of for one, of in origins.items() if similarity(sets[one], sets[of]) >= THRESHOLD}
    # Texts of different families have hardly a word in common.
    root = {number: number for number in range(count)}
    families: dict[int, list[int]] = {}
    for number, source in origins.items():  # a source comes before what is made from it
        root[number] = root[source]
        families.setdefault(root[number], [root[number]]).append(number)

    def is_wrong(number: int, stayed: set[int]) -> bool:
        earlier = [one for one in families.get(root[number], ()) if one < number and one in stayed]
        return not any(similarity(sets[number], sets[one]) >= THRESHOLD for one in earlier)

    def judged(stayed: set[int], among: int = count) -> tuple[int, int]:
        """Of the first texts, those that stayed beside an original that they are near to, and removed ones that are
        near to no earlier one that stayed."""
        missed = sum(number in stayed and source in stayed for number, source in near.items() if number < among)
        return missed, sum(is_wrong(number, stayed) for number in range(among) if number not in stayed)

    missed, wrong_removals = judged(stayed)
    # The same removal with thresholds that are too high and too low.
    few = min(count, CONTROLLED)
    lax, strict = (
        {item.metadata["number"] for item in deduplicate(items[:few], threshold)[0]} for threshold in TOO_LAX_AND_STRICT
    )
    return {
        f"dedupe_{count}_seconds": round(seconds, 1),
        "dedupe_cpu_seconds": round(worked, 1),
        "dedupe_kept": len(kept),
        "dedupe_removed": left,
        "dedupe_missed": missed,
        "dedupe_missed_share": missed / max(1, len(near)),
        "dedupe_wrong": wrong_removals + (len(kept) + left != count),
        "control_dedupe_missed": judged(lax, few)[0],
        "control_dedupe_wrong": judged(strict, few)[1],
        "dedupe_rss_mb": peak_mb(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss),
    }


if __name__ == "__main__":
    sys.exit(main())
