"""The one tree of errors that Toprope raises on purpose.

Whoever catches `TopropeError` may show its text to an agent or a person as it stands: it says what failed and why,
names valid values where there are any, and what to do next. Anything else that escapes is a bug of ours.

    TopropeError
    ├── NotFound              no such environment, draft, run, component, field, file
    ├── InvalidValue          a value has the wrong type, is out of bounds, or does not fit its neighbours
    │   └── LockedField       the owner keeps this field
    ├── NotPossibleNow        the request is fine, the moment is not (a run that ended, a lock that is held)
    │   └── DiskFull          there is no room on a disk; nothing is lost, and the same may pass when there is
    ├── EnvironmentFailed     a user's environment does not load, raises, hangs or answers nonsense
    ├── ComponentFailed       a process of the crew ended or did not answer
    └── Corrupt               something on disk is not what we wrote; it was left as it is
        └── TooNew            it is what a newer version of us wrote
"""

from __future__ import annotations

__all__ = [
    "ComponentFailed",
    "Corrupt",
    "DiskFull",
    "EnvironmentFailed",
    "InvalidValue",
    "LockedField",
    "NotFound",
    "NotPossibleNow",
    "TooNew",
    "TopropeError",
    "shown",
    "visible",
]


def shown(name: object, limit: int = 80) -> str:
    """A name as a message quotes it: cut, and with what is invisible in it written out. It came from outside."""
    text = ascii(name) if isinstance(name, str) and not name.isprintable() else repr(name)
    return text if len(text) <= limit else f"{text[: limit - 2]}…{text[0]}"


def visible(text: str, limit: int = 4000) -> str:
    """Words from outside as a message may hold them: lines stay, what else is invisible is marked, and it is cut."""
    if not text.isprintable():
        text = "".join(c if c == "\n" or c.isprintable() else " " if c == "\t" else "\ufffd" for c in text)
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


class TopropeError(Exception):
    """Root of the tree.

    Args:
        message: What failed and why, in one or two sentences.
        hint: What to do next: valid values, a call, a command. Shown after the message.
    """

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} {self.hint}".strip()


class NotFound(TopropeError):
    """Nothing has that name or id."""


class InvalidValue(TopropeError):
    """A value cannot be accepted; nothing was changed."""


class LockedField(InvalidValue):
    """The owner fixed or bounded this field; the message carries the owner's reason."""


class NotPossibleNow(TopropeError):
    """The state of things does not allow this; the message says which state would."""


class DiskFull(NotPossibleNow):
    """There is no room on a disk for what was to be written; nothing was lost, and it may pass later."""


class EnvironmentFailed(TopropeError):
    """A user's environment failed in its worker."""


class ComponentFailed(TopropeError):
    """A process of a crew failed or did not answer in time."""


class Corrupt(TopropeError):
    """A file or database of ours cannot be read; it was left untouched."""


class TooNew(Corrupt):
    """A file of ours that a newer version wrote; it was left untouched."""
