"""Rollouts that are scored together: a group waits for its last one.

Rewards that compare rollouts with each other, or are computed in one batch, need the whole group at once. A rollout
that is done earlier has no outcome yet; whoever plays the group asks for it (`settle`) once all of them are done.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from toprope.sdk.authoring.environment import Outcome
from toprope.sdk.rollouts import Rollout, score_together

__all__ = ["Together"]


class Together:
    """The groups in progress whose rollouts wait for each other, by the handles of their rollouts."""

    def __init__(self) -> None:
        self._groups: dict[int, dict[int, Rollout | None]] = {}
        """Of each handle its whole group: what is done, None for what is still played."""
        self._outcomes: dict[int, Outcome] = {}

    def begin(self, handles: Sequence[int]) -> None:
        """A new group."""
        group: dict[int, Rollout | None] = dict.fromkeys(handles)
        self._groups.update(dict.fromkeys(handles, group))

    def done(self, ended: Iterable[tuple[int, Rollout]]) -> dict[int, Outcome]:
        """Takes rollouts that are done.

        Returns:
            Outcomes of those among them whose groups are complete now, by handle. The others' are had by `settle`.
        """
        ended = list(ended)
        for handle, rollout in ended:
            self._groups[handle][handle] = rollout
        for handle, _ in ended:
            if handle in self._groups and None not in self._groups[handle].values():
                self._score(self._groups[handle])
        return {handle: self._outcomes.pop(handle) for handle, _ in ended if handle in self._outcomes}

    def settle(self, handles: Iterable[int]) -> dict[int, Outcome]:
        """Outcomes of rollouts that are done, scored with those of their groups that are done as well."""
        handles = list(handles)
        for handle in handles:
            if self._groups.get(handle, {}).get(handle) is not None:
                self._score(self._groups[handle])
        return {handle: self._outcomes.pop(handle) for handle in handles if handle in self._outcomes}

    def discard(self, handle: int) -> bool:
        """Forgets a rollout; whether it was there. The others of its group no longer wait for it."""
        group = self._groups.pop(handle, None)
        if group is not None:
            group.pop(handle, None)
        return (self._outcomes.pop(handle, None) is not None) or group is not None

    def clear(self) -> None:
        """Forgets all."""
        self._groups.clear()
        self._outcomes.clear()

    def _score(self, group: dict[int, Rollout | None]) -> None:
        ended = {handle: rollout for handle, rollout in group.items() if rollout is not None}
        for handle, outcome in zip(ended, score_together(list(ended.values())), strict=True):
            self._outcomes[handle] = outcome
            del group[handle]
            del self._groups[handle]
