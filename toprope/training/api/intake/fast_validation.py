"""Checking a group's numbers in their text: a post has 12,000 of them, and to make Python objects of them all costs
more than everything else about it.

msgspec passes over the matrices of a group without decoding them, which checks that they are JSON. What is left to be
known of each is found in its bytes, many at a time: where its rows end, how many numbers they have, that ids are below
a bound, that log-probabilities are finite, and that a mask repeats the ids behind its prompt, letter by letter. The
rest of the group is decoded by type as ever, with the matrices cut out.

Nothing here refuses anything. Whatever does not look the way that encoders write it is left to the exact decoder, which
says what is wrong with it, if anything: `survey` then returns None.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from toprope.records.journal.groups import MASKED

__all__ = ["Survey", "Surveyor"]

_ROW_WORTH_IT = 128
"""Bytes of an average row below which it is."""
_EMPTY = b"[[0]]"
"""Stands for a matrix in what is left to decode."""
_LONGEST = b"\0" * 36
"""Of a comma map packed to bits: a number of 300 characters, which might be too large for a float."""
_MASKED = str(MASKED).encode()
_COMMA, _DOT, _SPACE, _OPEN, _CLOSE, _E = b",. []e"

_Bytes = npt.NDArray[np.uint8]


_NULL = msgspec.Raw(b"null")


class _Skim(msgspec.Struct):
    tokens: msgspec.Raw
    masks: msgspec.Raw
    inference_logprobs: msgspec.Raw = _NULL
    advantages: msgspec.Raw = _NULL
    ref_logprobs: msgspec.Raw = _NULL


class Survey(NamedTuple):
    """What a body holds: `rest` is its JSON with a matrix of one 0 in the place of each of `lengths`, which says the
    numbers of each of their rows."""

    rest: bytes
    lengths: dict[str, list[int]]


class _Matrix:
    """A matrix in its text: `[[...], ...]` from `at` to `end` of a body that is valid JSON."""

    def __init__(self, body: bytes | bytearray, at: int, text: _Bytes) -> None:
        self.body, self.at, self.end, self.text = body, at, at + len(text), text
        self.rows = self._rows()
        """Where the numbers of each row begin and end; none where it is not sure that this is a matrix."""
        self.commas: npt.NDArray[np.bool_] = text == _COMMA
        self.largest = int(text.max())

    def _rows(self) -> list[tuple[int, int]]:
        body, end, rows = self.body, self.end, []
        start = self.at + 2
        if not body.startswith(b"[[", self.at):
            return []
        while (close := body.find(b"]", start, end)) > start and body[start] != _SPACE:
            rows.append((start, close))
            if body[close + 1] == _CLOSE:
                whole = close + 2 == end and np.count_nonzero(self.text == _OPEN) == len(rows) + 1
                return rows if whole and (end - self.at) > _ROW_WORTH_IT * len(rows) else []
            start = close + (4 if body[close + 2] == _SPACE else 3)
            if body[close + 1] != _COMMA or body[start - 1] != _OPEN:
                return []
        return []

    def lacks(self, *characters: bytes) -> bool:
        return all(self.body.find(character, self.at, self.end) < 0 for character in characters)

    def lengths(self) -> list[int]:
        """The numbers of each row, if they are numbers: rows are not empty."""
        at, commas = self.at, self.commas
        return [int(np.count_nonzero(commas[start - at : end - at])) + 1 for start, end in self.rows]

    def finite(self) -> bool:
        """Whether these are numbers, all of them finite: no letters but the e of a negative exponent, and short."""
        if self.largest > _E or not self.lacks(b'"', b"E", b"\n", b"\r", b"\t"):
            return False
        if self.largest == _E and self.body.count(b"e", self.at, self.end) != self.body.count(b"e-", self.at, self.end):
            return False
        return np.packbits(self.commas).tobytes().find(_LONGEST) < 0

    def below(self, limit: bytes) -> bool:
        """Whether these are whole numbers from 0 to `limit`, in its decimal digits."""
        if self.largest > _CLOSE or not self.lacks(b'"', b"-", b".", b"E", b"\n", b"\r", b"\t"):
            return False
        text, count = self.text, len(limit)
        digits = (text - 48) < 10
        runs = digits
        for shift in range(1, count):  # where as many digits as the limit has begin
            runs = runs[:-1] & digits[shift:]
        if (runs[:-1] & digits[count:]).any():
            return False  # one is longer
        starts = np.flatnonzero(runs & (text[: len(runs)] >= limit[0]))
        for place, most in enumerate(limit):
            found = text[starts + place]
            if (found > most).any():
                return False
            starts = starts[found == most]
            if not starts.size:
                break
        return True


class Surveyor:
    """Looks bodies over for a policy.

    Args:
        vocabulary: Token ids are below this.
    """

    def __init__(self, vocabulary: int) -> None:
        self._limit = str(vocabulary - 1).encode()
        self._skim = msgspec.json.Decoder(_Skim)
        self._ids = msgspec.json.Decoder(list[int])

    def survey(self, body: bytes | bytearray) -> Survey | None:
        """What is in a body, if its matrices are sound; None where that is not sure."""
        try:
            skim = self._skim.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
        base = _address(np.frombuffer(body, np.uint8))
        places: list[tuple[int, int]] = []
        lengths: dict[str, list[int]] = {}
        tokens = _matrix(body, base, skim.tokens)
        if not tokens.rows or not tokens.below(self._limit):
            return None
        lengths["tokens"] = tokens.lengths()
        places.append((tokens.at, tokens.end))
        masks = _matrix(body, base, skim.masks)
        if len(masks.rows) != len(tokens.rows):
            return None
        lengths["masks"] = masks.lengths()
        places.append((masks.at, masks.end))
        if lengths["masks"] != lengths["tokens"]:
            return None
        for row, ids in zip(masks.rows, tokens.rows, strict=True):
            if not (_repeats(body, row, ids) or self._fits(body, row, ids)):
                return None
        for name in _Skim.__struct_fields__[2:]:
            raw = getattr(skim, name)
            if len(memoryview(raw)) == 4 and bytes(raw) == b"null":
                continue
            matrix = _matrix(body, base, raw)
            if not matrix.rows or not matrix.finite():
                return None
            lengths[name] = matrix.lengths()
            places.append((matrix.at, matrix.end))
        return Survey(_without(body, places), lengths)

    def _fits(self, body: bytes | bytearray, row: tuple[int, int], ids: tuple[int, int]) -> bool:
        """Whether a mask that is more than a prompt and what follows it holds the ids where it is not masked."""
        try:
            mask = self._ids.decode(b"[%s]" % body[slice(*row)])
            tokens = self._ids.decode(b"[%s]" % body[slice(*ids)])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return False
        return len(mask) == len(tokens) and all(m in (MASKED, t) for m, t in zip(mask, tokens, strict=True))


def _address(text: _Bytes) -> int:
    return int(text.__array_interface__["data"][0])


def _matrix(body: bytes | bytearray, base: int, raw: Any) -> _Matrix:
    text = np.frombuffer(raw, np.uint8)  # a view into the body
    return _Matrix(body, _address(text) - base, text)


def _repeats(body: bytes | bytearray, row: tuple[int, int], ids: tuple[int, int]) -> bool:
    """Whether a row of a mask, as text, is n times MASKED and then the text of the ids but for the first n; to be asked
    of rows with as many entries as there are ids."""
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


def _without(body: bytes | bytearray, places: list[tuple[int, int]]) -> bytes:
    parts, at = [], 0
    for start, end in sorted(places):
        parts += [body[at:start], _EMPTY]
        at = end
    return b"".join([*parts, body[at:]])
