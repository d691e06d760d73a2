"""The door of the trajectory API: what comes in is read within limits, decoded by type and checked before anything is
stored, so that no post can harm another group or the trainer.

A body that passes is kept byte for byte, and later handed out as it came. That is safe because every part of it has
been checked: the matrices of large groups in their text (`matrices.py`), everything else, and what is not plainly in
order there, by the strict decoder. A body with fields that we do not know is written anew without them.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope

from toprope.records.journal.groups import MASKED, Group
from toprope.records.journal.journal import GroupNote
from toprope.training.api.http.body_protocol import body_of
from toprope.training.api.http.errors import Refused

__all__ = ["Door", "Limits", "Parcel", "lane_of", "read_body"]

if TYPE_CHECKING:
    from toprope.training.api.intake.fast_validation import Surveyor

_FLOATS = ("inference_logprobs", "advantages", "ref_logprobs")
_SURVEYED_BYTES = 16_384
"""Bodies below this are decoded as quickly as they are looked over."""
_DEPTH = 32
_VOCABULARY = 2**31 - 1


@dataclass(frozen=True)
class Limits:
    """What the API takes in.

    `queue_groups` and `queue_bytes` bound what waits: posts beyond are answered 503 with Retry-After.
    """

    body_bytes: int = 64 * 1024 * 1024
    """Of a request as it comes."""
    decoded_bytes: int = 256 * 1024 * 1024
    """Of a request after decompression."""
    rows: int = 65_536
    """Of one group."""
    queue_groups: int = 131_072
    queue_bytes: int = 32 * 1024**3
    lanes: int = 4096
    """Different environments."""


class Parcel(msgspec.Struct, gc=False):
    """A group that passed the door."""

    body: bytes
    note: GroupNote
    env_id: int | None
    posted: bytes
    """The body as it came; `body` differs where unknown fields were left out or versions were added."""
    unversioned: bool = False
    """Whether an outside environment posted it without policy versions."""


def lane_of(env_id: int | None, environment: str | None) -> str:
    """The name of an environment's lane: `#<env_id>` for one that registered, else the name it goes by."""
    return f"#{env_id}" if env_id is not None else environment or ""


async def read_body(scope: Scope, receive: Receive, limits: Limits) -> bytes | bytearray:
    """The body of a request, decompressed where it is gzip.

    Raises:
        Refused: It is too large, before or after decompression, or its encoding is unknown or broken.
        ClientDisconnect: The client went before all of it had come.
    """
    encoding = b""
    for name, value in scope["headers"]:
        if name == b"content-length":
            if value.isdigit() and int(value) > limits.body_bytes:
                raise _too_large(limits.body_bytes)
        elif name == b"content-encoding":
            encoding = value.strip().lower()
    body = body_of(scope)
    if body is None:
        body = await _receive(receive, limits)
    elif len(body) > limits.body_bytes:
        raise _too_large(limits.body_bytes)
    if encoding in (b"", b"identity"):
        return body
    if encoding not in (b"gzip", b"x-gzip"):
        name = encoding.decode("latin-1")
        raise Refused("unknown_encoding", f"Content-Encoding {name!r} is not understood; use gzip.", status=415)
    return _gunzip(body, limits.decoded_bytes)


async def _receive(receive: Receive, limits: Limits) -> bytes:
    chunks, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        if chunk := message.get("body", b""):
            chunks.append(chunk)
            size += len(chunk)
            if size > limits.body_bytes:
                raise _too_large(limits.body_bytes)
        if not message.get("more_body", False):
            break
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def _gunzip(body: bytes | bytearray, limit: int) -> bytes:
    unpack = zlib.decompressobj(wbits=31)
    try:
        plain = unpack.decompress(body, limit + 1)
    except zlib.error:
        plain = b""
    if len(plain) > limit:
        raise _too_large(limit, " after decompression")
    if not unpack.eof or unpack.unused_data:
        raise Refused("bad_gzip", "The body is not one whole gzip stream.", status=400)
    return plain


def _too_large(limit: int, when: str = "") -> Refused:
    return Refused("too_large", f"The body exceeds {limit} bytes{when}.", status=413)


