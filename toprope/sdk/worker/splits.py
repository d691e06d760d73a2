"""Splits that share no content, made from a stream of tasks that may leak.

Seeds do not separate tasks: generators repeat themselves, and neighbouring seeds give shifted copies of one stream. So
the content of a task decides where it belongs: a hash of its normalised text, the same in every process and for every
seed. 80 of 100 fall to `train`, 10 to `validation`, 10 to `heldout`. Equal content counts once.

An environment that writes `tasks(self, split)` gives its own splits. Then held-out content is never seen elsewhere:
what `heldout` has is dropped from `validation`, what either has is dropped from `train`. For that both are read in
full, at most `OWN_SPLIT_LIMIT` tasks of each.
"""

from __future__ import annotations

import hashlib
import inspect
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from toprope.sdk.authoring.environment import Environment, Task
from toprope.sdk.authoring.knobs import nearest
from toprope.sdk.errors import EnvironmentMistake, InvalidRequest

__all__ = ["OWN_SPLIT_LIMIT", "PATIENCE", "SPLITS", "Splits", "split_of"]

SPLITS = ("train", "validation", "heldout")
PATIENCE = 500
"""After so many tasks in a row that were seen before, the content counts as finite."""
OWN_SPLIT_LIMIT = 10_000
_STRICTEST = ("heldout", "validation", "train")


def split_of(content: str) -> str:
    """The split of a task with this normalised content."""
    h = _bucket(content.encode("utf-8", "surrogatepass"))
    return "train" if h < 80 else "validation" if h < 90 else "heldout"


def _bucket(content: bytes) -> int:
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "big") % 100


def _content(task: Task) -> bytes:
    content = task.content.encode("utf-8", "surrogatepass")
    if not content:
        raise EnvironmentMistake("A task has an empty prompt.")
    return content


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()


class _Stream:
    """A stream of tasks, read once, that remembers how it failed."""

    def __init__(self, tasks: Any) -> None:
        self._tasks = tasks
        self._iterator: Iterator[Any] | None = None
        self._failure: BaseException | None = None
        self.ended = False

    def next(self) -> Task | None:
        """The next task, None at the end; raises again what the author's code once raised."""
        if self._failure is not None:
            raise self._failure
        try:
            if self._iterator is None:
                self._iterator = iter(self._tasks())
            task = next(self._iterator, None)
        except BaseException as error:
            self._failure = error  # the generator is dead now: it must not look like the end of the stream
            raise
        if task is None:
            self.ended = True
        elif not isinstance(task, Task):
            self._failure = EnvironmentMistake(f"tasks() must yield Task objects, not {type(task).__name__}.")
            raise self._failure
        return task


