"""Knobs without a default: null and empty values are no values, unless the environment takes them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from toprope.sdk import Environment, Task
from toprope.sdk.authoring.knobs import REQUIRED, knob
from toprope.sdk.errors import InvalidRequest, MissingKnobs
from toprope.sdk.rollouts import configure


@dataclasses.dataclass(kw_only=True)
class Needs:
    """Settings of somebody else's class."""

    path: str = knob(REQUIRED, help="file with rows")
    anything: Any = knob(REQUIRED)
    limit: int | None = knob(REQUIRED, help="most rows")
    size: int = knob(3)


class Reads(Environment):
    """Reads a file."""

    Knobs = Needs  # type: ignore[assignment]

    def setup(self) -> None:
        if self.knobs.path == "odd":
            raise OSError("it is odd")
        if not self.knobs.path or not self.knobs.anything:
            raise FileNotFoundError("no such file: ''")

    def tasks(self):
        yield Task("Say it.")


def opened(**knobs: Any) -> Any:
    return configure(Reads(), knobs={"path": "rows", "anything": 1, "limit": None, **knobs}).knobs


def test_null_is_no_value_unless_the_type_allows_it() -> None:
    assert opened().limit is None
    with pytest.raises(MissingKnobs, match=r"^It needs the knobs path \(str: file with rows\), anything \(Any\)\.$"):
        opened(path=None, anything=None)
    with pytest.raises(InvalidRequest, match="'size' must be int, not null"):
        opened(size=None)


@pytest.mark.parametrize("empty", ["", [], {}])
def test_an_empty_value_is_no_value_if_it_does_not_work(empty: Any) -> None:
    with pytest.raises(MissingKnobs, match=r"^It needs the knob anything \(Any\)\. Empty, it gives FileNotFoundError"):
        opened(anything=empty)


def test_other_failures_of_setup_stay_what_they_are() -> None:
    with pytest.raises(OSError, match="it is odd"):
        opened(path="odd")
