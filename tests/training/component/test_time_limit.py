"""A chat template comes with a model and may loop for ever."""

from __future__ import annotations

import time

import pytest

from toprope.training.component.time_limit import TemplateTooSlow, render_limit
from toprope.trajectories.capture import templates
from toprope.trajectories.capture.templates import ChatTemplate

ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{{ messages[0].content }}"


def test_loops_within_loops_are_interrupted(monkeypatch):
    monkeypatch.setattr(templates, "_RENDER_S", 0.1)
    monkeypatch.setattr(templates, "_FIRST", (("user",),))
    monkeypatch.setattr(templates, "_BETWEEN", ())
    began = time.monotonic()
    assert ChatTemplate(ENDLESS, [], {}).before("question") is None
    assert time.monotonic() - began < 5


def test_a_limit_ends_with_its_block():
    with pytest.raises(TemplateTooSlow, match="did not end within"), render_limit(0.05):
        while True:
            pass
    with render_limit(0.05):
        pass
    time.sleep(0.1)
