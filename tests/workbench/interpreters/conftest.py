"""Homes, wheels and an installer that needs no network."""

from __future__ import annotations

import base64
import hashlib
import types
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from toprope.records.run.manifest import site_packages_of
from toprope.settings.owner import Home
from toprope.workbench.adapters import Adapter
from toprope.workbench.interpreters.installing import Installer, Pin, Wanted

GAME = "def main():\n    print('scripts work')\n"


def adapter(name: str, package: str, *requirements: str) -> Adapter:
    return Adapter(name, f"Environments of {name}", package, requirements, module=types.ModuleType(name))


def make_wheel(
    folder: Path, name: str, version: str = "1.0", *, requires: tuple[str, ...] = (), code: str = ""
) -> Path:
    """Write a pure wheel of one module and return its path.

    Args:
        folder: Folder of the wheel.
        name: Name of distribution and module.
        version: Version of the distribution.
        requires: Requirements of the distribution.
        code: Text of the module.
    """
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{name}-{version}.dist-info"
    metadata = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}"]
    metadata += [f"Requires-Dist: {one}" for one in requires]
    files = {
        f"{name}.py": code or f"VERSION = {version!r}\n",
        f"{info}/METADATA": "\n".join(metadata) + "\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": f"[console_scripts]\n{name}-says = {name}:main\n",
    }
    record = "".join(f"{path},sha256={_hash(text)},{len(text.encode())}\n" for path, text in files.items())
    wheel = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
        archive.writestr(f"{info}/RECORD", f"{record}{info}/RECORD,,\n")
    return wheel


def _hash(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheels")
    make_wheel(folder, "tinygame", "1.0", requires=("tinyrules>=1",), code=GAME)
    make_wheel(folder, "tinygame", "2.0", requires=("tinyrules>=1",), code=GAME)
    make_wheel(folder, "tinyrules", "1.5")
    make_wheel(folder, "tinyalone", "1.0", requires=("tinynowhere==9",))
    return folder


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Resolve every requirement to version 1.5 of a generated module; `tinytorn` cannot be imported."""

    def resolve(self: Installer, what: str, wanted: Wanted) -> list[Pin]:
        names = [Requirement(one).name for one in wanted.requirements]
        return [Pin(name, f"{name}==1.5") for name in names]

    def install(self: Installer, what: str, pins: list[Pin], wanted: Wanted) -> None:
        site = site_packages_of(self.python)
        assert site is not None
        for pin in pins:
            code = "raise OSError('no such library')" if pin.name == "tinytorn" else "VERSION = '1.5'"
            (site / f"{pin.name}.py").write_text(code)
            (site / f"{pin.name}-1.5.dist-info").mkdir()
            (site / f"{pin.name}-1.5.dist-info" / "METADATA").write_text(
                f"Metadata-Version: 2.1\nName: {pin.name}\nVersion: 1.5\n"
            )

    monkeypatch.setattr(Installer, "resolve", resolve)
    monkeypatch.setattr(Installer, "install", install)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home", tmp_path / "config")
