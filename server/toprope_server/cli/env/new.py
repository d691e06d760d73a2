"""`toprope env new`: write a working environment and its test, as a starting point."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from toprope_server.cli.context import reporting_errors

_ENVIRONMENT = '''"""{title}: an environment for Toprope. docs/environments.md describes what else it can have."""

from __future__ import annotations

from collections.abc import Iterator

from toprope.sdk import Environment, Part, Task, knob


class {type}(Environment):
    """Write a word backwards."""  # the first line is what list_environments shows

    name = "{name}"
    tags = ("strings",)

    # The reward is the sum of weight times value. Partial credit lets a weak policy start to learn.
    parts = {{
        "letters": Part(weight=0.5, description="share of letters in the right place"),
        "exact": Part(weight=0.5, description="1 when the whole word is right"),
    }}

    # Settings of a run, checked before you see them as self.knobs.
    class Knobs:
        length: int = knob(3, ge=2, le=12, help="letters of a word")

    # All tasks, finite or endless, in the same order in every run because self.random is seeded. Splits depend on the
    # text of a task, not on its position.
    def tasks(self) -> Iterator[Task]:
        while True:
            word = "".join(self.random.choice("abcdefghij") for _ in range(self.knobs.length))
            yield Task(f"Write this backwards: {{word}}", reference=word[::-1])

    # Called when the rollout is done. For several turns, write reset(), step() and max_turns, too.
    def score(self) -> dict[str, float]:
        right, answer = self.task.reference, self.answer.strip()
        hits = sum(a == b for a, b in zip(answer, right, strict=False))
        return {{"letters": hits / max(len(right), len(answer)), "exact": float(answer == right)}}
'''

_TEST = '''"""Tests of {name}: scores of right, wrong and odd answers. Run them with pytest."""

from __future__ import annotations

import sys
from itertools import islice
from pathlib import Path

import pytest

from toprope.sdk import play
from toprope.sdk.rollouts import configure

sys.path.insert(0, str(Path(__file__).parent))

from {module} import {type}  # noqa: E402 - the file beside this one


def task(index: int):
    return next(islice(configure({type}()).tasks(), index, None))


@pytest.mark.parametrize("index", range(5))
def test_reference_gets_full_reward(index: int) -> None:
    outcome = play({type}, [task(index).reference], index=index)
    assert outcome.error is None and outcome.success and outcome.reward == 1.0


@pytest.mark.parametrize("answer", ["", "qx zv 17 ?!", "a" * 10_000])
def test_junk_gets_little_reward_without_errors(answer: str) -> None:
    outcome = play({type}, [answer])
    assert outcome.error is None and not outcome.success and outcome.reward < 0.5


def test_tasks_are_the_same_in_every_run() -> None:
    assert [task(index).id for index in range(20)] == [task(index).id for index in range(20)]
    assert len({{task(index).id for index in range(20)}}) > 10
'''


def new(
    name: Annotated[str, typer.Argument(help="Lower-case letters, digits, '_' and '-'.")],
    folder: Annotated[
        Path | None,
        typer.Option(help="The folder to write to. Default: environments in the owner's configuration folder."),
    ] = None,
) -> None:
    """Write a working environment and its test, as a starting point for your own."""
    from toprope.settings.owner import Home

    with reporting_errors():
        home = Home.locate()
        place = (folder or home.configuration / "environments").expanduser().absolute()
        file, test = write_template(name, place)
        listed = place in [one.absolute() for one in home.environment_folders(home.settings())]
    typer.echo(f"Wrote {file}\n      {test}")
    called = name if listed else str(file)
    if not listed:
        typer.echo(f"Add it to the list: toprope env add {place}")
    typer.echo(f"Play it: toprope env try {called} --model solver\nTest it: python -m pytest {test}")


def write_template(name: str, folder: Path) -> tuple[Path, Path]:
    """Write the environment and its test.

    Args:
        name: The environment's name, and with underscores that of the file.
        folder: The folder to write to; created if missing.

    Returns:
        Both files.

    Raises:
        InvalidValue: Not a valid name, or the name of a Python module.
        NotPossibleNow: A file exists already, or the folder is not writable.
    """
    from toprope.errors import NotPossibleNow
    from toprope.workbench.interpreters.naming import module_name

    module = module_name(name)
    words = {
        "name": name,
        "module": module,
        "title": module.replace("_", " ").capitalize(),
        "type": "".join(word.capitalize() for word in module.split("_") if word),
    }
    texts = {folder / f"{module}.py": _ENVIRONMENT, folder / f"test_{module}.py": _TEST}
    for path in texts:
        if path.exists():
            raise NotPossibleNow(f"{path} already exists; nothing was written.", hint="Choose another name.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in texts.items():
            with path.open("x", encoding="utf-8") as out:
                out.write(text.format(**words))
    except OSError as error:
        raise NotPossibleNow(f"Cannot write to {folder}: {error.strerror or error}.") from None
    file, test = texts
    return file, test
