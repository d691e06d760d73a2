"""Run folders with real journals of the embedded policy's tokens, made without a model."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from toprope.atomic import write_json
from toprope.records.journal.file_journal import FileJournal
from toprope.records.journal.groups import MASKED, Group, Outcome
from toprope.records.journal.marks import GroupNote
from toprope.records.run.folder import RunFolder
from toprope.records.run.specification import EnvironmentSource, Specification
from toprope.settings.schema import Config
from toprope.training.policy.loading import embedded_folder
from toprope.training.policy.tiny_model import RECIPES, make_tokenizer


def place_tokenizer(policies: Path) -> None:
    """Save the embedded policy's tokenizer in the policy cache."""
    make_tokenizer(RECIPES["embedded"]).save_pretrained(embedded_folder(policies, "embedded"))


def make_run(runs: Path, run_id: str = "run-a", kind: str = "train", policies: Path | None = None) -> RunFolder:
    """Create a run folder with a specification."""
    folder = RunFolder.create(runs, run_id)
    Specification(
        run_id=run_id, kind=kind, created_at=time.time(), toprope_version="0",
        environment=EnvironmentSource(name="words", file="/nowhere.py", attribute="Words"), config=Config(),
        policy_cache=str(policies or runs.parent / "policies"),
    ).write(folder)  # fmt: skip
    return folder


def row(talk: list[dict[str, str]]) -> tuple[list[int], list[int]]:
    """Return tokens and mask of a conversation whose answers were sampled, each with its end token."""
    tokenizer = make_tokenizer(RECIPES["embedded"])
    tokens: list[int] = []
    mask: list[int] = []
    for place, message in enumerate(talk):
        if message["role"] != "assistant":
            continue
        before = tokenizer.apply_chat_template(talk[:place], tokenize=False, add_generation_prompt=True)
        ids = tokenizer(before, add_special_tokens=False)["input_ids"][len(tokens) :]
        said = tokenizer(message["content"], add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
        tokens += [*ids, *said]
        mask += [*[MASKED] * len(ids), *said]
    return tokens, mask


def asked(question: str, *answers: str) -> list[dict[str, str]]:
    """Return a conversation: a question, then answers with remarks of the user between them."""
    talk = [{"role": "user", "content": question}]
    for number, answer in enumerate(answers):
        talk += [{"role": "user", "content": f"go on {number}"}] if number else []
        talk.append({"role": "assistant", "content": answer})
    return talk


def group(number: int, talks: list[list[dict[str, str]]], rewards: list[float], **fields) -> Group:
    """Return a group as the driver posts it."""
    rows = [row(talk) for talk in talks]
    return Group(
        **{
            "tokens": [tokens for tokens, _ in rows],
            "masks": [mask for _, mask in rows],
            "scores": rewards,
            "versions": [[(number, 3)]] * len(talks),
            "group_id": f"g{number}",
            "environment": "words",
            "task_id": f"task-{number}",
            "outcomes": [
                Outcome(reward, {"exact": reward}, success=reward >= 1, turns=(len(talk)) // 2)
                for reward, talk in zip(rewards, talks, strict=True)
            ],
            "prompt": talks[0][0]["content"],
            "answers": [talk[1]["content"] for talk in talks],
            **fields,
        }
    )


def journal(folder: RunFolder, groups: list[Group], **options) -> None:
    """Append the groups to the journal as the trajectory API does."""
    file = FileJournal(folder.journal, **options)
    for one in groups:
        file.append(msgspec.json.encode(one), GroupNote(rows=len(one.tokens)))
    file.close()


def hold_out(folder: RunFolder, *tasks: str) -> None:
    """Write an evaluation that held these tasks out."""
    sampled = {"split": "heldout", "by_task": {"tasks": list(tasks)}}
    write_json(folder.evaluation("before"), {"version": 1, "label": "before", "sampled": sampled, "greedy": None})


def words_run(runs: Path, groups: int = 6, run_id: str = "run-a") -> RunFolder:
    """Create a run of single-turn groups of two: the first answer right, the second wrong."""
    folder = make_run(runs, run_id)
    names = ["rope", "knot", "cliff", "belay", "hold", "slab", "crimp", "jug"]
    made = []
    for number in range(1, groups + 1):
        word = names[(number - 1) % len(names)] + str(number // len(names) or "")
        question = f"Spell this word backward: {word}"
        made.append(group(number, [asked(question, word[::-1]), asked(question, word)], [1.0, 0.0]))
    journal(folder, made)
    return folder
