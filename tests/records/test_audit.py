"""The audit trail: chained, bounded, without secrets."""

import errno
import json
import os
import threading

import pytest

from toprope.records import audit
from toprope.records.audit import AuditTrail, shorten


@pytest.fixture
def trail(tmp_path):
    trail = AuditTrail(tmp_path / "home")
    for number in range(6):
        trail.append({"by": {"client": "t"}, "did": "list_runs", "outcome": "done", "arguments": {"number": number}})
    return trail


def test_lines_are_numbered_and_whole(trail):
    assert [line["n"] for line in trail.lines()] == [1, 2, 3, 4, 5, 6]
    assert trail.verify() == audit.Trail(6, 1, ())
    assert trail.path.stat().st_mode & 0o777 == 0o600
    assert trail.path.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    "attack",
    [
        lambda lines: lines[:-1],
        lambda lines: lines[:2] + lines[3:],
        lambda lines: lines[1:],
        lambda lines: [],
        lambda lines: [*lines[:3], lines[3].replace(b"list_runs", b"stop_runs"), *lines[4:]],
        lambda lines: [lines[1], lines[0], *lines[2:]],
        lambda lines: [*lines, lines[-1]],
    ],
)
def test_every_cut_and_change_is_noticed(trail, attack):
    trail.path.write_bytes(b"".join(attack(trail.path.read_bytes().splitlines(keepends=True))))
    assert trail.verify().problems
    trail.append({"did": "next"})
    assert trail.verify().problems  # also after more lines


def test_a_trail_that_was_removed_is_noticed(trail):
    trail.path.unlink()
    assert trail.verify().problems


def test_a_crash_between_line_and_head_is_no_cut(trail):
    head = trail.path.with_name("audit.head")
    before = head.read_bytes()
    trail.append({"did": "last"})
    head.write_bytes(before)
    assert not trail.verify().problems
    trail.append({"did": "next"})
    assert trail.verify() == audit.Trail(8, 1, ())


def test_old_files_are_rotated_away_and_the_rest_stays_whole(trail, monkeypatch):
    monkeypatch.setattr(audit, "MOST_BYTES", 1000)
    for _ in range(80):
        trail.append({"did": "list_runs", "arguments": {"text": "x" * 100}})
    files = sorted(path.name for path in trail.path.parent.glob("audit*.jsonl"))
    assert len(files) == audit.PARTS + 1
    found = trail.verify()
    assert found.problems == () and found.first > 1 and found.first + found.lines - 1 == 86
    trail.path.with_name(f"audit.{audit.PARTS}.jsonl").unlink()
    assert trail.verify().problems


def test_several_processes_share_a_chain(trail):
    def write():
        own = AuditTrail(trail.path.parent)
        for _ in range(20):
            own.append({"did": "list_runs"})

    threads = [threading.Thread(target=write) for _ in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert trail.verify() == audit.Trail(86, 1, ())


def test_arguments_are_cut_and_secrets_masked():
    given = {
        "changes": {"api_key": "0123456789", "max_new_tokens": 5},
        "text": "the key is hunter2hunter2",
        "long": "x" * 100_000,
        "deep": [[[[[[1]]]]]],
        "many": list(range(1000)),
        "half": "\udc00\u202e",
        "number": 10**100,
    }
    text = json.dumps(shorten(given, ["hunter2hunter2"]), ensure_ascii=False)
    assert "0123456789" not in text and "hunter2" not in text and len(text.encode()) < 2000
    assert '"max_new_tokens": 5' in text


def test_keys_and_passwords_within_arguments_are_masked():
    given = [
        "https://bob:hunter2@git.example/x.git",
        "https://__token__:pypi-AgEIcHlwaS5vcmc@host/simple",
        {"header": "Bearer sk-0123456789abcdef0123"},
        "x" * 170 + " hf_0123456789abcdefghijklmnopqrstuv",
    ]
    text = json.dumps(shorten(given))
    assert not any(part in text for part in ("hunter2", "pypi-", "0123456789"))
    assert "git.example/x.git" in text and "host/simple" in text


def test_a_line_is_never_longer_than_its_limit(trail):
    trail.append({"did": "x", "arguments": {str(n): {str(m): "y" * 200 for m in range(20)} for n in range(20)}})
    assert max(map(len, trail.path.read_bytes().splitlines())) < 8192
    assert not trail.verify().problems


def test_line_that_a_full_disk_cuts_is_taken_back(trail, monkeypatch):
    write = os.write
    monkeypatch.setattr(audit.os, "write", lambda file, data: write(file, data[: len(data) // 2]))
    with pytest.raises(OSError, match="No space"):
        trail.append({"did": "lost"})
    monkeypatch.undo()
    assert trail.verify() == audit.Trail(6, 1, ())
    trail.append({"did": "next"})
    assert trail.verify() == audit.Trail(7, 1, ())


def test_trail_stays_whole_if_the_line_after_a_rotation_fails(trail, monkeypatch):
    monkeypatch.setattr(audit, "MOST_BYTES", 1)
    for number in range(audit.PARTS + 1):  # every line begins a new file
        trail.append({"did": f"{number}"})
    write = os.write
    monkeypatch.setattr(audit.os, "write", lambda file, data: write(file, data[:1]))
    with pytest.raises(OSError, match="No space"):
        trail.append({"did": "lost"})
    monkeypatch.undo()
    assert trail.verify().problems == ()
    trail.append({"did": "next"})
    assert trail.verify().problems == ()


def test_rotation_without_room_closes_each_descriptor_once(trail, monkeypatch):
    monkeypatch.setattr(audit, "MOST_BYTES", 1)
    real = os.open

    def full(path, flags, mode=0o777):
        if not os.path.exists(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(path, flags, mode)

    monkeypatch.setattr(audit.os, "open", full)
    with pytest.raises(OSError, match="No space"):
        trail.append({"did": "lost"})
    monkeypatch.undo()
    trail.append({"did": "next"})
    assert trail.verify().problems == ()
