"""What an owner may name to `toprope env add`: which kind of thing it is, and what it is called then."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from packaging.requirements import InvalidRequirement, Requirement

from toprope.errors import InvalidValue, NotFound, shown
from toprope.sdk.discovery import NAME
from toprope.sdk.worker.client import KEY_IN_URL
from toprope.settings.yamlfiles import nearest
from toprope.workbench.adapters import Adapter

__all__ = ["Target", "checked_name", "is_project", "require_no_secret", "target_of"]

_GIT = re.compile(r"^(git\+|git@|ssh://|file://.*\.git)|\.git(@[^/@]+)?$")
_HUB = re.compile(r"hf:[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True)
class Target:
    """What is to be added."""

    kind: str
    """`packages`, `folder`, `git`, `server` or `dataset`."""
    given: str
    name: str
    requirements: tuple[str, ...] = ()
    adapter: Adapter | None = None
    path: Path | None = None
    ref: str = ""
    """Of a checkout: the branch or tag."""


def target_of(
    given: str, adapters: Sequence[Adapter], speaks: str | None = None, *, plain_only: bool = False
) -> Target:
    """Reads what an owner named.

    Args:
        given: An ecosystem, a requirement, a path, a git URL, a server's URL, or `hf:` and a data set's id.
        adapters: The ecosystems there are.
        speaks: The ecosystem of a server.
        plain_only: Whether it can be nothing but an ecosystem or a requirement, whatever lies here by that name.

    Raises:
        NotFound: It is none of these.
        InvalidValue: It may not be added as it is named.
    """
    by_name = {one.name: one for one in adapters}
    plain = given.strip()
    require_no_secret(plain)
    if plain.replace("-", "_").lower() in by_name:
        adapter = by_name[plain.replace("-", "_").lower()]
        if not adapter.requirements:
            raise InvalidValue(f"{adapter.name} needs no interpreter of its own: it is there.", hint="toprope env list")
        return Target("packages", given, adapter.name, adapter.requirements, adapter)
    if not plain_only and (place := _place_of(given, plain, by_name, speaks)) is not None:
        return place
    try:
        requirement = Requirement(plain)
    except InvalidRequirement:
        raise NotFound(
            f"{shown(given)} is no ecosystem, requirement, path or URL.", hint=nearest(plain, _ecosystems(adapters))
        ) from None
    return Target("packages", given, _name_from(requirement.name), (plain,))


def checked_name(name: str) -> str:
    """The name, if it is one.

    Raises:
        InvalidValue: It is none.
    """
    if NAME.fullmatch(name) is None:
        raise InvalidValue(
            f"{shown(name)} is no valid name.",
            hint="Up to 64 lower-case letters, digits, '_' and '-', the first a letter or digit.",
        )
    return name


def _place_of(given: str, plain: str, by_name: dict[str, Adapter], speaks: str | None) -> Target | None:
    """What lies at a place: on the Hub, in a repository, at a URL, on this machine; None where it names none."""
    if _HUB.fullmatch(plain):
        return Target("dataset", plain, _name_from(plain.removeprefix("hf:").rpartition("/")[2]))
    if _GIT.search(plain):
        return _git(plain)
    if re.match(r"(https?|wss?)://", plain):
        return _server(plain, by_name, speaks)
    if (path := Path(plain).expanduser()).exists():
        return _path(given, path.absolute())
    return None


def _git(given: str) -> Target:
    url, _, ref = given.removeprefix("git+").rpartition("@")
    if not url or "/" in ref or ":" in ref:  # the @ was of a user
        url, ref = given.removeprefix("git+"), ""
    if ref.startswith("-") or url.startswith("-"):
        raise InvalidValue(f"{shown(given)} is no URL of a repository.")
    return Target("git", url, _name_from(url.rstrip("/").rpartition("/")[2].removesuffix(".git")), ref=ref)


def _server(given: str, by_name: dict[str, Adapter], speaks: str | None) -> Target:
    parts = urlsplit(given)
    if not parts.hostname:
        raise InvalidValue(f"{shown(given)} names no host.")
    if speaks is None or speaks not in by_name:
        raise InvalidValue(
            f"What the server at {given} speaks has to be said: --as ECOSYSTEM.",
            hint=f"{nearest(speaks, by_name)}" if speaks else f"There are {', '.join(by_name)}.",
        )
    name = _name_from(f"{parts.hostname}-{parts.port}" if parts.port else parts.hostname)
    return Target("server", given.rstrip("/"), name, adapter=by_name[speaks])


def _path(given: str, path: Path) -> Target:
    if path.is_file() and path.suffix not in (".py", ".whl"):
        raise InvalidValue(f"{path} is neither a folder nor a Python file nor a wheel.")
    name = _name_from(path.stem if path.is_file() else path.name)
    if path.suffix == ".whl" or (path.is_dir() and is_project(path)):
        return Target("packages", str(path), _name_from(name.split("-")[0]), (str(path),), path=path)
    listed = path / "requirements.txt"
    own = tuple(_lines(listed)) if listed.is_file() else ()
    return Target("folder", str(path), name, own, path=path)


def is_project(folder: Path) -> bool:
    """Whether a folder can be installed."""
    return any((folder / name).is_file() for name in ("pyproject.toml", "setup.py"))


def _lines(file: Path) -> list[str]:
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidValue(f"{file} cannot be read as UTF-8: {error}.", hint="Save it as UTF-8.") from None
    lines = (line.partition(" #")[0].strip() for line in text.splitlines())
    wanted = [line for line in lines if line and not line.startswith("#")]
    if option := next((line for line in wanted if line.startswith("-")), None):
        raise InvalidValue(
            f"{file} has the line {shown(option)}, which is an option of pip and no requirement.",
            hint="Leave it out of the file; --requirement, --extra-index-url and --find-links say the same.",
        )
    return wanted


def _name_from(text: str) -> str:
    return re.sub(r"[^a-z0-9_-]+", "-", text.lower()).strip("-_")[:64] or "environment"


def _ecosystems(adapters: Sequence[Adapter]) -> list[str]:
    return [one.name for one in adapters if one.requirements]


def require_no_secret(text: str) -> None:
    """Passes where a URL holds neither user nor password: it would be read in lists of processes and in files.

    Raises:
        InvalidValue: One does. It is not repeated.
    """
    if KEY_IN_URL.search(text):
        raise InvalidValue(
            "A URL with a user or password in it is not taken.",
            hint="Let git and pip find it: a credential helper, netrc, or PIP_EXTRA_INDEX_URL.",
        )
