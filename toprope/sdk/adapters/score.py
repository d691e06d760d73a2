"""Single-turn environments from a function `score(prompt, completion) -> float` and prompts.

The target is a JSON object:

    {"file": "/path/grade.py",       the user's file
     "function": "score",            the scorer; sync or async
     "rows": "prompts.jsonl",        see toprope.sdk.adapters._shared.user_files
     "prompt": "prompt",             column of the prompt: a text, or messages
     "reference": "answer",          column of the right answer, if any
     "range": [0, 1],                bounds of the score; a value outside is an error of its rollout,
     "clip": false,                  or is clipped
     "success": 1.0,                 score from which a rollout counts as solved; the highest by default
     "name": "...", "description": "..."}

The function receives the prompt, the completion, and the columns that its further parameters name:
`def score(prompt, completion, answer)`; with `**columns` it receives all.
"""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from toprope.sdk.adapters._shared.bounds import Bounds
from toprope.sdk.adapters._shared.keys import keyed
from toprope.sdk.adapters._shared.listing import Listed
from toprope.sdk.adapters._shared.rows import chat_of
from toprope.sdk.adapters._shared.user_files import UserFile, data_beside, functions, parsed
from toprope.sdk.authoring.environment import Environment, Task
from toprope.sdk.authoring.event_loop import BackgroundLoop
from toprope.sdk.discovery import first_line
from toprope.sdk.errors import EnvironmentMistake, LoadError
from toprope.sdk.worker.splits import KEYED_RULE

__all__ = ["KEYS", "Score", "declared", "make"]

KEYS = ("file", "function", "rows", "prompt", "reference", "range", "clip", "success", "name", "description")
"""Keys of a target, and of an owner's YAML file."""
_REFERENCES = ("reference", "answer", "solution", "ground_truth", "label")


class Score(Environment):
    """A score function."""

    listed = finite = True
    tags = ("score-function", "single-turn")
    key_rule = KEYED_RULE

    def __init__(self, target: Mapping[str, Any]) -> None:
        self._user = UserFile(str(target.get("file") or ""))
        name = str(target.get("function") or "score")
        self._function = self._user.get(name, "the score")
        if not callable(self._function):
            raise LoadError(f"{self._user.path.name}: {name} is {type(self._function).__name__}, not a function.")
        self._rows = target.get("rows") or self._user.own_rows()
        if not self._rows:
            raise LoadError(
                f"{self._user.path.name} has no rows: give `rows` in the target, a data file or the name of a list."
            )
        self.files = self._user.files(self._rows)
        self.name = str(target.get("name") or self._user.path.stem)
        description = (
            target.get("description") or first_line(self._function.__doc__) or first_line(self._user.module.__doc__)
        )
        self.__doc__ = str(description or f"Prompts scored by {name} of {self._user.path.name}")
        self._bounds = Bounds(target.get("range"), bool(target.get("clip")), "`range`")
        self._solved = float(target.get("success", self._bounds.high))
        self._label = f"{name}()"
        self.parts = {"score": self._bounds.part(1.0, f"what {name} of {self._user.path.name} returns")}
        self._prompt = str(target.get("prompt") or "prompt")
        self._reference = str(target.get("reference") or "")
        self.guessed_reference = not self._reference
        self._must, self._may, self._all, self._taken = _parameters(self._function, name)
        self._loop = BackgroundLoop()

    def tasks(self) -> Iterator[Task]:
        yield from keyed(self._row_tasks(), played=False, prompt=self._prompt)

    def _row_tasks(self) -> Iterator[Task]:
        for number, row in enumerate(self._user.rows(self._rows), 1):
            if self._prompt not in row:
                raise EnvironmentMistake(
                    f"Row {number} has no {self._prompt!r}; it has {', '.join(map(str, row))}. `prompt` in the target "
                    "names the column."
                )
            column = self._reference or next((name for name in _REFERENCES if name in row), "")
            prompt = chat_of(row[self._prompt], f"Row {number}")
            yield Task(prompt, reference=row.get(column), data={"row": row})

    def score(self) -> dict[str, float]:
        row = self.task.data["row"]
        accepted = row if self._all else {name: row[name] for name in self._may if name in row}
        columns = {name: value for name, value in accepted.items() if name not in self._taken}
        for name in self._must:
            if name not in row and name != "reference":
                raise EnvironmentMistake(
                    f"{self._label} wants {name!r}, which is not a column of the rows: {list(row)}."
                )
            columns[name] = row[name] if name in row else self.task.reference
        returned = self._function(self.task.prompt, self.answer, **columns)
        if inspect.isawaitable(returned):
            returned = self._loop.run(returned)
        return {"score": self._bounds.value(returned, self._label)}

    def success(self, parts: dict[str, float], reward: float) -> bool:
        return parts["score"] >= self._solved - 1e-9


def make(target: str) -> Score:
    """Make the environment of a target. See the module.

    Raises:
        LoadError: Not a valid target, or the file lacks a name in it.
    """
    return Score(parsed(target, "score", KEYS))


def declared(file: Path, tree: ast.Module) -> list[Listed]:
    """List a file with a function `score(prompt, completion, ...)` and rows."""
    parameters = functions(tree).get("score")
    if parameters is None or parameters[:2] not in (["prompt", "completion"], ["prompt", "answer"]):
        return []
    rows = data_beside(file, tree)
    problem = f"No rows: add a list `rows`, a function `rows()`, or {file.stem}.jsonl beside {file.name}."
    return [
        Listed(
            name=file.stem,
            target=json.dumps({"file": str(file), "rows": rows or None}),
            description=first_line(ast.get_docstring(tree)) or f"Prompts scored by score() of {file.name}",
            turns=1,
            tags=Score.tags,
            problem="" if rows else problem,
        )
    ]


def _parameters(function: Any, name: str) -> tuple[list[str], list[str], bool, set[str]]:
    """Return required and optional parameters besides prompt and completion, True if it takes any column, and the
    names that are no columns."""
    taken = {"prompt", "completion"}
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return [], [], False, taken
    plain = [
        parameter
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    if len(plain) < 2 and not any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        raise LoadError(f"{name} takes {len(plain)} arguments; it must take a prompt and a completion.")
    more = [*plain[2:], *(parameter for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY)]
    must = [parameter.name for parameter in more if parameter.default is parameter.empty]
    return (
        must,
        [parameter.name for parameter in more if parameter.name not in must],
        any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters),
        taken | {parameter.name for parameter in plain[:2]},
    )