class Splits:
    """Random access to the tasks of each split, scanned as far as was asked for.

    Args:
        environment: A configured environment.
        seed: Seed of the order of training tasks after the first pass over them.
        family: Splits of the same environment with other knobs, read no further than their first tasks. Where it gives
            its own splits, what one of them keeps apart no other trains on.
    """

    def __init__(self, environment: Environment, seed: int = 0, family: Sequence[Splits] = ()) -> None:
        self._seed = seed
        self._family = list(family)
        for other in family:
            other._family.append(self)
        self._found: dict[str, list[Task]] = {split: [] for split in SPLITS}
        self._seen: set[bytes] = set()
        self._owner: dict[bytes, str] = {}
        """Of an environment's own splits: which of them a content belongs to."""
        self._leaked: Counter[str] = Counter()
        self._orders: dict[int, list[int]] = {}
        self._repeats = 0
        self._own = bool(inspect.signature(environment.tasks).parameters)
        if self._own:
            self._streams = {split: _Stream(lambda split=split: environment.tasks(split)) for split in SPLITS}
        else:
            stream = _Stream(environment.tasks)
            self._streams = dict.fromkeys(SPLITS, stream)

    def get(self, split: str, index: int) -> tuple[Task, int]:
        """A task and its epoch.

        `train` never ends: after its last task it begins again, in another order. The others end.

        Raises:
            InvalidRequest: There is no such split or task.
        """
        self._check(split, index)
        self._scan(split, index + 1)
        found = self._found[split]
        if index < len(found):
            return found[index], 0
        if not found:
            sizes = ", ".join(f"{len(self._found[name])} {name}" for name in SPLITS)
            raise InvalidRequest(
                f"The {split} split has no tasks ({sizes}). Give the environment more distinct tasks, or its own "
                "splits by writing tasks(self, split)."
            )
        if split != "train":
            raise InvalidRequest(f"The {split} split has {len(found)} tasks: there is no number {index}.")
        epoch, position = divmod(index, len(found))
        return found[self._order(epoch)[position]], epoch

    def some(self, split: str, start: int, count: int) -> list[Task]:
        """Up to `count` distinct tasks from `start` on; fewer at the end."""
        self._check(split, start)
        if count < 0:
            raise InvalidRequest(f"count must be at least 0, not {count}.")
        self._scan(split, start + count)
        return self._found[split][start : start + count]

    def known(self, split: str) -> int:
        """Distinct tasks found so far."""
        return len(self._found[split])

    def exhausted(self, split: str) -> bool:
        """Whether `known` is all there is."""
        return self._streams[split].ended or (not self._own and self._repeats >= PATIENCE)

    def leaked(self, split: str) -> int:
        """How often the environment itself gave this split a task that belongs to another one, as far as it was read;
        such tasks are left out."""
        return self._leaked[split]

    def survey(self, limit: int, seconds: float) -> None:
        """Scans on until every split has `limit` tasks or ended, or time is up."""
        deadline = time.monotonic() + seconds
        for split in reversed(SPLITS):
            while self.known(split) < limit and not self.exhausted(split) and time.monotonic() < deadline:
                self._scan(split, self.known(split) + 1)

    def _check(self, split: str, index: int) -> None:
        if split not in SPLITS:
            raise InvalidRequest(f"There is no split {split!r}. {nearest(str(split), SPLITS, 'Splits')}")
        if not isinstance(index, int) or isinstance(index, bool) or index < 0:
            raise InvalidRequest(f"The number of a task must be a whole number of at least 0, not {index!r}.")

    def _scan(self, split: str, wanted: int) -> None:
        if self._own:
            self._scan_own(split, wanted)
            return
        found = self._found[split]
        while len(found) < wanted and not self.exhausted(split):
            task = self._streams[split].next()
            if task is None:
                return
            content = _content(task)
            if self._is_new(content):
                h = _bucket(content)
                self._found["train" if h < 80 else "validation" if h < 90 else "heldout"].append(task)

    def _scan_own(self, split: str, wanted: int) -> None:
        for name in _STRICTEST:
            if name == "train":
                limit = wanted if split == "train" else 0
            else:
                limit = OWN_SPLIT_LIMIT
            stream, found = self._streams[name], self._found[name]
            repeats = 0
            while len(found) < limit and not stream.ended:
                task = stream.next()
                if task is None:
                    break
                content = _content(task)
                new = self._is_new(content) and not self._kept_elsewhere(name, content)
                repeats = 0 if new else repeats + 1
                if new:
                    found.append(task)
                self._leaked[name] += self._owner.setdefault(_digest(content), name) != name
                stream.ended = repeats >= PATIENCE
            if name != "train":
                stream.ended = True  # what lies beyond the limit belongs to no split
            if name == split:
                return

    def _kept_elsewhere(self, split: str, content: bytes) -> bool:
        """Whether another of the family has this content in a split that is to be kept apart from this one."""
        stricter = _STRICTEST[: _STRICTEST.index(split)]
        for other in self._family:
            for name in stricter:
                other._scan_own(name, OWN_SPLIT_LIMIT)
            if other._owner.get(_digest(content)) in stricter:
                return True
        return False

    def _is_new(self, content: bytes) -> bool:
        digest = _digest(content)
        if digest in self._seen:
            self._repeats += 1
            return False
        self._repeats = 0
        self._seen.add(digest)
        return True

    def _order(self, epoch: int) -> list[int]:
        if epoch not in self._orders:
            while len(self._orders) > 3:  # groups of neighbouring epochs may be in flight together
                del self._orders[min(self._orders)]
            order = list(range(len(self._found["train"])))
            random.Random(f"{self._seed}:{epoch}").shuffle(order)
            self._orders[epoch] = order
        return self._orders[epoch]
