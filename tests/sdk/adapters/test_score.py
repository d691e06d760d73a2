"""The adapter `score`: an environment of a score function and a file of prompts."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy
import pytest

from toprope.sdk.adapters import score
from toprope.sdk.authoring.environment import Task
from toprope.sdk.discovery import parse
from toprope.sdk.errors import LoadError
from toprope.sdk.rollouts import Rollout, configure
from toprope.sdk.worker.splits import KEYED_RULE, ORDER_RULE, SPLITS, TaskSplits

GRADE = """
    '''Sums, graded.'''
    import math

    def score(prompt, completion, answer, level=0):
        return completion.strip() == answer if level < 5 else 0.0

    async def slowly(prompt, completion, **columns):
        return len(completion) / 10 + (columns["level"] if completion == "level" else 0)

    def named(prompt, answer, **columns):
        return answer == "x" and columns == {"level": 1}

    def asks(prompt, completion, missing):
        return 1.0

    def odd(prompt, completion):
        return {"nan": math.nan, "none": None, "text": "1", "messages": prompt}[completion]

    def narrow(prompt):
        return 1.0
"""
ROWS = '{"prompt": "1+1", "answer": "2", "level": 1}\n{"prompt": "2+2", "answer": "4", "level": 2}\n'


def outcome(tmp_path: Path, answer: str, index: int = 0, **target: Any) -> Any:
    (tmp_path / "grade.py").write_text(textwrap.dedent(GRADE))
    (tmp_path / "grade.jsonl").write_text(ROWS)
    environment = configure(score.make(json.dumps({"file": str(tmp_path / "grade.py"), **target})))
    task = list(environment.tasks())[index]
    rollout = Rollout(environment, task)
    rollout.begin()
    return rollout.advance(answer.replace("{}", str(task.reference))).outcome


def test_score_function_with_rows_is_an_environment(tmp_path: Path) -> None:
    right = outcome(tmp_path, " {} ", 1)
    assert (right.reward, right.success) == (1.0, True)
    assert outcome(tmp_path, "3").reward == 0.0
    assert score.make(json.dumps({"file": str(tmp_path / "grade.py")})).__doc__ == "Sums, graded."


def test_prompt_of_blocks_of_text_is_text(tmp_path: Path) -> None:
    (tmp_path / "blocks.py").write_text(
        "rows = [{'prompt': [{'role': 'user', 'content': [{'type': 'text', 'text': 'Go.'}]}]}]\n"
        "def score(prompt, completion): return 1.0\n"
    )
    environment = configure(score.make(json.dumps({"file": str(tmp_path / "blocks.py")})))
    [task] = environment.tasks()
    assert task.messages == [{"role": "user", "content": "Go."}]


def test_rows_with_equal_prompts_are_tasks_of_their_own(tmp_path: Path) -> None:
    rows = "[{'question': 'Go.', 'answer': str(n)} for n in [0, 0, 1, 2]]"
    (tmp_path / "alike.py").write_text(f"rows = {rows}\ndef score(prompt, completion, answer): return 1.0\n")
    target = {"file": str(tmp_path / "alike.py"), "prompt": "question"}
    environment = configure(score.make(json.dumps(target)))
    tasks = list(environment.tasks())
    assert len({task.id for task in tasks}) == 3
    assert tasks[0].id == Task("Go.").id, "as in runs that began before"
    for rule, known in (KEYED_RULE, 3), (ORDER_RULE, 1):
        splits = TaskSplits(environment, rule=rule)
        assert sum(len(splits.page(split, 0, 9)) for split in SPLITS[:known]) == known, "runs keep their tasks"


@pytest.mark.parametrize("rows", ["rows = shuffled()", "def rows():\n    yield from shuffled()"])
def test_rows_that_are_shuffled_are_the_same_in_every_worker(tmp_path: Path, rows: str) -> None:
    (tmp_path / "shuffled.py").write_text(
        "import random\nimport numpy\n"
        "def shuffled():\n"
        "    order = list(range(20))\n    random.shuffle(order)\n"
        "    return [{'prompt': f'{number} {numpy.random.rand()}'} for number in order]\n"
        f"{rows}\ndef score(prompt, completion): return 1.0\n"
    )
    target = json.dumps({"file": str(tmp_path / "shuffled.py")})
    orders = []
    for seed in (1, 2):
        random.seed(seed)
        numpy.random.seed(seed)
        orders.append([task.content for task in configure(score.make(target)).tasks()])
    assert orders[0] == orders[1] != sorted(orders[0])
    state = random.getstate()
    next(configure(score.make(target)).tasks())
    assert random.getstate() == state, "nobody else draws from these states"


def test_rows_drawn_by_a_helper_are_the_same_in_every_worker(tmp_path: Path) -> None:
    (tmp_path / "helper_of_rows.py").write_text("import numpy\nrows = [{'prompt': str(numpy.random.rand())}]\n")
    (tmp_path / "helped.py").write_text("from helper_of_rows import rows\ndef score(prompt, completion): return 1.0\n")
    target = json.dumps({"file": str(tmp_path / "helped.py")})
    code = "import sys\nfrom toprope.sdk.adapters import score\nprint(next(score.make(sys.argv[1]).tasks()).prompt)"
    workers = [subprocess.run([sys.executable, "-c", code, target], capture_output=True, check=True) for _ in range(2)]
    assert workers[0].stdout == workers[1].stdout != b""


def test_seeds_that_a_file_sets_decide_its_rows(tmp_path: Path) -> None:
    found = []
    for seed in (1, 2, 1):
        (tmp_path / "seeded.py").write_text(
            f"import random\nimport numpy\nrandom.seed({seed})\nnumpy.random.seed({seed})\n"
            "def rows():\n    return [{'prompt': str(draw())} for draw in (random.random, numpy.random.rand)]\n"
            "def score(prompt, completion): return 1.0\n"
        )
        environment = configure(score.make(json.dumps({"file": str(tmp_path / "seeded.py")})))
        found.append([task.content for task in environment.tasks()])
    assert found[0] == found[2] and not set(found[0]) & set(found[1])


def test_column_named_as_the_completion_s_parameter_is_left_out(tmp_path: Path) -> None:
    assert outcome(tmp_path, "x", function="named").reward == 1.0


def test_score_outside_range_is_refused_or_clipped(tmp_path: Path) -> None:
    assert "slowly() gave 1.2, beyond 0 to 1" in outcome(tmp_path, "x" * 12, function="slowly").error
    assert outcome(tmp_path, "x" * 12, function="slowly", range=[0, 1.1999999]).reward == 1.1999999
    clipped = outcome(tmp_path, "x" * 12, function="slowly", clip=True)
    assert clipped.reward == 1.0 and clipped.success
    wide = outcome(tmp_path, "level", function="slowly", range=[0, 9], success=1.5)
    assert wide.reward == 1.5 and wide.success


@pytest.mark.parametrize(
    ("answer", "said"), [("nan", "nan, which is not finite"), ("none", "None, which is not a number"), ("text", "'1'")]
)
def test_score_that_is_not_a_number_is_rollout_error(tmp_path: Path, answer: str, said: str) -> None:
    assert said in outcome(tmp_path, answer, function="odd").error


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ({"function": "scor"}, "has no 'scor' for the score. Did you mean 'score'?"),
        ({"function": "narrow"}, "takes 1 arguments; it must take a prompt and a completion"),
        ({"rows": "absent.csv"}, "absent.csv"),
        ({"prompt": "question"}, "Row 1 has no 'question'; it has prompt, answer, level"),
        ({"range": [0]}, "must be [low, high]"),
        ({"colour": 1}, "The target of score has no 'colour'"),
    ],
)
def test_score_refuses_invalid_target(tmp_path: Path, target: dict[str, Any], said: str) -> None:
    with pytest.raises(Exception, match=".") as caught:
        outcome(tmp_path, "x", **target)
    assert said in str(caught.value)
    assert "wants 'missing', which is not a column" in outcome(tmp_path, "x", function="asks").error


def test_score_target_must_be_json_object() -> None:
    for target in ("", "[]", "x"):
        with pytest.raises(LoadError, match="JSON object"):
            score.make(target)


def test_score_files_are_listed_without_import(tmp_path: Path) -> None:
    file = tmp_path / "grade.py"
    file.write_text(textwrap.dedent(GRADE) + "\nraise SystemExit\n")
    [bare] = score.declared(file, parse(file))
    assert "No rows" in bare.problem and bare.name == "grade"
    (tmp_path / "grade.csv").write_text("prompt,answer\n1+1,2\n")
    [listed] = score.declared(file, parse(file))
    assert listed.problem == "" and json.loads(listed.target)["rows"] == "grade.csv"
    assert listed.description == "Sums, graded."
    other = tmp_path / "other.py"
    other.write_text("def score(a, b):\n    return 1\n")
    assert score.declared(other, parse(other)) == []
