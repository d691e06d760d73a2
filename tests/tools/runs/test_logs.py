"""Logs as an agent reads them: bounded, cleaned, marked, without the owner's keys."""

import pytest
from toprope_tools.answers.answer import TOKEN_BUDGET, tokens
from toprope_tools.runs.logs import read_logs

from tests.support.tools_house import do, start_run
from toprope.errors import InvalidValue, NotFound


@pytest.fixture
def run(house):
    shop, _ = house
    return shop, start_run(shop)


def _lines(answer):
    return [line.removeprefix("| ") for line in answer.text.splitlines() if line.startswith("| ")]


def test_logs_are_bounded_cleaned_and_marked(run):
    shop, folder = run
    with pytest.raises(NotFound, match="no log of trainer"):
        do(read_logs, shop, run_id=folder.run_id, component="trainer")
    for wrong in ("../spec", "environment-0", "trainer-2"):
        with pytest.raises(InvalidValue, match="keeper, policy"):
            do(read_logs, shop, run_id=folder.run_id, component=wrong)
    lines = [f"line {number} \x1b[31mred\x1b[0m \u202egnirts\u200b" for number in range(300)]
    folder.log("trainer").write_text("\n".join(lines) + "\n")
    answer = do(read_logs, shop, run_id=folder.run_id, component="trainer", lines=10)
    assert _lines(answer) == [f"line {number} red gnirts" for number in range(290, 300)]
    assert answer.data.untrusted is True
    assert "untrusted text" in answer.text
    older = do(read_logs, shop, run_id=folder.run_id, component="trainer", lines=10, before=answer.data.before)
    assert _lines(older) == [f"line {number} red gnirts" for number in range(280, 290)]


def test_logs_do_not_show_the_owners_keys(run, monkeypatch):
    shop, folder = run
    shop.home.settings_file.write_text("variables: {environment: {JUDGE_KEY: judge-4711-key, MAX_TOKENS: '512'}}")
    monkeypatch.setenv("HF_TOKEN", "hf_0123456789")
    folder.log("environment").write_text("keys judge-4711-key and hf_0123456789; 512 tokens\n")
    answer = do(read_logs, shop, run_id=folder.run_id, component="environment")
    assert _lines(answer) == ["keys [secret] and [secret]; 512 tokens"]


def test_long_lines_stay_within_the_budget_and_nothing_is_skipped(run):
    shop, folder = run
    folder.log("trainer").write_text("".join(f"{number} " + "\u00e9" * 450 + "\n" for number in range(200)))
    seen, before = [], None
    while True:
        answer = do(read_logs, shop, run_id=folder.run_id, component="trainer", lines=200, before=before)
        seen = [int(line.split()[0]) for line in _lines(answer)] + seen
        if (before := answer.data.before) is None:
            break
        assert 0.47 * TOKEN_BUDGET < tokens(answer) <= TOKEN_BUDGET
    assert seen == list(range(200))
