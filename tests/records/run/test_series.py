"""The follower of metrics.jsonl: buckets that equal those of a whole reading, however the file came to be."""

from __future__ import annotations

import json
import random
import statistics
from pathlib import Path
from typing import Any

import pytest

from toprope.errors import TooNew
from toprope.records.run.metrics import header, read_rows
from toprope.records.run.series import MOST_BUCKETS, Followers, Piece, SeriesFollower


def line(step: int, **values: Any) -> bytes:
    return json.dumps({"step": step, "reward": step % 7 / 7, "version": step, **values}).encode() + b"\n"


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def read(follower: SeriesFollower, **asked: Any) -> Piece:
    follower.read()
    found = follower.piece(**asked)
    assert found is not None
    return found


def expected(path: Path, width: int) -> dict[int, list[float]]:
    """Rewards by the place of their bucket, from a reading of all rows."""
    buckets: dict[int, list[float]] = {}
    for row in read_rows(path):
        buckets.setdefault((row["step"] - 1) // width, []).append(row["reward"])
    return buckets


def assert_same(path: Path, found: Piece) -> None:
    buckets = expected(path, found.width)
    reward = found.columns["reward"]
    assert [(last - 1) // found.width for last in found.x] == list(buckets)
    assert reward.mean == pytest.approx([statistics.fmean(one) for one in buckets.values()], rel=1e-4, abs=1e-9)
    assert reward.low == pytest.approx([min(one) for one in buckets.values()], rel=1e-4)
    assert reward.high == pytest.approx([max(one) for one in buckets.values()], rel=1e-4)
    assert found.rows == sum(map(len, buckets.values())) and found.last_step == read_rows(path)[-1]["step"]


def test_buckets_keep_every_peak_and_are_at_most_400(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append(path, header(1) + b"".join(line(step, loss=9.0 if step == 4321 else 0.5) for step in range(1, 10_001)))
    found = read(SeriesFollower(path))
    assert 200 < len(found.x) <= MOST_BUCKETS and found.width == 32 and found.complete
    assert_same(path, found)
    assert max(value for value in found.columns["loss"].high if value is not None) == 9.0
    assert "entropy" not in found.columns  # no row has it


def test_reader_gets_only_buckets_that_changed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append(path, b"".join(line(step) for step in range(1, 1001)))
    follower = SeriesFollower(path)
    first = read(follower)
    assert not follower.read() and follower.piece(first.generation, first.rows) is None
    append(path, line(1001) + line(1002))
    after = read(follower, generation=first.generation, seen=first.rows)
    assert after.generation == first.generation and after.start == len(first.x) and after.x == [1002]
    append(path, line(1003))
    third = read(follower, generation=after.generation, seen=after.rows)
    assert third.start == after.start and third.x == [1003]  # the last bucket grew
    kept = first.x[: third.start] + third.x
    assert kept == read(SeriesFollower(path)).x


def test_torn_last_line_counts_once_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    whole = line(2)
    append(path, line(1) + whole[:9])
    follower = SeriesFollower(path)
    assert read(follower).last_step == 1
    append(path, whole[9:])
    assert read(follower).last_step == 2


def test_line_torn_by_a_crash_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append(path, line(1) + b'{"step": 2, "rew\n' + header(2) + line(2) + b"[1]\nnull\n" + line(3))
    assert_same(path, read(SeriesFollower(path)))


def test_damaged_lines_are_counted_and_torn_ones_are_not(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append(path, header(1) + line(1) + b"garbage\n" + line(2) + b'{"step": 3, "rew\n' + header(2) + line(3))
    append(path, b'{"step": [4]}\n\n{"step": 5, "re')
    follower = SeriesFollower(path)
    assert read(follower).rows == 3 and follower.unreadable == 2
    append(path, b'ward": 1}\n' + line(2))  # written again: the lines before it are read twice
    assert read(follower).last_step == 2 and follower.unreadable == 2
    for blank, count in ((b"\0" * 5000, 1), (b"\0\n\xff\n" + header(1), 2), (b"", 0)):
        other = tmp_path / f"{count}.jsonl"
        append(other, blank)
        follower = SeriesFollower(other)
        follower.read()
        assert follower.unreadable == count


def test_resumed_attempt_writes_steps_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append(path, b"".join(line(step) for step in range(1, 2001)))
    follower = SeriesFollower(path)
    first = read(follower)
    append(path, header(2) + b"".join(line(step, reward=0.25) for step in range(1503, 1600)))
    after = read(follower, generation=first.generation, seen=first.rows)
    assert after.generation != first.generation and after.start == 0 and after.last_step == 1599
    assert_same(path, after)


def test_any_history_equals_a_reading_of_all_rows(tmp_path: Path) -> None:
    chance = random.Random(3)
    for number in range(40):
        path = tmp_path / f"{number}.jsonl"
        path.touch()
        follower, step = SeriesFollower(path), 1
        seen: Piece | None = None
        for _ in range(chance.randrange(1, 9)):
            if chance.random() < 0.4:
                step = max(1, step - chance.randrange(1, 900))
                append(path, header(2))
            many = chance.randrange(1, 1500)
            append(path, b"".join(line(one, reward=round(chance.random(), 4)) for one in range(step, step + many)))
            step += many
            if chance.random() < 0.6:
                follower.read()
                seen = follower.piece() or seen
        found = read(follower)
        assert_same(path, found)
        if seen is not None and seen.generation == found.generation:
            changed = follower.piece(seen.generation, seen.rows)
            told = [] if changed is None else changed.x
            assert (seen.x if changed is None else seen.x[: changed.start] + told) == found.x


def test_reader_of_fewer_buckets_gets_wider_ones_up_to_a_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append(path, b"".join(line(step) for step in range(1, 5001)))
    follower = SeriesFollower(path)
    found = read(follower, most=120)
    assert len(found.x) <= 120 and found.width == 64
    assert_same(path, found)
    until = read(follower, most=120, until=1000)
    assert until.last_step <= 1000 and until.x[-1] > 900
    assert read(follower).width == 16  # the follower's own buckets stay


def test_deleted_and_replaced_files_begin_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    follower = SeriesFollower(path)
    assert not follower.read() and read(follower).x == []
    append(path, line(1) + line(2))
    before = read(follower)
    path.unlink()
    gone = read(follower, generation=before.generation, seen=before.rows)
    assert gone.x == [] and gone.generation != before.generation
    append(path, line(1))
    assert read(follower).x == [1]


def test_parts_of_the_reward_are_columns_by_number(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append(path, header(1) + line(1, **{"rewards/exact/mean": 0.5, "rewards/<b>x</b>/mean": 0.1}))
    found = read(SeriesFollower(path))
    assert found.parts == ("exact", "<b>x</b>")
    assert found.columns["part:0"].mean == [0.5] and found.columns["part:1"].high == [0.1]


def test_newer_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append(path, b'{"version": 99, "attempt": 1}\n' + line(1))
    with pytest.raises(TooNew):
        SeriesFollower(path).read()


def test_large_file_is_read_in_slices_and_shown_as_a_sample_until_then(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append(path, header(1) + b"".join(line(step, note="x" * 500) for step in range(1, 40_001)))  # 22 MB
    follower = SeriesFollower(path)
    assert follower.read(0.0)
    first = follower.piece()
    assert first is not None and not first.complete and first.last_step == 40_000
    assert 100 < len(first.x) <= MOST_BUCKETS and first.rows < 40_000
    values = [value for value in first.columns["reward"].mean if value is not None]
    assert len(values) == len(first.x) and 0 <= min(values) <= max(values) < 1
    again = follower.piece(first.generation, first.rows)  # nothing new, but the reader is to ask again
    assert again is not None and not again.complete and again.x == []
    slices = 1
    while (found := follower.piece(first.generation, first.rows)) is not None and not found.complete:
        follower.read(0.0)
        slices += 1
    assert found is not None and slices > 3 and found.start == 0 and found.generation != first.generation
    assert_same(path, found)


def test_readers_share_followers_and_old_ones_are_dropped(tmp_path: Path) -> None:
    followers = Followers(most=2)
    first = followers.of(tmp_path / "a")
    assert followers.of(tmp_path / "a") is first
    followers.of(tmp_path / "b")
    followers.of(tmp_path / "c")
    assert followers.of(tmp_path / "a") is not first
