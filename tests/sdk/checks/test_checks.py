"""The rules of a check on given observations, and the comparison of texts that finds copied tasks."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from toprope.sdk.checks import judge, probing
from toprope.sdk.checks.answers import near_miss, probes
from toprope.sdk.checks.observed import Again, Ended, Observed, Scored, SplitSeen, TaskSeen
from toprope.sdk.checks.texts import overlap
from toprope.sdk.errors import OURS, WorkerTimeout


def seen_with(*scores: Scored, **fields: object) -> Observed:
    seen = Observed(**fields)  # type: ignore[arg-type]
    seen.scores = list(scores)
    return seen


def named(seen: Observed) -> dict[str, str]:
    return {finding.rule: finding.level for finding in judge(seen)}


def split(*prompts: str, exhausted: bool = False, known: int = 0, reference: str = "x") -> SplitSeen:
    tasks = tuple(TaskSeen(str(place), prompt, f"{reference}{place}") for place, prompt in enumerate(prompts))
    return SplitSeen(tasks, known or len(tasks), exhausted)


SOUND = [
    Scored(task, kind, reward, success=reward == 1.0, seconds=0.001, again=again)
    for task in range(3)
    for kind, reward, again in (
        ("reference", 1.0, 1.0),
        ("empty", 0.0, 0.0),
        ("junk", 0.0, 0.0),
        ("near_miss", 0.3, 0.3),
    )
]


def test_sound_environment_has_no_findings() -> None:
    assert named(seen_with(*SOUND)) == {}


def test_constant_reward_refuses_if_right_answer_was_tried() -> None:
    same = [Scored(task, kind, 0.5) for task in range(2) for kind in ("reference", "empty", "junk")]
    [finding] = [one for one in judge(seen_with(*same)) if one.rule == "never_varies"]
    assert finding.refuses and finding.level == "critical"
    by_task = [Scored(task, kind, task / 2) for task in range(2) for kind in ("reference", "junk")]
    assert named(seen_with(*by_task))["never_varies"] == "critical"
    unknown = [Scored(task, kind, 0.0) for task in range(2) for kind in ("empty", "junk")]
    [finding] = [one for one in judge(seen_with(*unknown)) if one.rule == "never_varies"]
    assert not finding.refuses
    game = [Scored(task, kind, 0.0) for task in range(2) for kind in ("reference", "junk")]
    assert named(seen_with(*game, max_turns=6))["never_varies"] == "note"
    played = [*game, Scored(0, "solver", 0.0), Scored(1, "solver", 0.0)]
    assert named(seen_with(*played, max_turns=6))["never_varies"] == "critical"


def test_rewards_of_judges_are_not_missed() -> None:
    unscored = [Scored(task, kind, 0.0) for task in range(2) for kind in ("empty", "junk")]
    assert named(seen_with(*unscored)) == {"never_varies": "warning", "no_reference": "warning"}
    assert named(seen_with(*unscored, judged=True)) == {}
    raising = [replace(one, error="KeyError") for one in unscored]
    assert named(seen_with(*raising, judged=True)) == {"never_varies": "critical"}


def test_lone_answers_of_a_grouped_environment_refuse_nothing() -> None:
    same = [Scored(task, kind, 0.0) for task in range(2) for kind in ("reference", "empty", "junk")]
    [finding] = [one for one in judge(seen_with(*same, grouped=True)) if one.rule == "never_varies"]
    assert (finding.level, finding.refuses) == ("warning", False) and "none could be tried" in finding.what
    assert named(seen_with(*same, grouped=True, together={0: [0.0, 0.0]}))["never_varies"] == "critical"
    half = [replace(score, reward=0.5) for score in same if score.kind != "reference"]  # the middle of its group
    compared = seen_with(*half, grouped=True, together={0: [1.0, 0.0]})
    assert named(compared) == {"no_reference": "warning"}
    solved = seen_with(*half, Scored(0, "other", 0.5, success=True), grouped=True, together={0: [1.0, 0.0]})
    assert "no_reference" not in named(solved)


def test_guessed_references_refuse_nothing() -> None:
    """The scorer may require another form of the answer (boxed, in tags), so this is a warning at most."""
    same = [Scored(task, kind, 0.0) for task in range(2) for kind in ("reference", "empty", "junk")]
    [finding] = [one for one in judge(seen_with(*same, guessed=True)) if one.rule == "never_varies"]
    assert (finding.level, finding.refuses) == ("warning", False) and "another form" in finding.what
    assert named(seen_with(*same, guessed=True))["reference_fails"] == "warning"
    full = [Scored(task, kind, 1.0) for task in range(2) for kind in ("reference", "empty", "junk")]
    [finding] = [one for one in judge(seen_with(*full, guessed=True)) if one.rule == "never_varies"]
    assert finding.refuses, "every answer has the highest reward"


def test_lone_rollout_errors_only_warn_for_own_loop() -> None:
    error = f"RuntimeError: {'left out ' * 99}, as ffmpeg is missing"
    raised = [Scored(0, kind, 0.0, error=error) for kind in ("reference", "junk", "empty")]
    [alone] = [one for one in judge(seen_with(*raised, own_loop=True)) if one.rule == "never_varies"]
    assert (alone.level, alone.refuses) == ("warning", False) and "tried alone" in alone.what
    [ours] = [one for one in judge(seen_with(*raised)) if one.rule == "never_varies"]
    assert (ours.level, ours.refuses) == ("critical", True)
    assert ours.what.endswith("as ffmpeg is missing") and ours.next == "fix score()"
    [theirs] = [one for one in judge(seen_with(*raised, foreign=True)) if one.rule == "never_varies"]
    assert theirs.next.startswith("give it what the error names") and theirs.refuses


@pytest.mark.parametrize(
    ("scores", "rule", "level"),
    [
        ([Scored(0, "reference", 0.2)], "reference_fails", "critical"),
        ([Scored(0, "long", 1.0)], "junk_rewarded", "critical"),
        ([Scored(0, "echo", 0.3)], "junk_rewarded", "warning"),
        ([Scored(0, "nan", 0.1)], "junk_rewarded", "note"),
        ([Scored(0, "other", 1.0, True)], "wrong_rewarded", "critical"),
        ([Scored(0, kind, 1.0, True) for kind in ("other", "near_miss")], "wrong_rewarded", "critical"),
        ([Scored(0, "near_miss", 1.0, True)], "wrong_rewarded", "warning"),
        ([Scored(0, "several", 1.0, True)], "wrong_rewarded", "warning"),
        ([Scored(0, "appended", 1.0, True)], "lenient", "note"),
        ([Scored(0, "unicode", 0.0, error="ValueError: no digit")], "scoring_raises", "warning"),
        (
            [Scored(0, "junk", 0.0, error="EnvironmentMistake: score() gave part 'a' nan, which is not finite.")],
            "bad_score",
            "warning",
        ),
        ([Scored(0, "junk", 0.0, again=0.6)], "score_changes", "critical"),
        ([Scored(0, "junk", 0.0, seconds=7.0)], "slow", "warning"),
        ([Scored(0, "junk", 0.0, cut_short=True)], "cut_short", "warning"),
    ],
)
def test_judge_names_rule_and_level_of_scores(scores: list[Scored], rule: str, level: str) -> None:
    others = [Scored(9, "reference", 1.0, True), Scored(9, "empty", 0.0)] if rule != "reference_fails" else []
    assert named(seen_with(*others, *scores, Scored(0, "empty", 0.0)))[rule] == level


def test_prompt_that_wins_by_chance_is_not_junk() -> None:
    letters = tuple(TaskSeen(str(n), f"Choose {n}: A. x B. y", "AB"[n % 2]) for n in range(40))
    numbers = tuple(TaskSeen(str(n), f"Say {n}", str(n)) for n in range(40))
    for tasks, wins, level in ((letters, 4, None), (letters, 6, "critical"), (numbers, 4, "critical")):
        echoes = [Scored(n, "echo", float(n < wins), n < wins) for n in range(6)]
        seen = seen_with(*SOUND, *echoes, splits={"train": SplitSeen(tasks, 400, False)})
        assert named(seen).get("junk_rewarded") == level


def test_reward_functions_that_raise_on_every_answer_are_named() -> None:
    always = [replace(one, raised=1.0) for one in SOUND]
    assert named(seen_with(*always)) == {"scoring_raises": "warning"}
    assert named(seen_with(*always[1:], SOUND[0])) == {}, "a function may fail on a wrong answer"


def test_repeats_tell_hash_seed_from_randomness() -> None:
    by_hash = seen_with(*SOUND, again=[Again("1", 20, 5), Again("0", 20, 0)])
    assert named(by_hash) == {"hash_seed": "warning"}
    chance = seen_with(*SOUND, again=[Again("1", 20, 0, 9, 2), Again("0", 20, 0, 9, 1)])
    assert named(chance) == {"not_repeatable": "critical"}
    assert named(seen_with(*SOUND, again=[Again("1", 20, 0, 9, 0)])) == {}


def test_judge_names_split_and_process_problems() -> None:
    many = [f"Say {number} twice" for number in range(40)]
    clean = {"train": split(*many, known=400), "heldout": split("Say 99 twice", reference="y", known=30)}
    assert named(seen_with(*SOUND, splits=clean)) == {}
    leaking = {**clean, "heldout": split("SAY  7 twice!", reference="y", known=30)}
    assert named(seen_with(*SOUND, splits=leaking)) == {"splits_leak": "critical"}
    few = {**clean, "validation": split("Say 50 twice", reference="z", exhausted=True)}
    assert named(seen_with(*SOUND, splits=few)) == {"few_tasks": "warning"}
    alone = SplitSeen(split("Say 1 twice").tasks, 1, True, shared=True)
    shared = judge(seen_with(*SOUND, splits={"train": alone, "heldout": alone}))
    assert [one.rule for one in shared] == ["few_tasks"] and shared[0].what.startswith("There is 1 distinct task, too")
    assert named(seen_with(*SOUND, splits={"train": split(), "heldout": split()}))["no_tasks"] == "critical"
    assert named(seen_with(*SOUND, tasks_raised="KeyError: 'x'"))["tasks_raise"] == "critical"
    nothing = judge(seen_with(*SOUND, splits={"train": SplitSeen((), 0, True, 90), "heldout": split("Say 2 twice")}))
    assert nothing[0].rule == "no_tasks" and nothing[0].next == "give every split tasks of its own"
    copied = judge(seen_with(*SOUND, splits={"train": SplitSeen(alone.tasks, 1, True, shared=True, copies=299)}))
    assert "299 tasks are left out as copies" in copied[0].what and copied[0].next.startswith("give each task a key")
    same = SplitSeen(tuple(TaskSeen(str(n), f"Question {n}", "42") for n in range(20)), 900, False)
    assert named(seen_with(*SOUND, splits={"train": same})) == {"one_answer": "critical"}
    starts = SplitSeen(tuple(TaskSeen(str(n), "Guess the number.", None) for n in range(20)), 400, False)
    assert named(seen_with(*SOUND, splits={"train": starts, "heldout": starts})) == {"one_prompt": "note"}
    words = SplitSeen(tuple(TaskSeen(str(n), f"A word of {n % 3} letters.", None) for n in range(90)), 90, False)
    fewer = SplitSeen(words.tasks[:30], 30, False)
    [few] = judge(seen_with(*SOUND, splits={"train": words, "heldout": fewer}))
    assert few.rule == "one_prompt" and few.what.startswith("All 120 tasks that were looked at have 3 prompts:")
    lengths = (number % 30 if number < 60 else number for number in range(100))
    words = SplitSeen(tuple(TaskSeen(str(n), f"A word of {n} letters.", None) for n in lengths), 100, False)
    assert named(seen_with(*SOUND, splits={"train": words, "heldout": replace(words, tasks=words.tasks[:20])})) == {
        "one_prompt": "note"
    }, "most share theirs"
    others = SplitSeen(tuple(TaskSeen(str(n), f"A name of {n} letters.", None) for n in range(20)), 20, False)
    assert named(seen_with(*SOUND, splits={"train": fewer, "heldout": others})) == {}, "no split has another's"
    odd = seen_with(
        *SOUND,
        ended=[Ended("score long", True, "no answer")],
        left_processes=2,
        grown_mb=80.0,
        grown_calls=300,
        printed_bytes=90_000,
        left_files=("core",),
    )
    assert named(odd) == {
        "hangs": "warning", "leaves_processes": "warning", "memory_grows": "warning", "prints": "warning",
        "leaves_files": "note",
    }  # fmt: skip
    assert named(seen_with(*SOUND, tasks_s=0.4))["slow"] == "warning"


def test_call_that_timed_out_is_told_with_its_limit_and_the_setting_for_it() -> None:
    for doing, setting in (("tasks", "load_timeout_s"), ("score long", "call_timeout_s")):
        [hangs] = judge(seen_with(*SOUND, foreign=True, ended=[Ended(doing, True, "reset(seed=7) took 25 s")]))
        assert f"raise environment.{setting}" in hangs.next
        assert hangs.what.endswith(f"these calls timed out: {doing} (reset(seed=7) took 25 s).")
    [hangs] = judge(seen_with(*SOUND, foreign=True, ended=[Ended(doing, True, "") for doing in ("tasks", "solve")]))
    assert "raise environment.call_timeout_s, environment.load_timeout_s or" in hangs.next
    assert "within environment.load_timeout_s" in hangs.threshold and "environment.call_timeout_s" in hangs.threshold


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        ("What is 3 + 4?", "what is 3+4", True),
        ("Task 12: What is 3 + 4?", "What is 3 + 4?", True),
        ("Say \u201cyes\u201d", 'Say "yes"', True),
        ("#7) What is 3 + 4?", "What is 3 + 4?", True),
        ("5 - 3 = ?", "6 - 3 = ?", False),
        ("Q: 12 + 5 = ?", "Q: 47 + 5 = ?", False),
        ("Question: 47 * 5 = ?", "5 = ?", False),
        ("Task 12:  - 5", "Task 13:  - 5", False),
        ("Problem: 3 boxes of 4", "Problem: 5 boxes of 4", False),
        ("Number 17 in words", "Number 18 in words", False),
        ("12 + 7", "1 2 + 7", False),
        ("Count: ##  # #", "Count: #  ## #", False),
    ],
)
def test_overlap_ignores_spelling_but_not_numbers(one: str, other: str, alike: bool) -> None:
    assert overlap([(one, None)], [(other, None)]).copies == alike


def test_overlap_finds_wrapped_copies_by_answer() -> None:
    train = [(f"Reverse the word {word}.", word[::-1]) for word in map("w{:03}".format, range(60))]
    wrapped = [
        (f"Please help. Reverse the word {word}. Thank you!", word[::-1]) for word in map("w{:03}".format, range(20))
    ]
    assert overlap(wrapped, train).near == 20
    fresh = [
        (f"Please help. Reverse the word {word}. Thank you!", word[::-1]) for word in map("v{:03}".format, range(20))
    ]
    assert overlap(fresh, train).near == 0


def test_overlap_leaves_out_prompts_that_tasks_of_a_split_share() -> None:
    """A number to guess is hidden: authors give such tasks a key."""
    hidden = [("Guess the number.", None)] * 30
    assert overlap(hidden[:8], hidden).copies == 0
    numbers = [("Guess the number.", str(number)) for number in range(30)]
    assert overlap(numbers[:8], numbers).copies == 0
    boards = [(f"The opponent starts at {place}.", None) for place in range(9) for _ in range(3)]
    assert overlap(boards[::3], boards).copies == 0, "games that begin in few ways"
    rows = [(f"Question {row // 2 if row < 20 else row}", None) for row in range(100)]
    assert overlap(rows[::2], rows[1::2]).copies == 10, "some rows are there twice"
    accepted = [(f"Who wrote book {book}?", f"author {name}") for book in range(10) for name in range(3)]
    assert overlap(accepted[::3], accepted[1::3]).copies == 10, "questions with several accepted answers"


@pytest.mark.parametrize("form", ["{}", "<answer>{}</answer>", "\\boxed{{{}}}", "So $\\boxed{{{}}}$."])
def test_answers_in_a_form_are_varied_within_it(form: str) -> None:
    told = {probe.kind: probe.text for probe in probes("What?", form.format("New \\frac{York}{2}"))}
    assert told["first_word"] == form.format("New") and told["appended"] == form.format("New \\frac{York}{2}zzz")
    tasks = [TaskSeen(str(place), f"Is it city{place} or not?", form.format(f"city{place}")) for place in range(10, 30)]
    seen = Observed(splits={"train": SplitSeen(tuple(tasks), 20, True)})
    assert "answer_given" in named(seen)


def test_near_miss_and_probes_cover_answer_kinds() -> None:
    assert [near_miss(text) for text in ("41", "0.5", "[1, 20]", "cab", "", "?!")] == [
        "42",
        "1.5",
        "[1, 30]",
        "cai",
        None,
        "?",
    ]
    assert near_miss("<answer>cab</answer>") == "<answer>cai</answer>"
    kinds = [probe.kind for probe in probes("What?", "12 days", ["12 Days", "13 days"])]
    assert kinds[:5] == ["reference", "empty", "junk", "other", "near_miss"] and "first_word" in kinds
    assert next(p.text for p in probes("What?", "12 days", ["12 Days", "13 days"]) if p.kind == "other") == "13 days"
    several = [p.text for p in probes("What?", "3", ["3", "4", "5"]) if p.kind == "several"]
    assert several == ["4 3 5"]
    assert "reference" not in [probe.kind for probe in probes("What?", None)]


class SlowWorker:
    """A worker that needs some seconds to make the first tasks, which are 9, and as many for one of the survey."""

    pid, alive = 0, True

    def __init__(self, clock: list[float], seconds: float, prints: str) -> None:
        self.clock, self.seconds, self.prints, self.calls = clock, seconds, prints, list[str]()

    async def call(self, op: str, *, timeout: float, **arguments: Any) -> Any:
        known = op == "survey" and not arguments["seconds"]
        needed = 0.0 if op in self.calls or known else self.seconds
        if not known:
            self.calls.append(op)
        self.clock[0] += min(needed, timeout)
        if needed > timeout:
            late = WorkerTimeout(f"The worker did not answer {op!r} within {timeout:g} s and was killed.")
            late.stderr = f"noise\n{self.prints}"
            raise late
        size = {"known": 3, "exhausted": False, "shared": False}
        if op == "survey":
            more = size if known else size | {"known": 4}
            return {"train": more, "validation": size, "heldout": size}
        return size | {"tasks": [{"id": "1", "messages": [], "reference": None}]}

    async def close(self, grace: float = 0.0) -> None: ...


@pytest.mark.parametrize(
    ("extra_s", "prints", "printed"),
    [
        (40.0, "", ""),
        (5.0, f"{OURS}reset(seed=7) took 9 s", " It printed last: reset(seed=7) took 9 s"),
        (5.0, "The answer is 12.", ""),
    ],
)
def test_first_tasks_may_take_as_long_as_loading(
    monkeypatch: pytest.MonkeyPatch, extra_s: float, prints: str, printed: str
) -> None:
    clock = [100.0]
    monkeypatch.setattr(probing, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    async def opened() -> Any:
        return SlowWorker(clock, 20.0, prints)

    trial = probing.Trial(opened, call_timeout_s=4.0, until=125.0)
    asyncio.run(trial.open())
    asyncio.run(trial.look(limit=9, seconds=1.0, listed={"train": 9, "validation": 9, "heldout": 9}, extra_s=extra_s))
    if prints:
        assert trial.seen.ended[0].said.endswith(f"within 9 s and was killed.{printed}")
    else:
        assert not trial.seen.ended and trial.seen.splits["heldout"].known == 3
        assert trial.until == 125.0 + 39.0 and not trial.late and trial.first_tasks_s == 39.0
        assert trial.seen.tasks_s == 20.0, "one more task in these seconds"


def test_first_tasks_and_survey_share_the_time_beyond_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(probing, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    async def opened() -> Any:
        return SlowWorker(clock, 20.0, "")

    trial = probing.Trial(opened, call_timeout_s=4.0, until=125.0)
    asyncio.run(trial.open())
    asyncio.run(trial.look(limit=9, seconds=1.0, listed={"train": 9, "validation": 9, "heldout": 9}, extra_s=22.0))
    assert trial.seen.ended[0].said == "The worker did not answer 'survey' within 7 s and was killed."
    assert trial.until == 125.0 + 22.0
