"""Container images: the server's is small; both run without root's rights in a root that nobody can write to.

The root folder runs in bubblewrap, as a container engine would run it; its archive is read as such engines read it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import anyio
import pytest
from mcp import Client, StdioServerParameters

from benchmarks.house.install import megabytes

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "bundles" / "make_image.py"
USER = "65532"
pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the image has Python 3.11"),
    pytest.mark.skipif(shutil.which("mmdebstrap") is None, reason="mmdebstrap is missing"),
    pytest.mark.skipif(
        shutil.which("bwrap") is None or os.getuid() != 0, reason="bubblewrap or root's rights are missing"
    ),
]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, ROOT]
    subprocess.run(build, check=True, timeout=300)
    [built] = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def image(wheel: Path) -> tuple[Path, Path]:
    """The server's root folder, and where the archive is if buildah packed it."""
    root, archive = wheel.parent / "server", wheel.parent / "image.tar"
    command = [sys.executable, "-P", SCRIPT, "server", wheel, archive, "--folder", root]
    subprocess.run(command, check=True, timeout=900)
    return root, archive


def inside(root: Path, data: Path) -> list[str]:
    """The command that runs a program in the root as the image's user, without a network."""
    data.mkdir(exist_ok=True)
    os.chown(data, int(USER), int(USER))
    for parent in {root, *root.parents, *data.parents}:
        if len(parent.parts) > 2:  # the tests' own folders are root's alone
            parent.chmod(0o755)
    confined = [
        "bwrap",
        "--ro-bind",
        str(root),
        "/",
        "--bind",
        str(data),
        "/data",
        "--tmpfs",
        "/tmp",
        "--proc",
        "/proc",
    ]
    confined += ["--dev", "/dev", "--unshare-user", "--unshare-net", "--unshare-pid", "--uid", USER, "--gid", USER]
    confined += [
        "--clearenv",
        "--setenv",
        "PATH",
        "/usr/local/bin:/usr/bin:/bin",
        "--chdir",
        "/data",
        "--die-with-parent",
    ]
    for name in ("TOPROPE_HOME", "HOME"):
        confined += ["--setenv", name, "/data"]
    return ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", *confined]


def test_image_is_small_and_serves_as_user_with_read_only_root(image: tuple[Path, Path], tmp_path: Path) -> None:
    root, data = image[0], tmp_path / "data"
    assert megabytes(root) <= 300
    confined = inside(root, data)
    for place in ("/usr/local/bin/x", "/x", "/etc/x"):
        done = subprocess.run([*confined, "/bin/sh", "-c", f"echo > {place}"], capture_output=True, text=True)
        assert done.returncode and "Read-only" in done.stderr, done.stderr
    report = subprocess.run([*confined, "toprope", "doctor", "--json"], capture_output=True, text=True, timeout=120)
    found = json.loads(report.stdout)
    assert not [one for one in found["findings"] if one["level"] == "broken"]
    server = StdioServerParameters(command=confined[0], args=[*confined[1:], "toprope", "serve"], cwd=str(tmp_path))

    async def ask() -> str:
        with anyio.fail_after(100):
            async with Client(server) as client:
                made = await client.call_tool("select_environment", {"name": "number_guess", "preset": "cpu-embedded"})
                return made.content[0].text

    assert "draft" in anyio.run(ask)
    assert (data / "index.db").stat().st_uid == int(USER), "the draft is in the volume, written by the image's user"


@pytest.mark.skipif(shutil.which("buildah") is None, reason="buildah is missing")
def test_archive_names_user_program_and_volume(image: tuple[Path, Path]) -> None:
    with tarfile.open(image[1]) as archive:
        index = json.load(archive.extractfile("index.json"))
        blob = {"digest": index["manifests"][0]["digest"]}
        for step in ("manifest", "config"):
            blob = json.load(archive.extractfile("blobs/sha256/" + blob["digest"].removeprefix("sha256:")))
            blob = blob["config"] if step == "manifest" else blob
    settings = blob["config"]
    assert settings["User"] == f"{USER}:{USER}" and settings["Entrypoint"] == ["/usr/local/bin/toprope"]
    assert settings["Cmd"] == ["serve"] and settings["Volumes"] == {"/data": {}}
    assert "TOPROPE_HOME=/data" in settings["Env"]


def test_training_image_loads_what_runs_need(wheel: Path, tmp_path: Path) -> None:
    root = wheel.parent / "train"
    subprocess.run([sys.executable, "-P", SCRIPT, "train", wheel, "--folder", root], check=True, timeout=900)
    confined = inside(root, tmp_path / "data")
    done = subprocess.run([*confined, "toprope", "doctor", "--json"], capture_output=True, text=True, timeout=200)
    found = {one["subject"]: one for one in json.loads(done.stdout)["findings"]}
    assert found["torch"]["level"] == "ok" and not [one for one in found.values() if one["level"] == "broken"]
