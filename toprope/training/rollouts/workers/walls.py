"""The wall for one worker: the owner's decisions together with the files of its code."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from toprope.records.run.specification import EnvironmentSource
from toprope.records.walls import Walls
from toprope.sdk.wall.enclosure import Enclosure
from toprope.sdk.wall.paths import data_paths, source_paths
from toprope.sdk.wall.plan import Network, Wall


def environment_wall(
    walls: Walls,
    source: EnvironmentSource,
    *,
    network: Network = "allow",
    memory_mb: int = 0,
) -> Wall:
    """The wall around an environment. If an agent wrote any of its code, it has no rights, none of the owner's
    variables for environments, nothing of a project that the owner added, and a HOME of its own.

    Args:
        walls: The owner's decisions.
        source: The environment with its reward functions.
        network: Its network.
        memory_mb: Memory that one process may allocate in MB; 0: no limit.
    """
    of_agent = is_of_agent(walls, source)
    walls = replace(walls, rights={}, added=()) if of_agent else walls
    code, data = _files(walls, source)
    rights = walls.rights.get(source.name, {})
    is_data_alone = source.adapter == "harbor"  # tasks may have hidden files, and no code that runs behind this wall
    return Wall(
        sources=(*_sources(code, walls), *(() if is_data_alone else data)),
        reads=(*rights.get("reads", ()), *(data if is_data_alone else ())),
        writes=tuple(rights.get("writes", ())),
        closed=walls.closed,
        home=walls.home_of(source.name, of_agent=of_agent),
        network=network,
        memory_mb=memory_mb,
        trusted=bool(rights.get("trust")),
        required=walls.required,
        withheld=walls.variables if of_agent else (),
    )


def is_of_agent(walls: Walls, source: EnvironmentSource) -> bool:
    """True if an agent wrote any of an environment's files, or of its reward functions."""
    code, data = _files(walls, source)
    return any(walls.wrote_agent(file) for file in (*code, *data))


def _files(walls: Walls, source: EnvironmentSource) -> tuple[list[str], tuple[str, ...]]:
    """The files of an environment's code with its reward functions, and those that its target names."""
    code = [*([source.file] if source.file else []), *(reward.file for reward in source.rewards)]
    return code, tuple(data_paths(source.target, walls.closed, walls.added))


def code_wall(walls: Walls, files: Sequence[str]) -> Wall:
    """The wall around strategies, scorers and generators, which belong to no environment."""
    return Wall(sources=_sources(files, replace(walls, added=())), closed=walls.closed, required=walls.required)


def _sources(files: Sequence[str], walls: Walls) -> tuple[str, ...]:
    return tuple(path for file in files for path in source_paths(file, walls.closed, walls.added))


def passed_on() -> Walls:
    """The owner's decisions as this process got them."""
    return Walls.from_variables(os.environ)


def missing_wall(enclosure: Enclosure | None) -> str:
    """A warning that a program has no wall; empty if it has one, or its owner let it out."""
    if enclosure is None or enclosure.level != "none":
        return ""
    return (
        f"No wall stands around this environment's code, because {enclosure.lacks}: it can read and change what you "
        "can. Use only environments that you trust here (toprope doctor)."
    )
