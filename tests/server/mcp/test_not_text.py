"""Half a surrogate pair in an argument is the caller's mistake and is answered as such."""

from __future__ import annotations

import pytest
from toprope_server.mcp.arguments import check
from toprope_server.mcp.tool_registry import ALL_TOOLS


@pytest.mark.parametrize(
    "arguments",
    [
        {"hypothesis": "half \ud800"},
        {"run_ids": ["\udfff"]},
        {"hypothesis": "fine", "\udc00": "x"},
    ],
)
def test_half_a_surrogate_pair_is_refused_in_words(arguments):
    [note] = [spec.build() for spec in ALL_TOOLS if spec.name == "note_experiment"]
    [problem] = check(note, arguments)
    assert "surrogate" in problem and problem.isascii()


def test_characters_beyond_the_first_plane_are_text():
    [note] = [spec.build() for spec in ALL_TOOLS if spec.name == "note_experiment"]
    assert check(note, {"hypothesis": "\U0001f600 and ä"}) == []
