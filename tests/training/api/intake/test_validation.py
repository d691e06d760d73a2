"""Any post is either refused with a reason, or stored so that a trainer can read it."""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.training_api_server import group
from toprope.records.journal.groups import MASKED, Batch, Group
from toprope.training.api.clients.requests import BATCH
from toprope.training.api.http.errors import Refused
from toprope.training.api.intake.validation import GroupValidator, Limits

VALIDATOR = GroupValidator(vocabulary=100, limits=Limits(rows=16))


def check(body: bytes) -> Group | None:
    """The stored group as a trainer reads it; None if it was refused. Asserts everything a trainer relies on."""
    try:
        post = VALIDATOR.validate(body, 64)
    except Refused as refusal:
        assert 400 <= refusal.status < 500 and refusal.kind and refusal.message
        json.loads(refusal.body())
        return None
    batch: Batch = BATCH.decode(b'{"batch":[' + post.body + b'],"cursor":1}')
    (stored,) = batch.batch or []
    lengths = [len(row) for row in stored.tokens]
    assert 1 <= len(lengths) <= 16 and all(1 <= length <= 64 for length in lengths)
    assert all(0 <= token < 100 for row in stored.tokens for token in row)
    assert all(
        m in (MASKED, t)
        for mask, row in zip(stored.masks, stored.tokens, strict=True)
        for m, t in zip(mask, row, strict=True)
    )  # noqa: E501
    assert len(stored.scores) == len(lengths) and all(map(math.isfinite, stored.scores))
    for name in ("inference_logprobs", "advantages", "ref_logprobs"):
        matrix = getattr(stored, name)
        if matrix is not None:
            assert [len(row) for row in matrix] == lengths
            assert all(math.isfinite(value) for row in matrix for value in row)
    for row, length in zip(stored.versions or (), lengths, strict=False):
        assert sum(count for _, count in row) <= length
    assert post.note.rows == len(lengths) and post.note.tokens == sum(lengths)
    return stored


VALID = json.dumps(
    group(1, rows=3, inference_logprobs=[[1.0, -0.5, -1e-3]] * 3, versions=[[[1, 1], [2, 1]]] * 3, group_id="k",
          outcomes=[{"reward": 1.0, "parts": {"a": 0.5}}] * 3, messages=[{"role": "user", "content": "é\u2028"}])
).encode()  # fmt: skip

values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**12), 10**12) | st.floats() | st.text(max_size=8)
    | st.sampled_from([0, 1, 2, 99, 100, -100, -101, 1e308, "NaN"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=12,
)  # fmt: skip
fields = st.sampled_from([*msgspec.structs.asdict(Group([], [], [])), "unknown"])


def test_valid_group_is_accepted() -> None:
    stored = check(VALID)
    assert stored is not None and stored.group_id == "k" and stored.versions == [[(1, 1), (2, 1)]] * 3


@settings(max_examples=300, deadline=None)
@given(changes=st.dictionaries(fields, values, min_size=1, max_size=3))
@example(changes={"unknown": math.nan})
@example(changes={"scores": [1e999, 0.0, 0.0]})
def test_group_with_any_fields_replaced(changes: dict[str, Any]) -> None:
    check(json.dumps(json.loads(VALID) | changes).encode())


@settings(max_examples=400, deadline=None)
@given(at=st.integers(0, len(VALID) - 1), cut=st.integers(0, 12), put=st.binary(max_size=6) | st.sampled_from(
    [b"1e999", b"-", b"[", b"]]", b"null", b"NaN", b"1.5", b"\xff", b"9" * 400, b"\\u0000", b'"', b"{}", b",,"]
))  # fmt: skip
def test_group_with_any_bytes_replaced(at: int, cut: int, put: bytes) -> None:
    check(VALID[:at] + put + VALID[at + cut :])


@settings(max_examples=100, deadline=None)
@given(body=st.binary(max_size=200))
def test_random_bytes_are_refused(body: bytes) -> None:
    assert check(body) is None


@settings(max_examples=150, deadline=None)
@given(rows=st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=8), min_size=1, max_size=5), data=st.data())
def test_mask_is_valid_if_it_repeats_tokens(rows: list[list[int]], data: st.DataObject) -> None:
    chosen = [[data.draw(st.sampled_from([MASKED, token, token + 1])) for token in row] for row in rows]
    stored = check(json.dumps({"tokens": rows, "masks": chosen, "scores": [0.0] * len(rows)}).encode())
    valid = all(
        mask in (MASKED, token)
        for own, row in zip(chosen, rows, strict=True)
        for mask, token in zip(own, row, strict=True)
    )
    assert (stored is not None) == valid


@pytest.mark.parametrize("depth", [33, 2000, 200_000])
def test_nesting_depth_is_bounded(depth: int) -> None:
    nested = b"[" * depth + b"]" * depth
    for name in (b"messages", b"images", b"unknown", b"tokens"):
        body = VALID[:-1] + b',"' + name + b'":' + nested + b"}"
        assert check(body) is None or name == b"unknown", name


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"tokens": [[100] * 3] * 3}, "tokens[0][0]"),
        ({"tokens": [[1, 9, 3]] * 3}, "masks[0][1]"),
        ({"masks": [[MASKED] * 4] * 3}, "masks[0]"),
        ({"inference_logprobs": [[1.0] * 3] * 2}, "inference_logprobs"),
        ({"advantages": [[]]}, "advantages"),
        ({"scores": [1.0]}, "scores"),
        ({"rollouts": [0, 0, 9], "outcomes": [{"reward": 1.0}]}, "rollouts[2]"),
    ],
)
def test_refusal_names_the_field(change: dict[str, Any], field: str) -> None:
    with pytest.raises(Refused) as refusal:
        VALIDATOR.validate(json.dumps(json.loads(VALID) | change).encode())
    assert refusal.value.field == field


@pytest.mark.parametrize("again", [b'"junk"', b"[[1.5]]", b"[[5]]", b"null", b"[[]]"])
@pytest.mark.parametrize("name", [b"tokens", b"masks", b"inference_logprobs", b"advantages"])
def test_repeated_json_key_is_validated(name: bytes, again: bytes) -> None:
    check(b'{"' + name + b'":' + again + b"," + VALID[1:])
    check(VALID[:-1] + b',"' + name + b'":' + again + b"}")
    check(b'{"\\u00' + b"%x" % name[0] + name[1:] + b'":' + again + b"," + VALID[1:])
