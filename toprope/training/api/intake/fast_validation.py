"""Validation of a group's matrices as text, without making a Python object of each number.

A typical post of 8 x 512 tokens (130 KB) holds 12,000 numbers, and decoding them costs more than all other work on the
post. msgspec skips the matrices, which checks that they are JSON. NumPy and byte searches then check the rest: where
rows end, how many numbers they hold, that ids are below the bound, that log-probabilities are finite, and that a mask
repeats the token ids after its prompt. The rest of the group, with the matrices cut out, is decoded by type.

This module refuses nothing. `MatrixScanner.scan` returns None for text that does not look as JSON encoders write it,
and the exact decoder then decides.

Measured on two shared cores (medians over alternating rounds): 1.2 ms of processor time for such a post, 1.6 ms
without this module. An HTTP protocol that received bodies without uvicorn's copies saved another 0.1 ms; it overrode
private methods of uvicorn and was removed.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from toprope.records.journal.groups import MASKED

_MIN_ROW_BYTES = 128
"""Average row length from which scanning is faster than decoding."""
_PLACEHOLDER = b"[[0]]"
"""Replaces a matrix in the JSON that is left to decode."""
_LONG_NUMBER = b"\0" * 36
"""About 300 bytes without a comma, in a bitmap of commas: the number may overflow a float."""
_MASKED = str(MASKED).encode()
_COMMA, _DOT, _SPACE, _OPEN, _CLOSE, _E = b",. []e"

_Bytes = npt.NDArray[np.uint8]

_NULL = msgspec.Raw(b"null")


class _RawMatrices(msgspec.Struct):
    tokens: msgspec.Raw
    masks: msgspec.Raw
    inference_logprobs: msgspec.Raw = _NULL
    advantages: msgspec.Raw = _NULL
    ref_logprobs: msgspec.Raw = _NULL


class Scan(NamedTuple):
    """A body whose matrices are valid."""

    rest: bytes
    """Its JSON with `[[0]]` in place of each matrix."""
    lengths: dict[str, list[int]]
    """Row lengths of each matrix, by name."""


class _Matrix:
    """The text of a matrix: `[[...], ...]` from `at` to `end` of a body that is valid JSON."""

    def __init__(self, body: bytes, at: int, text: _Bytes) -> None:
        self.body, self.at, self.end, self.text = body, at, at + len(text), text
        self.rows = self._find_rows()
        """Start and end of the numbers of each row; empty if this may not be a matrix."""
        self.commas: npt.NDArray[np.bool_] = text == _COMMA
        self.largest = int(text.max())

    def _find_rows(self) -> list[tuple[int, int]]:
        body, end, rows = self.body, self.end, []
        start = self.at + 2
        if not body.startswith(b"[[", self.at):
            return []
        while (close := body.find(b"]", start, end)) > start and body[start] != _SPACE:
            rows.append((start, close))
            if body[close + 1] == _CLOSE:
                whole = close + 2 == end and np.count_nonzero(self.text == _OPEN) == len(rows) + 1
                return rows if whole and (end - self.at) > _MIN_ROW_BYTES * len(rows) else []
            start = close + (4 if body[close + 2] == _SPACE else 3)
            if body[close + 1] != _COMMA or body[start - 1] != _OPEN:
                return []
        return []

    def _lacks(self, *characters: bytes) -> bool:
        return all(self.body.find(character, self.at, self.end) < 0 for character in characters)

    def lengths(self) -> list[int]:
        """Count of numbers in each row, provided they are numbers; no row is empty."""
        at, commas = self.at, self.commas
        return [int(np.count_nonzero(commas[start - at : end - at])) + 1 for start, end in self.rows]

    def is_finite(self) -> bool:
        """True if all entries are finite numbers: short, and no letters but the e of a negative exponent."""
        if self.largest > _E or not self._lacks(b'"', b"E", b"\n", b"\r", b"\t"):
            return False
        if self.largest == _E and self.body.count(b"e", self.at, self.end) != self.body.count(b"e-", self.at, self.end):
            return False
        return np.packbits(self.commas).tobytes().find(_LONG_NUMBER) < 0

    def has_ids_up_to(self, limit: bytes) -> bool:
        """True if all entries are integers from 0 to `limit`, which is written in decimal digits."""
        if self.largest > _CLOSE or not self._lacks(b'"', b"-", b".", b"E", b"\n", b"\r", b"\t"):
            return False
        text, count = self.text, len(limit)
        digits = (text - 48) < 10
        runs = digits
        for shift in range(1, count):  # starts of runs of as many digits as the limit has
            runs = runs[:-1] & digits[shift:]
        if (runs[:-1] & digits[count:]).any():
            return False  # a number has more digits than the limit
        starts = np.flatnonzero(runs & (text[: len(runs)] >= limit[0]))
        for place, most in enumerate(limit):
            found = text[starts + place]
            if (found > most).any():
                return False
            starts = starts[found == most]
            if not starts.size:
                break
        return True


class MatrixScanner:
    """Scans posted bodies.

    Args:
        vocabulary: Number of token ids.
    """

    def __init__(self, vocabulary: int) -> None:
        self._limit = str(vocabulary - 1).encode()
        self._raw = msgspec.json.Decoder(_RawMatrices)
        self._ids = msgspec.json.Decoder(list[int])

    def scan(self, body: bytes) -> Scan | None:
        """The row lengths of a body's matrices, if these are valid; None if that is uncertain."""
        try:
            raw = self._raw.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
        base = _address(np.frombuffer(body, np.uint8))
        tokens, masks = _matrix(body, base, raw.tokens), _matrix(body, base, raw.masks)
        if not tokens.rows or not tokens.has_ids_up_to(self._limit) or len(masks.rows) != len(tokens.rows):
            return None
        if tokens.lengths() != masks.lengths():
            return None
        for row, ids in zip(masks.rows, tokens.rows, strict=True):
            if not (_repeats_ids(body, row, ids) or self._matches_ids(body, row, ids)):
                return None
        matrices = {"tokens": tokens, "masks": masks}
        for name in _RawMatrices.__struct_fields__[2:]:
            text = getattr(raw, name)
            if len(memoryview(text)) == 4 and bytes(text) == b"null":
                continue
            matrix = _matrix(body, base, text)
            if not matrix.rows or not matrix.is_finite():
                return None
            matrices[name] = matrix
        return Scan(
            _cut_out(body, [(matrix.at, matrix.end) for matrix in matrices.values()]),
            {name: matrix.lengths() for name, matrix in matrices.items()},
        )

    def _matches_ids(self, body: bytes, row: tuple[int, int], ids: tuple[int, int]) -> bool:
        """True if a mask row of any pattern holds the ids at all positions that are not masked."""
        try:
            mask = self._ids.decode(b"[%s]" % body[slice(*row)])
            tokens = self._ids.decode(b"[%s]" % body[slice(*ids)])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return False
        return len(mask) == len(tokens) and all(m in (MASKED, t) for m, t in zip(mask, tokens, strict=True))


