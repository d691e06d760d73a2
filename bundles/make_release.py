"""Make everything that a release consists of: `make release`.

    python -P bundles/make_release.py OUTPUT --tools FOLDER [--owner NAME] [--commit COMMIT] [--image KIND ...]

OUTPUT gets wheel, sdist, the extension for Claude Desktop (.mcpb), server.json, locked requirements, a bill of
materials for each of them (CycloneDX), the licences of all packages, container images, and SHA256SUMS. Only committed
files are built, and every time in them is the commit's, so two builds of a commit are equal byte by byte.

`uv` and `cyclonedx-py` come from an interpreter of their own (`--tools`, which `make release` makes).
"""

from __future__ import annotations

import argparse
import hashlib
import io
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOCKS = ("server", "train", "tinker")
"""Names of the locked requirements in `bundles/requirements`: of the server alone, and with what runs need, here or at
a service. The last two are extras."""
_LOCKED = re.compile(r"^([A-Za-z0-9][A-Za-z0-9._-]*)==(\S+)", re.MULTILINE)


def make_release(output: Path, owner: str, commit: str, tools: Path, images: Iterable[str] = ()) -> list[Path]:
    """Build a commit into an empty or missing folder; return the files, SHA256SUMS last.

    Args:
        owner: The account at GitHub that publishes; empty: server.json names a placeholder.
        commit: As git names it.
        tools: The folder of the program cyclonedx-py.
        images: Kinds of container images, as make_image.py names them.

    Raises:
        SystemExit: The folder is not empty, the wheel has no page, or a step failed.
    """
    output.mkdir(parents=True, exist_ok=True)
    if any(output.iterdir()):
        raise SystemExit(f"{output} is not empty; nothing was built.")
    made = _told("git", "log", "-1", "--format=%ct", commit).strip()
    with tempfile.TemporaryDirectory(prefix="toprope-release-") as folder:
        source = Path(folder) / "source"
        _export(commit, source, owner)
        variables = {**os.environ, "SOURCE_DATE_EPOCH": made, "PYTHONPATH": _paths(source)}
        _run([sys.executable, "-P", "-m", "hatchling", "build", "-d", str(output)], source, variables)
        [wheel] = output.glob("*.whl")
        if "toprope_server/page/page.js" not in zipfile.ZipFile(wheel).namelist():
            raise SystemExit("The wheel has no page: `make page` tells why. The output is incomplete.")
        stem = "-".join(wheel.stem.split("-")[:2])
        bundles = Path(folder) / "bundles"
        command = [
            sys.executable,
            "-P",
            "bundles/make_bundles.py",
            str(bundles),
            *(["--owner", owner] if owner else []),
        ]
        _run(command, source, variables)
        pack(bundles / "mcpb", output / f"{stem}.mcpb", int(made))
        (output / "server.json").write_bytes((bundles / "server.json").read_bytes())
        licences: dict[str, str] = {}
        for name in LOCKS:
            lock = source / "bundles" / "requirements" / f"{name}.txt"
            (output / f"{stem}-{name}.requirements.txt").write_bytes(lock.read_bytes())
            command = [str(tools / "cyclonedx-py"), "requirements", "--pyproject", "pyproject.toml"]
            command += ["--output-reproducible", "-o", str(output / f"{stem}-{name}.cdx.json"), str(lock)]
            _run(command, source, variables)
            licences |= {f"{one} {version}": licence(one) for one, version in locked(lock).items()}
        report = "".join(f"{name}: {licences[name]}\n" for name in sorted(licences))
        (output / f"{stem}-licences.txt").write_text(report)
        for kind in images:
            command = [sys.executable, "-P", "bundles/make_image.py", kind, str(wheel)]
            _run([*command, str(output / f"{stem}-{kind}.oci.tar")], source, variables)
    files = sorted(path for path in output.iterdir())
    sums = "".join(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files)
    (output / "SHA256SUMS").write_text(sums)
    return [*files, output / "SHA256SUMS"]


