"""Results of a test of several models (models.json) and of questions to a policy (answers.json) in a run's folder."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

from toprope.atomic import write_json
from toprope.errors import Corrupt, NotFound
from toprope.records.run.folder import RunFolder, read_json

TESTED_VERSION = 1
"""Version of both files."""

ENDPOINT_KEY = "TOPROPE_ENDPOINT_"
"""Prefix of the variables that carry keys of models at endpoints to the driver, and to no other component."""


class TestedModel(BaseModel):
    """The result of one model. Values that were not measured are None, never 0."""

    __test__ = False

    name: str
    model: str
    error: str | None = None
    """The reason why it could not be measured; None if it was."""
    sampled: dict[str, Any] | None = None
    """Counts, means and shares over all answers, as in an evaluation."""
    scores: list[list[float]] = []
    """The rewards of all answers to each task, in the order of the tasks."""
    examples: list[dict[str, Any]] = []
    seconds: float
    answered: int = 0
    """Tasks with all their answers."""
    unanswered: int = 0
    """Tasks that the endpoint did not answer after all attempts; no mean includes them."""
    retries: int = 0
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cost_usd: float | None = None
    """The cost that the endpoint reported, else tokens times the owner's prices; None if neither is known."""


class AnsweredConversation(BaseModel):
    """A conversation with a policy, and its answers."""

    messages: list[dict[str, str]]
    answers: list[str] = []
    truncated: list[bool] = []
    error: str | None = None
    """The reason why there is no answer."""


_Entry = TypeVar("_Entry")

_models = TypeAdapter(list[TestedModel])
_answers = TypeAdapter(list[AnsweredConversation])


def write_models(folder: RunFolder, models: list[TestedModel]) -> None:
    """Replace models.json."""
    _write(folder, "models", _models.dump_python(models, mode="json"))


def read_models(folder: RunFolder) -> list[TestedModel]:
    """The models in models.json; none if the file is missing.

    Raises:
        Corrupt: It cannot be read.
    """
    return _read(folder, "models.json", _models)


def write_answers(folder: RunFolder, answers: list[AnsweredConversation]) -> None:
    """Replace answers.json."""
    _write(folder, "answers", _answers.dump_python(answers, mode="json"))


def read_answers(folder: RunFolder) -> list[AnsweredConversation]:
    """The answers in answers.json; none if the file is missing.

    Raises:
        Corrupt: It cannot be read.
    """
    return _read(folder, "answers.json", _answers)


def _write(folder: RunFolder, what: str, entries: list[Any]) -> None:
    write_json(folder.path / f"{what}.json", {"version": TESTED_VERSION, what: entries})


def _read(folder: RunFolder, name: str, adapter: TypeAdapter[list[_Entry]]) -> list[_Entry]:
    path = folder.path / name
    try:
        value = read_json(path, TESTED_VERSION)
        # Before there were versions, the file was the list itself.
        return adapter.validate_python(value.get(path.stem) if isinstance(value, dict) else value)
    except NotFound:
        return []
    except ValidationError as error:
        raise Corrupt(
            f"{path} is not what a run writes: {error.error_count()} of its fields do not fit.",
            hint="It was left as it is.",
        ) from None
