"""Sessions join their turns into segments and are bounded."""

from __future__ import annotations

from toprope.records.journal.groups import MASKED, PROMPT_LOGPROB
from toprope.training.inference.sessions import SessionStore, Turn, join_turns


def turn(prompt: list[int], completion: list[int], version: int = 0) -> Turn:
    return Turn(prompt, completion, [-0.5] * len(completion), [(version, len(completion))], "stop")


def test_join_turns_extends_or_starts_segments() -> None:
    first, second = turn([1, 2], [3, 4], 1), turn([1, 2, 3, 4, 9], [5], 2)
    other = turn([1, 2, 8], [6], 3)
    joined, alone = join_turns([first, second, other])
    assert joined.tokens == [1, 2, 3, 4, 9, 5]
    assert joined.masks == [MASKED, MASKED, 3, 4, MASKED, 5]
    assert joined.logprobs == [PROMPT_LOGPROB, PROMPT_LOGPROB, -0.5, -0.5, PROMPT_LOGPROB, -0.5]
    assert joined.versions == [(1, 2), (2, 1)]
    assert alone.tokens == [1, 2, 8, 6]


def test_session_store_is_bounded_and_closes_sub_sessions() -> None:
    store = SessionStore(limit=3)
    for index in range(3):
        store.record(f"g/{index}", turn([1], [2]))
    assert sorted(store.matching("g")) == ["g/0", "g/1", "g/2"]
    store.record("h", turn([1], [2]))
    assert sorted(store.matching("g")) == ["g/1", "g/2"]
    assert store.close("h") == 1
    assert store.get("h") is None
    assert store.close("g") == 2  # g/0 was forgotten already
    assert len(store) == 0