def pack(folder: Path, output: Path, made: int) -> None:
    """Write a folder as a zip file whose bytes depend on the names and contents of its files alone."""
    moment = time.gmtime(made)[:6]
    with zipfile.ZipFile(output, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            entry = zipfile.ZipInfo(path.relative_to(folder).as_posix(), moment)
            entry.external_attr, entry.compress_type = 0o100644 << 16, zipfile.ZIP_DEFLATED
            archive.writestr(entry, path.read_bytes())


def locked(lock: Path) -> dict[str, str]:
    """Return name -> version of locked requirements."""
    return dict(_LOCKED.findall(lock.read_text(encoding="utf-8")))


def licence(name: str) -> str:
    """Return a package's licence as its metadata states it, if it is installed here."""
    try:
        stated: Mapping[str, str] = metadata.metadata(name)  # type: ignore[assignment]
    except metadata.PackageNotFoundError:
        return "not installed where this list was made (of another platform); see the package"
    classifiers = metadata.metadata(name).get_all("Classifier") or []
    named = [text.rpartition(" :: ")[2] for text in classifiers if text.startswith("License :: ")]
    text = stated["License-Expression"] or " and ".join(named) or (stated["License"] or "").strip().partition("\n")[0]
    return text or "not stated; see the package"


def write_locks(tools: Path) -> None:
    """Renew `bundles/requirements` from pyproject.toml and constraints.txt, with the hashes of every file."""
    common = [
        "pip",
        "compile",
        "--quiet",
        "--universal",
        "--python-version",
        "3.11",
        "--generate-hashes",
        "--no-header",
    ]
    common += ["--no-annotate", "-c", "constraints.txt", "pyproject.toml"]
    for name in LOCKS:
        path = ROOT / "bundles" / "requirements" / f"{name}.txt"
        extra = () if name == "server" else ("--extra", name)
        _run([str(tools / "uv"), *common, *extra, "--output-file", str(path)], ROOT, os.environ)


def _export(commit: str, folder: Path, owner: str) -> None:
    """Write a commit's files; link the page's packages if they are installed for the same lock file."""
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(folder, filter="data")
    modules, lock = ROOT / "page" / "node_modules", "page/package-lock.json"
    if modules.is_dir() and (ROOT / lock).read_bytes() == (folder / lock).read_bytes():
        (folder / "page" / "node_modules").symlink_to(modules)
    if owner:  # registries look for this line in the package's description
        with (folder / "README.md").open("a") as readme:
            readme.write(f"\n<!-- mcp-name: io.github.{owner}/toprope -->\n")


def _paths(source: Path) -> str:
    return os.pathsep.join(str(source / name) for name in ("", "server", "tools"))


def _told(*command: str) -> str:
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def _run(command: Sequence[str], folder: Path, variables: Mapping[str, str]) -> None:
    if subprocess.run(command, cwd=folder, env=dict(variables)).returncode:
        raise SystemExit(f"{Path(command[0]).name} failed; its output is above. The output is incomplete.")


def main(arguments: Iterable[str] | None = None) -> None:
    """Make the release, or the locks, that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, nargs="?", help="an empty folder")
    parser.add_argument("--owner", default="", help="the account at GitHub that publishes; server.json names it")
    parser.add_argument("--commit", default="HEAD", help="the commit to build")
    parser.add_argument("--tools", type=Path, required=True, help="the folder of the programs uv and cyclonedx-py")
    parser.add_argument("--image", action="append", default=[], choices=("server", "train"), help="make it, too")
    parser.add_argument("--locks", action="store_true", help="renew bundles/requirements instead")
    given = parser.parse_args(None if arguments is None else list(arguments))
    if given.locks:
        write_locks(given.tools)
        return
    if given.output is None:
        parser.error("name a folder")
    for path in make_release(given.output.resolve(), given.owner, given.commit, given.tools, given.image):
        print(f"{path.stat().st_size:>10,}  {path.name}")
    if not given.owner:
        print(
            "server.json names no owner. Its publisher gives one (make release OWNER=...): the account's name "
            "goes into server.json and, as the line that registries look for, into the package's README."
        )


if __name__ == "__main__":
    main()
