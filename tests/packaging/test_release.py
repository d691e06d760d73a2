"""The parts of a release: one version, locks that name every pin and hash, and two builds that are equal."""

from __future__ import annotations

import hashlib
import json
import os
import re
import runpy
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import toprope
from tests.support.run_engines import RELEASE_TOOLS

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "bundles" / "make_release.py"
LOCKS = {name: ROOT / "bundles" / "requirements" / f"{name}.txt" for name in ("server", "train", "tinker")}
NEEDS_TOOLS = pytest.mark.skipif(not (RELEASE_TOOLS / "bin" / "cyclonedx-py").exists(), reason="make tools-release")


def test_version_is_in_one_place() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["dynamic"] == ["version"] and "version" not in project["project"]
    listed = subprocess.run(["git", "grep", "-lF", f'"{toprope.__version__}"', "--", "*.py", "*.toml", "*.json"],
                            cwd=ROOT, capture_output=True, text=True)  # fmt: skip
    product = [name for name in listed.stdout.split() if not name.startswith(("tests/", "page/package"))]
    assert product == ["toprope/__init__.py"]


def test_locks_name_every_pin_with_hashes() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.M))
    pins = {canonicalize_name(name): version for name, version in pins.items()}
    wanted = {"server": project["dependencies"]}
    for extra in ("train", "tinker"):
        wanted[extra] = wanted["server"] + project["optional-dependencies"][extra]
    for kind, path in LOCKS.items():
        entries = re.split(r"\n(?=\S)", path.read_text().strip())
        locked = {}
        for entry in entries:
            requirement = Requirement(entry.partition(" \\")[0])
            assert re.search(r"--hash=sha256:[0-9a-f]{64}", entry), requirement
            [pin] = requirement.specifier
            locked[canonicalize_name(requirement.name)] = pin.version
        assert {canonicalize_name(Requirement(line).name) for line in wanted[kind]} <= locked.keys()
        differing = {
            name: (version, pins[name]) for name, version in locked.items() if pins.get(name, version) != version
        }
        assert not differing, "renew bundles/requirements: make lock"
    assert not any("torch" in LOCKS[kind].read_text() for kind in ("server", "tinker"))


def test_bundle_is_packed_alike_whenever_and_wherever(tmp_path: Path) -> None:
    pack = runpy.run_path(str(SCRIPT))["pack"]
    made = []
    for name, umask in (("a", 0o022), ("b", 0o077)):
        before = os.umask(umask)
        try:
            folder = tmp_path / name / "mcpb"
            (folder / "server").mkdir(parents=True)
            for file in ("server/main.py", "manifest.json") if name == "a" else ("manifest.json", "server/main.py"):
                (folder / file).write_text(f"content of {file}\n")
        finally:
            os.umask(before)
        pack(folder, tmp_path / f"{name}.mcpb", 1_700_000_000)
        made.append((tmp_path / f"{name}.mcpb").read_bytes())
    assert made[0] == made[1]
    with zipfile.ZipFile(tmp_path / "a.mcpb") as archive:
        assert archive.read("server/main.py") == b"content of server/main.py\n"


def build(output: Path, *options: str, **variables: str) -> dict[str, str]:
    command = [sys.executable, "-P", str(SCRIPT), str(output), "--tools", str(RELEASE_TOOLS / "bin"), *options]
    subprocess.run(command, check=True, timeout=400, env={**os.environ, **variables})
    sums = dict(reversed(line.split()) for line in (output / "SHA256SUMS").read_text().splitlines())
    for name, digest in sums.items():
        assert hashlib.sha256((output / name).read_bytes()).hexdigest() == digest
    assert set(sums) == {path.name for path in output.iterdir()} - {"SHA256SUMS"}
    return sums


@pytest.mark.engines
@NEEDS_TOOLS
def test_two_builds_are_equal_and_complete(tmp_path: Path) -> None:
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    first = build(tmp_path / "first", "--commit", commit.strip(), TZ="UTC")
    assert build(tmp_path / "second", "--commit", commit.strip(), TZ="Asia/Tokyo", PYTHONHASHSEED="7") == first
    stem = f"toprope-{toprope.__version__}"
    locks = [f"{stem}-{kind}.{ending}" for kind in LOCKS for ending in ("requirements.txt", "cdx.json")]
    names = [f"{stem}-py3-none-any.whl", f"{stem}.tar.gz", f"{stem}.mcpb", f"{stem}-licences.txt", "server.json"]
    assert set(first) == {*names, *locks}
    output = tmp_path / "first"
    bill = json.loads((output / f"{stem}-train.cdx.json").read_text())
    components = {one["name"]: one for one in bill["components"]}
    assert bill["bomFormat"] == "CycloneDX" and components["torch"]["version"] == "2.13.0"
    assert components["mcp"]["externalReferences"][0]["hashes"]
    licences = (output / f"{stem}-licences.txt").read_text().splitlines()
    bills = [json.loads((output / f"{stem}-{kind}.cdx.json").read_text())["components"] for kind in LOCKS]
    assert len(licences) == len({(one["name"], one["version"]) for bill in bills for one in bill})
    installed = [line for line in licences if "not installed" not in line]
    assert len(installed) > 100
    assert [line.split()[0] for line in installed if line.endswith("not stated; see the package")] in ([], ["zss"])
    with tarfile.open(output / f"{stem}.tar.gz") as source:
        inside = source.getnames()
    assert f"{stem}/server/toprope_server/page/page.js" in inside and not [
        name for name in inside if "node_modules" in name
    ]


@pytest.mark.engines
@NEEDS_TOOLS
def test_owner_stands_in_entry_and_description(tmp_path: Path) -> None:
    build(tmp_path / "out", "--owner", "somebody")
    entry = json.loads((tmp_path / "out" / "server.json").read_text())
    [wheel] = (tmp_path / "out").glob("*.whl")
    [distribution] = metadata.distributions(path=[str(wheel)])
    assert entry["name"] == "io.github.somebody/toprope"
    assert f"<!-- mcp-name: {entry['name']} -->" in (distribution.metadata.get_payload() or "")
