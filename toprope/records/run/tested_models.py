"""What a test of several models and a question to a policy leave in a run's folder: models.json and answers.json."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from toprope.atomic import write_json
from toprope.errors import Corrupt, NotFound
from toprope.records.run.folder import RunFolder, read_json

__all__ = ["ENDPOINT_KEY", "AnswersTo", "TestedModel", "read_answers", "read_models", "write_answers", "write_models"]

TESTED_VERSION = 1
"""Of both files."""

ENDPOINT_KEY = "TOPROPE_ENDPOINT_"
"""Begins the variable by which a key of a model at an endpoint reaches the rollout driver, and nobody else."""


class TestedModel(BaseModel):
    """How one model did. What was not measured is None, never 0."""

    __test__ = False
    model_config = ConfigDict(extra="ignore")

    name: str
    model: str
    error: str | None = None
    """Why it could not be measured; None where it was."""
    sampled: dict[str, Any] | None = None
    """As the evaluation of a test has it: counts, means and shares over all answers."""
    examples: list[dict[str, Any]] = []
    seconds: float
    answered: int = 0
    """Tasks to which every answer came."""
    unanswered: int = 0
    """Tasks that the endpoint did not answer after all tries; they are in no mean."""
    retries: int = 0
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cost_usd: float | None = None
    """What the endpoint said it cost, else tokens times the owner's prices; None where neither is known."""


class AnswersTo(BaseModel):
    """A conversation that was put to a policy, and its answers."""

    model_config = ConfigDict(extra="ignore")

    messages: list[dict[str, str]]
    answers: list[str] = []
    truncated: list[bool] = []
    error: str | None = None
    """Why there is no answer."""


_models = TypeAdapter(list[TestedModel])
_answers = TypeAdapter(list[AnswersTo])


def write_models(folder: RunFolder, models: list[TestedModel]) -> None:
    """Replaces models.json."""
    _write(folder, "models", _models.dump_python(models, mode="json"))


def read_models(folder: RunFolder) -> list[TestedModel]:
    """The models of models.json; none where there is no such file.

    Raises:
        Corrupt: It is not what `write_models` wrote.
    """
    return _read(folder, "models.json", _models)


def write_answers(folder: RunFolder, answers: list[AnswersTo]) -> None:
    """Replaces answers.json."""
    _write(folder, "answers", _answers.dump_python(answers, mode="json"))


def read_answers(folder: RunFolder) -> list[AnswersTo]:
    """The answers of answers.json; none where there is no such file.

    Raises:
        Corrupt: It is not what `write_answers` wrote.
    """
    return _read(folder, "answers.json", _answers)


def _write(folder: RunFolder, what: str, entries: list[Any]) -> None:
    write_json(folder.path / f"{what}.json", {"version": TESTED_VERSION, what: entries})


def _read(folder: RunFolder, name: str, adapter: TypeAdapter[Any]) -> list[Any]:
    path = folder.path / name
    try:
        value = read_json(path, TESTED_VERSION)
        # Before there was a version the file was the list itself.
        return adapter.validate_python(value.get(path.stem) if isinstance(value, dict) else value)
    except NotFound:
        return []
    except ValidationError as error:
        raise Corrupt(
            f"{path} is not what a run writes: {error.error_count()} of its fields do not fit.",
            hint="It was left as it is.",
        ) from None
