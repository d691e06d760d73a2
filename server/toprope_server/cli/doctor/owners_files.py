"""The check of the owner's files: valid, private, and naming only what exists."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from toprope.errors import TopropeError
from toprope.settings.owner import Home, OwnerSettings
from toprope.settings.presets import list_presets, load_preset
from toprope_server.cli.doctor.checks import Finding, Level


def owners_files(home: Home) -> Iterator[Finding]:
    """settings.yaml, locks.yaml, limits.yaml, clusters.yaml and presets: valid, and private if they hold keys."""
    readers: list[tuple[str, Path, Callable[[], Any]]] = [
        ("settings.yaml", home.settings_file, home.settings),
        ("locks.yaml", home.locks_file, home.locks),
        ("limits.yaml", home.limits_file, home.limits),
    ]
    if (clusters_file := home.configuration / "clusters.yaml").exists():
        readers.append(("clusters.yaml", clusters_file, home.clusters))
    for name, path in list_presets(home.preset_folders).items():
        readers.append((f"preset {name}", path, partial(load_preset, name, home.preset_folders)))
    sound = []
    for subject, path, read_file in readers:
        try:
            read_file()
        except TopropeError as error:
            line = line_of_mistake(path, str(error))
            line_text = f"line {line}: " if line and f"line {line}" not in str(error) else ""
            yield Finding(subject, "broken", f"{line_text}{error.message}", error.hint or "Fix the file.")
        else:
            sound.append(subject)
    yield from _check_named(home)
    if os.environ.get("TOPROPE_CONFIG") and not home.configuration.exists():
        text = f"TOPROPE_CONFIG names {home.configuration}, which does not exist: the shipped locks and limits hold"
        yield Finding("owner's files", "warning", text, "Correct it; or make the folder, if yours are to be there.")
    elif sound:
        settings_file = home.settings_file if home.settings_file.exists() else None
        yield Finding(
            "owner's files", "ok", f"{', '.join(sound)}{'' if settings_file else ' (no settings.yaml: defaults apply)'}"
        )
    if "locks.yaml" in sound and not list(home.locks()):
        yield Finding("locks.yaml", "note", "it has no locks, and replaces the shipped ones: no field is locked")
    for path in (home.settings_file, home.configuration / "http-token"):
        if path.exists() and path.stat().st_mode & 0o077:
            holds = path.name == "http-token" or "variables" in path.read_text(errors="replace")
            if holds:
                level: Level = "broken" if path.name == "http-token" else "warning"
                yield Finding(path.name, level, "others can read it, and it can hold keys", f"Run: chmod 600 {path}")


def _check_named(home: Home) -> Iterator[Finding]:
    """Settings that name what does not exist, or contradict each other."""
    try:
        settings = home.settings()
    except TopropeError:
        return
    if settings.preset not in (presets := list_presets(home.preset_folders)):
        text = f"preset: there is no preset {settings.preset!r}"
        yield Finding("settings.yaml", "broken", text, f"The presets are: {', '.join(presets)}.")
    for text, remedy in _doubts(settings, home.configuration):
        yield Finding("settings.yaml", "warning", text, remedy)


def _doubts(settings: OwnerSettings, folder: Path) -> Iterator[tuple[str, str]]:
    """Valid settings that cannot be meant, with their remedies. Relative paths start at `folder`."""
    for key in ("environments", "datasets", "trainers"):
        for path in _paths(folder, getattr(settings, key)):
            if not path.is_dir():
                yield f"{key}: there is no folder {path}", "Make it, or name another."
    if len(settings.http.tls) == 1:
        yield "http.certificate and http.key belong together", "Give both or none; 'serve --http' refuses one."
    for key, file in settings.http.tls.items():
        for path in _paths(folder, [file]):
            if not path.is_file():
                yield f"http.{key}: there is no file {path}", f"Correct http.{key}; 'serve --http' needs it."
    for program in settings.notify.command[:1]:
        if shutil.which(program) is None:
            yield f"notify.command: there is no program {program!r}", "Install it, or give its path."
    for name, rights in settings.environment.items():
        for path in _paths(folder, [*rights.reads, *rights.writes]):
            if not path.exists():
                yield f"environment: {name} may use {path}, which does not exist", "Make it, or name another."
    if settings.status.min_s > settings.status.max_s:
        text = f"status: max_s {settings.status.max_s:g} is less than min_s {settings.status.min_s:g}"
        yield f"{text}, which counts", "Raise max_s or lower min_s."


def _paths(folder: Path, names: Iterable[str]) -> list[Path]:
    return [folder / Path(name).expanduser() for name in names]


def line_of_mistake(path: Path, message: str) -> int | None:
    """The line of a YAML file that an error message refers to, if it can be found."""
    import yaml

    if match := re.search(r" at line (\d+)", message):
        return int(match[1])
    try:
        root = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return None
    lines = dict(_lines(root))
    names: list[str] = []
    lock = re.search(r", lock (\d+)", message)
    within = f"locks.{int(lock[1]) - 1}" if lock else ""
    if match := re.search(r"no key '([^']+)'", message):
        names += [name for name in lines if name.rpartition(".")[2] == match[1] and name.startswith(within)]
    if entry := re.match(r", ([^:]+): ([\w.]+): ", message.partition(str(path))[2]):  # of clusters.yaml
        names.append(f"{entry[1]}.{entry[2]}")
    names += [within] if within else []
    for name in re.findall(r"[A-Za-z_][\w*]*(?:[.][\w*]+)+|[a-z_]+", message.partition(str(path))[2] or message):
        names += [dotted_name for dotted_name in lines if dotted_name == name or dotted_name == f"config.{name}"]
    return next((lines[name] for name in names if name in lines), None)


def _lines(node: Any, name: str = "") -> Iterator[tuple[str, int]]:
    """Dotted names in a YAML document with their lines; entries of lists by number."""
    from yaml import MappingNode, SequenceNode

    if isinstance(node, MappingNode):
        for key, value in node.value:
            inner = f"{name}.{key.value}" if name else str(key.value)
            yield inner, key.start_mark.line + 1
            yield from _lines(value, inner)
    elif isinstance(node, SequenceNode):
        for number, value in enumerate(node.value):
            inner = f"{name}.{number}"
            yield inner, value.start_mark.line + 1
            yield from _lines(value, inner)