def _address(text: _Bytes) -> int:
    return int(text.__array_interface__["data"][0])


def _matrix(body: bytes, base: int, raw: msgspec.Raw) -> _Matrix:
    text = np.frombuffer(raw, np.uint8)  # a view into the body
    return _Matrix(body, _address(text) - base, text)


def _repeats_ids(body: bytes, row: tuple[int, int], ids: tuple[int, int]) -> bool:
    """True if the text of a mask row is n times MASKED, then the text of the ids from the n-th on.

    Both rows must hold the same number of entries.
    """
    start, end = row
    last = body.rfind(_MASKED, start, end)
    if last < 0:
        return body[start:end] == body[slice(*ids)]
    behind = last + len(_MASKED)
    tail = body[behind:end]
    if tail[:1] not in (b"", b",") or not body.endswith(tail, *ids):
        return False
    separator = b", " if body[start + len(_MASKED) + 1] == _SPACE else b","
    count = (behind - start + len(separator)) // (len(_MASKED) + len(separator))
    return body[start:behind] == (_MASKED + separator) * (count - 1) + _MASKED


def _cut_out(body: bytes, spans: list[tuple[int, int]]) -> bytes:
    """The body with the placeholder in place of each span."""
    parts, at = [], 0
    for start, end in sorted(spans):
        parts += [body[at:start], _PLACEHOLDER]
        at = end
    return b"".join([*parts, body[at:]])
