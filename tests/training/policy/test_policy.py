"""How the embedded policy gets into its place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from toprope.settings.schema import PolicySection
from toprope.training.policy import tiny_model as embedded
from toprope.training.policy.loading import embedded_folder, place


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Where policies were made; a file stands in for each."""
    folders: list[Path] = []

    def build(folder: Path, recipe: Any, progress: Any) -> None:
        folders.append(folder)
        (folder / "recipe.json").write_text("{}")

    monkeypatch.setattr(embedded, "build", build)
    return folders


def test_it_is_made_once(built: list[Path], tmp_path: Path) -> None:
    cache = tmp_path / "policies"
    assert [place(PolicySection(), cache, print) for _ in range(2)] == [embedded_folder(cache)] * 2
    assert len(built) == 1


def test_what_a_stopped_run_left_is_removed_and_half_a_policy_replaced(built: list[Path], tmp_path: Path) -> None:
    folder = embedded_folder(tmp_path)
    (tmp_path / f".making-{folder.name}-x1").mkdir()
    (tmp_path / ".making-embedded-other-x1").mkdir()
    folder.mkdir()
    (folder / "model.safetensors").write_text("half")
    assert place(PolicySection(), tmp_path, print) == folder
    assert {path.name for path in folder.iterdir()} == {"recipe.json"}
    left = {path.name for path in tmp_path.iterdir() if path.is_dir()}
    assert left == {folder.name, ".making-embedded-other-x1"}
