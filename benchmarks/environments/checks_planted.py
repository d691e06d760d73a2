"""Known-good tasks with one defect each: what was planted, and which rules may name it.

The tasks are reasoning-gym's greatest common divisors, sums and reversed words, and our own sorted letters. Each defect
is the smallest change of the code that makes it; nothing else differs from the environment that passes.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["GOOD", "PLANTED", "Planted", "source_of"]

_HEAD = '''"""Planted."""
import os
import random
import subprocess
import sys
import time

from toprope.sdk import Environment, Part, Task
from toprope.sdk.adapters.reasoning_gym import ReasoningGym, make


def planted():
    environment = make("{task}")
    environment.__class__ = Planted
    environment.__doc__ = "Planted."
    return environment


class Planted(ReasoningGym):
    """Planted."""

    def right(self):
        return self.answer.strip() == str(self.task.reference).strip()

    def given(self, value):
        return {{"exact": float(value >= 1.0), "partial": value}}

    def only(self, count):
        stream = ReasoningGym.tasks(self)
        return [next(stream) for _ in range(count)]

'''


@dataclass(frozen=True)
class Planted:
    """One defect."""

    name: str
    task: str
    """The known-good task of reasoning-gym."""
    code: str
    """Methods that replace the good ones."""
    rules: tuple[str, ...]
    """The rules that may name it."""
    full: bool = False
    """It takes the full form of the check."""


def source_of(planted: Planted) -> str:
    """Return the source of the environment's file."""
    body = "\n".join(f"    {line}" if line else "" for line in planted.code.strip("\n").split("\n"))
    return _HEAD.format(task=planted.task) + body + "\n"


GOOD = ("gcd", "chain_sum", "spell_backward", "count_bits", "lcm", "products", "base_conversion", "caesar_cipher")

_OWN_SPLITS = """
def tasks(self, split):
    found = self.only(600)
    if split == "train":
        yield from found[:500]
        return
    for number, task in enumerate(found[450:550] if split == "heldout" else found[550:]):
        yield Task({prompt}, reference=task.reference, data=task.data)
"""


def _own(prompt: str) -> str:
    return _OWN_SPLITS.format(prompt=prompt)


