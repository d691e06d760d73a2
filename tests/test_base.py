"""Files are replaced whole and lines are appended whole, also when the disk fails."""

import errno
import os
import stat

import pytest

from toprope.atomic import append, replacing, write_json, write_text


def test_write_replaces_content_with_given_mode(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"ä": 1})
    assert path.read_text(encoding="utf-8") == '{"ä":1}' and stat.S_IMODE(path.stat().st_mode) == 0o600
    write_text(path, "b", mode=0o644, durable=True)
    assert path.read_text() == "b" and stat.S_IMODE(path.stat().st_mode) == 0o644


def test_failed_write_keeps_old_file_and_leaves_nothing(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, 1)
    with pytest.raises(ValueError):
        write_json(path, float("nan"))
    with pytest.raises(RuntimeError), replacing(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert path.read_text() == "1" and os.listdir(tmp_path) == ["a.json"]


def test_write_without_replace_leaves_existing_file(tmp_path):
    path = tmp_path / "token"
    write_text(path, "first", replace=False)
    with pytest.raises(FileExistsError):
        write_text(path, "second", replace=False)
    assert path.read_text() == "first" and os.listdir(tmp_path) == ["token"]


def test_append_writes_header_once_and_ends_a_torn_line(tmp_path):
    path = tmp_path / "new" / "a.jsonl"
    append(path, b"1\n", header=b"head\n")
    append(path, b"2\n", header=b"head\n")
    path.write_bytes(path.read_bytes() + b"to")
    append(path, b"3\n")
    assert path.read_bytes() == b"head\n1\n2\nto\n3\n"


def test_failed_append_leaves_no_part_of_a_line(tmp_path, monkeypatch):
    path, write = tmp_path / "a.jsonl", os.write
    append(path, b"whole\n")

    def fill(descriptor: int, data: bytes) -> int:
        if not data.startswith(b"lost"):
            raise OSError(errno.ENOSPC, "full")
        return write(descriptor, data[:4])

    monkeypatch.setattr(os, "write", fill)
    with pytest.raises(OSError, match="full"):
        append(path, b"lost line\n")
    assert path.read_bytes() == b"whole\n"