class Door:
    """Decodes and checks groups.

    Args:
        vocabulary: How many token ids the policy has; None while that is not known.
        limits: Sizes.
    """

    def __init__(self, vocabulary: int | None = None, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        # The bound of token ids is a part of the type, so that it costs nothing and the message names the place.
        ids = list[list[Annotated[int, msgspec.Meta(ge=0, lt=vocabulary or _VOCABULARY)]]]
        fields: list[Any] = [("tokens", ids)]
        strict = msgspec.defstruct("Strict", fields, bases=(Group,), forbid_unknown_fields=True)
        lenient = msgspec.defstruct("Lenient", fields, bases=(Group,))
        self._strict = msgspec.json.Decoder(strict)
        self._lenient = msgspec.json.Decoder(lenient)
        self._vocabulary = vocabulary or _VOCABULARY
        self._surveyor: Surveyor | None = None
        self._encode = msgspec.json.Encoder().encode

    def open(self, body: bytes, max_row: int | None = None) -> Parcel:
        """Decodes and checks one group.

        Args:
            body: Its JSON.
            max_row: The longest row that the trainer takes, in tokens; None where it has not said.

        Raises:
            Refused: Something is wrong with it; `field` says where.
        """
        posted = body
        group, lengths = self._surveyed(body)
        if group is None:
            body, group = self._decoded(body)
            lengths = {name: [len(row) for row in matrix] for name, matrix in _matrices(group)}
            self._check(group, lengths, max_row)
            _check_masks(group.masks, group.tokens)
        else:
            self._check(group, lengths, max_row)
        unversioned = group.env_id is not None and group.versions is None
        return Parcel(body, _note(group, lengths["tokens"]), group.env_id, posted, unversioned)

    def _surveyed(self, body: bytes) -> tuple[Group | None, dict[str, list[int]]]:
        """The group but for its matrices, and their rows' lengths, where they are sound for sure."""
        if len(body) < _SURVEYED_BYTES:
            return None, {}
        if self._surveyor is None:  # it needs NumPy, which runs of small groups do without
            from toprope.training.api.intake.fast_validation import Surveyor

            self._surveyor = Surveyor(self._vocabulary)
        survey = self._surveyor.survey(body)
        if survey is not None:
            try:
                return self._strict.decode(survey.rest), survey.lengths
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                pass  # the exact decoder says at which place
        return None, {}

    def _decoded(self, body: bytes) -> tuple[bytes, Group]:
        """The whole group, and its body without the fields that are not known."""
        try:
            try:
                return body, self._strict.decode(body)
            except msgspec.ValidationError as error:
                if "unknown field" not in str(error):
                    raise
                group = self._lenient.decode(body)
                return self._encode(group), group
        except msgspec.ValidationError as error:
            raise _invalid(error) from None
        except RecursionError:
            raise Refused("too_deep", "The body is nested too deeply.", status=400) from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Refused("malformed_json", f"The body is not JSON: {error}.", status=400) from None

    def _check(self, group: Group, matrices: dict[str, list[int]], max_row: int | None) -> None:
        """All but the numbers themselves; `matrices` says of each how long its rows are."""
        lengths = matrices["tokens"]
        rows = len(lengths)
        if not rows:
            raise Refused("empty_group", "The group has no rows.", field="tokens")
        if rows > self.limits.rows:
            raise Refused("too_many_rows", f"The group has {rows} rows; at most {self.limits.rows}.", field="tokens")
        if not min(lengths):
            raise Refused("empty_row", "A row has no tokens.", field=f"tokens[{lengths.index(0)}]")
        if max_row is not None and max(lengths) > max_row:
            row = lengths.index(max(lengths))
            raise Refused(
                "row_too_long",
                f"Row {row} has {lengths[row]} tokens; the trainer takes at most {max_row}.",
                field=f"tokens[{row}]",
            )
        for name, found in matrices.items():
            if found != lengths:
                _raise_shape(name, found, lengths)
        for name in ("scores", "overrides", "rollouts", "versions"):
            column = getattr(group, name)
            if column is not None and len(column) != rows:
                raise Refused(
                    "length_mismatch", f"{name} has {len(column)} entries, but the group has {rows} rows.", field=name
                )
        _check_rollouts(group, lengths)
        for name in ("group_id", "environment", "task_id"):
            text = getattr(group, name)
            if text is not None and not 0 < len(text) <= 512:
                raise Refused("bad_name", f"{name} must have 1 to 512 characters.", field=name)
        if group.environment is not None and group.environment.startswith("#"):
            raise Refused("bad_name", "environment must not begin with '#'.", field="environment")
        for name in (
            "messages", "generation_params", "overrides", "group_overrides", "images", "distill_token_ids",
            "distill_logprobs",
        ):  # fmt: skip
            if (value := getattr(group, name)) is not None and _deeper(value, _DEPTH):
                raise Refused("too_deep", f"{name} is nested more than {_DEPTH} deep.", field=name)


def _matrices(group: Group) -> Iterator[tuple[str, Sequence[Sequence[Any]]]]:
    for name in ("tokens", "masks", *_FLOATS):
        if (matrix := getattr(group, name)) is not None:
            yield name, matrix


def _note(group: Group, lengths: list[int]) -> GroupNote:
    return GroupNote(
        rows=len(lengths),
        lane=lane_of(group.env_id, group.environment),
        group_id=group.group_id,
        equal_score=min(group.scores) == max(group.scores),
        tokens=sum(lengths),
        oldest_version=group.oldest_version(),
        at=round(time.time(), 3),
    )


def _check_masks(masks: list[list[int]], tokens: list[list[int]]) -> None:
    for index, (mask, row) in enumerate(zip(masks, tokens, strict=True)):
        prompt = mask.count(MASKED)
        if mask[prompt:] != row[prompt:] and any(m not in (MASKED, t) for m, t in zip(mask, row, strict=True)):
            at = next(i for i, (m, t) in enumerate(zip(mask, row, strict=True)) if m not in (MASKED, t))
            raise Refused(
                "bad_mask",
                f"A mask holds {MASKED} or the token's id; here it is {mask[at]}, and the token {row[at]}.",
                field=f"masks[{index}][{at}]",
            )


def _raise_shape(name: str, found: list[int], lengths: list[int]) -> None:
    if len(found) != len(lengths):
        raise Refused("length_mismatch", f"{name} has {len(found)} rows, but tokens has {len(lengths)}.", field=name)
    row = next(index for index, length in enumerate(lengths) if found[index] != length)
    raise Refused(
        "length_mismatch",
        f"{name}[{row}] has {found[row]} entries, but tokens[{row}] has {lengths[row]}.",
        field=f"{name}[{row}]",
    )


def _check_rollouts(group: Group, lengths: list[int]) -> None:
    rollouts, outcomes = group.rollouts, group.outcomes
    if rollouts is not None:
        if outcomes is None:
            raise Refused("missing_outcomes", "rollouts point into outcomes, which are missing.", field="rollouts")
        for row, index in enumerate(rollouts):
            if not 0 <= index < len(outcomes):
                raise Refused(
                    "bad_rollout", f"Rollout {index} is none of the {len(outcomes)} outcomes.", field=f"rollouts[{row}]"
                )
    elif outcomes is not None and len(outcomes) != len(lengths):
        raise Refused(
            "length_mismatch",
            f"outcomes has {len(outcomes)} entries for {len(lengths)} rows; say in rollouts which row is whose.",
            field="outcomes",
        )
    for row, runs in enumerate(group.versions or ()):
        if any(version < 0 or count < 1 for version, count in runs):
            raise Refused("bad_version", "versions holds [version >= 0, count >= 1].", field=f"versions[{row}]")
        if sum(count for _, count in runs) > lengths[row]:
            raise Refused("bad_version", "versions count more tokens than the row has.", field=f"versions[{row}]")


def _deeper(value: Any, depth: int) -> bool:
    level = [value]
    while level:
        if not depth:
            return True
        inner: list[Any] = []
        for item in level:
            if type(item) is list:
                inner.extend(x for x in item if type(x) in (list, dict))
            elif type(item) is dict:
                inner.extend(x for x in item.values() if type(x) in (list, dict))
        level = inner
        depth -= 1
    return False


def _invalid(error: msgspec.ValidationError) -> Refused:
    """msgspec's `what - at `$.path``, as a refusal with a field."""
    what, _, where = str(error).partition(" - at `")
    field = where.rstrip("`").removeprefix("$").removeprefix(".") or None
    return Refused(
        "out_of_range" if "range" in what or ">=" in what or "<=" in what else "invalid_type", what + ".", field=field
    )
