"""Knobs without a default: null and empty values are no values, unless the environment takes them."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import pytest

from toprope.sdk import Environment, Task
from toprope.sdk.authoring.knobs import REQUIRED, knob, make_knobs
from toprope.sdk.errors import InvalidRequest, LoadError, MissingKnobs
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

    Knobs = Needs

    def setup(self) -> None:
        if (error := {"odd": OSError, "gone": LoadError, "wrong": InvalidRequest}.get(self.knobs.path)) is not None:
            raise error(f"it is {self.knobs.path}")
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


@pytest.mark.parametrize(("path", "error"), [("odd", OSError), ("gone", LoadError), ("wrong", InvalidRequest)])
def test_error_with_a_cause_of_its_own_is_not_put_down_to_an_empty_value(path: str, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"^it is {path}$"):
        opened(path=path, anything=[])


def test_null_of_a_choice_is_a_value() -> None:
    @dataclasses.dataclass(kw_only=True)
    class Chosen:
        kind: Literal["a", None] = knob(REQUIRED)
        several: list[None] = knob(REQUIRED)

    assert make_knobs(Chosen, {"kind": None, "several": []}).kind is None
    with pytest.raises(MissingKnobs, match="the knob several "):
        make_knobs(Chosen, {"kind": "a", "several": None})


def test_empty_value_that_the_class_refuses_is_missing() -> None:
    @dataclasses.dataclass(kw_only=True)
    class Checked:
        names: list[str] = knob(REQUIRED)
        size: int = knob(3)

        def __post_init__(self) -> None:
            if not self.names or self.size > 5:
                raise ValueError("no names, or a large size")

    with pytest.raises(
        MissingKnobs, match=r"^It needs the knob names \(list\[str\]\)\. Empty, it gives ValueError: no"
    ):
        make_knobs(Checked, {"names": []})
    with pytest.raises(InvalidRequest, match="^The knobs do not fit together: no names"):
        make_knobs(Checked, {"names": ["a"], "size": 6})
