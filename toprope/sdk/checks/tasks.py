"""Rules about tasks: enough of them, disjoint splits, the same in every process."""

from __future__ import annotations

from collections import Counter

from toprope.sdk.checks.answers import bare
from toprope.sdk.checks.observed import ASKED, Finding, Level, Observed, SplitSeen, copies_counted, cut
from toprope.sdk.checks.texts import overlap, prompts_of_most

__all__ = ["TASKS"]

_FEW_TRAIN, _FEW_MEASURED = 100, 20
_FEW_ALIKE = 8


def no_tasks(seen: Observed) -> Finding | None:
    """A split has no tasks, or generating them fails."""
    if seen.tasks_raised:
        return Finding(
            "tasks_raise",
            "critical",
            f"tasks() raises: {cut(seen.tasks_raised)}",
            "tasks() does not raise: no task follows an error",
            seen.advice("fix tasks(); skip tasks that cannot be generated", ASKED),
            {"found": sum(split.known for split in seen.splits.values())},
        )
    empty = [name for name, split in seen.splits.items() if not split.known]
    if not empty or not seen.splits:
        return None
    slow = not all(seen.splits[name].exhausted for name in empty)
    level: Level = "critical" if "train" in empty else "note" if slow else "warning"
    sentence = f"No tasks were found in {', '.join(empty)}{' within the time' if slow else ''}."
    author = "give more distinct tasks, or a key if prompts do not distinguish tasks"
    if leaked := sum(seen.splits[name].leaked for name in empty):
        sentence += f" {leaked} were left out there, because tasks(self, split) gives them to another split, too."
        author = "give every split tasks of its own"
    return Finding(
        "no_tasks",
        level,
        sentence,
        "every split has tasks; 10 of 100 distinct ones are for validation, 10 held out",
        seen.advice(
            author,
            "set knobs that give more tasks, do without the split (evaluation.heldout_tasks: 0), or choose another "
            "environment",
        ),
        {name: split.known for name, split in seen.splits.items()},
    )


def few_tasks(seen: Observed) -> Finding | None:
    """Too few tasks to train on or to measure with."""
    few = []
    for name, split in seen.splits.items():
        least = _FEW_TRAIN if name == "train" else _FEW_MEASURED
        if split.exhausted and 0 < split.known < least:
            few.append(f"{name} {split.known}")
    if not few:
        return None
    sentence = f"There are few distinct tasks: {', '.join(few)}."
    if (train := seen.splits.get("train")) is not None and train.shared:
        tasks = "is 1 distinct task" if train.known == 1 else f"are {train.known} distinct tasks"
        sentence = f"There {tasks}, too few to hold any out: the same serve for training and evaluation."
    author = "widen the settings, or add tasks"
    if copies := max(split.copies for split in seen.splits.values()):
        sentence += f" {copies_counted(copies)}."
        author = (
            "give each task a key if they differ in more than the prompt; otherwise widen the settings, or add tasks"
        )
    return Finding(
        "few_tasks",
        "warning",
        sentence,
        f"at least {_FEW_TRAIN} for training, {_FEW_MEASURED} for validation and as many held out",
        seen.advice(author, "set wider knobs, or mix in others (environment.mixture)") + ": a policy memorises a few",
        {name: split.known for name, split in seen.splits.items()},
    )


def splits_leak(seen: Observed) -> Finding | None:
    """Held-out or validation tasks also occur in training."""
    observed: dict[str, float | int | str] = {}
    worst = 0.0
    leaked = sum(split.leaked for split in seen.splits.values())
    for split, other_split in (("heldout", "train"), ("validation", "train"), ("heldout", "validation")):
        unseen, compared = seen.splits.get(split), seen.splits.get(other_split)
        if unseen is None or compared is None or not unseen.tasks or not compared.tasks or unseen.shared:
            continue
        overlapping = overlap(_pairs(unseen), _pairs(compared))
        if overlapping.copies or overlapping.near:
            observed[f"{split}_in_{other_split}"] = overlapping.copies + overlapping.near
            worst = max(worst, (overlapping.copies + overlapping.near) / overlapping.tasks)
    if leaked:
        observed["left_out"] = leaked
    if not observed:
        return None
    shares = [f"{value} of {name.replace('_in_', ' in ')}" for name, value in observed.items() if "_in_" in name]
    if leaked:
        shares.append(f"{leaked} tasks that the environment itself gives to two splits (they are left out of one)")
    return Finding(
        "splits_leak",
        "critical" if worst >= 0.1 else "warning",
        f"Splits share content: {'; '.join(shares)}.",
        "no task is in two splits, regardless of case, spacing, spelling, or a number in front",
        seen.advice(
            "make splits disjoint by content, or give copies of a task the same key",
            "do not trust its figures on unseen tasks; measure with another environment, or tell its author",
        ),
        observed,
    )


