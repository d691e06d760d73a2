"""The embedded policy is built once, in its place in the cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from toprope.settings.schema import PolicySection
from toprope.training.policy import tiny_model
from toprope.training.policy.loading import embedded_folder, place


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Folders in which policies were built; a file represents each."""
    folders: list[Path] = []

    def build(folder: Path, recipe: Any, progress: Any) -> None:
        folders.append(folder)
        (folder / "recipe.json").write_text("{}")

    monkeypatch.setattr(tiny_model, "build", build)
    return folders


def test_embedded_policy_is_built_once(built: list[Path], tmp_path: Path) -> None:
    cache = tmp_path / "policies"
    assert [place(PolicySection(), cache, print) for _ in range(2)] == [embedded_folder(cache)] * 2
    assert len(built) == 1


def test_incomplete_policy_is_replaced_and_leftovers_removed(built: list[Path], tmp_path: Path) -> None:
    folder = embedded_folder(tmp_path)
    (tmp_path / f".making-{folder.name}-x1").mkdir()
    (tmp_path / ".making-embedded-other-x1").mkdir()
    folder.mkdir()
    (folder / "model.safetensors").write_text("half")
    assert place(PolicySection(), tmp_path, print) == folder
    assert {path.name for path in folder.iterdir()} == {"recipe.json"}
    left = {path.name for path in tmp_path.iterdir() if path.is_dir()}
    assert left == {folder.name, ".making-embedded-other-x1"}
