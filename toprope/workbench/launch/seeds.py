"""Seed groups: the same experiment several times, differing in its seed alone, so that luck can be told from gain.

A group is no object of its own. Its runs carry it in their specifications and in their ids (`<group>-s0`,
`<group>-s1`), so that folders alone tell it, wherever they are moved to.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from toprope.errors import InvalidValue
from toprope.records.run.folder import RUN_ID
from toprope.records.run.specification import SeedGroup, Specification
from toprope.settings.locks import Locks
from toprope.workbench.drafts import Draft

__all__ = ["MOST_SEEDS", "as_group", "check_seeds", "expand", "group_of", "members", "seeded"]

MOST_SEEDS = 16
_MEMBER = re.compile(r"^(?P<group>.+-\d{6}-\d{4}-[a-z0-9]{4})-s(?P<index>\d{1,2})$")
_LARGEST_SEED = 2**31 - 1


def check_seeds(count: int) -> int:
    """The number of runs of a group.

    Raises:
        InvalidValue: It is none.
    """
    if not 1 <= count <= MOST_SEEDS:
        raise InvalidValue(f"{count} seeds are no group.", hint=f"1 to {MOST_SEEDS}; 3 to 5 tell luck from gain.")
    return count


def seeded(draft: Draft, count: int, locks: Locks) -> list[Draft]:
    """The draft under `count` seeds, from its own algorithm.seed upwards.

    Raises:
        InvalidValue: The seeds run out of range, or the owner fixed the seed.
    """
    first = draft.config.algorithm.seed
    if first + count - 1 > _LARGEST_SEED:
        raise InvalidValue(f"{count} seeds from {first} upwards exceed {_LARGEST_SEED}.", hint="Lower algorithm.seed.")
    drafts = []
    for seed in range(first, first + count):
        if (refusal := locks.refusal("algorithm.seed", seed)) is not None:
            raise InvalidValue(f"{count} seeds cannot be had: {refusal}", hint="Leave seeds out to start a single run.")
        config = draft.config.model_copy(deep=True)
        config.algorithm.seed = seed
        drafts.append(dataclasses.replace(draft, config=config))
    return drafts


def as_group(specifications: Sequence[Specification]) -> list[Specification]:
    """The specifications as one group, named after the first of them; a single one is left as it is."""
    if len(specifications) == 1:
        return list(specifications)
    group, size = specifications[0].run_id, len(specifications)
    return [
        one.model_copy(
            update={"run_id": f"{group}-s{index}", "seed_group": SeedGroup(id=group, index=index, size=size)}
        )
        for index, one in enumerate(specifications)
    ]


def group_of(run_id: str) -> tuple[str, int] | None:
    """The group that a run belongs to and its number in it, by its id; None for a run by itself."""
    found = _MEMBER.match(run_id)
    return (found["group"], int(found["index"])) if found else None


def members(runs: Path, group: str) -> list[str]:
    """The ids of a group's runs that lie in a folder of runs, in their order; none where there is no such group."""
    if not RUN_ID.fullmatch(group):
        return []
    found = [path.name for path in runs.glob(f"{group}-s*") if (group_of(path.name) or ("", 0))[0] == group]
    return sorted(found, key=lambda run_id: (group_of(run_id) or ("", 0))[1])


def expand(runs: Path, ids: Iterable[str]) -> list[str]:
    """Ids of runs and of groups as ids of runs, each once; what is neither stays as it is, to be missed by name."""
    found: dict[str, None] = {}
    for one in ids:
        is_run = RUN_ID.fullmatch(one) and (runs / one).is_dir()
        for run_id in [one] if is_run else members(runs, one) or [one]:
            found[run_id] = None
    return list(found)
