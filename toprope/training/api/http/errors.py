"""Why the trajectory API turns a request away, in one form that the server sends and the clients raise again."""

from __future__ import annotations

import msgspec

from toprope.errors import InvalidValue

__all__ = ["Refused"]


class Refused(InvalidValue):
    """A request that the API does not carry out; nothing was changed.

    Args:
        kind: A short name for programs (`length_mismatch`, `cursor_ahead`), also the reason under which it is counted.
        message: What is wrong, for people.
        status: The HTTP status it is answered with.
        field: The part of the request that is at fault, as a path (`masks[3]`), where there is one.
        retry_after: Seconds after which the same request may pass.
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
        """The JSON that it is answered with: {"error": {"type", "message", "field"}}."""
        return msgspec.json.encode({"error": {"type": self.kind, "message": self.message, "field": self.field}})

    @classmethod
    def parse(cls, status: int, body: bytes) -> Refused:
        """The refusal in an answer, however little of it can be understood."""
        try:
            error = msgspec.json.decode(body)["error"]
            return cls(str(error["type"]), str(error["message"]), status=status, field=error.get("field"))
        except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError):
            text = body[:200].decode("utf-8", "replace")
            return cls("unexpected_answer", f"The trajectory API answered {status}: {text}", status=status)
