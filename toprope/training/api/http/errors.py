"""The refusal of a request, in one form that the server sends and the clients raise again."""

from __future__ import annotations

import msgspec

from toprope.errors import DiskFull, InvalidValue, NotPossibleNow


class Refused(InvalidValue):
    """A request that the API does not carry out; nothing was changed.

    Args:
        kind: A short name for programs (`length_mismatch`, `cursor_ahead`); refusals are counted by it.
        message: The reason, for people.
        status: The HTTP status of the answer.
        field: The faulty part of the request, as a path (`masks[3]`), if one is known.
        retry_after: Seconds after which the same request may succeed.
    """

    def __init__(
        self, kind: str, message: str, *, status: int = 422, field: str | None = None, retry_after: int | None = None
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.status = status
        self.field = field
        self.retry_after = retry_after

    def body(self) -> bytes:
        """The JSON body of the answer: {"error": {"type", "message", "field"}}."""
        return msgspec.json.encode({"error": {"type": self.kind, "message": self.message, "field": self.field}})

    @classmethod
    def parse(cls, status: int, body: bytes) -> Refused:
        """The refusal in an answer; `unexpected_answer` if the body is not one of the API's."""
        try:
            error = msgspec.json.decode(body)["error"]
            return cls(str(error["type"]), str(error["message"]), status=status, field=error.get("field"))
        except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError):
            text = body[:200].decode("utf-8", "replace")
            return cls("unexpected_answer", f"The trajectory API answered {status}: {text}", status=status)


def to_refusal(error: InvalidValue | NotPossibleNow) -> Refused:
    """The refusal with which the API answers one of our errors."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, DiskFull):
        return Refused("disk_full", str(error), status=503, retry_after=5)
    if isinstance(error, NotPossibleNow):
        return Refused("storage", str(error), status=503, retry_after=5)
    return Refused("invalid_value", str(error))
