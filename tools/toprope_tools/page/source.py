"""The page's one source: answers every question of a page, in a browser and in a client.

In the browser the owner sees everything as it is now. In a client the page belongs to the agent, too: numbers of
live runs are those that check_status may tell, what waits for the owner and the diary are left out, and no answer has
more than 60,000 characters, because clients replace longer results by a file.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from toprope.errors import InvalidValue, NotFound
from toprope.records.run.series import MOST_BUCKETS, Followers
from toprope.records.run.specification import Specification
from toprope.text_format import clip
from toprope_tools.page import comparing, library, now, rollouts, shapes
from toprope_tools.page.findings import Worded, as_written
from toprope_tools.page.items import Items, Remembered
from toprope_tools.page.run import RunLooks, fixed_part

if TYPE_CHECKING:
    from toprope_tools.workshop import Workshop

MOST_CHARACTERS = 60_000
"""Of a whole result of an app tool."""
_ROOM = MOST_CHARACTERS - 2_000
"""Of the structure, so that the text and the frame of the message fit beside it."""
_OWNERS_ALONE = frozenset({"log", "sweeps", "datasets", "dataset", "ledger", "environments", "environment"})


@dataclass(frozen=True)
class _Size:
    """Limits of an answer: buckets of a series, characters of a text, candidates of a sweep."""

    buckets: int
    characters: int
    message: int
    group: int
    candidates: int


_WHOLE = _Size(MOST_BUCKETS, 700, 4000, 0, 400)
_SMALLER = (_Size(120, 300, 1500, 4, 60), _Size(60, 160, 600, 2, 30), _Size(30, 80, 200, 1, 12))


class PageSource:
    """Answers questions of pages about one home.

    Args:
        owner: The page is the owner's dashboard.
        read_only: The page changes nothing.
        worded: Words next steps, which are calls of tools, for the page's reader.
    """

    def __init__(
        self, workshop: Workshop, *, owner: bool, read_only: bool = False, worded: Worded = as_written
    ) -> None:
        self.workshop, self.owner, self.read_only, self._worded = workshop, owner, read_only, worded
        self._remembered, self._followers = Remembered(), Followers()
        self._items = Items(workshop, owner=owner, remembered=self._remembered)

    def ask(self, question: Mapping[str, Any]) -> shapes.Answer:
        """Answer a question: `what`, and the arguments of that.

        Raises:
            InvalidValue: There is no such question, or an argument is wrong.
            NotFound: There is no such run, data set or environment.
            Corrupt: Records cannot be read.
        """
        if self.owner:
            return self._answer(question, _WHOLE)
        for size in _SMALLER:
            answer = self._answer(question, size)
            if len(msgspec.json.encode(answer)) <= _ROOM:
                return answer
        return _without_the_largest(answer)

    def _answer(self, question: Mapping[str, Any], size: _Size) -> shapes.Answer:
        what = question.get("what")
        answers: dict[object, Callable[[], shapes.Answer]] = {
            "now": lambda: now.now(
                self.workshop, self._items, self._remembered, owner=self.owner, read_only=self.read_only
            ),
            "runs": lambda: now.runs(
                self.workshop,
                self._items,
                state=_text(question, "state") or "any",
                query=_text(question, "query"),
                cursor=_text(question, "cursor"),
            ),
            "run": lambda: self._run(_run_id(question), _text(question, "after"), size),
            "rollouts": lambda: rollouts.rollouts(
                self.workshop,
                _run_id(question),
                order=_text(question, "order") or "newest",
                task=_text(question, "task"),
                part=_text(question, "part"),
                failed=question.get("failed") in (True, "1"),
                cursor=_text(question, "cursor"),
                characters=size.characters,
            ),
            "group": lambda: rollouts.whole_group(
                self.workshop,
                _run_id(question),
                _whole(question, "group"),
                cursor=_text(question, "cursor"),
                characters=size.message,
                page=size.group,
            ),
            "compare": lambda: comparing.compare(
                self.workshop,
                self._items,
                self._followers,
                _names(question, "a"),
                _names(question, "b"),
                owner=self.owner,
                buckets=size.buckets,
                worded=self._worded,
            ),
            "sweep": lambda: comparing.sweep(self.workshop, self._items, _run_id(question), most=size.candidates),
            "log": lambda: rollouts.log(
                self.workshop,
                _run_id(question),
                _text(question, "component") or "",
                lines=_whole(question, "lines", 200),
            ),
            "sweeps": lambda: comparing.sweeps(self.workshop, self._items),
            "datasets": lambda: library.datasets(self.workshop),
            "dataset": lambda: library.dataset(self.workshop, self._items, _text(question, "name") or ""),
            "ledger": lambda: library.ledger(self.workshop, self._items),
            "environments": lambda: library.environments(
                self.workshop, self._remembered, query=_text(question, "query"), cursor=_text(question, "cursor")
            ),
            "environment": lambda: library.environment(
                self.workshop, self._items, self._remembered, _text(question, "name") or ""
            ),
        }
        allowed_questions = [name for name in answers if self.owner or name not in _OWNERS_ALONE]
        if what not in allowed_questions:
            raise InvalidValue(
                f"{clip(str(what), 40)!r} is no question.",
                hint=f"what is one of {', '.join(map(str, allowed_questions))}.",
            )
        return answers[what]()

    def _run(self, run_id: str, after: str | None, size: _Size) -> shapes.Answer:
        looks = RunLooks(
            self.workshop,
            self._items,
            self._followers,
            owner=self.owner,
            buckets=size.buckets,
            may_act=not self.read_only,
            worded=self._worded,
        )
        try:
            live = looks.look(run_id, after)
            fixed = None
            if after is None:
                fixed = fixed_part(self.workshop, Specification.read(self.workshop.runs.folder(run_id)))
        except NotFound:
            if after is None:
                raise
            return shapes.Run(what="run", at=time.time(), run_id=run_id, gone=True)
        return shapes.Run(what="run", at=time.time(), run_id=run_id, gone=False, fixed=fixed, live=live)


def source_of(workshop: Workshop, *, read_only: bool) -> PageSource:
    """The source of pages in clients: one of each workshop for those that may stop runs, and one for the others."""
    kind = "reader" if read_only else "client"
    source = workshop.pages.get(kind)
    if not isinstance(source, PageSource):
        source = workshop.pages[kind] = PageSource(workshop, owner=False, read_only=read_only)
    return source


def _without_the_largest(answer: shapes.Answer) -> shapes.Answer:
    """Empty the longest lists of an answer that is too long even at its smallest, until it fits."""
    emptied: Any = answer.live if isinstance(answer, shapes.Run) and answer.live is not None else answer
    while len(msgspec.json.encode(answer)) > _ROOM:
        sizes = {
            name: len(msgspec.json.encode(field_value))
            for name, field_value in msgspec.structs.asdict(emptied).items()
            if isinstance(field_value, list) and field_value
        }
        if not sizes:
            break
        longest = max(sizes, key=lambda name: sizes[name])
        items = getattr(emptied, longest)
        setattr(emptied, longest, items[: len(items) // 2])
    return answer


def _text(question: Mapping[str, Any], name: str) -> str | None:
    text = question.get(name)
    if text is None or text == "":
        return None
    if not isinstance(text, str) or len(text) > 400:
        raise InvalidValue(f"{name} must be a text of at most 400 characters.")
    return text


def _run_id(question: Mapping[str, Any]) -> str:
    run_id = _text(question, "run_id")
    if run_id is None:
        raise InvalidValue("run_id is missing.")
    return run_id


def _whole(question: Mapping[str, Any], name: str, default: int | None = None) -> int:
    number = question.get(name, default)
    if isinstance(number, str) and number.isdecimal() and len(number) < 16:
        number = int(number)
    if not isinstance(number, int) or isinstance(number, bool):
        raise InvalidValue(f"{name} must be a whole number.")
    return number


def _names(question: Mapping[str, Any], name: str) -> list[str]:
    names = question.get(name)
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, list) or not all(isinstance(run_id, str) and len(run_id) <= 100 for run_id in names):
        raise InvalidValue(f"{name} must be a list of run ids.")
    return names[:32]
