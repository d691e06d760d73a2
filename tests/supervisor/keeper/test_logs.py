"""Logs are shown bounded and clean."""

from __future__ import annotations

from toprope.supervisor.keeper.logs import KeeperLog, clean_line, read_page, read_tail


def test_clean_line_removes_escapes_and_secrets():
    assert (
        clean_line("\x1b[31mred\x1b[0m \x1b]8;;http://x\x07link\x07 a\u200bb\u202ec\tend\r\n") == "red link abc    end"
    )
    assert clean_line(" 10%\r 50%\r100%") == "100%"
    assert clean_line("token s3cret here", ["s3cret", ""]) == "token [secret] here"
    assert len(clean_line("x" * 9999)) == 500


def test_read_page_covers_log_without_gaps(tmp_path):
    log = tmp_path / "a.log"
    log.write_text("".join(f"line {number}\n" for number in range(250)))
    lines, before = [], None
    while before != 0:
        found = read_page(log, lines=60, before=before)
        lines, before = found.lines + lines, found.start
    assert lines == [f"line {number}" for number in range(250)]
    assert read_page(tmp_path / "none").lines == []


def test_read_page_is_bounded(tmp_path):
    log = tmp_path / "a.log"
    log.write_bytes(b"y" * 70 + b"\n" + (b"z" * 99 + b"\n") * 20_000)
    found = read_page(log, lines=100_000)
    assert 2_000 < len(found.lines) < 3_000 and set(found.lines) == {"z" * 99}


def test_read_tail_continues_in_previous_part(tmp_path):
    log = tmp_path / "a.log"
    (tmp_path / "a.log.1").write_text("one\ntwo\n\nthree\n")
    log.write_text("four\n\n")
    assert read_tail(log, 3) == ["two", "three", "four"]
    assert read_tail(tmp_path / "b.log") == []


def test_keeper_log_is_bounded_and_never_raises(tmp_path):
    log = KeeperLog(tmp_path / "keeper.log", 1000)
    for number in range(500):
        print(f"line {number}", file=log, flush=True)
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert set(sizes) == {"keeper.log", "keeper.log.1"} and max(sizes.values()) <= 1000
    assert read_tail(tmp_path / "keeper.log", 2) == ["line 498", "line 499"]
    gone = KeeperLog(tmp_path / "no such folder" / "keeper.log", 1000)
    print("lost", file=gone, flush=True)
