"""A short slice of the campaign of faults: whatever is killed, nothing is left and every run ends as it should."""

from __future__ import annotations

import os

from benchmarks.faults.faults import campaign


def test_a_slice_of_the_campaign_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", os.environ.get("TMPDIR", ""))  # the campaign sets it
    said: list[str] = []
    figures, tally = campaign(tmp_path, light_rounds=1, real_rounds=0, accuracy_rounds=0, seed=4, say=said.append)
    assert tally.everything == [], "\n".join(said)
    assert figures["runs"] == 1 and figures["kills"] >= 1
