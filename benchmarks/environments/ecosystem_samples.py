"""One small environment for each ecosystem, as its users would write it, for `make bench-environments` and the tests.

All have the same task, so that they can be compared: copy a word of four letters.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["SAMPLES", "Sample", "interpreter", "write"]

_WORD = """def word(number):
    return "".join(chr(97 + (number * step) % 26) for step in (1, 3, 7, 11))
"""

VERIFIERS = f'''"""Copy a word."""
import verifiers.v1 as vf


{_WORD}

class CopyData(vf.TaskData):
    answer: str = ""


class CopyTask(vf.Task[CopyData]):
    @vf.reward(weight=0.75)
    async def exact(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=0.25)
    async def letters(self, trace: vf.Trace) -> float:
        """Share of the letters that are there."""
        return sum(letter in trace.last_reply for letter in self.data.answer) / len(self.data.answer)

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return len(trace.last_reply)


class CopyConfig(vf.TasksetConfig):
    words: int = 60


class CopyTaskset(vf.Taskset[CopyTask, CopyConfig]):
    """Copy a word of four letters."""

    def load(self):
        for number in range(self.config.words):
            answer = word(number)
            yield CopyTask(CopyData(prompt=f"Copy: {{answer}}", answer=answer), self.config.task)
'''

VERIFIERS_BEFORE = f'''"""Copy a word."""
import verifiers as vf
from datasets import Dataset


{_WORD}

def exact(completion, answer):
    return float(completion[-1]["content"] == answer)


async def length(completion):
    """Letters of the answer."""
    return len(completion[-1]["content"])


def load_environment(words: int = 60):
    """Copy a word of four letters."""
    names = [word(number) for number in range(words)]
    rows = [{{"question": f"Copy: {{name}}", "answer": name, "task": "copying"}} for name in names]
    rubric = vf.Rubric(funcs=[exact, length], weights=[0.5, 0.0])
    return vf.SingleTurnEnv(dataset=Dataset.from_list(rows), rubric=rubric)
'''

OPENENV = f'''"""Copy a word, or guess again."""
from openenv.core.env_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


{_WORD}

class CopyAction(Action):
    message: str


class CopyObservation(Observation):
    text: str = ""


class Copy(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._state = State(episode_id="", step_count=0)

    def reset(self, seed=None, episode_id=None, **more):
        self.word = word(seed or 0)
        self._state = State(episode_id=episode_id or "", step_count=0)
        return CopyObservation(text=f"Copy: {{self.word}}", done=False, reward=0.0)

    def step(self, action, timeout_s=None, **more):
        self._state.step_count += 1
        right = action.message.strip() == self.word
        done = right or self._state.step_count >= 2
        return CopyObservation(text="right" if right else "wrong, again", done=done, reward=float(right))

    @property
    def state(self):
        return self._state


app = create_fastapi_app(Copy, CopyAction, CopyObservation, max_concurrent_envs=3)
'''

INSPECT = f'''"""Copy a word."""
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import exact, includes
from inspect_ai.solver import generate


{_WORD}

@task
def copying(words: int = 60):
    """Copy a word of four letters."""
    names = [word(number) for number in range(words)]
    samples = [Sample(input=f"Copy: {{name}}", target=name) for name in names]
    return Task(dataset=samples, solver=generate(), scorer=[exact(), includes()])
'''

ATROPOS = f'''"""Copy a word."""
from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup


{_WORD}

class Copy(BaseEnv):
    """Copy a word of four letters."""

    name = "copy"

    @classmethod
    def config_init(cls):
        server = APIServerConfig(model_name="x", base_url="http://127.0.0.1:1/v1", api_key="x", server_type="sglang")
        return BaseEnvConfig(tokenizer_name="nowhere/no-such-tokenizer", group_size=4, max_token_length=64), [server]

    async def setup(self):
        self.number = 0

    async def get_next_item(self):
        self.number += 1
        return {{"question": f"Copy: {{word(self.number)}}", "answer": word(self.number)}}

    async def collect_trajectories(self, item):
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            await managed.chat_completion(
                messages=[{{"role": "user", "content": item["question"]}}],
                n=self.config.group_size, max_tokens=12, temperature=1.0,
            )
            nodes = managed.get_state()["nodes"]
        group = ScoredDataGroup(tokens=[], masks=[], scores=[], inference_logprobs=[])
        for node in reversed(nodes):
            group["tokens"].append(node.tokens)
            group["masks"].append(node.masked_tokens)
            group["inference_logprobs"].append(node.logprobs)
            said = [token for token, mask in zip(node.tokens, node.masked_tokens) if mask != -100]
            text = self.tokenizer.decode(said, skip_special_tokens=True)
            group["scores"].append(float(text.strip() == item["answer"]))
        return group, []

    async def evaluate(self, *args, **kwargs):
        return None
'''

TRL = f'''"""Copy a word."""

{_WORD}

rows = [{{"prompt": f"Copy: {{word(number)}}", "solution": word(number)}} for number in range(60)]


def accuracy(prompts, completions, solution, **columns):
    return [float(said == right) for said, right in zip(completions, solution)]
'''

SCORE = f'''"""Copy a word."""

{_WORD}

rows = [{{"prompt": f"Copy: {{word(number)}}", "answer": word(number)}} for number in range(60)]


def score(prompt, completion, answer):
    return float(completion.strip() == answer)
'''


@dataclass(frozen=True)
class Sample:
    """An ecosystem's environment: the adapter, the text of its file, and its target with `{{file}}` filled in."""

    ecosystem: str
    adapter: str
    text: str
    target: str
    imports: str
    """Statement that imports what its author imports, in the folder of its file; where that is a server, loads it."""
    knobs: dict[str, Any] = field(default_factory=dict)
    tokenizer: str = ""
    """The knob that names the policy's tokenizer, where there is one."""

    @property
    def file(self) -> str:
        return f"{self.ecosystem}_sample.py"


