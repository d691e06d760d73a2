"""What an interpreter has installed, read from its folders without starting it."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

__all__ = ["packages_in", "site_packages_of"]


def site_packages_of(python: str | Path) -> Path | None:
    """Where the packages of a virtual environment's Python lie; None where `python` is of none."""
    # Not resolved: the link leads out of the environment, to the Python that it was made with.
    prefix = Path(python).absolute().parent.parent
    if not (prefix / "pyvenv.cfg").is_file():
        return None
    return next((path for path in sorted(prefix.glob("lib/python*/site-packages")) if path.is_dir()), None)


def packages_in(site_packages: Path) -> dict[str, str]:
    """Distributions and their versions, by name."""
    found = {}
    for one in metadata.distributions(path=[str(site_packages)]):
        name = one.metadata["Name"] if one.metadata is not None else None
        if name:
            found[str(name)] = one.version or ""
    return dict(sorted(found.items(), key=lambda pair: pair[0].lower()))