PLANTED: tuple[Planted, ...] = (
    Planted("splits share tasks", "gcd", _own("task.prompt"), ("splits_leak",)),
    Planted("splits share tasks in upper case", "caesar_cipher", _own("task.prompt.upper()"), ("splits_leak",)),
    Planted("splits share tasks, numbered", "gcd", _own('f"Task {number + 17}: {task.prompt}"'), ("splits_leak",)),
    Planted(
        "splits share tasks in other signs",
        "products",
        _own('task.prompt.replace("*", "\\uff0a").replace("?", "\\uff1f")'),
        ("splits_leak",),
    ),
    Planted(
        "splits share tasks within other words",
        "chain_sum",
        _own('f"Please help me with this one. {task.prompt} Thank you very much."'),
        ("splits_leak",),
    ),
    Planted(
        "splits share tasks without spaces",
        "lcm",
        _own('task.prompt.replace(", ", ",")'),
        ("splits_leak",),
    ),
    Planted(
        "any text is rewarded",
        "gcd",
        "def score(self):\n    return self.given(float(bool(self.answer)))",
        ("junk_rewarded",),
    ),
    Planted(
        "no answer is rewarded",
        "gcd",
        "def score(self):\n    return self.given(float(self.right() or not self.answer))",
        ("junk_rewarded",),
    ),
    Planted(
        "length is rewarded",
        "spell_backward",
        "def score(self):\n    return self.given(max(float(self.right()), min(1.0, len(self.answer) / 2000)))",
        ("junk_rewarded",),
    ),
    Planted(
        "repeating the prompt is rewarded",
        "chain_sum",
        "def score(self):\n    return self.given(float(self.right() or self.task.prompt[:20] in self.answer))",
        ("junk_rewarded",),
    ),
    Planted(
        "junk raises",
        "gcd",
        "def score(self):\n    return self.given(float(int(self.answer) == int(self.task.reference)))",
        ("scoring_raises",),
    ),
    Planted(
        "signs that look like digits raise",
        "gcd",
        "def score(self):\n"
        "    found = [c for c in self.answer if c.isdigit()]\n"
        "    return self.given(float(sum(int(c) for c in found) >= 0 and self.right()))",
        ("scoring_raises",),
    ),
    Planted(
        "the reference fails",
        "gcd",
        "def score(self):\n    return self.given(float(self.answer.strip() == str(int(self.task.reference) + 1)))",
        ("reference_fails",),
    ),
    Planted(
        "some references fail",
        "chain_sum",
        "def score(self):\n"
        '    return self.given(float(self.right() and not self.task.reference.endswith(("1", "3", "5", "7"))))',
        ("reference_fails",),
    ),
    Planted(
        "tasks depend on the hash seed",
        "spell_backward",
        "def tasks(self):\n"
        "    found = {task.prompt: task for task in self.only(600)}\n"
        "    return [found[prompt] for prompt in set(found)]",
        ("hash_seed",),
    ),
    Planted(
        "scores depend on the hash seed",
        "gcd",
        "def score(self):\n    return self.given(1.0 if self.right() else 0.01 * (hash(self.task.prompt) % 7))",
        ("hash_seed",),
    ),
    Planted(
        "every process has its own tasks",
        "gcd",
        "def tasks(self):\n"
        "    found = self.only(600)\n"
        "    random.seed(time.time_ns())\n"
        "    random.shuffle(found)\n"
        "    return found",
        ("not_repeatable",),
    ),
    Planted("the reward is always the same", "gcd", "def score(self):\n    return self.given(0.5)", ("never_varies",)),
    Planted(
        "the reward is the task's, not the answer's",
        "chain_sum",
        "def score(self):\n    return self.given((len(self.task.prompt) % 5) / 10)",
        ("never_varies",),
    ),
    Planted(
        "any number is right",
        "gcd",
        'def score(self):\n    return self.given(float(self.answer.strip().lstrip("-").isdecimal()))',
        ("wrong_rewarded",),
    ),
    Planted(
        "nearly right is right",
        "lcm",
        "def score(self):\n"
        "    text = self.answer.strip()\n"
        "    return self.given(float(text.isdecimal() and abs(int(text) - int(self.task.reference)) <= 1))",
        ("wrong_rewarded",),
    ),
    Planted(
        "the same answer is scored by chance",
        "gcd",
        "def score(self):\n    return self.given(min(1.0, max(0.0, self.right() * 0.7 + 0.3 * random.random())))",
        ("score_changes",),
    ),
    Planted(
        "a wrong answer's score is not a number",
        "gcd",
        'def score(self):\n    return {"exact": 0.0, "partial": 1.0 if self.right() else float("nan")}',
        ("bad_score",),
    ),
    Planted(
        "a score is out of its range",
        "gcd",
        'def score(self):\n    return {"exact": 0.0, "partial": 1.0 if self.right() else -1.0}',
        ("bad_score",),
    ),
    Planted(
        "one answer is right for all",
        "gcd",
        'def tasks(self):\n    return [Task(task.prompt, reference="6", data=task.data) for task in self.only(600)]\n\n'
        "def score(self):\n    return self.given(float(self.right()))",
        ("one_answer",),
    ),
    Planted(
        "there are few tasks",
        "gcd",
        "def tasks(self):\n    return self.only(60)",
        ("few_tasks",),
    ),
    Planted(
        "making tasks raises in the end",
        "gcd",
        "def tasks(self):\n    yield from self.only(200)\n    raise KeyError('row 201')",
        ("tasks_raise",),
    ),
    Planted(
        "long answers take for ever",
        "gcd",
        "def score(self):\n"
        "    if len(self.answer) > 10000:\n"
        "        time.sleep(60)\n"
        "    return self.given(float(self.right()))",
        ("hangs",),
    ),
    Planted(
        "no answer ends the process",
        "gcd",
        "def score(self):\n    if not self.answer:\n        os._exit(3)\n    return self.given(float(self.right()))",
        ("hangs",),
    ),
    Planted(
        "scoring leaves processes",
        "gcd",
        "def score(self):\n"
        '    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"], start_new_session=True)\n'
        "    return self.given(float(self.right()))",
        ("leaves_processes",),
    ),
    Planted(
        "every answer is kept for ever",
        "gcd",
        "kept = []\n\n"
        "def score(self):\n"
        "    Planted.kept.append(bytearray(os.urandom(4096) * 64))\n"
        "    return self.given(float(self.right()))",
        ("memory_grows",),
        full=True,
    ),
)