_SERVED = "import uvicorn, openenv_sample as sample; uvicorn.Config(sample.app).load()"

SAMPLES = (
    Sample("reasoning_gym", "reasoning_gym", "", "spell_backward", "import reasoning_gym"),
    Sample("trl", "trl", TRL, json.dumps({"file": "{file}", "reward_funcs": ["accuracy"], "rows": "rows"}),
           "import trl_sample"),
    Sample("score", "score", SCORE, json.dumps({"file": "{file}", "rows": "rows"}), "import score_sample"),
    Sample("textarena", "textarena", "", "GuessTheNumber-v0", "import textarena"),
    Sample("verifiers", "verifiers", VERIFIERS, "{file}", "import verifiers_sample"),
    Sample("verifiers_before", "verifiers", VERIFIERS_BEFORE, "{file}", "import verifiers_before_sample"),
    Sample("openenv", "openenv", OPENENV, "{file}:app", _SERVED),
    Sample("inspect_ai", "inspect_ai", INSPECT, "{file}@copying", "import inspect_ai_sample"),
    Sample("atropos", "atropos", ATROPOS, "{file}:Copy", "import atropos_sample", {}, "tokenizer"),
)  # fmt: skip


def interpreter(ecosystem: str) -> str | None:
    """The ecosystem's own interpreter; None where it was not made (`make test-engines` does)."""
    cache = Path.home() / ".cache" / "toprope"
    folder = cache / "ecosystems" / ecosystem
    if ecosystem == "atropos":
        folder = Path(os.environ.get("TOPROPE_BENCH_VENV") or cache / "bench-atropos")
    # An installation that broke off leaves an interpreter without the ecosystem.
    if (folder / ("bin/run-api" if ecosystem == "atropos" else "installed")).exists():
        return str(folder / "bin" / "python")
    return sys.executable if ecosystem in ("reasoning_gym", "trl", "score") else None


def write(sample: Sample, folder: Path) -> dict[str, Any]:
    """Puts the environment into a folder; the source by which a worker loads it."""
    file = folder / sample.file
    if sample.text:
        file.write_text(sample.text)
    return {"adapter": sample.adapter, "target": sample.target.replace("{file}", str(file))}