def one_answer(seen: Observed) -> Finding | None:
    """One answer is right for nearly all tasks."""
    train = seen.splits.get("train")
    references = [task.reference.strip() for task in train.tasks if task.reference is not None] if train else []
    if len(references) < 12:
        return None
    answer, count = Counter(references).most_common(1)[0]
    share = count / len(references)
    if share < 0.8:
        return None
    return Finding(
        "one_answer",
        "critical" if share == 1.0 else "warning",
        f"The same answer is right for {share:.0%} of {len(references)} tasks: the policy learns to repeat it.",
        "no answer is right for 80 % of the tasks",
        seen.advice(
            "generate tasks with varied answers",
            "set knobs that vary the answers, mix in others (environment.mixture), or choose another environment",
        ),
        {"share": round(share, 3), "tasks": len(references), "length": len(answer)},
    )


def one_prompt(seen: Observed) -> Finding | None:
    """All tasks of all splits have one prompt, or splits share those of most, and no references tell them apart."""
    tasks = [task for split in seen.splits.values() if not split.shared for task in split.tasks]
    prompts = {(task.prompt, task.reference) for task in tasks}
    if len(tasks) < _FEW_ALIKE or (len(prompts) > 1 and not _share_left_out(seen)):
        return None
    share = "the same prompt" if len(prompts) == 1 else f"{len(prompts)} prompts"
    return Finding(
        "one_prompt",
        "note",
        f"All {len(tasks)} tasks that were looked at have {share}: unless something else tells them apart, held-out "
        "tasks are those of training.",
        "tasks differ in their prompts, or in what they hide or reset() tells",
        "fine if each hides something else, such as a number to guess; otherwise "
        + seen.advice(
            "generate tasks with different starts",
            "set knobs that vary the start, or take its figures on held-out tasks for figures of training",
        ),
        {"tasks": len(tasks)},
    )


def _share_left_out(seen: Observed) -> bool:
    """Return True if splits share prompts that tell nothing to `overlap`, nor do references."""
    splits = [_pairs(split) for split in seen.splits.values() if not split.shared]
    left_out = set[str]().union(*map(prompts_of_most, splits))
    found_in = Counter(pair for pairs in splits for pair in set(pairs))
    return any(count > 1 and pair[0] in left_out and pair[1] is None for pair, count in found_in.items())


def answer_given(seen: Observed) -> Finding | None:
    """The prompt contains the answer."""
    train = seen.splits.get("train")
    pairs = [
        (task.prompt, bare(task.reference))
        for task in (train.tasks if train else ())
        if task.reference is not None and len(bare(task.reference)) >= 6
    ]
    if len(pairs) < 8:
        return None
    share = sum(reference in prompt for prompt, reference in pairs) / len(pairs)
    if share < 0.9:
        return None
    return Finding(
        "answer_given",
        "note",
        f"The right answer occurs word for word in {share:.0%} of the prompts.",
        "a prompt does not contain its answer",
        "fine if the task is to choose or to find; otherwise "
        + seen.advice("remove the answer from the prompt", "set other knobs, or tell its author"),
        {"share": round(share, 3)},
    )


def not_repeatable(seen: Observed) -> Finding | None:
    """Another process generates other tasks or scores."""
    wrong = [again for again in seen.again if again.other_tasks or again.other_scores]
    if not wrong:
        return None
    same_seed = [again for again in seen.again if again.hash_seed == "0"]
    by_hash = bool(same_seed) and not any(again in wrong for again in same_seed)
    difference = wrong[0]
    differing = []
    if difference.other_tasks:
        differing.append(f"{difference.other_tasks} of {difference.tasks} tasks")
    if difference.other_scores:
        differing.append(f"{difference.other_scores} of {difference.scores} scores")
    observed: dict[str, float | int | str] = {
        "other_tasks": difference.other_tasks,
        "other_scores": difference.other_scores,
        "hash_seed": difference.hash_seed,
    }
    if by_hash:
        return Finding(
            "hash_seed",
            "warning",
            f"{' and '.join(differing)} differ under another PYTHONHASHSEED. {difference.first}".strip(),
            "tasks and scores are equal in every process, for any PYTHONHASHSEED",
            seen.advice("sort sets if their order matters", "nothing is to be done")
            + "; workers run with PYTHONHASHSEED=0, so runs here agree",
            observed,
        )
    return Finding(
        "not_repeatable",
        "critical",
        f"{' and '.join(differing)} differ in another process. {difference.first}".strip(),
        "tasks and scores are equal in every process",
        seen.advice(
            "use self.random or a generator with a fixed seed; avoid time, ids and global random",
            "set a seed if it has such a knob; otherwise compare no figures, tell its author, or choose another "
            "environment",
        ),
        observed,
    )


def _pairs(split: SplitSeen) -> list[tuple[str, str | None]]:
    return [(task.prompt, task.reference) for task in split.tasks]


TASKS = (no_tasks, not_repeatable, splits_leak, one_answer, one_prompt, few_tasks, answer_given)
