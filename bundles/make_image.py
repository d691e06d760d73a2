"""Make a container image of a wheel: `make release IMAGES="server train"`.

    python -P bundles/make_image.py server|train WHEEL [OUTPUT] [--folder ROOT]

The root is Debian's smallest with its Python, made by mmdebstrap; buildah packs it as an OCI archive. The image runs
`toprope` as user 65532, needs no writable root, and keeps its home in the volume /data. `train` adds what runs need.
With `--folder` the root is kept there; without OUTPUT or buildah that is all that is made.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SUITE, PYTHON = "bookworm", (3, 11)
"""Debian's release and the version of its Python."""
USER = 65_532
PROGRAM = ("/usr/bin/python3", "-P", "-m", "toprope_server.cli")
VARIABLES = {"TOPROPE_HOME": "/data", "TOPROPE_CONFIG": "/data/config", "HOME": "/data", "LANG": "C.UTF-8"}
_PACKAGES = ("python3-minimal", "libpython3-stdlib", "ca-certificates")
_TRAINING_PACKAGES = ("libgomp1", "libstdc++6")
_LEFT_OUT = ("/usr/share/doc/*", "/usr/share/man/*", "/usr/share/locale/*", "/usr/share/info/*", "/usr/share/lintian/*")
_SITE = "usr/local/lib/python3.11/dist-packages"


def make_root(kind: str, wheel: Path, root: Path) -> None:
    """Make the root folder of an image: Debian, Python, the wheel with its dependencies.

    Raises:
        SystemExit: mmdebstrap or pip failed, or another Python runs this.
    """
    if sys.version_info[:2] != PYTHON:
        raise SystemExit("Run this with Python 3.11, which the image has; the wheels of dependencies depend on it.")
    packages = [*_PACKAGES, *(_TRAINING_PACKAGES if kind == "train" else ())]
    excluded = [f"--dpkgopt=path-exclude={pattern}" for pattern in _LEFT_OUT]
    included = f"--include={','.join(packages)}"
    _run(["mmdebstrap", "--quiet", "--variant=essential", included, *excluded, SUITE, str(root)])
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--target"]
    extra = "[train]" if kind == "train" else ""
    _run([*install, str(root / _SITE), "-c", str(ROOT / "constraints.txt"), f"{wheel}{extra}"])
    shutil.rmtree(root / _SITE / "bin", ignore_errors=True)
    program = root / "usr" / "local" / "bin" / "toprope"
    program.write_text(f'#!/bin/sh\nexec {" ".join(PROGRAM)} "$@"\n')
    program.chmod(0o755)
    for name in ("var/cache", "var/lib/apt", "var/log"):
        shutil.rmtree(root / name, ignore_errors=True)
        (root / name).mkdir(parents=True)
    (root / "data").mkdir(mode=0o700)
    os.chown(root / "data", USER, USER)


def pack(root: Path, output: Path, made: str) -> None:
    """Pack a root folder as an OCI archive with its user, its program and its volume."""
    tool = ["buildah", "--storage-driver", "vfs"]
    name = subprocess.run([*tool, "from", "scratch"], check=True, capture_output=True, text=True).stdout.strip()
    try:
        _run([*tool, "add", "--quiet", name, str(root), "/"])
        settings = ["--user", f"{USER}:{USER}", "--volume", "/data", "--workingdir", "/data", "--cmd", "serve"]
        settings += ["--entrypoint", '["/usr/local/bin/toprope"]']
        for key, value in VARIABLES.items():
            settings += ["--env", f"{key}={value}"]
        _run([*tool, "config", *settings, name])
        _run([*tool, "commit", "--quiet", "--timestamp", made, name, f"oci-archive:{output}"])
    finally:
        subprocess.run([*tool, "rm", name], capture_output=True)


def _run(command: Sequence[str]) -> None:
    if shutil.which(command[0]) is None:
        raise SystemExit(f"{command[0]} is missing: it is a package of Debian.")
    if subprocess.run(command).returncode:
        raise SystemExit(f"{Path(command[0]).name} failed; its output is above.")


def main() -> None:
    """Make the image that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("server", "train"))
    parser.add_argument("wheel", type=Path)
    parser.add_argument("output", type=Path, nargs="?", help="the archive to write")
    parser.add_argument("--folder", type=Path, help="keep the root folder here")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="toprope-image-") as scratch:
        root = given.folder or Path(scratch) / "root"
        make_root(given.kind, given.wheel.resolve(), root)
        if given.output is None or shutil.which("buildah") is None:
            why = "" if given.output is None else " because buildah is missing"
            print(f"Nothing was packed{why}. The root folder: {given.folder or 'not kept'}")
            return
        pack(root, given.output.resolve(), os.environ.get("SOURCE_DATE_EPOCH", "0"))
        print(f"{given.output}; run it: podman run --read-only -i --volume toprope:/data oci-archive:{given.output}")


if __name__ == "__main__":
    main()
