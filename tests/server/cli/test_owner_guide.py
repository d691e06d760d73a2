"""Commands and files of docs/owner.md and docs/security.md work as written."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from toprope_server.cli.app import build
from typer.testing import CliRunner

from tests.server.cli.test_commands import make_run
from toprope.settings.limits import Limits
from toprope.settings.locks import Locks
from toprope.settings.owner import Home, OwnerSettings
from toprope.workbench.approvals import Approvals

DOCS = Path(__file__).resolve().parents[3] / "docs"
GUIDE = "\n".join((DOCS / name).read_text() for name in ("owner.md", "security.md"))
COMMANDS = [
    line.partition("#")[0].strip()
    for block in re.findall(r"```sh\n(.*?)```", GUIDE, re.S)
    for line in block.splitlines()
    if line.strip()
]
SERVER = [sys.executable, "-P", "-m", "toprope_server.cli"]


@pytest.fixture(scope="module")
def variables(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    home = tmp_path_factory.mktemp("owner")
    folder = make_run(home, "a-run", "completed", ended=5.0)
    folder.log("trainer").write_text("step 1\n")
    Approvals(Home(home / "home", home / "config")).ask("4f2a9c01", "a run that waits")
    kept = {"PATH": os.environ["PATH"], "HOME": str(home), "TERM": "dumb"}
    return kept | {"TOPROPE_HOME": str(home / "home"), "TOPROPE_CONFIG": str(home / "config")}


@pytest.mark.parametrize("line", COMMANDS)
def test_guide_command_works(variables: dict[str, str], line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program, *arguments = shlex.split(line)
    assert program == "toprope"
    if arguments[:2] == ["serve", "--http"]:
        serving = subprocess.Popen([*SERVER, *arguments, "--port", "0"], stdout=subprocess.PIPE, env=variables)
        try:
            assert serving.stdout is not None
            assert b"http://127.0.0.1:" in serving.stdout.readline()
        finally:
            serving.terminate()
            assert serving.wait(timeout=10) == 0
            serving.stdout.close()
        return
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    done = CliRunner().invoke(build(), arguments)
    assert done.exit_code == 0, done.output
    assert done.stdout.strip()


def test_guide_has_commands() -> None:
    assert len(COMMANDS) >= 16
    assert {shlex.split(line)[1] for line in COMMANDS} >= {"clients", "doctor", "install", "serve", "token", "prune"}


def test_guide_files_are_valid(tmp_path: Path) -> None:
    blocks = re.findall(r"```yaml\n# (\S+\.yaml)[^\n]*\n(.*?)```", GUIDE, re.S)
    assert [name for name, _ in blocks].count("settings.yaml") >= 3
    for number, (name, text) in enumerate(blocks):
        path = tmp_path / f"{number}-{name}"
        path.write_text(text)
        if name == "locks.yaml":
            assert len(list(Locks.read(path))) == text.count("- field:")
        elif name == "limits.yaml":
            limits = Limits.read(path)
            assert len(list(limits)) == 9 and limits.above == {"cost_usd": 1.0}
        else:
            assert OwnerSettings.read(path) != OwnerSettings() or "share: 0.02" in text
